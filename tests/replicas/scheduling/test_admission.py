"""Who is started: as many as may come to an end within the ceiling, and nobody behind cells that others merely keep."""

from dataclasses import replace

import pytest
from engine_world import World, talkative, words
from pinning import KEEP

from holdfast.replicas.config import RetentionConfig
from holdfast.replicas.requests import TurnEnded

KEEPS = RetentionConfig(KEEP, most_s=9000.0)


def cells_of_running(world: World) -> int:
    pages = {page for sequence in world.engine.scheduler._running for page in sequence.the_holding.pages.tolist()}
    return len(pages) * world.config.page_size


def paused(world: World, number: int, prompt: list[int]) -> list[int]:
    """A program has its first turn, which leaves a pin; its history."""
    name = f"p{number}"
    world.serve(name, prompt, 4, program=name, began=float(number))
    world.give(TurnEnded(name, "", name, ("ls",), False, 1))
    return prompt + world.out[name]


@pytest.mark.parametrize("ceiling", [0.25, 0.5, 0.75])
def test_what_runs_stays_within_the_ceiling_to_its_end(ceiling: float) -> None:
    room = {"cells": 1024, "context_length": 256, "max_sequences": 32, "completion_reserve": 32}
    world = World(**room, admission_ceiling=ceiling, step_tokens=64)
    for i in range(20):
        world.submit(f"r{i}", words(i, 90), 30)
    most, together = 0, 0
    while world.engine.busy:
        world.step()
        most = max(most, world.engine.cache.cells.in_use)
        together = max(together, world.engine.occupancy().running)
    assert most <= 1024 * ceiling
    assert together == 1024 * ceiling // 120  # each takes 120 cells
    assert world.engine.stats.preemptions == 0


def test_a_cached_prefix_counts_from_when_somebody_uses_it() -> None:
    world = World(cells=512, context_length=256, max_sequences=8, admission_ceiling=0.5)
    preamble = words(1, 120)
    world.serve("first", preamble, 1)
    for i in range(2):
        world.submit(f"r{i}", words(100 + i, 100), 20)
    world.submit("again", [*preamble, *words(3, 8)], 8)  # only 16 cells beyond what is cached, of 136
    world.step()
    assert world.engine.occupancy().running == 2
    world.run()
    world.assert_right("r0", "r1", "again")


@pytest.mark.parametrize("policy", ["none", KEEP])
def test_a_prompt_is_not_deferred_for_what_is_kept_for_programs_behind_it(policy: str) -> None:
    room = {"cells": 2048, "context_length": 512, "max_sequences": 40, "session_rows": 30}
    world = World(**room, retention=replace(KEEPS, policy=policy))
    world.engine.scheduler._high_water = int(0.8 * 2048)
    for i in range(24):
        paused(world, 100 + i, words(i + 50, 76))
    world.submit("early", talkative(10, 100), 100, began=1.0)
    world.steps(3)
    assert world.engine.cache.cells.in_use >= (0.8 * 2048 if policy == KEEP else 0)
    asked = world.now
    world.serve("second", words(999, 120), 4, began=2.0)
    assert world.end("second").timing.first_token - asked <= 2.0
    assert world.engine.stats.chunks_deferred == 0


@pytest.mark.parametrize("policy", ["none", KEEP])
@pytest.mark.parametrize("own", [False, True])
def test_what_a_pin_keeps_is_occupied_by_those_who_read_it(policy: str, own: bool) -> None:
    """A preamble that a paused program has as well, and histories that come back to their own pins."""
    room = {"cells": 1024, "context_length": 1000, "max_sequences": 20, "session_rows": 10, "completion_reserve": 64}
    how = {"without": ("chunk_deferral",), "admission_ceiling": 0.5, "step_tokens": 400}
    world = World(**room, **how, retention=replace(KEEPS, policy=policy))
    preamble = words(1, 260)
    begun = [paused(world, i, words(i + 50, 136)) if own else paused(world, i, preamble) and preamble for i in range(6)]
    for i, tokens in enumerate(begun):
        prompt = talkative(4 if own else 20, 60, tokens, first=10_000 * i)
        world.submit(f"q{i}", prompt, 60, program=f"{'p' if own else 'q'}{i}", began=float(i), turns=int(own))
    most = together = 0
    while world.engine.busy:
        world.step()
        most, together = max(most, cells_of_running(world)), max(together, world.engine.occupancy().running)
    assert most <= 512
    assert together == (2 if own else 3)  # 204 cells each; 260 and then 80 each
    assert world.engine.stats.preemptions == 0
