"""Counts of observations by size."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.stats import Histogram

BOUNDS = st.lists(st.floats(0.0, 100.0), min_size=1, unique=True).map(sorted).map(tuple)


@given(BOUNDS, st.lists(st.floats(0.0, 200.0)))
def test_buckets_count_what_is_not_above_their_bound(bounds, values):
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    told = histogram.cumulative()
    assert [name for name, _ in told] == [*map(str, bounds), "+Inf"]
    assert [n for _, n in told] == [sum(value <= bound for value in values) for bound in (*bounds, float("inf"))]
    assert histogram.total == sum(values)
