"""docs/clients.md tells of what is tested, at the versions that are installed."""

import ast
import re
from importlib.metadata import version
from pathlib import Path

from real_clients import CLIENTS

ROOT = Path(__file__).parent.parent.parent
PACKAGES = {"`openai`, chat": "openai", "`openai`, responses": "openai", "`anthropic`": "anthropic"}


def rows() -> dict[str, list[str]]:
    """The cells of the table, by client."""
    lines = (ROOT / "docs" / "clients.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {each[0]: each for each in cells[1:]}


def test_every_row_is_a_test_and_every_test_has_a_row() -> None:
    tree = ast.parse((ROOT / "tests" / "cluster" / "test_clients.py").read_text())
    tests = {each.name for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")}
    told = {test for cells in rows().values() for test in re.findall(r"TESTS=(test_\w+)", cells[3])}
    assert told == tests


def test_versions_are_those_that_are_run() -> None:
    for name, cells in rows().items():
        client = CLIENTS.get(name)
        if client is not None:
            assert cells[1] == client.version, name
        elif name in PACKAGES or name == "LangGraph":
            assert cells[1] == version(PACKAGES.get(name, "langgraph")), name
