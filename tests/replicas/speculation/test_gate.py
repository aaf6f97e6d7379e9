"""How many tokens are drafted: laws of the gate, and of the cost that it goes by.

The learned cost begins as measured, follows what steps take, and never falls with the rows.
"""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.speculation.gate import (
    Acceptance,
    LearnedCost,
    VerificationCost,
    cap,
    competing_lengths,
    draft_length,
    uniform_length,
)

CONFIG = DraftConfig(verify_rows=64)
LINEAR = VerificationCost((1, 101), (1.0, 6.0))  # 5 % of a step for each row
FREE = VerificationCost((1, 101), (1.0, 1.0))
DEAR = VerificationCost((1, 101), (1.0, 101.0))
load = st.integers(1, 200)
share = st.floats(0, 1)


@settings(deadline=None)
@given(load)
def test_cap_keeps_to_the_rows_of_a_step(decoding: int) -> None:
    most = cap(CONFIG, decoding)
    assert 0 <= most <= CONFIG.max_draft
    assert most == 0 or decoding * (1 + most) <= CONFIG.verify_rows
    assert cap(CONFIG, decoding + 1) <= most


offers = st.lists(st.tuples(share, st.integers(0, 16)), min_size=1, max_size=4)
costs = st.sampled_from([LINEAR, FREE, DEAR])


def table(cost: VerificationCost, rows: int = 101) -> list[float]:
    return [cost.at(max(n, 1)) for n in range(rows)]


def rate(offered: list[tuple[float, int]], lengths: tuple[int, ...] | list[int], seconds: list[float]) -> float:
    """Tokens a second of a step in which sequence i verifies `lengths[i]` drafts."""
    expected = sum(sum(a**k for k in range(n + 1)) for (a, _), n in zip(offered, lengths, strict=True))
    return expected / seconds[len(offered) + sum(lengths)]


