"""From a file of a comparison to the other files, by the command line."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from bench_rows import row

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen.bench.ablation import Comparison
from holdfast.loadgen.report.page import HEADS, ablation_grid, read_ablation
from holdfast.loadgen.rows import to_json


def test_a_trace_and_a_page_are_made_of_a_file(tmp_path: Path) -> None:
    source = tmp_path / "run.json"
    source.write_text(json.dumps({"rows": to_json([row(), row(started=1.0, turn=1)])}))
    assert holdfast(["bench", "trace", str(source), str(tmp_path / "trace.json")]) == 0
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert names.count("decode") == 2
    pytest.importorskip("matplotlib")
    assert holdfast(["bench", "report", str(source), str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"rows": []}'])
@pytest.mark.parametrize("command", ["report", "trace"])
def test_another_file_is_refused_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture, command: str, text: str
) -> None:
    source, target = tmp_path / "run.json", tmp_path / "made"
    source.write_text(text)
    assert holdfast(["bench", command, str(source), str(target)]) != 0
    assert "Traceback" not in capsys.readouterr().err
    assert not target.exists()


def test_what_the_ablation_writes_is_what_the_table_reads(tmp_path: Path) -> None:
    comparison = Comparison("drafts", "long", 72, 31.25, 80.0, 45.0, 99.0, 1.44, 1.2, 1.6, 1.24, 1.3, 0.95, 1.0)
    path = tmp_path / "ablation.json"
    path.write_text(json.dumps([asdict(comparison)]))
    grid = ablation_grid(read_ablation(path))
    assert grid is not None
    ((name, cells),) = grid.rows
    assert name == "drafts"
    told = dict(zip(HEADS, cells, strict=True))
    assert told["ms p50 on"] == ["31.2"]
    assert told["ms p99 off"] == ["99.0"]
    assert told["p50 off/on"] == ["1.44x", "1.20–1.60"]
    assert told["equal"] == ["95%"]
    assert ablation_grid([]) is None
