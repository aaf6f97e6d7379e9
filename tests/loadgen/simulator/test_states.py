"""Ways to keep recurrent states, on programs whose states do not fit."""

from holdfast.loadgen.simulator.programs import Workload
from holdfast.loadgen.simulator.states import run


def test_ends_of_turns_are_hit_more_often_than_fixed_intervals() -> None:
    programs = list(Workload("swe", 10, 1.0, scale=0.2).draw(1))
    ours, interval, none = (run(way, programs, slots=8) for way in ("ours", "every 2048", "none"))
    assert ours.evicted > 0
    assert ours.hits > 0.9 > interval.hits > none.hits == 0.0
    assert ours.mean_s < interval.mean_s < none.mean_s
