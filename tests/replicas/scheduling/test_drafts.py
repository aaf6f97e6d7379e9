"""Drafts beside steps: the drafter knows what has been drawn, and reads and remembers while a step runs."""

import pytest
from engine_world import World, play, words
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.programs import Status
from holdfast.replicas.speculation import drafter as drafting

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
    drafter, step = world.engine._drafter, world.step

    def checked() -> None:
        step()
        drafter._table.learn()
        for sequence in world.engine.live.values():
            state = drafter._states.get(sequence.request_id)
            if state is not None and sequence.status is Status.RUNNING:
                assert state.index.tokens().tolist() == sequence.tokens.tolist()

    world.step = checked
    play(world, script)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_what_a_turn_said_is_drafted_for_the_next_one(overlap):
    world = World(overlap_steps=overlap)
    for name in ("a", "b"):
        world.serve(name, words(1, 12), 20)
    assert world.end("b").usage.work.accepted > world.end("a").usage.work.accepted


@pytest.mark.parametrize("broken", ["_State", "draft_lengths", "NGramIndex"])
def test_a_broken_drafter_costs_drafts_alone(broken, monkeypatch):
    world = World(overlap_steps="on")

    def fail(*args) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(drafting, broken, fail)
        world.serve("a", words(1, 12), 8)
    world.serve("after", words(1, 12), 8)
    assert world.end("after").usage.work.drafted > 0
