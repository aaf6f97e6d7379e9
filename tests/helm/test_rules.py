"""Rules against the metrics there are, their files, promtool and the runbook."""

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from fake_backend import begun
from prometheus_client import CollectorRegistry
from prometheus_server import found

from helm.build.rules import ALERTS, GROUPS, RECORDINGS, RUNBOOK, files
from holdfast.cluster.config import Settings
from holdfast.replicas import metrics as replica
from holdfast.router import metric_list as router
from holdfast.router.entry.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]
RAY = Path(ray.__file__).parent
FOLDER = ROOT / "helm" / "holdfast" / "files" / "rules"
METRICS = {each.name: each for each in replica.ALL} | {each.name: each for each in router.ALL}
SUFFIXES = re.compile(r"_(bucket|sum|count)$")


def sections() -> dict[str, str]:
    """Text of the runbook's sections by heading."""
    parts = re.split(r"^#+ (.+)$", (ROOT / RUNBOOK).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def metrics_in(expression: str) -> set[str]:
    return {SUFFIXES.sub("", name) for name in re.findall(r"(?<![:\w])holdfast_\w+", expression)}


def test_the_files_are_what_the_code_makes() -> None:
    assert {path.name: path.read_text() for path in FOLDER.glob("*.yaml")} == files(), "run `make chart`"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_section_that_says_what_to_do(alert: Any) -> None:
    text = sections()[alert.name]
    assert [word for word in ("**Means.**", "**See.**", "**Do.**") if word not in text] == []


def test_every_section_of_the_runbook_that_names_an_alert_has_one() -> None:
    named = {heading for heading in sections() if heading.startswith("Holdfast")}
    assert named == {alert.name for alert in ALERTS}


def test_options_that_the_runbook_names_exist() -> None:
    for path in re.findall(
        r"`((?:engine|router|placement|replicas|redis|server)\.[\w.]+)`", (ROOT / RUNBOOK).read_text()
    ):
        value: Any = Settings()
        if path in ("redis.maxMemory", "redis.resources"):  # the chart's
            section, _, name = path.partition(".")
            assert name in yaml.safe_load((ROOT / "helm" / "holdfast" / "values.yaml").read_text())[section]
            continue
        for part in path.split("."):
            value = getattr(value, part)


def test_metrics_and_panels_that_the_runbook_names_exist() -> None:
    from helm.build.dashboards import BOARDS

    text = (ROOT / RUNBOOK).read_text()
    assert set(re.findall(r"`(holdfast_\w+)", text)) <= METRICS.keys()
    boards = {board.title.removeprefix("Holdfast: "): board for board in BOARDS}
    named = re.findall(rf"\*({'|'.join(boards)}): ([^*]+)\*", text)
    assert len(named) > 15
    for board, title in named:
        titles = {panel.title for row in boards[board].rows for panel in row.panels} | {
            r.title for r in boards[board].rows
        }
        assert title in titles, f"{board}: {title}"


@pytest.mark.parametrize("rule", [*ALERTS, *RECORDINGS], ids=lambda rule: rule.name)
def test_what_a_rule_asks_for_exists(rule: Any) -> None:
    assert metrics_in(rule.expression) <= METRICS.keys()
    recorded = set(re.findall(r"\w+:holdfast_\w+:\w+", rule.expression))
    assert recorded <= {each.name for each in RECORDINGS}


COUNTED = re.compile(r"(holdfast_\w+_total)({[^}]*})?\[")  # over a time


FAILED = [each for each in RECORDINGS if "requests_failed" in each.name]  # alerts are built on them


@pytest.mark.parametrize("rule", [*ALERTS, *FAILED], ids=lambda rule: rule.name)
def test_what_an_alert_counts_is_0_before_the_first_of_it(rule: Any) -> None:
    """A series that begins with its first event has not risen by it, so an alert would miss that."""
    metrics = RouterMetrics(CollectorRegistry())
    for watched in (
        "replicas_lost_total",
        "redis_evicted_keys_total",
    ):  # where they stand they are there from the start
        metrics.watch(watched, lambda: 0.0)
    metrics.name_tenants(["acme"], 1)
    begun(metrics).asks("pocket")
    shown = asyncio.run(metrics.exposition())
    for name, labels in COUNTED.findall(rule.expression):
        if name in {each.name for each in replica.ALL}:
            assert not METRICS[name].labels, "of a replica's metrics the labels are there from the start"
            continue
        wanted = [name + "{", *re.findall(r'\w+="[^"]*"', labels)]
        assert any(all(part in line for part in wanted) for line in shown.splitlines()), f"{wanted} in {shown}"


@pytest.mark.parametrize("alert", GROUPS["ray"], ids=lambda alert: alert.name)
def test_ray_still_has_what_an_alert_asks_it_for(alert: Any) -> None:
    """An alert may be quiet where a series is missing, so a new name of it would not show."""
    sources = [*RAY.glob("serve/_private/*.py"), *RAY.glob("dashboard/modules/reporter/reporter_agent.py")]
    text = "".join(path.read_text() for path in sources)
    names = set(re.findall(r"\bray_(\w+)", alert.expression))
    assert names
    assert [name for name in names if f'"{name}"' not in text] == []


def test_names_are_there_once_and_as_prometheus_wants_them() -> None:
    names = [rule.name for rule in (*ALERTS, *RECORDINGS)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"(model|tenant):holdfast_\w+:\w+", each.name) for each in RECORDINGS)


def test_every_expression_ends_with_its_threshold() -> None:
    """By which the chart puts in another one; `absent` alerts have none."""
    for alert in ALERTS:
        assert alert.absent or re.search(r"[=<>] [0-9.]+$", alert.expression), alert.name


def test_promtool_finds_nothing_wrong() -> None:
    done = subprocess.run([found("promtool"), "check", "rules", *FOLDER.glob("*.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
