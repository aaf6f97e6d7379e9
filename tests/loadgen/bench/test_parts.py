"""Parts that fail, take too long or end their process: the file names them, and the other parts go on."""

import json
import sys
import time

import pytest

from holdfast.loadgen.bench import parts
from holdfast.loadgen.bench.parts import Once, Report, supervised

SCRIPT = """
import argparse, os, sys, time
from pathlib import Path
from holdfast.loadgen.bench import parts
from holdfast.loadgen.bench.parts import Report

parts._GRACE_S = 1.5
parser = argparse.ArgumentParser()
parser.add_argument("case")
parser.add_argument("--json", type=Path)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
parts.device_answers = lambda: options.case != "lost"
report = Report(options.json, 100.0, options.resume)

def worse(deadline):
    if options.case == "killed":
        os._exit(9)
    yield "begun", {"x": 1.0}
    while options.case == "endless":
        time.sleep(60)
    raise RuntimeError("no such address")

def start(deadline):
    if options.case == "never":
        os._exit(3)
    yield "pid", {"pid": os.getpid()}

report.run("first", start, 0.2)
report.run("second", worse, 0.2)
report.run("third", start, 0.2)
sys.exit(1 if report.found["failed"] else 0)
"""


def test_a_part_that_fails_leaves_the_others_their_figures(tmp_path):
    report = Report(tmp_path / "found.json", 1000.0)

    def half(deadline):
        yield "first", {"x": 1.0}
        raise RuntimeError("no kernel image")

    report.run("half", half)
    report.run("whole", lambda deadline: iter([("second", {"share": 0.5}), ("third", {"y": 2.0})]))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["parts"]["half"] == {"first": {"x": 1.0}}
    assert found["parts"]["whole"] == {"second": {"share": 0.5}, "third": {"y": 2.0}}
    assert "no kernel image" in found["failed"]["half"]
    assert list(found["failed"]) == ["half"]
    assert found["shares"] == {"whole: second": 0.5}
    assert parts.device_answers(), "a device that is not there is not lost"


def test_no_part_begins_without_time_and_none_has_more_than_is_left():
    late = Report(None, 0.0)
    late.run("late", lambda deadline: iter([("never", {})]))
    assert (late.found["left_out"], late.found["parts"]) == (["late"], {})
    report, left = Report(None, 50.0), []

    def part(deadline):
        left.append(deadline.left)
        yield "line", {}

    report.run("short", part, budget=7.0)
    report.run("long", part, budget=100.0)
    assert left[0] <= 7.0 < left[1] <= 50.0


def test_what_several_parts_need_is_made_once_in_each_process_and_a_failure_is_kept(tmp_path):
    file, made = tmp_path / "found.json", []
    for process in range(2):
        report, needed = Report(file, 1000.0, resume=True), Once(lambda: made.append(1))
        for name in ("one", "two", f"of process {process}"):
            report.run(name, lambda deadline: iter([("line", {})]), setup=needed)
    assert len(made) == 2
    assert list(report.found["parts"]) == ["one", "two", "of process 0", "of process 1"]
    broken = Once(lambda: made.append(1 / 0))
    for name in ("three", "four"):
        report.run(name, lambda deadline: iter([("line", {})]), setup=broken)
    assert "ZeroDivisionError" in report.found["failed"]["three"]
    assert "could not be made" in report.found["failed"]["four"]


@pytest.mark.parametrize(("case", "apart"), [("fails", False), ("lost", True), ("killed", True), ("endless", True)])
def test_another_process_goes_on_behind_the_part_that_ended_one(case, apart, tmp_path):
    file = tmp_path / "found.json"
    assert supervised([sys.executable, "-c", SCRIPT, case], file) == 1
    found = json.loads(file.read_text())
    assert list(found["parts"]) == ["first", "second", "third"]
    assert found["parts"]["second"] == ({"begun": {"x": 1.0}} if case != "killed" else {})
    assert list(found["failed"]) == ["second"]
    assert (found["parts"]["first"]["pid"] != found["parts"]["third"]["pid"]) == apart
    assert "running" not in found


def test_a_process_that_ends_with_its_first_part_leaves_the_others_to_the_next(tmp_path):
    file = tmp_path / "found.json"
    assert supervised([sys.executable, "-c", SCRIPT, "never"], file) == 1
    assert list(json.loads(file.read_text())["failed"]) == ["first", "second", "third"]


def test_time_counts_from_the_first_process_and_one_that_does_not_begin_is_not_begun_again(tmp_path):
    file, before = tmp_path / "found.json", time.time()
    file.write_text("of another call")
    assert supervised([sys.executable, "-c", "import sys; sys.exit(7)"], file) == 7
    assert before <= json.loads(file.read_text())["began"] <= time.time()
