"""How many tokens are drafted: laws of the gate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.speculation.config import DraftConfig
from holdfast.replicas.speculation.gate import Acceptance, VerificationCost, agreement, cap, draft_length

CONFIG = DraftConfig(verify_rows=64)
LINEAR = VerificationCost((1, 101), (1.0, 6.0))  # 5 % of a step for each row
FREE = VerificationCost((1, 101), (1.0, 1.0))
DEAR = VerificationCost((1, 101), (1.0, 101.0))
load = st.integers(1, 200)
share = st.floats(0, 1)


@given(st.integers(0, 50), load)
def test_cap_keeps_to_limit_and_rows(limit: int, decoding: int) -> None:
    most = cap(CONFIG, limit, decoding)
    assert 0 <= most <= min(limit, CONFIG.max_draft)
    assert most == 0 or decoding * (1 + most) <= CONFIG.verify_rows
    assert cap(CONFIG, limit, decoding + 1) <= most


@given(st.integers(0, 16), load, share, st.sampled_from([None, LINEAR, FREE, DEAR]))
def test_more_load_never_means_longer_drafts(
    most: int, decoding: int, acceptance: float, cost: VerificationCost | None
) -> None:
    length = draft_length(CONFIG, most, decoding, acceptance, cost)
    assert 0 <= length <= most
    assert draft_length(CONFIG, most, decoding + 1, acceptance, cost) <= length


@given(st.integers(0, 16), load, share, share, st.sampled_from([None, LINEAR, FREE, DEAR]))
def test_better_drafts_are_never_shorter(
    most: int, decoding: int, one: float, other: float, cost: VerificationCost | None
) -> None:
    low, high = sorted((one, other))
    assert draft_length(CONFIG, most, decoding, low, cost) <= draft_length(CONFIG, most, decoding, high, cost)


def test_below_confidence_only_the_floor_is_drafted() -> None:
    assert draft_length(CONFIG, 16, 1, CONFIG.confidence - 0.01) == CONFIG.floor
    assert draft_length(CONFIG, 16, 1, CONFIG.confidence) == 16
    assert draft_length(CONFIG, 2, 1, 0.0) == 2


def test_where_verifying_costs_more_than_it_saves_nothing_is_drafted() -> None:
    assert draft_length(CONFIG, 16, 1, 0.95, DEAR) == 0
    assert draft_length(CONFIG, 16, 1, 0.95, FREE) == 16
    assert 0 < draft_length(CONFIG, 16, 1, 0.7, LINEAR) < 16


def test_length_is_that_of_the_most_tokens_a_second() -> None:
    def rate(n: int) -> float:
        return sum(0.75**i for i in range(n + 1)) / LINEAR.at(2 * (1 + n))

    assert draft_length(CONFIG, 16, 2, 0.75, LINEAR) == max(range(17), key=rate)


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
