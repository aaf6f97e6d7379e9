import math
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.retention.policy import (
    Conditions,
    Pause,
    RestoreCost,
    break_even_s,
    discard_waste,
    swap_waste,
)

seconds = st.floats(0.001, 100.0)
pauses = st.builds(Pause, st.just(""), st.just(""), st.integers(1, 10_000))
loads = st.builds(
    lambda others, recompute_s, reload: Conditions(others=others, restore=RestoreCost(c=recompute_s, reload=reload)),
    st.integers(0, 100_000),
    seconds,
    st.none() | st.floats(1e-6, 0.1),
)


class Way(Enum):
    PRESERVE = "preserve"  # the cells stay on the device, pinned
    DISCARD = "discard"  # they are computed again
    SWAP = "swap"  # they wait in host memory


def waste(pause: Pause, load: Conditions, pause_s: float) -> dict[Way, float]:
    """Cell-seconds of each way, for a pause of known length."""
    return {
        Way.PRESERVE: pause_s * pause.cells,
        Way.DISCARD: discard_waste(pause, load),
        Way.SWAP: swap_waste(pause, load),
    }


def least_waste(pause: Pause, load: Conditions, pause_s: float) -> Way:
    """The best way; of equals the one that keeps more."""
    wasted = waste(pause, load, pause_s)
    return min((Way.PRESERVE, Way.SWAP, Way.DISCARD), key=lambda way: wasted[way])


def test_the_formulas_of_the_paper():
    """A copy overlaps with steps, so only the program's own cells wait for it."""
    pause, load = Pause("", "", 100), Conditions(others=300, restore=RestoreCost(c=2.0, reload=0.005))
    assert discard_waste(pause, load) == 2.0 * 100 + 2.0 * 300
    assert swap_waste(pause, load) == pytest.approx(2 * 0.5 * 100)
    assert break_even_s(pause, load) == pytest.approx(1.0), "100 cell-seconds by copying, against 100 cells a second"


def test_who_comes_back_meanwhile_is_counted_where_that_is_asked_for():
    load = Conditions(others=300, paused=1000, returning=50.0, restore=RestoreCost(c=2.0))
    pause = Pause("", "", 100)
    assert discard_waste(pause, load, returning=True) == 2.0 * 100 + 2.0 * (300 + 100)
    assert discard_waste(pause, load) == 2.0 * 100 + 2.0 * 300


def test_without_a_host_tier_nothing_is_swapped():
    pause, load = Pause("", "", 100), Conditions(restore=RestoreCost(c=2.0))
    assert swap_waste(pause, load) == math.inf
    assert least_waste(pause, load, 1.9) is Way.PRESERVE
    assert least_waste(pause, load, 2.1) is Way.DISCARD


@given(pauses, loads)
def test_a_pin_is_worth_it_exactly_as_long_as_preserving_wastes_least(pause, load):
    until = break_even_s(pause, load)
    assert least_waste(pause, load, until * 0.999) is Way.PRESERVE
    assert until == 0.0 or least_waste(pause, load, until * 1.001 + 1e-9) is not Way.PRESERVE


def test_an_empty_program_is_not_worth_a_pin():
    assert break_even_s(Pause("", "", 0), Conditions(others=5, restore=RestoreCost(c=1.0))) == 0.0


def test_a_recurrent_state_counts_as_memory_that_is_kept() -> None:
    load = Conditions(others=5, restore=RestoreCost(c=1.0))
    alone, stateful = Pause("", "", 100), Pause("", "", 100, state=50)
    assert break_even_s(alone, load) == pytest.approx(1.0 * 105 / 100)
    assert break_even_s(stateful, load) == pytest.approx(1.0 * 155 / 150)
