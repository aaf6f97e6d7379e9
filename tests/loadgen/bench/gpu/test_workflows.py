"""Conversations played to the engine, and what the time of a turn is laid to."""

import json
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.ceilings import Ceilings
from holdfast.loadgen.bench.gpu import __main__ as command
from holdfast.loadgen.bench.gpu import workflows
from holdfast.loadgen.bench.gpu.accounting import CountingRunner, Totals
from holdfast.loadgen.bench.gpu.stage import Exchange, Stage, dialogues, full_turns, small_turns
from holdfast.loadgen.bench.gpu.workflows import Player, Turn, play
from holdfast.loadgen.bench.parts import Deadline, Report, put
from holdfast.replicas.engine import Engine
from holdfast.replicas.plan import Chunk, Landed, StepOutput, StepPlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes there, and is run by hand")

SPENT = ("ideal_s", "prepare_s", "kernels_s", "sample_s", "plan_s", "commit_s", "idle_s")
seconds = st.floats(0.0, 10.0)


@pytest.fixture(scope="module")
def stage():
    made = Stage(small_turns(), Ceilings(1e12, 1e13))
    yield made
    made.close()


@given(seconds, seconds, seconds, seconds, seconds, seconds, seconds)
def test_the_parts_of_a_turn_add_up_to_it(ideal, forward, sample, between, prepare, plan, commit):
    total = Totals(3, 100, 0, 0, forward, sample, prepare, plan, commit)
    wall, least = forward + sample + between, min(ideal, forward)
    turn = Turn(0, 10, 10, 5, 1, wall_s=wall, ideal_s=least, total=total)
    assert sum(turn.spent.values()) == pytest.approx(turn.wall_s)
    assert all(value >= -1e-9 for value in turn.spent.values())
    for name, most in {"prepare_s": prepare, "plan_s": plan, "commit_s": commit}.items():
        assert turn.spent[name] <= most


def test_conversations_follow_from_the_seed_and_grow_by_what_is_on_record(stage):
    tokenizer, most = stage.loaded().tokenizer, 3000
    programs, again = (dialogues(tokenizer, 2, 4, most) for _ in range(2))
    for program, same in zip(programs, again, strict=True):
        assert len(program) == 4
        for one, other in zip(program, same, strict=True):
            assert np.array_equal(one.prompt, other.prompt)
            assert len(one.prompt) + len(one.reply) <= most
        for before, after in pairwise(program):
            known = np.concatenate((before.prompt, before.reply))
            assert np.array_equal(after.prompt[: len(known)], known)
    assert not np.array_equal(programs[0][0].prompt, programs[1][0].prompt)
    assert full_turns().most_tokens + 16 <= 8192  # of Pocket's context


def test_turns_stop_where_the_time_is_over_and_say_so(stage):
    lines = dict(workflows.turns(stage, 2, 1, Deadline(0.0)))
    assert list(lines) == ["turn 0", "all"]
    assert (lines["all"]["turns"], lines["all"]["wanted_turns"]) == (1, 2)


def test_only_what_was_never_seen_counts_as_new(stage):
    program = stage.dialogues(2, 1)[0]
    first, second = play(Player(*stage.engine(), stage.bounds, [program]), 2, Deadline(1000.0))
    assert first.new == first.prompt == len(program[0].prompt)
    assert second.new < second.prompt
    if first.as_recorded:
        assert second.new == second.prompt - first.prompt - first.completion
    for turn, exchange in zip((first, second), program, strict=True):
        assert turn.completion == len(exchange.reply)
        assert turn.total.positions >= turn.total.forwards * turn.prompt - turn.new
        compute = stage.bounds.compute_s(turn.new, turn.prompt - turn.new)
        read = stage.bounds.read_s(int(turn.total.positions), int(turn.total.forwards))
        assert turn.ideal_s == pytest.approx(read + compute)


