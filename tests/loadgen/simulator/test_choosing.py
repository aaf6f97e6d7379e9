"""The benchmark of a router's choices runs; what it says is for people."""

import math

from holdfast.loadgen.simulator.choosing import measure


def test_it_measures_every_kind_of_choice() -> None:
    costs = measure(replicas=5, turns=20)
    assert len(costs) == 4
    assert all(0 < each < math.inf for each in costs)
