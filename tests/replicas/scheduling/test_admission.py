"""Who is started: as many as may come to an end within the ceiling, and nobody behind cells that others merely keep."""

import pytest
from engine_world import World, words
from fake_runner import complete

from holdfast.replicas.events import TurnEnded
from holdfast.replicas.kv.cache import in_use
from holdfast.replicas.retention.config import RetentionConfig


def talkative(n_prompt: int, n: int) -> list[int]:
    """A prompt that is answered with `n` tokens."""
    return next(p for seed in range(5000) if len(complete(p := words(seed, n_prompt), n)) == n)


@pytest.mark.parametrize("ceiling", [0.25, 0.5, 0.75])
def test_what_runs_stays_within_the_ceiling_to_its_end(ceiling: float) -> None:
    world = World(
        cells=1024,
        context_length=256,
        max_sequences=32,
        page_size=4,
        completion_reserve=32,
        admission_ceiling=ceiling,
        step_tokens=64,
    )
    for i in range(20):
        world.submit(f"r{i}", words(i, 90), 30)
    most, together = 0, 0
    while world.engine.busy:
        world.step()
        most = max(most, in_use(world.engine.cache))
        together = max(together, world.engine.occupancy().running)
    assert most <= 1024 * ceiling
    assert together == 1024 * ceiling // 120  # each takes 120 cells
    assert world.engine.stats.preemptions == 0


def test_a_cached_prefix_counts_from_when_somebody_uses_it() -> None:
    world = World(cells=512, context_length=256, max_sequences=8, page_size=4, admission_ceiling=0.5)
    preamble = words(1, 120)
    world.submit("first", preamble, 1)
    world.run()
    for i in range(2):
        world.submit(f"r{i}", words(100 + i, 100), 20)
    world.submit("again", [*preamble, *words(3, 8)], 8)  # only 16 cells beyond what is cached, of 136
    world.step()
    assert world.engine.occupancy().running == 2
    world.run()
    for name in ("r0", "r1", "again"):
        world.assert_right(name)


@pytest.mark.parametrize("policy", ["none", "fixed"])
def test_a_prompt_is_not_deferred_for_what_is_kept_for_programs_behind_it(policy: str) -> None:
    retention = RetentionConfig(policy=policy, fixed_s=9000.0, most_s=9000.0, settle_s=9000.0)
    world = World(
        cells=2048,
        context_length=512,
        max_sequences=40,
        session_rows=30,
        page_size=4,
        completion_reserve=16,
        high_water=0.8,
        retention=retention,
    )
    for i in range(24):
        world.submit(f"p{i}", words(i + 50, 76), 4, program=f"p{i}", began=100.0 + i)
        world.run()
        world.give(TurnEnded(f"p{i}", "", f"p{i}", ("ls",), False, 1))
    world.submit("early", talkative(10, 100), 100, began=1.0)
    for _ in range(3):
        world.step()
    assert in_use(world.engine.cache) >= (0.8 * 2048 if policy == "fixed" else 0)
    asked = world.now
    world.submit("second", words(999, 120), 4, began=2.0)
    world.run()
    assert world.end("second").timing.first_token - asked <= 2.0
    assert world.engine.stats.chunks_deferred == 0
