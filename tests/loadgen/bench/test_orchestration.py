"""Sutradhara's table on the real engine, in small: every row answers the same, and what is sent ahead is found."""

import asyncio

import pytest

from holdfast.loadgen.bench import orchestration
from holdfast.loadgen.bench.orchestration import ROWS, Agent, Row, Run, Sizes, measured, report, rows_named
from holdfast.loadgen.bench.orchestration import main as bench
from holdfast.loadgen.orchestrator import SPLIT_AFTER_S
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.requests import ToolCall


@pytest.mark.parametrize(("workload", "rows"), [("fan-out", ROWS), ("append-only", ROWS[:5])])
def test_every_row_gives_the_same_answers(workload: str, rows: tuple[Row, ...]) -> None:
    sizes = Sizes(workload, rounds=1, system=60, result=10)
    found = asyncio.run(measured("pocket", sizes, warm=1, rows=rows))
    turns = len(Agent.drawn(0, sizes).systems)
    for runs in found.values():
        assert runs[0].said == found["baseline"][0].said
        assert 0 < runs[0].first_s < runs[0].seconds
        assert len(runs[0].prompt) == len(runs[0].cached) == turns
    if workload == "fan-out":
        assert sum(found["+ splitting"][0].cached) > sum(found["baseline"][0].cached)
    told = report(found, sizes)
    assert "1 of them with the same answers" in told[0]
    assert len(told) == 2 + len(rows)


def test_it_sends_ahead_when_the_orchestrator_does() -> None:
    assert orchestration.SPLIT_AFTER_S == SPLIT_AFTER_S


def test_gains_are_over_the_first_row() -> None:
    runs = [Run(1.0, 2.0, ["a"], [10], [100])] * 3
    fast = [Run(0.5, 1.5, ["b"], [50], [100])] * 3
    told = report({"baseline": runs, "fast": fast}, Sizes())
    assert "0 of them" in told[0]
    assert "50.0% (50.0% to 50.0%)" in told[-1]
    assert "25.0% (25.0% to 25.0%)" in told[-1]
    assert told[-1].endswith("50%")


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError):
        Sizes("poetry")
    with pytest.raises(ConfigError):
        Sizes(rounds=0)
    with pytest.raises(ConfigError):
        Sizes(tools=-1.0)
    assert bench(["--workload", "poetry"]) == 2
    assert bench(["--row", "poetry"]) == 2


def test_rows_are_compared_to_the_baseline_and_tools_may_take_no_time() -> None:
    assert [row.name for row in rows_named(["tags alone", "+ splitting"])] == ["baseline", "+ splitting", "tags alone"]
    assert rows_named([]) == ROWS
    agents = [Agent.drawn(3, Sizes(tools=times)) for times in (0.0, 1.0, 2.0)]
    cities = [*agents[0].seconds, "Atlantis"]
    none, plain, double = ([agent.tool_s(ToolCall("", "", city)) for city in cities] for agent in agents)
    assert set(none) == {0.0}
    assert double == [2 * seconds for seconds in plain]
