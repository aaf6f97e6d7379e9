"""Steps that overlap: outputs are those of steps one after the other, and what was planned in vain leaves nothing."""

import numpy as np
from engine_world import World, words
from fake_runner import complete
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.radix import RadixTree
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Abort, Failed, Finished, Stop, Submit
from holdfast.replicas.speculation import drafter

PLAIN = DraftConfig(enabled=False)


def overlapped(**settings) -> World:
    return World(**({"overlap_steps": "on", "speculation": PLAIN, "admission_ceiling": 1.0} | settings))


request = st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(0, 20), st.integers(0, 6))
command = st.one_of(request, st.integers(1, 4))


def play(world: World, script, cuts: bool) -> None:
    """Requests (text, its length, most tokens, steps after) and steps; every third number also ends a request."""
    for each in script:
        if isinstance(each, int):
            if cuts and world.ends:
                name = list(world.ends)[-min(each, len(world.ends))]
                world.give(Stop(name) if each % 2 else Abort(name))
            world.step()
        else:
            text, length, most, steps = each
            world.submit(f"r{len(world.ends)}", words(text, length), most, program=f"p{text}")
            for _ in range(steps):
                world.step()
    world.run()
    world.assert_idle()


@settings(max_examples=30)
@given(
    script=st.lists(command, min_size=1, max_size=14),
    cells=st.sampled_from([96, 256]),
    page_size=st.sampled_from([1, 4]),
    step_tokens=st.sampled_from([5, 64]),
    drafts=st.booleans(),
    eager=st.integers(1, 4),
    cuts=st.booleans(),
)
def test_outputs_and_ends_are_those_of_one_step_after_the_other(
    script, cells, page_size, step_tokens, drafts, eager, cuts
):
    worlds = []
    for overlap in ("off", "on"):
        speculation = DraftConfig(enabled=drafts)
        how = {"cells": cells, "page_size": page_size, "step_tokens": step_tokens, "speculation": speculation}
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
        right = complete(prompt, most)
        assert late.out[name] == right[: len(late.out[name])]


def test_steps_are_begun_before_the_one_before_is_over():
    world = overlapped()
    for i in range(3):
        world.submit(f"{i}", words(i, 9), max_tokens=12)
    world.run()
    assert world.runner.most_in_flight == 2
    for i in range(3):
        world.assert_right(f"{i}")
    followed = [chunk for plan in world.runner.plans for chunk in plan.chunks if chunk.start >= 10]
    assert len(followed) >= 20


def test_what_needs_the_tokens_first_is_not_overlapped():
    world = overlapped(speculation=DraftConfig())
    world.submit("a", [1, 2, 3, 4, 5, 6, 7] * 4, max_tokens=20)  # the model repeats it: there are always drafts
    world.run()
    world.assert_right("a")
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
    world.submit("a", words(1, 9), max_tokens=20)
    world.run()
    world.assert_right("a")
    assert world.runner.most_in_flight == 2


def test_books_that_break_with_a_step_in_flight_are_opened_anew(monkeypatch):
    world = overlapped(max_sequences=2)
    for i in range(3):
        world.submit(f"{i}", words(i, 9), max_tokens=20)
    for _ in range(4):
        world.step()
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
    for _ in range(4):
        world.step()
    world.take(world.engine.fail_all(ConfigError("over", "x"), world.now))
    assert isinstance(world.end("a"), Failed)
    assert not world.engine.busy
    assert all(flight.landed for flight in world.runner.flights)
