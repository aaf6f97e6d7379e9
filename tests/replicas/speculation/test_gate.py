"""How many tokens are drafted: laws of the gate."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.speculation.gate import Acceptance, VerificationCost, agreement, alike, cap, draft_length, shares

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
        assert alike(low, most, 2, table(cost)) <= alike(high, most, 2, table(cost)) <= most


@settings(deadline=None)
@given(st.integers(0, 16), st.integers(1, 50), share, costs)
def test_more_load_never_means_longer_drafts(
    most: int, decoding: int, acceptance: float, cost: VerificationCost
) -> None:
    assert alike(acceptance, most, decoding + 1, table(cost)) <= alike(acceptance, most, decoding, table(cost))


def test_below_confidence_only_the_floor_is_drafted() -> None:
    assert draft_length(CONFIG, 16, CONFIG.confidence - 0.01) == CONFIG.floor
    assert draft_length(CONFIG, 16, CONFIG.confidence) == 16
    assert draft_length(CONFIG, 2, 0.0) == 2


@pytest.mark.parametrize("lengths", [alike, lambda a, n, d, t: shares([a] * d, [n] * d, t, d)[0]])
def test_where_verifying_costs_more_than_it_saves_nothing_is_drafted(lengths) -> None:
    assert lengths(0.95, 16, 1, table(DEAR)) == 0
    assert lengths(0.95, 16, 1, table(FREE)) == 16
    assert 0 < lengths(0.7, 16, 1, table(LINEAR)) < 16


def test_length_is_that_of_the_most_tokens_a_second() -> None:
    def yields(n: int) -> float:
        return sum(0.75**i for i in range(n + 1)) / LINEAR.at(2 * (1 + n))

    assert alike(0.75, 16, 2, table(LINEAR)) == max(range(17), key=yields)


@settings(deadline=None)
@given(st.lists(st.tuples(share, st.integers(0, 3)), min_size=1, max_size=3), costs)
def test_no_other_sharing_yields_more(offered: list[tuple[float, int]], cost: VerificationCost) -> None:
    seconds = table(cost)
    lengths = shares([a for a, _ in offered], [n for _, n in offered], seconds, len(offered))
    best = max(rate(offered, other, seconds) for other in product(*(range(n + 1) for _, n in offered)))
    assert rate(offered, lengths, seconds) >= best * 0.95  # drafts hardly ever right are not looked at


@settings(deadline=None)
@given(offers, costs, st.integers(0, 20))
def test_shares_keep_to_what_is_offered_and_to_the_table(
    offered: list[tuple[float, int]], cost: VerificationCost, least: int
) -> None:
    acceptances, most = [a for a, _ in offered], [n for _, n in offered]
    lengths = shares(acceptances, most, table(cost, 20), len(offered), least)
    assert all(0 <= n <= m for n, m in zip(lengths, most, strict=True))
    assert len(offered) + sum(lengths) < 20
    assert sum(lengths) >= sum(shares(acceptances, most, table(cost, 20), len(offered)))


def test_the_likelier_drafts_come_first() -> None:
    lengths = shares([0.9, 0.1], [16, 16], table(LINEAR), 2)
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


def test_agreement() -> None:
    assert agreement([1, 2, 3], [1, 2, 4]) == 2
    assert agreement([1, 2, 3], [1]) == 1
    assert agreement([], [1]) == 0


@pytest.mark.parametrize("field", ["max_draft", "confidence", "floor", "min_n", "scope_bytes"])
def test_a_setting_that_cannot_be_is_named(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DraftConfig(**{field: -1})
    assert caught.value.field == field


def test_a_step_has_room_for_a_row_and_its_draft() -> None:
    with pytest.raises(ConfigError) as caught:
        DraftConfig(verify_rows=1)
    assert caught.value.field == "verify_rows"
    assert DraftConfig(verify_rows=2).verify_rows == 2
