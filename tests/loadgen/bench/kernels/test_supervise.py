"""Processes that end, or do not end, with a part, and what the others go on with."""

import json
import sys
import time

import pytest

from holdfast.loadgen.bench import report, supervise
from holdfast.loadgen.bench.supervise import supervised

SCRIPT = """
import argparse, os, sys, time
from pathlib import Path
from holdfast.loadgen.bench import report
from holdfast.loadgen.bench.report import Report

report._GRACE_S = 0.1
parser = argparse.ArgumentParser()
parser.add_argument("what")
parser.add_argument("--json", type=Path)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
report.device_answers = lambda: options.what != "lost"
found = Report(options.json, 100.0, options.resume)

def worse(deadline):
    if options.what == "killed":
        os._exit(9)
    yield "begun", {"x": 1.0}
    if options.what == "endless":
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        while True:
            time.sleep(60)
    raise RuntimeError("no such address")

def start(deadline):
    if options.what == "never":
        os._exit(3)
    yield "pid", {"pid": os.getpid()}

if options.what == "import":
    sys.exit(7)
found.run("first", start, 0.2)
found.run("second", worse, 0.2)
found.run("third", start, 0.2)
sys.exit(1 if found.found["failed"] else 0)
"""


@pytest.mark.parametrize(("what", "apart"), [("fails", False), ("lost", True), ("killed", True), ("endless", True)])
def test_another_process_goes_on_behind_the_part_that_one_did_not_survive(what, apart, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "_SLACK_S", 0.0)
    file = tmp_path / "found.json"
    assert supervised([sys.executable, "-c", SCRIPT, what], file) == 1
    found = json.loads(file.read_text())
    assert list(found["parts"]) == ["first", "second", "third"]
    assert found["parts"]["second"] == ({"begun": {"x": 1.0}} if what != "killed" else {})
    assert list(found["failed"]) == ["second"]
    assert (found["parts"]["first"]["pid"] != found["parts"]["third"]["pid"]) == apart
    assert "running" not in found


def test_a_process_that_does_not_begin_is_not_begun_again(tmp_path):
    assert supervised([sys.executable, "-c", SCRIPT, "import"], tmp_path / "found.json") == 7


def test_time_counts_from_when_the_first_process_is_begun(tmp_path):
    file, before = tmp_path / "found.json", time.time()
    script = "import json, pathlib, sys; print(json.loads(pathlib.Path(sys.argv[2]).read_text())['began']); sys.exit(7)"
    file.write_text("of another call")
    assert supervised([sys.executable, "-c", script], file) == 7
    assert before <= json.loads(file.read_text())["began"] <= time.time()


def test_a_process_that_ends_with_its_first_part_leaves_the_others_to_the_next(tmp_path):
    file = tmp_path / "found.json"
    assert supervised([sys.executable, "-c", SCRIPT, "never"], file) == 1
    found = json.loads(file.read_text())
    assert list(found["failed"]) == ["first", "second", "third"]


def test_a_device_that_is_not_there_is_not_lost():
    assert report.device_answers()
