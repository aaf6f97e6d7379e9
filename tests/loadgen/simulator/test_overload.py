"""At several times the capacity an engine that knows how long clients wait serves as much in time as it can at all."""

from dataclasses import replace

from holdfast.loadgen.simulator import overload
from holdfast.loadgen.simulator.overload import Options, Run, capacity, drawn
from holdfast.replicas.types import Priority

SMALL = Options(seconds=60.0, deadline_s=10.0, prompt=1500, reply=60, sequences=16)


def test_goodput_holds_at_three_times_the_capacity_where_the_engine_is_told(monkeypatch):
    monkeypatch.setattr(overload, "WARM_S", 30.0)
    most = capacity(SMALL)
    runs = {
        (load, told): Run(SMALL, drawn(SMALL, load * most), told=told).run()
        for load in (1.0, 3.0)
        for told in (True, False)
    }
    best = max(found.goodput for found in runs.values())
    assert runs[3.0, True].goodput >= 0.95 * best
    assert runs[3.0, False].goodput < 0.3 * best
    told = runs[3.0, True]
    assert told.ends["refused"] > 10 * told.ends["dropped"], "who is refused is told so at once"
    assert max(told.refused_s) == 0.0, "before the step that runs is over"
    assert sum(found.ends["refused"] for key, found in runs.items() if not key[1]) == 0


def test_requests_are_drawn_alike_for_every_run():
    asked = list(drawn(replace(SMALL, batch=0.5), 5.0))
    assert asked == list(drawn(replace(SMALL, batch=0.5), 5.0))
    assert {each.priority for each in asked} == set(Priority)
    assert all(5.0 <= each.within_s <= 15.0 for each in asked)
