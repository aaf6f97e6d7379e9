"""Each policy against numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.retention.latency import LatencySnapshot, ToolLatency
from holdfast.replicas.retention.policy import Conditions, Continuum, Pause, RestoreCost, best_time, retention_policy

PAUSE = Pause("acme", "grep", cells=1000, turn=1)
COST = RestoreCost(a=1e-6, b=1e-3, c=0.5)  # 1,000 cells: 1 + 1 + 0.5 s
NOTHING = LatencySnapshot()


def known(mean: float, count: int = 1000, variance: float = 0.0, recent: tuple[float, ...] = ()) -> LatencySnapshot:
    """A snapshot that knows `grep` of tenant acme alone."""
    tool = ToolLatency(count, mean, variance, recent or (mean,))
    return LatencySnapshot(tool, {("acme", "grep"): tool})


def ttl(policy: str, latency: LatencySnapshot = NOTHING, pause: Pause = PAUSE, conditions=None) -> float:
    return retention_policy(policy).ttl(pause, latency, conditions or Conditions())


def test_none_keeps_nothing():
    assert ttl("none", known(0.1), conditions=Conditions(wait_s=100.0, restore=COST)) == 0.0


def test_continuum_weighs_what_is_saved_against_what_it_holds():
    latency = known(1.0, count=101, recent=(0.5, 1.0, 1.5, 8.0))
    # 2.5 s to compute again; with a wait of 2 s at eta 0.75 it is 4 s.
    assert ttl("continuum", latency, conditions=Conditions(restore=COST)) == 1.5
    assert ttl("continuum", latency, conditions=Conditions(wait_s=50.0, eta=0.75, restore=COST)) == 8.0
    assert ttl("continuum", latency) == 0.0, "nothing is lost without it"


def test_continuum_takes_a_tool_it_hardly_knows_for_the_average_one(monkeypatch):
    few = ToolLatency(100, 9.0, 0.0, (9.0,))
    overall = ToolLatency(500, 1.0, 0.0, (1.0,))
    conditions = Conditions(restore=RestoreCost(c=20.0))
    snapshot = LatencySnapshot(overall, {("acme", "grep"): few})
    assert ttl("continuum", snapshot, conditions=conditions) == 1.0
    assert ttl("continuum", snapshot, Pause("acme", "", 1000), conditions) == 1.0
    monkeypatch.setattr(Continuum, "TRUSTED", 99)
    assert ttl("continuum", snapshot, conditions=conditions) == 9.0


def test_continuum_knowing_no_tool_assumes_an_exponential_one():
    conditions = Conditions(wait_s=math.e, restore=RestoreCost())
    assert ttl("continuum", known(1.0, count=100), conditions=conditions) == pytest.approx(1.0)
    assert ttl("continuum", conditions=Conditions(wait_s=1.0)) == 0.0


def test_infercept_keeps_while_that_wastes_least():
    conditions = Conditions(others=3000, restore=COST)
    # Computing again: 2.5 s for its own 1,000 cells and the others' 3,000, against 1,000 cells a second.
    assert ttl("infercept", conditions=conditions) == pytest.approx(10.0)
    reload = RestoreCost(a=1e-6, b=1e-3, c=0.5, reload=1e-3)
    assert ttl("infercept", conditions=Conditions(others=3000, restore=reload)) == pytest.approx(2.0)


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]) | st.floats(0.0, 50.0), max_size=40),
    st.floats(0.0, 60.0) | st.sampled_from([1.0, 2.0, 4.0]),
)
def test_no_other_time_gains_more_and_no_shorter_one_as_much(seconds: list[float], benefit: float):
    recent = tuple(sorted(seconds))
    gains = {0.0: 0.0}
    for i, duration in enumerate(recent):
        gain = (i + 1) / len(recent) * benefit - duration
        gains[duration] = max(gains.get(duration, gain), gain)
    best = best_time(ToolLatency(len(recent), 0.0, 0.0, recent), benefit)
    assert all(gains[best] > gain or (gains[best] == gain and best <= t) for t, gain in gains.items())
