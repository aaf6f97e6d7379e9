"""`holdfast simulate` and its scenarios, from arguments to tables and files."""

import json
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.cli import MISUSE, main
from holdfast.loadgen.simulator import scenarios
from holdfast.loadgen.simulator.cli import ABOUT
from holdfast.loadgen.simulator.commands import play
from holdfast.loadgen.simulator.machines import profile
from holdfast.loadgen.simulator.scenarios import NOISY, QUIET, SCENARIOS, Column, Row, Run, Scenario, jain, play_tenants
from holdfast.loadgen.simulator.states import play as play_states
from holdfast.loadgen.simulator.workloads import Workload, of_tenants

BFCL = "--workload bfcl --cells 40000 --scale 0.1"
SMALL = {
    "simulate": f"--programs 3 --rates 0.5 {BFCL} --policy request --policy continuum --seeds 2 --host-tier both",
    "simulate-placement": "--programs 4 --workload preambles --placement ours --placement prefix",
    "simulate-tenants": "--tenants 3 --programs 12 --quiet 2 --replicas 2 --order fair",
    "simulate-orchestrator": "--agents 1 --seeds 1 --cells 90000 --rates 0.02",
    "simulate-states": "--workload bfcl --programs 2 --slots 8 --seeds 1",
}
ROWS = {"simulate": 8, "simulate-placement": 2, "simulate-tenants": 9, "simulate-states": 5}
ROWS["simulate-orchestrator"] = 8 + 2


def test_every_scenario_has_options_and_every_command_a_scenario() -> None:
    assert set(SCENARIOS) == set(ABOUT) == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_a_scenario_prints_its_tables_and_writes_every_run(name: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "folder" / "runs.json"
    assert main(f"{name} {SMALL[name]} --json {file}".split()) == 0
    content, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert len(content["rows"]) == ROWS[name]
    assert content["machine"]["name"] == content["options"]["profile"]
    assert all(row["way"] in printed for row in content["rows"])
    for columns in SCENARIOS[name].tables.values():
        assert all(any(column.figure in row["figures"] for row in content["rows"]) for column in columns)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one_load = "--rates 0.5 --host-tier on"  # bars
    for more in ("--rates 0.2,0.5 --policy plas", "--rates 0.5 --turns-times 1,2", one_load):
        assert main(f"simulate --programs 2 {BFCL} --policy request {more} --pictures {tmp_path}".split()) == 0
    assert {file.name for file in tmp_path.iterdir()} == {f"bfcl-8b-a100{kind}.svg" for kind in ("", "-turns", "-host")}
    assert "currentColor" not in (tmp_path / "bfcl-8b-a100.svg").read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        "simulate --workload poetry",
        "simulate --profile 8b-abacus",
        "simulate --profile 38m-cpu --host-tier on",
        "simulate --policy whim",
        "simulate --rates 0",
        "simulate --seeds 0",
        "simulate --replicas 0",
        "simulate --cells 100",
        "simulate-placement --workload poetry",
        "simulate-placement --placement whim",
        "simulate-placement --replicas 0",
        "simulate-placement --programs 0",
        "simulate-tenants --tenants 1",
        "simulate-tenants --replicas 3",
        "simulate-tenants --seeds 0",
        "simulate-tenants --quiet 0",
        "simulate-orchestrator --workload poetry",
        "simulate-orchestrator --agents 0",
        "simulate-orchestrator --rate 0",
        "simulate-orchestrator --tools -1",
        "simulate-states --slots 0",
    ],
)
def test_wrong_arguments_are_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrong.split()) == MISUSE
    printed = capsys.readouterr().err
    assert any(why in printed for why in ("must be", "there is no", "nothing is known"))


def test_ratios_are_of_the_same_seeds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {("a", 0): 8.0, ("b", 0): 2.0, ("a", 1): 4.0, ("b", 1): 1.0}
    runs = [Run("case", way, seed, lambda s=s: {"case": {"s": s}}) for (way, seed), s in figures.items()]  # type: ignore[misc]
    columns = (Column("mean", "s"), Column("faster", "s", "under"), Column("gained", "s", "gained"))
    scenario = Scenario(lambda options: runs, {"": columns})
    assert play(scenario, Namespace())[1] == Row("case", "b", 0, 0.0, {"s": 2.0})
    monkeypatch.setitem(SCENARIOS, "simulate-states", scenario)
    assert main(["simulate-states"]) == 0
    printed = capsys.readouterr().out
    assert "4.00x" in printed
    assert "75.0%" in printed


# ---- tenants ----


@cache
def shared(order: str) -> dict[str, dict[str, float]]:
    options = Namespace(tenants=3, programs=60, quiet=3, replicas=2, routers=2, profile="8b-a100", cells=1 << 16)
    return dict(play_tenants(options, order, 0))


def test_equal_tenants_are_served_alike_where_they_share() -> None:
    fair, program = shared("fair")["equal"], shared("program")["equal"]
    assert fair["jain"] > 0.95 > program["jain"]
    assert fair["most_over_least"] < program["most_over_least"]


def test_a_quiet_tenants_turns_are_compared_to_its_turns_alone() -> None:
    """On replicas that are half as fast, and on half of the replicas."""
    rows = shared("fair")
    for alone in ("alone, half as fast", "alone, half of the replicas"):
        base, beside = rows[f"pair: {alone}"], rows[f"pair: beside, over {alone}"]
        assert beside["raised"] == pytest.approx(beside["p50_s"] / base["p50_s"])
        assert beside["turns"] == base["turns"]


def test_a_run_that_ends_with_the_others_programs_says_the_same_of_them() -> None:
    programs, machine = of_tenants(0, {NOISY: 30, QUIET: 3}, scenarios.WITHIN_S), profile("8b-a100", 1 << 16)
    whole, short = (scenarios.share(programs, machine, 2, "fair", 2, but) for but in ("", NOISY))
    of_others = [[turn for turn in run.turns if turn.tenant == QUIET] for run in (whole, short)]
    assert of_others[0] == of_others[1]
    assert len(short.turns) < len(whole.turns)
    assert len(short.ended[NOISY]) < 30


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20), st.floats(0.1, 10.0))
def test_jains_index_is_one_for_equal_shares_and_does_not_depend_on_the_unit(values: list[float], times: float) -> None:
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9
    assert jain([value * times for value in values]) == pytest.approx(jain(values))
    assert jain([values[0]] * len(values)) == pytest.approx(1.0)
    assert jain([values[0], *[0.0] * (len(values) - 1)]) == pytest.approx(1 / len(values))


# ---- states ----


def test_ends_of_turns_are_hit_more_often_than_fixed_intervals() -> None:
    programs, machine = list(Workload("swe", 10, 1.0, scale=0.2).draw(1)), profile("27b-hybrid-h100")
    ours, interval, none = (play_states(machine, programs, way, 8) for way in ("ours", "every 2048", "none"))
    assert ours["evicted"] > 0
    assert ours["hits"] > 0.9 > interval["hits"] > none["hits"] == 0.0
    assert ours["mean_s"] < interval["mean_s"] < none["mean_s"]
