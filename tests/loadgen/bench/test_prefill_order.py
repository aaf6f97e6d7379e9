"""The comparison of prefill orders: every prompt is answered, and a burst sooner in order than shared equally."""

from dataclasses import replace

import numpy as np

from holdfast.loadgen.bench.prefill_order import PROFILE, Load, first_tokens, loads
from holdfast.loadgen.simulator.policies import engine_config


def test_a_burst_is_answered_sooner_in_order():
    burst = Load("burst", np.full(6, 4096), np.zeros(6), np.full(6, 2))
    config = engine_config("default", PROFILE, host=False)
    ordered, equal = first_tokens(burst, config), first_tokens(burst, replace(config, equal_chunks=True))
    assert list(ordered) == sorted(ordered)
    assert ordered.mean() < 0.8 * equal.mean()


def test_loads_are_the_same_each_time():
    for one, other in zip(loads(), loads(), strict=True):
        assert np.array_equal(one.sizes, other.sizes)
        assert np.all(np.diff(one.came) >= 0)
