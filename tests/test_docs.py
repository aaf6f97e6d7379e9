"""The docs name what there is, and their site builds with every link and every page in its menu."""

import argparse
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import yaml

from holdfast.replicas import metrics as replica
from holdfast.router import metric_list as router

ROOT = Path(__file__).parent.parent


def test_every_metric_is_documented_and_every_documented_metric_exists():
    documented = set(re.findall(r"^\| `(holdfast_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    assert documented == {each.name for each in replica.ALL} | {each.name for each in router.ALL}


def test_every_configuration_key_in_the_readme_exists_with_its_default():
    from holdfast.cluster.config import Settings

    table = (ROOT / "README.md").read_text().split("## Configuration")[1].split("## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.*?) \|", table, re.MULTILINE)
    checked = 0
    for names, defaults in rows:
        keys = re.findall(r"`([\w.]+)`", names)
        values = [d.strip() for d in defaults.split(",")]
        for key, shown in zip(keys, values * len(keys) if len(values) == 1 else values, strict=False):
            value = Settings()
            for part in key.split("."):
                value = getattr(value, part)
            expected = {True: "true", False: "false", (): "none", "": "empty"}.get(value, str(value))
            assert shown == expected or float(shown) == float(value), key
            checked += 1
    assert checked > 15


def test_the_papers_settings_are_configurations(tmp_path: Path) -> None:
    from holdfast.cluster.config_file import check

    file = tmp_path / "settings.yaml"
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/papers.md").read_text(), re.DOTALL)
    for block in blocks:
        file.write_text(block)
        assert check(file) == [], block
    assert len(blocks) == 3


def headings(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    titles = [title.strip().lower() for title in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_of_the_docs_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, heading = target.partition("#")
            if "://" in target:
                continue
            there = page.parent / path if path else page
            assert there.exists(), f"{page.name}: {target}"
            assert not heading or there.suffix != ".md" or heading in headings(there), f"{page.name}: {target}"


def options(parser: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """The options of a command, whose subcommands are the first words."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            assert words[0] in action.choices, words
            return options(action.choices[words[0]], words[1:])
    return set(parser._option_string_actions)


def test_commands_of_the_figures_exist_with_their_options():
    from holdfast.cluster import cli

    pages = ("results", "measuring", "scheduling", "papers", "gpu/README", "sizing", "architecture")
    files = [ROOT / "CHANGELOG.md", *(ROOT / f"docs/{page}.md" for page in pages), *(ROOT / "docs/data").glob("*.csv")]
    text = "\n".join(file.read_text() for file in files).replace("\\\n", " ")
    modules = r"\b(holdfast\.(?:kernels|replicas|router|cluster|loadgen)(?:\.[a-z_]+)*|(?<=-m )pocket\.[a-z_]+)\b"
    for module in set(re.findall(modules, text)):
        assert find_spec(module), module
    folders = "kernels|replicas|router|cluster|loadgen|helm|pocket|tools|tests|docs"
    for path in set(re.findall(rf"[` ]((?:{folders})/[\w./]*)[` ]", text)):
        assert (ROOT / path).exists(), path
    commands = set(re.findall(r"\bholdfast ((?:bench|simulate|simulate-\w+|doctor|sizing) [^`\n#;]*)", text))
    for command in commands:
        known = options(cli._parser(), command.split())
        given = set(re.findall(r"(?<!\S)--[a-z][\w-]*", re.sub(r"'[^']*'", "", command)))
        assert given <= known or "ablation" in command, command  # that of the ablation has a parser of its own
    assert len(commands) > 40


# ---- the site ----


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "quickstart.html").read_text()
    assert page.count("needs a cluster") > 4  # marks are shown
    assert (tmp_path / "chart.html").exists()
    assert 'href="chart.html' in page


def test_pages_load_nothing_from_elsewhere() -> None:
    theme = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]
    assert theme["font"] is False
    for picture in (ROOT / "docs").rglob("*.svg"):
        assert "url(http" not in picture.read_text(), picture.name
