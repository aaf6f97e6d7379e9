import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.retention.policy import Conditions, Pause, RestoreCost, break_even_s, discard_waste, swap_waste

seconds = st.floats(0.001, 100.0)
pauses = st.builds(Pause, st.just(""), st.just(""), st.integers(1, 10_000))
loads = st.builds(
    lambda others, recompute_s, reload: Conditions(others=others, restore=RestoreCost(c=recompute_s, reload=reload)),
    st.integers(0, 100_000),
    seconds,
    st.none() | st.floats(1e-6, 0.1),
)


def test_the_formulas_of_the_paper():
    """A copy overlaps with steps, so only the program's own cells wait for it."""
    pause, load = Pause("", "", 100), Conditions(others=300, restore=RestoreCost(c=2.0, reload=0.005))
    assert discard_waste(pause, load) == 2.0 * 100 + 2.0 * 300
    assert swap_waste(pause, load) == pytest.approx(2 * 0.5 * 100)
    assert break_even_s(pause, load) == pytest.approx(1.0), "100 cell-seconds by copying, against 100 cells a second"


def test_without_a_host_tier_nothing_is_swapped():
    assert swap_waste(Pause("", "", 100), Conditions(restore=RestoreCost(c=2.0))) == math.inf


@given(pauses, loads)
def test_a_pin_is_worth_it_exactly_as_long_as_preserving_wastes_least(pause, load):
    """Of equal ways the one that keeps more."""
    until, given_up = break_even_s(pause, load), min(discard_waste(pause, load), swap_waste(pause, load))
    assert until * 0.999 * pause.cells <= given_up
    assert until == 0.0 or (until * 1.001 + 1e-9) * pause.cells > given_up


def test_a_recurrent_state_counts_as_memory_that_is_kept() -> None:
    load = Conditions(others=5, restore=RestoreCost(c=1.0))
    alone, stateful = Pause("", "", 100), Pause("", "", 100, state=50)
    assert break_even_s(alone, load) == pytest.approx(1.0 * 105 / 100)
    assert break_even_s(stateful, load) == pytest.approx(1.0 * 155 / 150)
