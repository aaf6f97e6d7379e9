import math
from enum import Enum

from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.retention.policy import Interception, preserve_until

seconds = st.floats(0.001, 100.0)
pauses = st.builds(
    Interception,
    cells=st.integers(1, 10_000),
    others=st.integers(0, 100_000),
    recompute_s=seconds,
    swap_s=st.one_of(seconds, st.just(math.inf)),
    stalled=st.integers(0, 100_000),
)


class Way(Enum):
    PRESERVE = "preserve"  # the cells stay on the device, pinned
    DISCARD = "discard"  # they are computed again
    SWAP = "swap"  # they wait in host memory


def least_waste(pause: Interception, pause_s: float) -> Way:
    """The best way for a pause of known length; of equals the one that keeps more."""
    if pause.preserve(pause_s) <= min(pause.discard, pause.swap):
        return Way.PRESERVE
    return Way.SWAP if pause.swap <= pause.discard else Way.DISCARD


def test_the_formulas_of_the_paper():
    pause = Interception(cells=100, others=300, recompute_s=2.0, swap_s=0.5, stalled=400)
    assert pause.preserve(3.0) == 300.0
    assert pause.discard == 2.0 * 100 + 2.0 * 300
    assert pause.swap == 2 * 0.5 * 400


def test_without_a_host_tier_nothing_is_swapped():
    pause = Interception(cells=100, others=0, recompute_s=2.0)
    assert least_waste(pause, 1.9) is Way.PRESERVE
    assert least_waste(pause, 2.1) is Way.DISCARD


@given(pauses, seconds)
def test_the_way_taken_wastes_least(pause, pause_s):
    waste = {Way.PRESERVE: pause.preserve(pause_s), Way.DISCARD: pause.discard, Way.SWAP: pause.swap}
    assert waste[least_waste(pause, pause_s)] == min(waste.values())


@given(pauses)
def test_a_pin_is_worth_it_exactly_as_long_as_preserving_wastes_least(pause):
    until = preserve_until(pause)
    assert least_waste(pause, until * 0.999) is Way.PRESERVE
    assert until == 0.0 or least_waste(pause, until * 1.001 + 1e-9) is not Way.PRESERVE


def test_an_empty_program_is_not_worth_a_pin():
    assert preserve_until(Interception(cells=0, others=5, recompute_s=1.0)) == 0.0
