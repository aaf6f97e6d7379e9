"""What a replica learns of its load: cost of a prefill, queue delay, turns of programs."""

import numpy as np
import pytest
from engine_world import World, words
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.retention.policy import LoadStats, PrefillFit, RestoreCost, Turns


def prefill(start: int, n: int) -> list[tuple[int, int]]:
    return [(start, start + n)]


def seconds(cost: RestoreCost, start: int, n: int) -> float:
    return cost.seconds(start + n) - (cost.seconds(start) if start else cost.c) + cost.c


def test_a_polynomial_is_found_again():
    true = RestoreCost(a=2e-8, b=3e-5, c=0.01)
    fit, rng = PrefillFit(), np.random.default_rng(0)
    for _ in range(64):
        start, n = int(rng.integers(0, 20_000)), int(rng.integers(100, 4000))
        fit.measured(prefill(start, n), seconds(true, start, n))
    for n in (500, 5_000, 30_000):
        assert fit.cost.seconds(n) == pytest.approx(true.seconds(n), rel=0.02)


def test_few_steps_say_too_little_and_steps_without_a_clock_nothing():
    fit = PrefillFit()
    for _ in range(50):
        fit.measured(prefill(0, 100), 0.0)
    fit.measured(prefill(0, 100), 1.0)
    assert fit.cost == RestoreCost()
    fit.measured(prefill(0, 100), 1.0)
    assert fit.cost.seconds(100) == pytest.approx(1.0, rel=0.01)


def h100(start: int, n: int) -> float:
    """8B on an H100: 4,096 tokens take 0.1 s, and up to some 280 take what reading the weights does."""
    return 1.2e-3 + max(6e-3, n * 21.5e-6) + n * (start + n / 2) * 1.3e-9


@given(
    n=st.integers(512, 4096),
    steps=st.sampled_from([2, 8, 64]),
    held_up=st.lists(st.integers(0, 63), max_size=3),
    start=st.integers(0, 60_000),
)
def test_steps_that_were_held_up_and_prompts_that_are_all_alike_mislead_nobody(n, steps, held_up, start):
    """Of prompts of one length alone, up to three of 64 steps and one of eight a hundred times as long."""
    fit, allowed = PrefillFit(), {2: 0, 8: 1, 64: 3}[steps]
    late = {each % steps for each in held_up[:allowed]}
    for i in range(steps):
        fit.measured(prefill(0, n), h100(0, n) * (100 if i in late else 1))
    added = h100(start, 2000) - h100(start, 0)
    assert fit.cost.between(start, start + 2000) == pytest.approx(added + 6e-3, rel=0.35)


def test_what_reading_cells_takes_is_no_price_of_tokens():
    """Beside short chunks up to 64 sequences decode behind 10,000 tokens each, which takes 30 ms."""
    fit, rng = PrefillFit(), np.random.default_rng(3)
    for _ in range(256):
        start, n, others = int(rng.integers(0, 4000)), int(rng.integers(300, 1000)), int(rng.integers(0, 65))
        decoding = [(10_000, 10_001)] * others
        fit.measured([*decoding, (start, start + n)], h100(start, n) + sum(end for _, end in decoding) * 44e-9)
    assert fit.cost.read == pytest.approx(44e-9, rel=0.1)
    assert fit.cost.between(2000, 3000) == pytest.approx(h100(2000, 1000) - 1.2e-3, rel=0.1)


def test_what_short_prompts_say_of_long_ones_is_put_right_by_the_first_few():
    """Steps of short prompts take what reading the weights does, which says nothing of what a token takes."""
    fit, rng = PrefillFit(), np.random.default_rng(2)
    for n in rng.integers(16, 280, 256):
        fit.measured(prefill(0, int(n)), h100(0, int(n)))
    for _ in range(8):
        fit.measured(prefill(4096, 4096), h100(4096, 4096))
    assert fit.cost.between(4096, 8192) == pytest.approx(h100(4096, 4096), rel=0.25)


def test_steps_that_only_decode_say_nothing():
    world = World(speculation=DraftConfig(enabled=False))
    world.step_s = 1.0
    learned = world.engine._load
    for i in range(12):
        world.serve(f"short {i}", [i + 1], 8)
    assert learned.conditions().restore == RestoreCost()
    for i in range(12):
        world.serve(f"long {i}", words(i, 40), 1)
    assert learned.conditions().restore.seconds(40) > 0.5


def test_the_queue_delay_is_averaged_over_a_window():
    learned = LoadStats()
    assert learned.conditions().wait_s == 0.0
    for delay in (100.0, *range(1, 129)):
        learned.waited(delay)
    assert learned.conditions().wait_s == pytest.approx(64.5), "of the latest 128"


def test_how_fast_programs_come_back_is_counted_over_the_latest():
    learned = LoadStats()
    assert learned.conditions(paused=1000).returning == 0.0
    for i in range(400):
        learned.returned(1_000_000 if i < 200 else 50, float(i))
    assert learned.conditions(now=400.0).returning == pytest.approx(50.0)
    assert learned.conditions(now=400.0 + 128.0).returning == pytest.approx(25.0), "nobody came since"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_eta_is_minus_the_correlation_over_all_turns(lengths):
    turns = Turns()
    for length in lengths:
        turns.ended(length)
    done = [k for n in lengths for k in range(1, n + 1)]
    left = [n - k for n in lengths for k in range(1, n + 1)]
    if len(set(done)) == 1 or len(set(left)) == 1:
        assert turns.eta == 1.0
    else:
        assert turns.eta == pytest.approx(min(max(-np.corrcoef(done, left)[0, 1], 0.0), 1.0), abs=1e-6)
    assert turns.mean == pytest.approx(sum(lengths) / len(lengths))
