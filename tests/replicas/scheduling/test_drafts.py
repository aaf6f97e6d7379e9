"""Drafts beside steps: the drafter knows what has been drawn, and reads and remembers while a step runs."""

import numpy as np
import pytest
from engine_world import World, words
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.events import Abort, Stop, Submit
from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Sequence, Status
from holdfast.replicas.scheduling.batch import StepBuilder

request = st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(0, 20), st.integers(0, 6))


@settings(max_examples=40)
@given(
    script=st.lists(st.one_of(request, st.integers(1, 4)), min_size=1, max_size=10),
    overlap=st.sampled_from(["off", "on"]),
    cells=st.sampled_from([96, 256]),
    step_tokens=st.sampled_from([5, 64]),
)
def test_the_drafter_has_every_token_of_a_sequence(script, overlap, cells, step_tokens):
    world = World(overlap_steps=overlap, cells=cells, step_tokens=step_tokens, admission_ceiling=1.0)

    def step() -> None:
        world.step()
        drafts = world.engine.scheduler.drafts
        for sequence in world.engine.live.values():
            state = drafts._states.get(sequence.request_id)
            if state is not None and sequence.status is Status.RUNNING:
                assert state.index.tokens().tolist() == sequence.tokens.tolist()

    for each in script:
        if isinstance(each, int):
            if world.ends:
                name = list(world.ends)[-min(each, len(world.ends))]
                world.give(Stop(name) if each % 2 else Abort(name))
            step()
        else:
            text, length, most, steps = each
            world.submit(f"r{len(world.ends)}", words(text, length), most, program=f"p{text}")
            for _ in range(steps):
                step()
    while world.engine.busy:
        step()
    world.assert_idle()


def logged(world: World) -> list[str]:
    """What is going to happen to steps and to what drafts are taken from, in order."""
    log: list[str] = []
    drafter, runner = world.engine._drafter, world.runner

    def note(owner: object, name: str) -> None:
        does = getattr(owner, name)

        def noted(*args):
            log.append(name)
            return does(*args)

        setattr(owner, name, noted)

    note(drafter, "open")
    note(drafter, "close")
    note(drafter, "propose_all")
    note(runner, "begin")
    note(runner, "compute")  # when the step lands
    return log


def test_prompts_are_read_and_answers_remembered_while_a_step_runs():
    world = World(overlap_steps="on")
    log = logged(world)
    for name in ("a", "b"):
        world.submit(name, words(1, 12), 8)
        world.run()
        world.assert_right(name)
    # Both of the first step are read, or remembered, before anybody waits for it.
    assert log[: log.index("compute")].count("open") == 1
    second = len(log) - log[::-1].index("open") - 1
    assert log[second - 2 : second + 2] == ["begin", "close", "open", "compute"]
    assert log.count("open") == 2
    assert log.count("close") == 1  # the last one's answer has no step yet that could do without it


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_what_a_turn_said_is_drafted_for_the_next_one(overlap):
    only = DraftConfig(prompt_lookup=False, skeleton=False)
    world = World(overlap_steps=overlap, speculation=only)
    for name in ("a", "b"):
        world.submit(name, words(1, 12), 20)
        world.run()
        world.assert_right(name)
    assert world.end("a").usage.work.accepted == 0
    assert world.end("b").usage.work.accepted > 0


def test_an_answer_too_short_for_drafts_is_not_read_for_any():
    world = World(overlap_steps="on")
    log = logged(world)
    for most in (0, 1, 2):
        world.submit(f"{most}", words(most, 12), most)
        world.run()
    assert "open" not in log


def test_a_broken_drafter_costs_drafts_alone(monkeypatch):
    world = World(overlap_steps="on")

    def broken(*args) -> None:
        raise RuntimeError("injected")

    for name in ("open", "close"):
        monkeypatch.setattr(world.engine._drafter, name, broken)
        world.submit(name, words(1, 12), 8)
        world.run()
        world.assert_right(name)
        monkeypatch.undo()
    world.submit("after", words(1, 12), 8)
    world.run()
    world.assert_right("after")


@given(st.lists(st.integers(0, 3), max_size=12), st.floats(0, 1))
def test_draws_are_kept_by_the_number_of_drafts(numbers, presence):
    sampling = Sampling(max_tokens=32, presence_penalty=presence)
    sequence = Sequence.of(
        Submit("r", tokens=np.arange(5, dtype=np.int32), sampling=sampling), 0, 0.0, frozenset(), seed=3
    )
    sequence.move(Status.RUNNING)
    sequence.row, sequence.n_computed = 0, sequence.length - 1
    builder = StepBuilder()
    for n in numbers:
        builder.compute(sequence, 1, np.arange(n, dtype=np.int32))
    for n, chunk in zip(numbers, builder.chunks, strict=True):
        assert chunk.draw is not None
        assert (chunk.draw.drafts, chunk.draw.seed, chunk.draw.sampling) == (n, 3, sampling)
        assert (chunk.draw.counts is not None) == (presence > 0)
        assert chunk.tokens[1:].tolist() == list(range(n))
    assert len({id(chunk.draw) for chunk in builder.chunks}) == (len(numbers) if presence else len(set(numbers)))
