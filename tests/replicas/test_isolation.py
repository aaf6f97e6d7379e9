"""A tenant cannot tell what another one has cached: not from its usage, not from when its answers come, not from what
the engine does for it.

Two worlds: in one the other tenant has sent what this one is going to ask, in the other as much of something else, in
the same order. The clock is the step's own cost, by its tokens, so that equal times mean equal work.
"""

from collections.abc import Sequence
from typing import Any

from engine_world import World, words
from fake_runner import VOCABULARY
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.plan import StepPlan
from holdfast.replicas.types import CellLimits

CELLS = (None, CellLimits(floor=0.3), CellLimits(ceiling=0.4))
sent = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 50), st.sampled_from(["", "p"])), min_size=1, max_size=6
)  # which text, how much of it, of which program


def other(tokens: list[int]) -> list[int]:
    """A text like this one in what it shares with its like, and in no token the same."""
    return [(token + VOCABULARY // 2) % VOCABULARY or 1 for token in tokens]


def takes(world: World, plan: StepPlan) -> bool:
    """A step takes as long as it has tokens; none fails."""
    world.step_s = 0.01 * sum(len(chunk.tokens) for chunk in plan.chunks)
    return False


def seen(
    before: Sequence[tuple[int, int, str]], asked: Sequence[tuple[int, int, str]], *, same: bool, **settings: Any
) -> list[Any]:
    """What a tenant sees of what it asks, after the other one has sent what was `before`."""
    world = World(**{"order": "fair", "page_size": 4, "context_length": 100} | settings)
    world.runner.fail = lambda plan: takes(world, plan)
    limits = iter(CELLS)
    for i, (text, n, program) in enumerate(before):
        tokens = words(text, n) if same else other(words(text, n))
        world.submit(f"v{i}", tokens, 1, scope="victim", program=program, cells=next(limits, None))
        if i % 2:
            world.run()
    found: list[Any] = []
    for i, (text, n, program) in enumerate(asked):
        world.submit(f"m{i}", words(text, n), 4, scope="me", program=program)
        world.run()
        end = world.end(f"m{i}")
        found.append((type(end), end.usage, end.timing, world.out[f"m{i}"], world.engine.load().cells_free))
    return found


@settings(max_examples=30)
@given(sent, sent, st.sampled_from([112, 256, 1024]), st.sampled_from([4, 64]), st.sampled_from([0, 96]), st.booleans())
def test_what_another_tenant_has_sent_changes_nothing_that_this_one_sees(before, asked, cells, step, host, grouped):
    how = {"cells": cells, "step_tokens": step, "host_cells": host, "without": () if grouped else ("grouped_prefill",)}
    assert seen(before, asked, same=True, **how) == seen(before, asked, same=False, **how)


def test_the_same_tenant_does_see_it():
    """The measure measures: what one has sent itself is found, and its answer comes sooner."""
    asked = [(0, 40, ""), (0, 40, "")]
    first, second = seen([(1, 8, "")], asked, same=False, cells=1024)
    assert first[1].cached == 0 < second[1].cached
    waits = [timing.first_token - timing.arrived for _, _, timing, *_ in (first, second)]
    assert waits[1] < waits[0]
