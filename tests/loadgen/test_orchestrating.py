"""The benchmark of the orchestrator: its rounds are of runs that called the same, and its ratios are to neither way."""

import asyncio

import pytest
from service_backend import engine_served

from holdfast.loadgen.options import Orchestrated
from holdfast.loadgen.orchestrating import Rounds, Way, measure, report
from holdfast.loadgen.orchestrator import Run
from holdfast.replicas.errors import ConfigError


def test_a_round_is_of_runs_that_called_the_same() -> None:
    with engine_served() as address:
        found = asyncio.run(measure(address, Orchestrated(rounds=1, calls=2, words=0)))
    assert found.calls == [2]
    for way in Way:
        assert 0 < found.first[way][0] < found.whole[way][0]
    found.add({way: Run("", "", "stop", (), (), ()) for way in Way})  # none has called anything
    assert found.calls == [2]


def test_ratios_are_to_what_takes_neither_way() -> None:
    halves = {way: [1.0 if way is Way.NEITHER else 0.5] * 3 for way in Way}
    told = "\n".join(report(Rounds([3] * 3, halves, halves, ahead=4)))
    assert told.count("0.500 (0.500 to 0.500)") == 2 * 3
    assert told.count("1.000 (1.000 to 1.000)") == 2
    assert "no prefills" not in told
    assert "no prefills" in "\n".join(report(Rounds([3] * 3, halves, halves)))
    assert report(Rounds()) == ["in no round did all runs make the same calls"]


def test_sizes_that_make_no_sense_are_refused_by_name() -> None:
    for name in ("rounds", "calls", "words"):
        with pytest.raises(ConfigError) as refused:
            Orchestrated(**{name: -1})
        assert refused.value.field == name
