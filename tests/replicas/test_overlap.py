"""Steps that overlap: outputs are those of steps one after the other, and what was planned in vain leaves nothing."""

import numpy as np
from engine_world import World, play, words
from fake_runner import complete
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.radix import RadixTree
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Failed, Finished, Stop, Submit
from holdfast.replicas.speculation import drafter

PLAIN = DraftConfig(enabled=False)


def overlapped(**settings) -> World:
    return World(**({"overlap_steps": "on", "speculation": PLAIN, "admission_ceiling": 1.0} | settings))


request = st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(0, 20), st.integers(0, 6))
command = st.one_of(request, st.integers(1, 4))


settings_of = {
    "cells": st.sampled_from([96, 256]),
    "page_size": st.sampled_from([1, 4]),
    "step_tokens": st.sampled_from([5, 64]),
    "speculation": st.builds(DraftConfig, enabled=st.booleans()),
}


@settings(max_examples=30)
@given(st.lists(command, min_size=1, max_size=14), st.fixed_dictionaries(settings_of), st.integers(1, 4), st.booleans())
def test_outputs_and_ends_are_those_of_one_step_after_the_other(script, how, eager, cuts):
    worlds = []
    for overlap in ("off", "on"):
        world = overlapped(overlap_steps=overlap, **how)
        world.runner.eager = lambda n: n % eager == 0
        play(world, script, cuts)
        worlds.append(world)
    plain, late = worlds
    for name, (prompt, most) in plain.prompts.items():
        ends = [world.end(name) for world in worlds]
        if not cuts:
            assert late.out[name] == plain.out[name]
            assert [type(end) for end in ends] == [type(ends[0])] * 2
            if isinstance(ends[0], Finished):
                assert ends[0].reason == ends[1].reason
                assert ends[0].usage.completion == ends[1].usage.completion == len(late.out[name])
        assert late.out[name] == complete(prompt, most)[: len(late.out[name])]


def test_steps_are_begun_before_the_one_before_is_over():
    world = overlapped()
    for i in range(3):
        world.submit(f"{i}", words(i, 9), max_tokens=12)
    world.run()
    assert world.runner.most_in_flight == 2
    world.assert_right(*(f"{i}" for i in range(3)))
    followed = [chunk for plan in world.runner.plans for chunk in plan.chunks if chunk.start >= 10]
    assert len(followed) >= 20


def test_what_needs_the_tokens_first_is_not_overlapped():
    world = overlapped(speculation=DraftConfig())
    world.serve("a", [1, 2, 3, 4, 5, 6, 7] * 4, max_tokens=20)  # the model repeats it: there are always drafts
    assert world.engine.stats.accepted > 0
    counted = overlapped()
    penalised = Sampling(12, presence_penalty=1.0)
    counted.prompts["b"] = (words(1, 9), 12)
    counted.give(Submit("b", tokens=np.asarray(words(1, 9), np.int32), sampling=penalised))
    counted.run()
    counted.assert_right("b")
    assert counted.runner.most_in_flight == 1


def test_without_drafts_for_a_while_steps_overlap_though_speculation_is_on(monkeypatch):
    world = overlapped(speculation=DraftConfig())
    monkeypatch.setattr(drafter, "draft_lengths", lambda acceptances, *_: [0] * len(acceptances))
    world.serve("a", words(1, 9), max_tokens=20)
    assert world.runner.most_in_flight == 2


def test_books_that_break_with_a_step_in_flight_are_opened_anew(monkeypatch):
    world = overlapped(max_sequences=2)
    for i in range(3):
        world.submit(f"{i}", words(i, 9), max_tokens=20)
    world.steps(4)
    assert world.engine._pipeline.flying
    with monkeypatch.context() as patch:
        patch.setattr(RadixTree, "release", lambda *_: 1 / 0)
        world.give(Stop("0"))
    assert not world.engine._pipeline.flying
    world.run()
    assert isinstance(world.end("0"), Finished)
    assert isinstance(world.end("1"), Failed)
    world.assert_right("2")
    world.assert_idle()


def test_an_engine_that_stops_lands_what_is_in_flight():
    world = overlapped()
    world.submit("a", words(1, 9), max_tokens=30)
    world.steps(4)
    world.take(world.engine.fail_all(ConfigError("over", "x"), world.now))
    assert isinstance(world.end("a"), Failed)
    assert not world.engine.busy
    assert all(flight.landed for flight in world.runner.flights)
