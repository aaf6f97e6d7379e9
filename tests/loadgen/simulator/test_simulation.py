"""Whole runs on small machines: nobody is lost, nothing is left to chance, and an idle machine takes what it must."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from kv_audit import check_cache

from holdfast.loadgen.program import Beginning, Program, sized, sized_turn
from holdfast.loadgen.simulator.machines import profile
from holdfast.loadgen.simulator.policies import POLICIES, engine_config
from holdfast.loadgen.simulator.replica import ONE_BY_ONE, Bulk
from holdfast.loadgen.simulator.routing import ROUTINGS, routing
from holdfast.loadgen.simulator.scenarios import CELLS, RATES, crowd_engine, play_placement
from holdfast.loadgen.simulator.simulation import USUAL, Outcome, Served, Simulation
from holdfast.loadgen.simulator.workloads import CROWDS, Crowd, Workload
from holdfast.replicas.plan import Chunk, Draw, Sampling, StepPlan

SMALL = replace(profile("8b-a100"), cells=24_000, host_cells=48_000)
BUSY = Workload("bfcl", 14, 0.5, scale=0.3, context=16_000)  # as much as SMALL can do, and more


@cache
def simulate(
    workload: Workload, policy: str = "continuum", host: bool = False, bulk: Bulk = USUAL, replicas: int = 1
) -> Outcome:
    return ended(Simulation(SMALL, engine_config(policy, SMALL, host), replicas, bulk), workload.draw(0))


def ended(simulation: Simulation, programs: Iterable[Program]) -> Outcome:
    """A run, at whose end no replica has anything left to do."""
    outcome = simulation.run(programs)
    for site in simulation.sites:
        check_cache(site.replica.engine.cache)
        assert site.replica.ongoing == 0
    return outcome


def seconds(outcome: Outcome) -> np.ndarray:
    return np.array([done.seconds for done in outcome.programs])


@pytest.mark.parametrize(
    ("policy", "host"), [*((name, False) for name in POLICIES), ("request", True), ("default", True)]
)
def test_every_program_ends_once_and_every_token_is_counted(policy: str, host: bool) -> None:
    programs = list(BUSY.draw(0))
    outcome = simulate(BUSY, policy, host=host)
    assert [done.number for done in outcome.programs] == list(range(BUSY.programs))
    for program, done in zip(programs, outcome.programs, strict=True):
        lengths = np.cumsum([[turn.added, turn.reply] for turn in program.turns]).tolist()
        assert done.turns == len(program.turns)
        assert done.prompt == sum(lengths[::2])
        assert done.drawn == sum(turn.reply for turn in program.turns)
        assert done.tool_s == pytest.approx(sum(turn.pause_s for turn in program.turns))
        assert 0 <= done.cached < done.prompt
        assert 0 <= done.bubble_s <= done.seconds - done.tool_s
        assert done.arrived == program.arrived
    # What is computed again after a preemption is on top.
    new = sum(done.prompt - done.cached for done in outcome.programs)
    assert outcome.counts["prompt_computed"] + outcome.counts["tokens_reloaded"] >= new


def test_the_machine_is_busy_in_these_tests() -> None:
    outcome = simulate(BUSY, "request", host=False)
    assert np.mean([done.bubble_s for done in outcome.programs]) > 5
    assert simulate(BUSY, "continuum", host=False).counts["pin_hits"] > 0
    assert simulate(BUSY, "request", host=True).counts["tokens_reloaded"] > 0


def test_the_same_again() -> None:
    engine, busy = engine_config("continuum", SMALL, host=False), replace(BUSY, rate=1.5)
    first, second, other = (ended(Simulation(SMALL, engine, 3), busy.draw(seed)) for seed in (5, 5, 6))
    assert first == second != other


def test_a_program_alone_takes_the_sum_of_its_parts() -> None:
    program = sized(
        0, (sized_turn(5000, 30, "a", 1.5), sized_turn(300, 1, "b", 0.25), sized_turn(200, 17)), 2.0, Beginning(100)
    )
    machine = profile("8b-a100")
    outcome = Simulation(machine, engine_config("program", machine, host=False)).run([program])
    whole, length, cached = 0.0, 0, 0
    for turn in program.turns:
        length += turn.added
        while cached < length:
            end = min(cached + 4096, length)
            draw = Draw(Sampling(), 0) if end == length else None
            plan = StepPlan((Chunk(0, cached, np.zeros(end - cached, np.int32), draw),))
            whole += machine.step(plan, 16)
            cached = end
        whole += machine.decode_s(1, length + 1, turn.reply - 1) + turn.pause_s
        length += turn.reply
        cached = length - 1  # nobody has computed the cell of the token that was drawn last
    (done,) = outcome.programs
    assert done.seconds == pytest.approx(whole)
    assert done.bubble_s == 0
    assert outcome.counts["machine_steps"] == 2 + 1 + 1 + 29 + 0 + 16


def test_where_nobody_waits_steps_in_bulk_are_steps_one_by_one() -> None:
    calm, machine = Workload("swe", 5, 0.1), profile("8b-a100")
    engine = engine_config("continuum", machine, host=False)
    bulk, single = (ended(Simulation(machine, engine, bulk=how), calm.draw(0)) for how in (USUAL, ONE_BY_ONE))
    assert seconds(bulk) == pytest.approx(seconds(single))
    assert bulk.counts["machine_steps"] == single.counts["machine_steps"] == single.counts["steps"]
    assert bulk.counts["steps"] < single.counts["steps"] / 5


@pytest.mark.parametrize("policy", ["request", "continuum"])
def test_where_somebody_waits_for_the_one_replica_they_are_as_well(policy: str) -> None:
    """The cells of a bulk are taken when the step is planned, so none is missing to who is let in by it."""
    bulk, single = simulate(BUSY, policy, host=False), simulate(BUSY, policy, bulk=ONE_BY_ONE)
    assert seconds(bulk) == pytest.approx(seconds(single))


def test_more_replicas_share_the_programs() -> None:
    busy = replace(BUSY, rate=4.0)
    one, four = (simulate(busy, replicas=replicas) for replicas in (1, 4))
    assert len(four.programs) == BUSY.programs
    assert seconds(four).mean() < seconds(one).mean() / 1.5
    assert sum(d.cached for d in four.programs) > 0.2 * sum(d.prompt for d in four.programs)  # each stays at home


# ---- many replicas ----

MACHINE = replace(profile("8b-a100"), cells=CELLS)


def crowd(kind: str, programs: int = 40) -> Crowd:
    return Crowd(kind, programs, 4 * RATES[kind])


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_program_and_sub_agent_ends_once(name: str) -> None:
    programs = list(crowd("fan-out", 12).draw(0))
    expected = {program.number for program in programs}
    expected |= {child.number for program in programs for turn in program.turns for child in turn.children}
    outcome = ended(Simulation(MACHINE, crowd_engine(MACHINE), 4, routing=routing(name)), programs)
    assert [done.number for done in outcome.programs] == sorted(expected)
    ends = {done.number: done.ended for done in outcome.programs}
    for program in programs:
        assert all(ends[child.number] < ends[program.number] for turn in program.turns for child in turn.children)


def play(kind: str, programs: int, placement: str, seed: int = 0) -> dict[str, float]:
    (figures,) = play_placement(kind, crowd(kind, programs), MACHINE, 4, placement, seed).values()
    return figures


@pytest.mark.parametrize("kind", CROWDS)
def test_ours_finds_more_cached_than_who_does_not_look(kind: str) -> None:
    ours, blind = (play(kind, 40, name) for name in ("ours", "round-robin"))
    assert ours["hit"] > blind["hit"] + 0.05
    assert ours["p99_s"] < blind["p99_s"]
    assert ours["most_in_hand"] < blind["most_in_hand"]


def test_a_run_ends_with_the_turns_of_its_window_which_are_what_they_are_in_a_whole_one() -> None:
    programs = list(crowd("fan-out", 16).draw(0))
    window = programs[4].arrived, programs[-1].arrived
    told: list[list[Served]] = []
    for asked in (window, (0.0, float("inf"))):
        told.append([])
        simulation = Simulation(MACHINE, crowd_engine(MACHINE), 4, window=asked, served=told[-1].append)
        simulation.run(programs)
    short, whole = ([turn for turn in turns if window[0] <= turn.asked <= window[1]] for turns in told)
    assert short == whole
    assert len(told[0]) < len(told[1])


def test_turns_that_take_too_long_count_with_the_time_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = play("agents", 30, "prefix")
    assert whole["cut"] == 0
    monkeypatch.setattr("holdfast.loadgen.simulator.simulation.BEHIND_S", 5.0)
    cut = play("agents", 30, "prefix")
    assert cut["turns"] == whole["turns"]
    assert 0 < cut["cut"] < cut["turns"]
    assert cut["p99_s"] < whole["p99_s"]
    assert 0 < cut["hit"] < 1


def test_others_than_the_hot_tenant_have_a_figure_of_their_own() -> None:
    figures = play("hot-tenant", 40, "ours")
    assert figures["others_p99_s"] > 0
    assert 0 < figures["busy"] <= 1
    assert "others_p99_s" not in play("agents", 12, "ours")
