"""The tables of a terminal: what servers are called is text."""

import pytest
from bench_rows import row

from holdfast.loadgen.summary import summarize
from holdfast.loadgen.table import print_report

NAMES = ("vllm[red]", "a[/b]", ":smile:")


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture) -> None:
    rows = [row(name, turn=turn, started=float(turn)) for name in NAMES for turn in range(2)]
    print_report(summarize(rows, 0), {"w": "[cpu] only"}, ())
    printed = capsys.readouterr().out
    assert "w: [cpu] only" in printed
    for name in NAMES:
        assert printed.count(f"  {name} ") == 2
    assert printed.count(f"/ {NAMES[0]}") == 4
