"""The quickstart's commands that need a cluster: what helm makes of them, and that they name what there is then."""

import re
import shlex

import pytest
import yaml
from doc_commands import ROOT, Block, blocks
from helm_chart import CHART, helm, parsed

RELEASE = "holdfast"
PAGE = [block for block in blocks("quickstart.md") if block.cluster]
TEXT = "\n".join(block.text for block in PAGE)


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], dict]:
    """What the page's `helm install` of the chart makes, by kind and name."""
    (install,) = [each for each in commands() if each.startswith("helm install holdfast")]
    words = shlex.split(install.replace("\\\n", " "))
    assert words[:4] == ["helm", "install", RELEASE, "helm/holdfast"]
    arguments = [word.replace("helm/holdfast/", f"{CHART}/") for word in words[4:]]
    done = helm("template", RELEASE, str(CHART), *arguments)
    assert done.status == 0, done.errors
    return {(each["kind"], each["metadata"]["name"]): each for each in parsed(done.output)}


def commands() -> list[str]:
    return [command for block in PAGE for command in block.commands]


def test_everything_that_is_named_is_made(objects: dict) -> None:
    named = re.findall(r"(rayservice|service|secret)[/ ]([a-z-]+)", TEXT)
    kinds = {"rayservice": "RayService", "service": "Service", "secret": "Secret"}
    ours = [(kinds[kind], name) for kind, name in named if not name.startswith("monitoring-")]
    assert len(ours) >= 4
    service = objects["RayService", RELEASE]["spec"]["serveService"]["metadata"]["name"]  # made by the operator
    made = {*objects, ("Service", service)}
    assert [each for each in ours if each not in made] == []


def test_keys_are_where_the_page_looks_for_them(objects: dict) -> None:
    for name in re.findall(r"get secret (holdfast-[a-z-]+) -o jsonpath=\'\{\.data\.api-key\}\'", TEXT):
        data = objects["Secret", name]
        assert "api-key" in {**data.get("data", {}), **data.get("stringData", {})}


def test_the_model_is_called_what_the_page_calls_it(objects: dict) -> None:
    (application,) = yaml.safe_load(objects["RayService", RELEASE]["spec"]["serveConfigV2"])["applications"]
    served = application["args"]["config"]["engine"]["served_name"]
    assert f'"model": "{served}"' in TEXT


def test_there_are_dashboards_and_what_fills_them(objects: dict) -> None:
    kinds = [kind for kind, _ in objects]
    assert "PodMonitor" in kinds
    assert "PrometheusRule" in kinds
    boards = [each for each in objects.values() if "grafana_dashboard" in each["metadata"].get("labels", {})]
    assert boards


def test_files_and_scripts_of_the_page_are_there() -> None:
    for path in re.findall(r"(?:-f|build -f) (\S+)", TEXT):
        assert (ROOT / path).is_file(), path


def test_every_block_is_run_or_marked() -> None:
    """Shell blocks without the mark are typed by `tests/cluster/test_stopping.py`; there are no others."""
    assert {block.language for block in blocks("quickstart.md")} == {"sh"}
    local = [block for block in blocks("quickstart.md") if not block.cluster]
    assert all(not re.search(r"\b(helm|kubectl|docker)\b", block.text) for block in local)
    assert all(re.search(r"\b(helm|kubectl|docker)\b", block.text) for block in PAGE)


def test_commands_are_told_apart() -> None:
    block = Block("sh", "a \\\n  b\ncurl -d '{\n}'\ncat > f <<'END'\nx\nEND\n# no\nlast\n", False)
    assert block.commands == ["a \\\n  b", "curl -d '{\n}'", "cat > f <<'END'\nx\nEND", "last"]
