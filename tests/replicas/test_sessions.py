"""Sessions of the engine: appends draw nothing, a query costs its own tokens, and all cells are freed."""

import numpy as np
import pytest
from engine_world import World, talkative, words
from hypothesis import given
from hypothesis import strategies as st

from holdfast.loadgen.simulator.policies import ORDERS
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ErrorKind
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Aborted, Finished, Rejected, SessionTurn, Stop, Submit
from holdfast.replicas.sessions import closed_reply


def make(**settings) -> World:
    return World(**({"cells": 1024, "context_length": 256, "max_sequences": 8, "session_rows": 4} | settings))


def opened(length: int = 20, **settings) -> World:
    """A world with a session "s" that has a history of so many tokens."""
    world = make(**settings)
    world.open("s")
    world.append("a", "s", words(1, length))
    world.run()
    return world


def test_max_tokens_0_computes_the_prompt_and_draws_nothing():
    world = make()
    world.serve("a", words(1, 30), max_tokens=0)
    end = world.end("a")
    assert (end.reason, end.usage.prompt, end.usage.completion) == ("length", 30, 0)
    assert world.out["a"] == []
    world.assert_idle()
    assert world.engine.cache.peek("", np.asarray([*words(1, 30), 1], np.int32)) == 30
    assert all(chunk.draw is None for plan in world.runner.plans for chunk in plan.chunks)


def test_a_prompt_may_fill_the_context_if_nothing_is_drawn():
    world = make(context_length=32)
    world.submit("full", words(1, 32), max_tokens=0)
    world.submit("one more", words(1, 33), max_tokens=0)
    world.run()
    assert isinstance(world.end("full"), Finished)
    assert world.end("one more").error.kind is ErrorKind.TOO_LONG


def test_a_query_sees_every_append_before_it_and_computes_its_own_tokens():
    world = make()
    world.open("s")
    for i in range(5):
        world.append(f"a{i}", "s", words(i, 17))  # all in flight at once
    world.run()
    before = world.engine.stats.prompt_computed
    assert before <= 5 * (17 + world.config.page_size)
    world.ask("q", "s", words(9, 6), max_tokens=10)
    assert world.prompts["q"][0][:85] == [token for i in range(5) for token in words(i, 17)]
    assert world.engine.stats.prompt_computed - before <= 6 + world.config.page_size


