"""The cost of steps: it begins as measured, follows what steps take, and never falls with the rows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.speculation.gate import StepCost, VerificationCost

MEASURED = VerificationCost((1, 4, 16), (1.0, 2.0, 4.0))


def test_it_begins_as_measured() -> None:
    cost = StepCost(MEASURED, 32)
    assert [cost.table[rows] for rows in (1, 2, 4, 16, 32)] == pytest.approx([1, 4 / 3, 2, 4, 20 / 3])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 40), st.floats(-1, 100)), max_size=60))
def test_a_wider_step_never_costs_less(steps: list[tuple[int, float]]) -> None:
    cost = StepCost(MEASURED, 32)
    for rows, seconds in steps:
        cost.learn(rows, seconds)
    assert len(cost.table) == 33
    assert cost.table[0] > 0
    assert all(a <= b for a, b in zip(cost.table, cost.table[1:], strict=False))


def test_it_follows_what_steps_take() -> None:
    cost = StepCost(MEASURED, 32)
    for _ in range(100):
        for rows in (2, 8, 24):
            cost.learn(rows, 0.1 * rows)
    assert abs(cost.table[8] - 0.8) < 0.1
    assert abs(cost.table[24] - 2.4) < 0.2


def test_one_step_that_something_else_delayed_changes_little() -> None:
    cost = StepCost(MEASURED, 32)
    for _ in range(16):
        cost.learn(4, 2.0)
    cost.learn(4, 1000.0)
    for _ in range(15):
        cost.learn(4, 2.0)
    assert cost.table[4] <= 2.1


def test_what_was_measured_in_a_noisy_moment_is_evened_out() -> None:
    cost = StepCost(VerificationCost((1, 8, 16, 32), (1.0, 9.0, 2.0, 3.0)), 64)
    assert cost.table[8] == 2.0
