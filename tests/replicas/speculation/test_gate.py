"""Laws of the gate: which drafts a step verifies, and what steps cost by their rows."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.plan import VERIFY_ROWS, StepCost, step_cost
from holdfast.replicas.speculation.drafter import FREE, draft_lengths

LINEAR = step_cost((1, 101), (1.0, 6.0))  # a row costs 5 % of a step
DEAR = step_cost((1, 101), (1.0, 101.0))
share = st.floats(0, 1)
costs = st.sampled_from([LINEAR, FREE, DEAR])
offers = st.lists(st.tuples(share, st.integers(0, 16)), min_size=1, max_size=4)


def lengths_of(
    offered: list[tuple[float, int]], cost: StepCost, extra_s: float = 0.0, decoding: int | None = None
) -> list[int]:
    acceptances, most = np.array([a for a, _ in offered], float), np.array([n for _, n in offered], np.int32)
    decoding = len(offered) if decoding is None else decoding
    return draft_lengths(acceptances, most, decoding, np.array(cost), extra_s)


def reference(offered: list[tuple[float, int]], cost: StepCost, extra_s: float, decoding: int) -> list[int]:
    """The likeliest drafts first, of equals those of the first sequence, as many as yield the most tokens a second."""
    drafts = sorted((-(a**n), i) for i, (a, most) in enumerate(offered) for n in range(1, most + 1) if a**n >= 0.01)
    rows, expected, best, taken = decoding, float(decoding), 1.02 * decoding / (cost[-1] + extra_s), 0
    if decoding < len(cost):
        best = 1.02 * decoding / (cost[decoding] + extra_s)
    for minus, _ in drafts[: max(len(cost) - 1 - decoding, 0)]:
        rows, expected = rows + 1, expected - minus
        if expected / (cost[rows] + extra_s) > best:
            best, taken = expected / (cost[rows] + extra_s), rows - decoding
    chosen = [i for _, i in drafts[:taken]]
    return [chosen.count(i) for i in range(len(offered))]


def rate(offered: list[tuple[float, int]], lengths: tuple[int, ...] | list[int], cost: StepCost) -> float:
    """Tokens a second of a step in which sequence i verifies `lengths[i]` drafts."""
    expected = sum(sum(a**k for k in range(n + 1)) for (a, _), n in zip(offered, lengths, strict=True))
    return expected / cost[len(offered) + sum(lengths)]


@given(st.lists(st.tuples(share, st.integers(0, 3)), min_size=1, max_size=3), costs)
def test_no_other_sharing_yields_more(offered: list[tuple[float, int]], cost: StepCost) -> None:
    best = max(rate(offered, other, cost) for other in product(*(range(n + 1) for _, n in offered)))
    assert rate(offered, lengths_of(offered, cost), cost) >= best * 0.95  # unlikely drafts are left out


exact = st.tuples(st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0]), st.integers(0, 16))  # whose powers are exact


@given(st.lists(exact, max_size=20), costs, st.sampled_from([0.0, 0.5, 100.0]), st.integers(0, VERIFY_ROWS + 5))
def test_lengths_are_those_of_the_reference(
    offered: list[tuple[float, int]], cost: StepCost, extra_s: float, decoding: int
) -> None:
    assert lengths_of(offered, cost, extra_s, decoding) == reference(offered, cost, extra_s, decoding)


@given(offers, costs, st.integers(0, VERIFY_ROWS + 5))
def test_lengths_keep_to_the_offers_and_to_the_rows_of_a_step(
    offered: list[tuple[float, int]], cost: StepCost, decoding: int
) -> None:
    decoding = max(decoding, len(offered))
    most = [n for _, n in offered]
    lengths = lengths_of(offered, cost, decoding=decoding)
    assert all(0 <= n <= m for n, m in zip(lengths, most, strict=True))
    assert not any(lengths) or decoding + sum(lengths) <= VERIFY_ROWS


@given(st.integers(0, 16), st.integers(1, 50), share, st.sampled_from([LINEAR, DEAR]))
def test_a_sequence_drafts_no_more_beside_others_like_it(
    most: int, decoding: int, acceptance: float, cost: StepCost
) -> None:
    fewer, more = (sum(lengths_of([(acceptance, most)] * n, cost)) / n for n in (decoding, decoding + 1))
    assert more <= fewer + 1  # one draft may go to one of them and not to the other


def test_drafts_are_verified_as_far_as_they_pay() -> None:
    assert lengths_of([(0.95, 16)], DEAR) == [0]
    assert lengths_of([(0.95, 16)], FREE) == [16]
    (length,) = lengths_of([(0.7, 16)], LINEAR)
    assert 0 < length < 16


def test_time_that_every_step_takes_makes_drafts_cheaper() -> None:
    assert lengths_of([(0.95, 16)], DEAR, extra_s=1000.0) == [16]


def test_cost_is_a_line_between_and_beyond_the_measured_widths() -> None:
    cost = step_cost((2, 4, 8), (1.0, 2.0, 4.0))
    assert len(cost) == VERIFY_ROWS + 1
    assert [cost[rows] for rows in (1, 2, 3, 6, 8, 10)] == pytest.approx([1.0, 1.0, 1.5, 3.0, 4.0, 5.0])


@given(st.lists(st.floats(0.001, 100), min_size=2, max_size=8))
def test_a_wider_step_never_costs_less(seconds: list[float]) -> None:
    """A width that was measured in a noisy moment counts as cheap as the next wider one."""
    cost = step_cost([1 << i for i in range(len(seconds))], seconds)
    assert cost[0] > 0
    assert all(a <= b + 1e-9 for a, b in pairwise(cost))
    assert cost[1] == pytest.approx(min(seconds))