def test_where_steps_overlap_preparing_them_is_counted_and_the_parts_still_add_up(stage):
    loaded = stage.loaded()
    counting = CountingRunner(loaded.runner)
    config = replace(loaded.config, overlap_steps="on")
    engine = Engine(config, counting, loaded.eos, loaded.vocabulary, loaded.cost)
    for turn in play(Player(engine, counting, stage.bounds, stage.dialogues(2, 2)), 2, Deadline(1000.0)):
        assert turn.total.prepare_s > 0
        assert sum(turn.spent.values()) == pytest.approx(turn.wall_s)
        assert 0 < turn.efficiency < 1


def test_a_turn_that_fails_is_no_figure(stage):
    short = (Exchange(np.full(9000, 5, np.int32), np.array([1], np.int32)),)  # beyond the context
    with pytest.raises((RuntimeError, KeyError)):
        Player(*stage.engine(), stage.bounds, [short]).wave(0)


class Nothing:
    def begin(self, plan):
        return Landed(StepOutput(()))


def test_forwards_and_what_they_read_are_counted_beside_steps_that_fly():
    counting = CountingRunner(Nothing())
    plan = StepPlan((Chunk(0, 5, np.ones(3, np.int32)), Chunk(1, 0, np.ones(1, np.int32))))
    first = counting.begin(plan)
    alone = counting.counts.prepare_s
    second = counting.begin(plan)
    assert counting.counts.prepare_s == alone > 0  # hidden behind the first
    first.land()
    second.land()
    counting.begin(StepPlan(())).land()  # moves pages, computes nothing
    assert (counting.counts.forwards, counting.counts.positions) == (2, 2 * (8 + 1))


def test_a_process_behind_a_fault_loads_again_and_one_that_cannot_load_fails_part_by_part(tmp_path):
    file, made = tmp_path / "gpu.json", Stage(replace(small_turns(), shape="no such shape"), Ceilings(1e12, 1e13))
    done = {"load": {}, "turns, 1, 1 at once": {}}
    put(file, {"parts": done, "failed": {"turns, 1, 1 at once": "the process ended"}, "began": time.time()})
    report = Report(file, 1000.0, resume=True)
    workflows.run(made, report)
    made.close()
    assert list(report.found["parts"])[1:3] == ["turns, 1, 1 at once", "turns, 1, 2 at once"]
    assert len(report.found["failed"]) == len(report.found["parts"]) - 1 == 6
    assert "UnknownShapeError" in report.found["failed"]["turns, 1, 2 at once"]


def test_the_command_tells_where_all_of_the_time_went(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Stage", lambda sizes, ceilings: stage)
    monkeypatch.setattr(stage, "sizes", replace(stage.sizes, turns=(2,)))
    monkeypatch.setattr(stage, "close", lambda: None)
    file = tmp_path / "gpu.json"
    assert command.main(["--json", str(file), "--only", "turns"]) == 0
    found = json.loads(file.read_text())
    assert (found["failed"], found["left_out"]) == ({}, [])
    drafting, plain = ([f"turns, 2, {n} at once{more}" for n in (1, 2)] for more in ("", ", no drafts"))
    assert list(found["parts"]) == ["load", *drafting, *plain]
    for name in drafting + plain:
        lines = found["parts"][name]
        assert list(lines) == ["turn 0", "turn 1", "all"]
        for figures in lines.values():
            assert 0 < figures["efficiency"] < 1
            assert figures["efficiency"] == pytest.approx(figures["ideal_s"] / figures["wall_s"])
            assert sum(figures[part] for part in SPENT) == pytest.approx(figures["wall_s"])
        assert found["shares"][f"{name}: all"] == lines["all"]["efficiency"]
        assert (sum(lines[line]["drafted"] for line in lines if line != "all") > 0) == (name in drafting)
    # The same replies, by fewer forwards.
    fast, slow = (found["parts"][name]["all"] for name in (drafting[0], plain[0]))
    assert fast["completion"] == slow["completion"]
    assert fast["tokens_per_forward"] > slow["tokens_per_forward"]
