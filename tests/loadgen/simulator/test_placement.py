"""Whole runs on several replicas, and the command that compares them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kv_audit import check_cache

from holdfast.cluster.cli import MISUSE, main
from holdfast.loadgen.simulator.crowds import CROWDS, Crowd
from holdfast.loadgen.simulator.machines import profile
from holdfast.loadgen.simulator.outcome import Served
from holdfast.loadgen.simulator.placement import CELLS, RATES, engine, run
from holdfast.loadgen.simulator.routing import ROUTINGS, routing
from holdfast.loadgen.simulator.simulation import Simulation

MACHINE = replace(profile("8b-a100"), cells=CELLS)


def crowd(kind: str, programs: int = 40) -> Crowd:
    return Crowd(kind, programs, 4 * RATES[kind])


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_program_and_sub_agent_ends_once(name: str) -> None:
    programs = list(crowd("fan-out", 24).draw(0))
    expected = {program.number for program in programs}
    expected |= {child.number for program in programs for turn in program.turns for child in turn.children}
    simulation = Simulation(MACHINE, engine(MACHINE), 4, routing=routing(name))
    outcome = simulation.run(programs)
    assert [done.number for done in outcome.programs] == sorted(expected)
    ended = {done.number: done.ended for done in outcome.programs}
    for program in programs:
        assert all(ended[child.number] < ended[program.number] for turn in program.turns for child in turn.children)
    for site in simulation.sites:
        check_cache(site.replica.engine.cache)
        assert site.replica.ongoing == 0


@pytest.mark.parametrize("kind", CROWDS)
def test_ours_finds_more_cached_than_who_does_not_look(kind: str) -> None:
    ours, blind = (run(crowd(kind), MACHINE, 4, name, 0) for name in ("ours", "round-robin"))
    assert ours.hit > blind.hit + 0.05
    assert ours.p99_s < blind.p99_s
    assert ours.most_in_hand < blind.most_in_hand


def test_the_same_again() -> None:
    first, second = (run(crowd("preambles"), MACHINE, 4, "ours-4-routers", 3) for _ in range(2))
    assert replace(first, took_s=0.0) == replace(second, took_s=0.0)


def test_a_run_ends_with_the_turns_of_its_window_which_are_what_they_are_in_a_whole_one() -> None:
    programs = list(crowd("fan-out", 16).draw(0))
    window = programs[4].arrived, programs[-1].arrived
    told: list[list[Served]] = []
    for asked in (window, (0.0, float("inf"))):
        told.append([])
        simulation = Simulation(MACHINE, engine(MACHINE), 4, window=asked, served=told[-1].append)
        simulation.run(programs)
    ended, whole = ([turn for turn in turns if window[0] <= turn.asked <= window[1]] for turns in told)
    assert ended == whole
    assert len(told[0]) < len(told[1])


def test_turns_that_take_too_long_are_told_of_with_the_time_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (crowd("agents", 30), MACHINE, 4, "prefix", 0)
    row = run(*asked)
    assert row.cut == 0
    monkeypatch.setattr("holdfast.loadgen.simulator.simulation.BEHIND_S", 5.0)
    cut = run(*asked)
    assert cut.turns == row.turns
    assert 0 < cut.cut < cut.turns
    assert cut.p99_s < row.p99_s
    assert 0 < cut.hit < 1


def test_others_than_the_hot_tenant_are_told_of() -> None:
    row = run(crowd("hot-tenant"), MACHINE, 4, "ours", 0)
    assert row.others_p99_s is not None
    assert 0 < row.busy <= 1
    assert run(crowd("agents", 12), MACHINE, 4, "ours", 0).others_p99_s is None


SMALL = ["simulate-placement", "--workload", "preambles", "--programs", "5"]


def test_the_command_prints_ratios_and_writes_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert main([*SMALL, "--placement", "ours", "--replicas", "2,4", "--seeds", "2", "--json", str(first)]) == 0
    capsys.readouterr()
    again = [*SMALL, "--placement", "prefix", "--replicas", "4", "--with", str(first), "--json", str(second)]
    assert main(again) == 0
    assert len(json.loads(first.read_text())["rows"]) == 4
    assert len(json.loads(second.read_text())["rows"]) == 5
    table = capsys.readouterr().out
    assert "| preambles, 2 | ours |" in table
    line = next(line for line in table.splitlines() if line.startswith("| preambles, 4 | prefix |"))
    assert "(" in line, "over ours"


@pytest.mark.parametrize(
    "wrong", [["--workload", "poetry"], ["--placement", "whim"], ["--replicas", "0"], ["--programs", "0"]]
)
def test_wrong_arguments_are_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate-placement", "--programs", "2", *wrong]) == MISUSE
    assert capsys.readouterr().err.startswith("holdfast: ")
