"""Parts that fail, take too long or end their process: what the file says of them, and what the others go on with."""

import json
import signal
import sys
import time

import pytest

from holdfast.loadgen.bench import parts
from holdfast.loadgen.bench.parts import Report, supervised

SCRIPT = """
import argparse, os, sys, time
from pathlib import Path
from holdfast.loadgen.bench import parts
from holdfast.loadgen.bench.parts import Report

parts._GRACE_S = 1.5
parser = argparse.ArgumentParser()
parser.add_argument("what")
parser.add_argument("--json", type=Path)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
parts.device_answers = lambda: options.what != "lost"
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


def test_a_part_that_fails_leaves_the_others_their_figures(tmp_path):
    report = Report(tmp_path / "found.json", 1000.0)

    def half(deadline):
        yield "first", {"x": 1.0}
        raise RuntimeError("no kernel image")

    report.run("half", half)
    report.run("whole", lambda deadline: iter([("second", {"share": 0.5}), ("third", {"theirs_over_ours": 2.0})]))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["parts"]["half"] == {"first": {"x": 1.0}}
    assert found["parts"]["whole"] == {"second": {"share": 0.5}, "third": {"theirs_over_ours": 2.0}}
    assert "no kernel image" in found["failed"]["half"]
    assert list(found["failed"]) == ["half"]
    assert found["shares"] == {"whole: second": 0.5}
    assert found["ratios"] == {"whole: third": 2.0}


def test_no_part_begins_without_time_and_none_has_more_than_is_left():
    late = Report(None, 0.0)
    late.run("late", lambda deadline: iter([("never", {})]))
    assert late.found["left_out"] == ["late"]
    assert late.found["parts"] == {}
    report, given = Report(None, 50.0), []

    def part(deadline):
        given.append(deadline.left)
        yield "line", {}

    report.run("short", part, budget=7.0)
    report.run("long", part, budget=100.0)
    assert given[0] <= 7.0
    assert 7.0 < given[1] <= 50.0


def test_what_others_need_is_made_in_every_process_until_it_fails(tmp_path):
    file = tmp_path / "found.json"
    for _ in range(3):
        report = Report(file, 1000.0, resume=True)
        report.run_anew("load", lambda deadline: iter([("loaded", {})]), 10.0)
    assert list(report.found["parts"]) == ["load", "load, again", "load, again 2"]
    assert not Report(file, 1000.0, resume=True).wants(["load", "load, again"])
    assert Report(file, 1000.0, resume=True).wants(["load", "turns"])
    for _ in range(2):
        report = Report(file, 1000.0, resume=True)
        report.run_anew("load", lambda deadline: iter([("loaded", 1 / 0)]), 10.0)
    assert list(report.found["failed"]) == ["load, again 3"]
    assert len(report.found["parts"]) == 4


def test_a_part_that_does_not_end_is_broken_off(monkeypatch):
    monkeypatch.setattr(parts, "_GRACE_S", 0.05)
    report = Report(None, 1000.0)

    def endless(deadline):
        yield "first", {"x": 1.0}
        while True:
            try:
                signal.pause()  # is interrupted
            except Exception:
                pytest.fail("an engine's own handlers must not see it")

    report.run("endless", endless, budget=0.01)
    report.run("next", lambda deadline: iter([("second", {"y": 2.0})]))
    assert "OverTimeError" in report.found["failed"]["endless"]
    assert report.found["parts"] == {"endless": {"first": {"x": 1.0}}, "next": {"second": {"y": 2.0}}}


@pytest.mark.parametrize(("what", "apart"), [("fails", False), ("lost", True), ("killed", True), ("endless", True)])
def test_another_process_goes_on_behind_the_part_that_one_did_not_survive(what, apart, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_SLACK_S", 0.0)
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
    assert parts.device_answers()