def test_a_session_goes_on_in_its_row_without_a_copy():
    world = opened(30)  # ends inside a page
    world.runner.plans.clear()
    world.append("second", "s", words(2, 30))
    world.run()
    rows = {chunk.row for plan in world.runner.plans for chunk in plan.chunks}
    assert len(rows) == 1
    assert not any(plan.copies for plan in world.runner.plans)
    assert all(write.first >= 30 // 4 for plan in world.runner.plans for write in plan.writes)
    assert world.engine.stats.turns_continued == 1


@pytest.mark.parametrize("keep", [True, False])
def test_only_a_kept_query_becomes_history(keep):
    world = opened()
    world.query("q1", "s", words(2, 7), max_tokens=9, keep=keep)
    world.ask("q2", "s", words(3, 7), max_tokens=9)
    world.assert_right("q1")
    middle = words(2, 7) + world.out["q1"] if keep else []
    assert world.prompts["q2"][0] == words(1, 20) + middle + words(3, 7)


def test_a_fork_shares_the_history_and_diverges():
    world = make()
    world.open("parent")
    world.append("a", "parent", words(1, 42))
    fork = world.fork("parent", "child")  # while the append is in flight
    world.run()
    assert isinstance(world.end(fork), Finished)
    cells, computed = world.engine.cache.stats.tree, world.engine.stats.prompt_computed
    world.query("p", "parent", words(2, 5))
    world.ask("c", "child", words(3, 5))
    world.assert_right("p")
    assert world.prompts["c"][0] == words(1, 42) + words(3, 5)
    assert world.engine.stats.prompt_computed - computed == 10
    assert sum(len(plan.copies) for plan in world.runner.plans) <= 2
    assert world.engine.cache.stats.tree <= cells + 2 * 5 * world.config.page_size
    world.close("parent")
    world.ask("again", "child", words(4, 5))


def test_a_sessions_cells_survive_cache_pressure_and_are_freed_on_close():
    world = opened(60, cells=256, context_length=128)
    for i in range(8):
        world.submit(f"flood{i}", words(100 + i, 90))
    world.run()
    assert world.engine.cache.stats.evicted > 0
    before = world.engine.stats.prompt_computed
    world.ask("q", "s", words(2, 4))
    assert world.engine.stats.prompt_computed - before <= 4 + world.config.page_size
    assert world.engine.cache.cells.in_use > 0
    world.close("s")
    world.run()
    world.assert_idle()
    assert world.engine.cache.cells.in_use == 0


def test_close_aborts_running_and_queued_operations():
    world = make(step_tokens=4)
    world.open("s")
    for name in ("running", "queued"):
        world.append(name, "s", words(1, 40))
    fork = world.fork("s", "child")
    world.step()
    world.close("s")
    assert all(isinstance(world.end(name), Aborted) for name in ("running", "queued", fork))
    world.assert_idle()
    assert not world.engine.busy


def test_a_tenant_cannot_take_every_session():
    world = make(tenant_sessions=2)
    own = [world.open(f"s{i}", scope="one") for i in range(3)]
    other = world.open("s0", scope="other")
    world.run()
    assert [isinstance(world.end(name), Rejected) for name in (*own, other)] == [False, False, True, False]
    assert world.end(own[2]).error.kind is ErrorKind.OVERLOADED
    assert "at most 2 sessions" in world.end(own[2]).error.message


def test_an_unused_session_is_closed():
    world = opened(session_idle_s=50.0)
    world.now += 60.0
    world.append("late", "s", words(2, 20))
    assert world.end("late").error.field == "session_id"
    assert "50 s" in world.end("late").error.message
    world.assert_idle()
    assert world.engine.cache.cells.in_use == 0


def test_tokens_after_the_end_of_a_reply_are_not_kept():
    world = make()
    world.open("s")
    world.query("q", "s", words(1, 9), max_tokens=20)
    world.steps(4)
    assert len(world.out["q"]) > 2
    world.give(Stop("q", completion=2))
    assert world.end("q").usage.completion == 2
    assert world.histories["", "s"] == words(1, 9) + world.out["q"][:2]
    world.ask("again", "s", words(2, 3))


def test_an_idle_engine_knows_when_to_close_a_session():
    world = make(session_idle_s=50.0)
    assert world.engine.due is None
    world.open("s")
    world.append("a", "s", words(1, 20))
    assert world.engine.due is None, "it is in use"
    world.run()
    due = world.engine.due
    assert due is not None
    assert due - world.now == pytest.approx(50.0, abs=1.0)
    world.now = due
    world.idle()
    assert world.engine.due is None
    assert world.engine.cache.cells.in_use == 0


@pytest.mark.parametrize("order", ["program", ORDERS["infercept"], "fair"])
def test_an_operation_is_served_before_requests_that_come_after_it(order):
    """Without a given arrival a session counts from its opening, a request from its own arrival."""
    world = make(max_sequences=2, session_rows=1, order=order)
    world.now = 1000.0
    world.open("s")
    for i in range(2):
        world.give(Submit(f"before {i}", tokens=np.asarray(words(i, 40), np.int32), sampling=Sampling(8)))
    world.step()
    world.query("q", "s", words(7, 40), 4)
    for i in range(20):
        world.give(Submit(f"after {i}", tokens=np.asarray(words(20 + i, 40), np.int32), sampling=Sampling(8)))
        world.step()
    world.run()
    world.assert_right("q")
    assert all(world.end("q").timing.scheduled <= world.end(f"after {i}").timing.scheduled for i in range(20))


def test_an_append_behind_a_long_query_does_not_wait_for_the_engine():
    world = make(queue_timeout_s=10.0)
    world.open("s")
    world.query("long", "s", talkative(9, 60), 60, keep=False)
    world.append("a", "s", words(1, 20))
    sent = world.now
    world.run_until("long")
    assert world.now > sent + 10.0
    world.ask("q", "s", words(3, 4), 4)
    assert world.prompts["q"][0] == words(1, 20) + words(3, 4)
    assert world.end("a").timing.arrived == sent, "its time counts from when it was sent"


def test_an_operation_that_waits_too_long_is_refused():
    world = make(max_sequences=2, session_rows=1, queue_timeout_s=10.0)
    world.open("s")
    for program in ("", "p"):  # a row of each region
        world.submit(f"long {program}", talkative(9, 60), 60, program=program)
    world.step()
    world.append("a", "s", words(1, 20))
    world.run_until("a")
    assert world.end("a").error.kind is ErrorKind.OVERLOADED
    assert 11.0 <= world.now <= 14.0


def test_decoding_continues_during_a_long_append(monkeypatch):
    monkeypatch.setattr(EngineConfig, "latency_chunk", 8)
    world = make(step_tokens=64)
    world.begin("a", words(1, 8), max_tokens=60)
    world.open("s")
    world.append("long", "s", words(2, 200))
    while not world.ends["long"]:
        drawn = len(world.out["a"])
        world.step()
        assert world.ends["a"] or len(world.out["a"]) > drawn
        chunks = world.runner.plans[-1].chunks
        assert len(chunks) == 1 or all(len(chunk.tokens) <= 8 for chunk in chunks)
    world.run()
    world.assert_right("a")


def test_without_the_prefix_cache_a_session_keeps_its_history_and_a_fork_computes_it_again():
    world = opened(40, without=("prefix_cache",))
    computed = world.engine.stats.prompt_computed
    world.ask("query", "s", words(2, 5))
    assert world.engine.stats.prompt_computed - computed <= 5 + 1
    world.fork("s", "child")
    computed = world.engine.stats.prompt_computed
    world.ask("of the child", "child", words(3, 5))
    assert world.engine.stats.prompt_computed - computed > 40
    for session in ("s", "child"):
        world.close(session)
    world.assert_idle()


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=8), closing=st.lists(st.integers(0, 3), max_size=4))
def test_a_reply_is_closed_once(tokens, closing):
    """Drawn tokens of the closing are not added again."""
    drawn, end = np.array(tokens, np.int32), np.array(closing, np.int32)
    closed = closed_reply(drawn, end).tolist()
    assert closed[: len(tokens)] == tokens
    assert closed[len(closed) - len(closing) :] == closing
    assert closed_reply(np.array(closed, np.int32), end).tolist() == closed
    shorter = [tokens + closing[n:] for n in range(len(closing) + 1) if tokens[len(tokens) - n :] == closing[:n]]
    assert closed == min(shorter, key=len)


def test_standing_questions_do_not_extend_a_session():
    world = opened(session_idle_s=50.0)
    world.now += 40.0
    asked = np.array(words(2, 5), np.int32)
    world.give(Submit("ahead", tokens=asked, sampling=Sampling(3), session=SessionTurn("s", keep=False, standing=True)))
    world.run()
    assert world.engine.session("", "s") is not None
    world.now += 20.0
    world.append("late", "s", words(2, 20))
    assert world.end("late").error.field == "session_id"
