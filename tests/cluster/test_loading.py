"""The line of `holdfast serve` that says how far its replicas are with their weights."""

from pathlib import Path

import pytest

from holdfast.cluster import model_files
from holdfast.replicas.model.progress import LOG_S, Progress

HALF = Progress(5 * 10**9, 10**10, 5.0)
WHOLE = Progress(10**10, 10**10, 9.0)


def test_what_replicas_write_is_added_up(tmp_path: Path) -> None:
    folder = tmp_path / "loading"
    assert model_files.read_progress(folder) is None
    model_files.write_progress(folder, "a", HALF)
    model_files.write_progress(folder, "b", WHOLE)
    assert model_files.read_progress(folder) == Progress(15 * 10**9, 2 * 10**10, 9.0)
    model_files.write_progress(folder, "a", WHOLE)
    assert model_files.read_progress(folder) == Progress(2 * 10**10, 2 * 10**10, 9.0)


def test_a_folder_that_cannot_be_written_to_keeps_nothing_from_loading(tmp_path: Path) -> None:
    model_files.write_progress(tmp_path / "gone" / "deeper", "a", HALF)


def test_a_terminal_has_one_line_that_is_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = model_files.ProgressLine(tmp_path, print, terminal=True)
    line.update()
    assert capsys.readouterr().out == ""
    model_files.write_progress(tmp_path, "a", HALF)
    line.update()
    line.update()  # nothing new
    assert capsys.readouterr().out == "\r\x1b[Kweights: 5.0 of 10.0 GB, 1.00 GB/s, 5 s left"
    line.say("1 of 2 replica(s) up")
    assert capsys.readouterr().out == "\r\x1b[K1 of 2 replica(s) up\n"
    model_files.write_progress(tmp_path, "a", WHOLE)
    line.update()
    line.clear()
    line.clear()
    assert capsys.readouterr().out == "\r\x1b[Kweights: 10.0 of 10.0 GB, 1.11 GB/s\r\x1b[K"


def test_elsewhere_there_is_a_line_now_and_then(tmp_path: Path) -> None:
    said: list[str] = []
    now = [0.0]
    line = model_files.ProgressLine(tmp_path, said.append, terminal=False, now=lambda: now[0])
    model_files.write_progress(tmp_path, "a", HALF)
    line.update()
    assert said == []  # a small model is loaded before there is anything to say
    now[0] = LOG_S
    line.update()
    line.update()
    line.say("1 of 1 replica(s) up")
    line.clear()
    assert said == ["weights: 5.0 of 10.0 GB, 1.00 GB/s, 5 s left", "1 of 1 replica(s) up"]
