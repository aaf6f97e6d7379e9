"""The comparison of step lengths: every prompt of a burst is answered, in order."""

from dataclasses import replace

import numpy as np

from holdfast.loadgen.bench.prefill_order import PROFILE, Load, loads, play
from holdfast.loadgen.simulator.policies import engine_config


def test_a_burst_is_answered_in_order():
    burst = Load("burst", np.full(6, 4096), np.zeros(6), np.full(6, 2))
    config = engine_config("default", PROFILE, host=False)
    first = play(burst, config).first
    assert list(first) == sorted(first)
    assert first.mean() < 0.8 * first.max()  # the others do not wait for the last


def test_loads_are_the_same_each_time():
    for one, other in zip(loads(), loads(), strict=True):
        assert np.array_equal(one.sizes, other.sizes)
        assert np.all(np.diff(one.came) >= 0)


def test_beside_those_that_decode_prompts_add_no_more_to_a_step_than_step_ms():
    """Once the engine has seen what steps take: here, in the first prompts' chunks."""
    load = Load("replies, then prompts", np.full(12, 6000), np.arange(12) * 2.0, np.full(12, 400))
    config = replace(engine_config("default", PROFILE, host=False), step_tokens=2048)
    free, bounded = (play(load, replace(config, step_ms=budget)) for budget in (0, 40))
    plain = np.median(bounded.gaps)
    assert np.percentile(free.gaps, 99) > plain + 0.1
    assert np.percentile(bounded.gaps, 99) < plain + 0.05
    assert bounded.wall < 1.02 * free.wall