@settings(deadline=None)
@given(st.integers(0, 16), share, share)
def test_better_drafts_are_never_shorter(most: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert draft_length(CONFIG, most, low) <= draft_length(CONFIG, most, high) <= most
    for cost in (LINEAR, FREE, DEAR):
        assert uniform_length(low, most, 2, table(cost)) <= uniform_length(high, most, 2, table(cost)) <= most


@settings(deadline=None)
@given(st.integers(0, 16), st.integers(1, 50), share, costs)
def test_more_load_never_means_longer_drafts(
    most: int, decoding: int, acceptance: float, cost: VerificationCost
) -> None:
    assert uniform_length(acceptance, most, decoding + 1, table(cost)) <= uniform_length(
        acceptance, most, decoding, table(cost)
    )


def test_below_confidence_only_the_floor_is_drafted() -> None:
    assert draft_length(CONFIG, 16, CONFIG.confidence - 0.01) == CONFIG.floor
    assert draft_length(CONFIG, 16, CONFIG.confidence) == 16
    assert draft_length(CONFIG, 2, 0.0) == 2


@pytest.mark.parametrize("lengths", [uniform_length, lambda a, n, d, t: competing_lengths([a] * d, [n] * d, t, d)[0]])
def test_where_verifying_costs_more_than_it_saves_nothing_is_drafted(lengths) -> None:
    assert lengths(0.95, 16, 1, table(DEAR)) == 0
    assert lengths(0.95, 16, 1, table(FREE)) == 16
    assert 0 < lengths(0.7, 16, 1, table(LINEAR)) < 16


def test_length_is_that_of_the_most_tokens_a_second() -> None:
    def yields(n: int) -> float:
        return sum(0.75**i for i in range(n + 1)) / LINEAR.at(2 * (1 + n))

    assert uniform_length(0.75, 16, 2, table(LINEAR)) == max(range(17), key=yields)


@settings(deadline=None)
@given(st.lists(st.tuples(share, st.integers(0, 3)), min_size=1, max_size=3), costs)
def test_no_other_sharing_yields_more(offered: list[tuple[float, int]], cost: VerificationCost) -> None:
    seconds = table(cost)
    lengths = competing_lengths([a for a, _ in offered], [n for _, n in offered], seconds, len(offered))
    best = max(rate(offered, other, seconds) for other in product(*(range(n + 1) for _, n in offered)))
    assert rate(offered, lengths, seconds) >= best * 0.95  # drafts hardly ever right are not looked at


@settings(deadline=None)
@given(offers, costs, st.integers(0, 20))
def test_lengths_keep_to_what_is_offered_and_to_the_table(
    offered: list[tuple[float, int]], cost: VerificationCost, least: int
) -> None:
    acceptances, most = [a for a, _ in offered], [n for _, n in offered]
    lengths = competing_lengths(acceptances, most, table(cost, 20), len(offered), least)
    assert all(0 <= n <= m for n, m in zip(lengths, most, strict=True))
    assert len(offered) + sum(lengths) < 20
    assert sum(lengths) >= sum(competing_lengths(acceptances, most, table(cost, 20), len(offered)))


def test_the_likelier_drafts_come_first() -> None:
    lengths = competing_lengths([0.9, 0.1], [16, 16], table(LINEAR), 2)
    assert lengths[0] > lengths[1]


def test_cost_is_a_line_between_and_beyond_the_measured_widths() -> None:
    cost = VerificationCost((2, 4, 8), (1.0, 2.0, 1.5))
    assert cost.at(3) == 1.5
    assert cost.at(6) == 2.0  # measured as falling: taken as level
    assert VerificationCost((2, 4), (1.0, 2.0)).at(8) == 4.0


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((1,), (1.0,)), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((0, 1), (1.0, 1.0)), ((1, 2), (1.0, 0.0))],
)
def test_a_cost_that_cannot_be_is_refused(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        VerificationCost(rows, seconds)


@settings(deadline=None)
@given(st.integers(0, 16), st.integers(0, 16), share)
def test_acceptance_stays_a_share_and_moves_towards_what_was_seen(compared: int, right: int, start: float) -> None:
    right = min(right, compared)
    acceptance = Acceptance(start)
    acceptance.learn(compared, right, 0.1)
    seen = right / compared if compared else start
    assert min(start, seen) - 1e-9 <= acceptance.value <= max(start, seen) + 1e-9


MEASURED = VerificationCost((1, 4, 16), (1.0, 2.0, 4.0))


def test_it_begins_as_measured() -> None:
    cost = LearnedCost(MEASURED, 32)
    assert [cost.table[rows] for rows in (1, 2, 4, 16, 32)] == pytest.approx([1, 4 / 3, 2, 4, 20 / 3])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 40), st.floats(-1, 100)), max_size=60))
def test_a_wider_step_never_costs_less(steps: list[tuple[int, float]]) -> None:
    cost = LearnedCost(MEASURED, 32)
    for rows, seconds in steps:
        cost.learn(rows, seconds)
    assert len(cost.table) == 33
    assert cost.table[0] > 0
    assert all(a <= b for a, b in zip(cost.table, cost.table[1:], strict=False))


def test_it_follows_what_steps_take() -> None:
    cost = LearnedCost(MEASURED, 32)
    for _ in range(100):
        for rows in (2, 8, 24):
            cost.learn(rows, 0.1 * rows)
    assert abs(cost.table[8] - 0.8) < 0.1
    assert abs(cost.table[24] - 2.4) < 0.2


def test_one_step_that_something_else_delayed_changes_little() -> None:
    cost = LearnedCost(MEASURED, 32)
    for _ in range(16):
        cost.learn(4, 2.0)
    cost.learn(4, 1000.0)
    for _ in range(15):
        cost.learn(4, 2.0)
    assert cost.table[4] <= 2.1


def test_what_was_measured_in_a_noisy_moment_is_evened_out() -> None:
    cost = LearnedCost(VerificationCost((1, 8, 16, 32), (1.0, 9.0, 2.0, 3.0)), 64)
    assert cost.table[8] == 2.0


@pytest.mark.parametrize(("decoding", "longest"), [(1, 7), (2, 3), (3, 1), (4, 1), (5, 0)])
def test_no_draft_goes_beyond_the_widest_step(decoding: int, longest: int) -> None:
    """Of at most 8 rows, where every draft is right and costs nothing."""
    assert uniform_length(1.0, 16, decoding, [1.0] * 9) == longest
