"""Parts that fail, or take too long, and what the file says of them."""

import json
import time

import pytest

from holdfast.loadgen.bench import report as reports
from holdfast.loadgen.bench.report import Report


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
    monkeypatch.setattr(reports, "_GRACE_S", 0.05)
    report = Report(None, 1000.0)

    def endless(deadline):
        yield "first", {"x": 1.0}
        while True:
            try:
                time.sleep(60.0)  # is interrupted
            except Exception:
                pytest.fail("an engine's own handlers must not see it")

    report.run("endless", endless, budget=0.01)
    report.run("next", lambda deadline: iter([("second", {"y": 2.0})]))
    assert "OverTimeError" in report.found["failed"]["endless"]
    assert report.found["parts"] == {"endless": {"first": {"x": 1.0}}, "next": {"second": {"y": 2.0}}}
