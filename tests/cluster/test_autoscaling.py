"""How many engines there should be. In a real Serve: `test_serve_hooks`."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.autoscaling import Demand, engines_needed
from holdfast.replicas.stats import Occupancy

TARGETS = {"ongoing_requests": 32, "waiting_tokens": 1000, "cell_pressure": 0.8, "pinned_programs": 64}
IDLE = {"requests": 0.0, "waiting_tokens": 0.0, "cell_pressure": 0.0, "pinned_programs": 0.0}


def context(*replicas: dict[str, float], queued: float = 0.0, target: int | None = None, silent: int = 0) -> Any:
    """What Serve gives the policy: `replicas` said this, `silent` more run and have said nothing yet."""
    told: dict[str, dict[str, float]] = {}
    for i, stats in enumerate(replicas):
        for name, value in (IDLE | stats).items():
            told.setdefault(name, {})[f"r{i}"] = value
    return SimpleNamespace(
        deployment_id="d",
        target_num_replicas=len(replicas) + silent if target is None else target,
        aggregated_metrics=told,
        total_queued_requests=queued,
    )


@pytest.mark.parametrize(
    ("stats", "engines"),
    [
        ([{}], 1),
        ([{"requests": 33}], 2),
        ([{"requests": 20}, {"requests": 20}, {"requests": 20}], 2),
        ([{"waiting_tokens": 2500}, {}], 3),
        ([{"cell_pressure": 0.9}, {"cell_pressure": 0.9}], 3),
        ([{"cell_pressure": 0.3}, {"cell_pressure": 0.3}], 1),
        ([{"pinned_programs": 64}, {"pinned_programs": 1}], 2),  # paused programs are no reason to stop where they are
    ],
)
def test_the_target_that_asks_for_most_counts(stats: list[dict[str, float]], engines: int) -> None:
    assert Demand(**TARGETS)(context(*stats))[0] == engines


def test_requests_in_the_routers_lines_count() -> None:
    assert Demand(**TARGETS)(context({"requests": 30}, queued=40.0))[0] == 3


def test_a_target_of_0_is_not_looked_at() -> None:
    assert Demand(**TARGETS | {"waiting_tokens": 0})(context({"waiting_tokens": 1e9}))[0] == 1


def test_nothing_is_stopped_for_what_was_not_said() -> None:
    demand = Demand(**TARGETS)
    assert demand(context({}, silent=3))[0] == 4
    assert demand(context(target=5))[0] == 5  # none is up
    assert demand(context({}, target=5))[0] == 5  # one is
    assert demand(context({"requests": 320}, silent=1))[0] == 10  # more may be wanted all the same
    assert demand(context({}, {}, {}))[0] == 1


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=4), st.floats(1, 10))
def test_no_engine_has_more_than_its_target_on_average(totals: list[float], factor: float) -> None:
    names = ("requests", "waiting_tokens", "cell_pressure", "pinned_programs")
    given_totals, targets = dict(zip(names, totals, strict=True)), dict.fromkeys(names, factor)
    number = engines_needed(given_totals, targets)
    assert all(total / number <= factor * (1 + 1e-9) for total in totals)
    assert number == 1 or any(total / (number - 1) > factor for total in totals)
    assert number <= max(1, math.ceil(max(totals)))


def test_a_replica_says_what_the_policy_asks_for() -> None:
    occupancy = Occupancy(
        running=5, waiting=3, rows_taken=5, tokens_waiting=700, cells_held=50, cells_pinned=30, cells_total=100, pins=4,
        cells_free=10, cells_tree=40, ahead_running=2, ahead_waiting=1, tokens_ahead=400,
    )  # fmt: skip
    assert occupancy.demand == {
        "requests": 5,
        "waiting_tokens": 300,
        "cell_pressure": 0.8,
        "pinned_programs": 4,
    }
    assert occupancy.demand.keys() == IDLE.keys()
