"""Laws of the estimates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.measure import FEW, estimate, mean, median, percentile, ratio

SAMPLES = st.lists(st.floats(0.001, 1000), min_size=2, max_size=30)
STATISTICS = [mean, median, percentile(90), percentile(99)]


@settings(max_examples=20)
@given(SAMPLES, st.sampled_from(STATISTICS), st.integers(0, 9))
def test_an_interval_lies_within_the_sample_and_repeats_with_its_seed(sample, statistic, seed) -> None:
    found = estimate(sample, statistic, seed)
    assert found == estimate(sample, statistic, seed)
    slack = 1e-9 * max(sample)
    assert min(sample) - slack <= found.low <= found.high <= max(sample) + slack
    assert found.value == pytest.approx(float(statistic(np.array(sample))))


@settings(max_examples=20)
@given(SAMPLES, st.sampled_from(STATISTICS), st.floats(0.1, 50))
def test_a_server_that_takes_k_times_as_long_each_time_has_that_ratio_without_doubt(sample, statistic, k) -> None:
    found = ratio([k * value for value in sample], sample, statistic, 0)
    assert (found.value, found.low, found.high) == pytest.approx((k, k, k))


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    samples = [rng.normal(10, 3, 40).tolist() for _ in range(200)]
    held = sum(found.low <= 10 <= found.high for found in (estimate(sample, mean, 0) for sample in samples))
    assert 175 <= held <= 199


def test_one_observation_has_no_interval_and_none_has_no_estimate() -> None:
    assert (estimate([3.0], mean, 0).low, estimate([3.0], mean, 0).ends) == (None, (3.0, 3.0))
    assert estimate([], mean, 0) is None
    assert ratio([], [], mean, 0) is None
    assert ratio([1.0], [0.0], mean, 0) is None
    with pytest.raises(ValueError, match="pairs"):
        ratio([1.0], [], mean, 0)


def test_of_a_few_observations_the_range_is_told() -> None:
    few = [4.0, 1.0, 9.0] * ((FEW - 1) // 3)
    found = estimate(few, mean, 0)
    assert (found.low, found.high) == (1.0, 9.0)
    found = estimate([*few, 4.0, 1.0, 9.0], mean, 0)
    assert 1.0 < found.low < found.high < 9.0


def test_the_range_of_a_ratio_is_that_of_its_pairs() -> None:
    found = ratio([2.0, 9.0, 4.0], [2.0, 3.0, 5.0], mean, 0)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 0.8, 3.0))
