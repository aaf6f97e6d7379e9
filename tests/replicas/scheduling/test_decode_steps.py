"""A step may stand for several where all that is to be done is to decode, and then nobody can tell the difference."""

import numpy as np
from engine_world import World, words
from fake_runner import complete
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.events import Sampling, Submit

SILENT = DraftConfig(enabled=False)


def step(world: World, times: int) -> int:
    """One call for `times` steps; how many were planned."""
    world.now += 1.0
    world.engine.scheduler.decode_steps = times
    world.take(world.engine.step(world.now, lambda: world.now))
    world.check()
    return world.runner.plans[-1].times


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_what_comes_out_is_what_comes_of_single_steps(requests: list[tuple[int, int]], times: list[int]) -> None:
    world = World(speculation=SILENT)
    for i, (prompt, _) in enumerate(requests[::2]):
        world.submit(f"early {i}", words(i, prompt), requests[2 * i][1])
    late = [(f"late {i}", words(50 + i, prompt), most) for i, (prompt, most) in enumerate(requests[1::2])]
    calls = 0
    while world.engine.busy or late:
        step(world, times[calls % len(times)])
        calls += 1
        if late and calls % 2:
            world.submit(*late.pop())
    for name, (prompt, most) in world.prompts.items():
        assert world.out[name] == complete(prompt, most)
    plans = [plan for plan in world.runner.plans if plan.times > 1]
    assert all(plan.decodes and plan.plain is False for plan in plans)


def test_a_prompt_beside_those_that_decode_makes_it_one_step() -> None:
    world = World(speculation=SILENT, max_sequences=2)
    world.submit("a", words(1, 10), 30)
    assert step(world, 5) == 1, "the prompt"
    assert step(world, 5) == 5
    world.submit("b", words(2, 10), 30)
    assert step(world, 5) == 1, "another one's"
    world.submit("c", words(3, 10), 30)
    assert step(world, 3) == 3, "no row is free for it"


def test_without_cells_for_all_of_them_it_is_one_step() -> None:
    world = World(speculation=SILENT, cells=64, context_length=56, admission_ceiling=1.0)
    world.submit("a", words(1, 12), 40)
    world.submit("b", words(2, 12), 40)
    step(world, 1)
    assert step(world, 28) == 1
    assert step(world, 4) == 4


def test_whoever_needs_each_token_before_the_next_gets_single_steps() -> None:
    world = World(speculation=SILENT)
    tokens = np.asarray(words(1, 10), np.int32)
    world.give(Submit("a", tokens, Sampling(20, presence_penalty=0.5)))
    step(world, 1)
    assert step(world, 5) == 1
