from pathlib import Path

import pytest

from holdfast.cluster.metrics_page import BEGIN, END, rewritten

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def test_the_page_is_what_the_definitions_make() -> None:
    page = PAGE.read_text()
    assert page == rewritten(page), "run `make chart`"


def test_what_stands_around_the_tables_is_left_alone() -> None:
    made = rewritten(f"above\n{BEGIN}what was there{END}\nbelow\n")
    assert made.startswith("above\n")
    assert made.endswith("\nbelow\n")
    assert "what was there" not in made
    assert rewritten(made) == made


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="tables"):
        rewritten(f"{END}{BEGIN}")
