"""Requests with a time: who is let in has its answer, who cannot have it is told so before anything is done for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import hypothesis.strategies as st
import pytest
from engine_world import World, words
from hypothesis import given, settings

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ErrorKind
from holdfast.replicas.requests import Abort, Aborted, Finished, Rejected
from holdfast.replicas.types import RANKS, Priority

BATCH, INTERACTIVE = Priority.BATCH, Priority.INTERACTIVE


def busy(requests: int = 12, **settings) -> World:
    """One that has learned: of its one row's requests some have ended, and some still wait."""
    world = World(max_sequences=1, cells=4096, **settings)
    for i in range(requests):
        world.submit(f"old{i}", words(i, 8), 4)
    while sum(bool(ends) for ends in world.ends.values()) < requests - 2:
        world.step()
    return world


@contextmanager
def token_bound(tokens: int) -> Iterator[None]:
    """The queue takes so many tokens of prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineConfig, "max_waiting_tokens", tokens)
        yield


def kind(event) -> ErrorKind:
    assert isinstance(event, Rejected)
    return event.error.kind


def test_a_time_that_is_over_in_the_queue_ends_a_request_before_any_work():
    world = World(max_sequences=1)
    world.begin("runs", words(0, 8), 20)
    world.submit("short", words(1, 8), within_s=2.5)
    world.submit("long", words(2, 8), within_s=200.0)
    world.steps(3)
    assert kind(world.end("short")) is ErrorKind.DEADLINE
    assert world.end("short").error.retry_after_s is None
    world.run()
    world.assert_right("runs", "long")
    assert world.engine.stats.not_begun["dropped"] == 1
    world.assert_idle()


def test_who_cannot_have_its_answer_in_time_is_refused_at_once_and_told_when_to_come():
    world = busy()
    gap_s = world.engine.scheduler.admission.forecast.gap_s
    assert gap_s > 2.0
    world.submit("hopeless", words(50, 8), 4, within_s=gap_s)
    assert kind(world.end("hopeless")) is ErrorKind.DEADLINE
    retry_s = world.end("hopeless").error.retry_after_s
    assert retry_s > 0
    world.submit("hopeful", words(51, 8), 4, within_s=gap_s + retry_s + 1.0)
    sent = world.now
    world.run_until("hopeful")
    world.assert_right("hopeful")
    assert world.now - sent <= gap_s + retry_s + 1.0
    world.run()
    assert world.engine.stats.not_begun["refused"] == 1


def test_a_program_that_goes_on_is_not_behind_those_that_came_after_it():
    world = busy()
    gap_s = world.engine.scheduler.admission.forecast.gap_s
    for i in range(5):
        world.submit(f"new{i}", words(70 + i, 8), 4)
    world.submit("mine", words(80, 8), 4, program="p", began=-1.0, turns=3, within_s=3 * gap_s)
    assert not world.ends["mine"], "it comes before all that wait"
    world.submit("theirs", words(81, 8), 4, program="q", within_s=3 * gap_s)
    assert kind(world.end("theirs")) is ErrorKind.DEADLINE
    world.run()
    world.assert_right("mine")


@pytest.mark.parametrize(("requests", "tokens"), [(3, 1000), (100, 24)])
def test_in_a_full_queue_the_last_of_the_lowest_class_gives_way(requests, tokens, monkeypatch):
    monkeypatch.setattr(EngineConfig, "max_waiting_tokens", tokens)
    world = World(max_sequences=1, cells=4096, max_waiting=requests)
    world.begin("runs", words(0, 8), 20)
    for i in range(2):
        world.submit(f"batch{i}", words(1 + i, 8), priority=BATCH)
    world.submit("one", words(3, 8), priority=INTERACTIVE)
    world.submit("more", words(4, 8), priority=BATCH)
    assert kind(world.end("more")) is ErrorKind.OVERLOADED, "none is of a lower class than it"
    for name, gone in (("two", "batch1"), ("three", "batch0")):
        world.submit(name, words(9, 8), priority=INTERACTIVE)
        assert kind(world.end(gone)) is ErrorKind.OVERLOADED
    world.submit("four", words(10, 8), priority=INTERACTIVE)
    assert kind(world.end("four")) is ErrorKind.OVERLOADED
    world.run()
    world.assert_right("runs", "one", "two", "three")
    assert world.engine.stats.not_begun["gave_way"] == 2
    assert world.engine.stats.not_begun["full"] == 2
    world.assert_idle()


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from(RANKS), st.integers(1, 12), st.integers(0, 1)), max_size=24),
    st.integers(1, 5),
    st.integers(1, 24),
)
def test_nobody_gives_way_in_vain(arrivals, most, tokens):
    """Who gives way does so for one that is taken in, and for which there was no room with it. Each ends once."""
    with token_bound(tokens):
        world = World(max_sequences=1, cells=1024, max_waiting=most)
        admission, sizes = world.engine.scheduler.admission, {}
        world.begin("runs", words(0, 8), 8)
        for number, (priority, n, steps) in enumerate(arrivals):
            name, waiting = f"r{number}", {each.request_id for each in admission}
            sizes[name] = n
            world.submit(name, words(1 + number, n), 2, priority=priority)
            gone = {each for each in waiting if world.ends[each]}
            assert not (gone and world.ends[name])
            for each in gone:
                assert kind(world.end(each)) is ErrorKind.OVERLOADED
                assert len(admission) + 1 > most or admission.tokens + sizes[each] > tokens
            world.steps(steps)
        world.run()
        world.assert_idle()
        for name in sizes:
            if isinstance(world.end(name), Finished):
                world.assert_right(name)


def test_clients_that_do_not_wait_teach_as_well():
    """Where nothing is ever finished it is still learned how long serving takes."""
    world = World(max_sequences=1, cells=4096)
    for i in range(12):
        world.submit(f"r{i}", words(i, 8), 100)
    for i in range(10):
        while not world.out[f"r{i}"]:
            world.step()
        world.steps(5)
        world.give(Abort(f"r{i}"))
        assert isinstance(world.end(f"r{i}"), Aborted)
    forecast = world.engine.scheduler.admission.forecast
    assert forecast.gap_s > 4.0
    assert forecast.serving_s(100, False) > 4.0


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it
        st.integers(4, 24),  # tokens of its prompt
        st.integers(1, 8),  # of its answer
        st.sampled_from([inf, 0.5, 3.0, 10.0, 40.0]),
        st.booleans(),
        st.sampled_from([INTERACTIVE, BATCH]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=30)
@given(ARRIVALS, st.sampled_from([16, 64, 1 << 20]))
def test_each_request_ends_once_and_none_is_begun_when_its_time_is_over(arrivals, tokens):
    with token_bound(tokens):
        world = World(max_sequences=2, cells=1024, max_waiting=6)
        sent = {}
        for number, (steps, prompt, answer, within_s, begins, priority) in enumerate(arrivals):
            world.steps(steps)
            name = f"r{number}"
            sent[name] = (world.now, within_s)
            world.submit(name, words(number, prompt), answer, within_s=within_s, begins=begins, priority=priority)
            assert world.engine.occupancy().waiting <= 6
        world.run()
        world.assert_idle()
        for name, (came, within_s) in sent.items():
            end = world.end(name)
            if isinstance(end, Finished):
                world.assert_right(name)
                assert end.timing.scheduled < came + within_s
            else:
                assert not world.out[name], "refused before any work"
                assert kind(end) is ErrorKind.OVERLOADED or within_s < inf
        assert sum(world.engine.stats.not_begun.values()) == world.engine.stats.ended["rejected"]
