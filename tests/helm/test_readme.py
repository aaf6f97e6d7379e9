"""README.md of the chart says what values.yaml says."""

from types import ModuleType

import pytest
from helm_chart import CHART, ROOT, load


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load(ROOT / "helm" / "readme.py")


def test_it_is_current(maker: ModuleType) -> None:
    assert (CHART / "README.md").read_text() == maker.readme(), "run `make chart`"


def test_a_row_for_every_value(maker: ModuleType) -> None:
    text = "# not a row\n\n# -- first\n# line\na: 1\nb:\n  # -- group\n  c:\n    d: {e: f}\n    # aside\n    g: []\n"
    assert [(row.key, row.default, row.description) for row in maker.rows(text)] == [
        ("a", "1", "first line"),
        ("b.c", "", "group"),
        ("b.c.d", "{e: f}", ""),
        ("b.c.g", "[]", ""),
    ]


def test_files_that_it_names_are_there() -> None:
    text = (CHART / "README.md").read_text()
    for name in ("values-cpu.yaml", "values-one-gpu.yaml", "values-production.yaml"):
        assert f"`{name}`" in text
        assert (CHART / name).exists()
