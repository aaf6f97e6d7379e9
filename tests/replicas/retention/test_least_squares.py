"""Least squares without negative coefficients, against the conditions that only the answer meets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.retention.policy import not_negative


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_no_step_from_the_answer_is_better(seed: int, terms: int) -> None:
    rng = np.random.default_rng(seed)
    a, y = rng.normal(size=(12, terms)), rng.normal(size=12)
    found = not_negative(a.T @ a, a.T @ y)
    slope = a.T @ (a @ found - y)
    assert (found >= 0).all()
    assert (slope >= -1e-9).all()
    assert np.abs(slope * found).max() < 1e-9


def test_a_term_that_is_never_there_costs_nothing() -> None:
    a = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert not_negative(a.T @ a, a.T @ np.array([3.0, 6.0])).tolist() == [3.0, 0.0]
