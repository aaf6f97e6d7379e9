"""The chart's README and the tables of docs/metrics.md are what the code makes."""

import pytest
from helm_chart import CHART

from helm.build import metrics_page, readme
from helm.build.metrics_page import BEGIN, END, rewritten


def test_the_metrics_page_is_current() -> None:
    page = metrics_page.FILE.read_text()
    assert page == rewritten(page), "run `make chart`"


def test_the_text_around_the_tables_stays() -> None:
    made = rewritten(f"above\n{BEGIN}old table{END}\nbelow\n")
    assert made.startswith("above\n")
    assert made.endswith("\nbelow\n")
    assert "old table" not in made
    assert rewritten(made) == made


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="tables"):
        rewritten(f"{END}{BEGIN}")


def test_the_readme_is_current() -> None:
    assert (CHART / "README.md").read_text() == readme.readme(), "run `make chart`"


def test_the_readme_has_a_row_for_every_value() -> None:
    text = "# not a row\n\n# -- first\n# line\na: 1\nb:\n  # -- group\n  c:\n    d: {e: f}\n    # aside\n    g: []\n"
    assert [(row.key, row.default, row.description) for row in readme.rows(text)] == [
        ("a", "1", "first line"),
        ("b.c", "", "group"),
        ("b.c.d", "{e: f}", ""),
        ("b.c.g", "[]", ""),
    ]


def test_files_that_the_readme_names_exist() -> None:
    text = (CHART / "README.md").read_text()
    for name in ("values-cpu.yaml", "values-one-gpu.yaml", "values-production.yaml"):
        assert f"`{name}`" in text
        assert (CHART / name).exists()
