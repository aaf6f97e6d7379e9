"""From a file of a comparison to the other files, by the command line."""

import json
from pathlib import Path

import pytest
from bench_rows import row

from holdfast.cluster.cli import main as holdfast
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
