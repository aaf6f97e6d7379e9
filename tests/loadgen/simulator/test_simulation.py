"""Whole runs on small machines: nobody is lost, nothing is left to chance, and an idle machine takes what it must."""

from dataclasses import replace

import numpy as np
import pytest
from kv_audit import check_cache

from holdfast.loadgen.simulator.machines import profile
from holdfast.loadgen.simulator.outcome import Outcome
from holdfast.loadgen.simulator.policies import POLICIES, engine_config
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.programs import Program, Turn, Workload
from holdfast.loadgen.simulator.replica import ONE_BY_ONE, Bulk
from holdfast.loadgen.simulator.simulation import Simulation
from holdfast.replicas.plan import Chunk, Draw, Sampling, StepPlan

SMALL = replace(profile("8b-a100"), cells=24_000, host_cells=48_000)
BUSY = Workload("bfcl", 14, 0.5, scale=0.3, context=16_000)  # as much as SMALL can do, and more


def simulate(
    workload: Workload,
    policy: str = "continuum",
    *,
    host: bool = False,
    bulk: Bulk | None = None,
    machine: Profile = SMALL,
    replicas: int = 1,
    seed: int = 0,
) -> Outcome:
    simulation = Simulation(machine, engine_config(policy, machine, host), replicas, bulk)
    outcome = simulation.run(workload.draw(seed))
    for site in simulation.sites:
        check_cache(site.replica.engine.cache)
        assert site.replica.ongoing == 0
    return outcome


def seconds(outcome: Outcome) -> np.ndarray:
    return np.array([done.seconds for done in outcome.programs])


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_program_ends_once_and_every_token_is_counted(policy: str, host: bool) -> None:
    programs = list(BUSY.draw(0))
    outcome = simulate(BUSY, policy, host=host)
    assert [done.number for done in outcome.programs] == list(range(BUSY.programs))
    for program, done in zip(programs, outcome.programs, strict=True):
        lengths = np.cumsum([[turn.prompt, turn.reply] for turn in program.turns]).tolist()
        assert done.turns == len(program.turns)
        assert done.prompt == sum(lengths[::2])
        assert done.drawn == sum(turn.reply for turn in program.turns)
        assert done.tool_s == pytest.approx(sum(turn.tool_s for turn in program.turns))
        assert 0 <= done.cached < done.prompt
        assert 0 <= done.bubble_s <= done.seconds - done.tool_s
        assert done.arrived == program.arrived
    # What is computed again after a preemption is on top.
    counts = outcome.counts
    assert counts.prompt_computed + counts.tokens_reloaded >= sum(
        done.prompt - done.cached for done in outcome.programs
    )


def test_the_machine_is_busy_in_these_tests() -> None:
    outcome = simulate(BUSY, "request")
    assert np.mean([done.bubble_s for done in outcome.programs]) > 5
    assert simulate(BUSY, "continuum").counts.pin_hits > 0
    assert simulate(BUSY, "request", host=True).counts.tokens_reloaded > 0


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_same_again(replicas: int) -> None:
    first, second = (simulate(replace(BUSY, rate=1.5), replicas=replicas, seed=5) for _ in range(2))
    assert first == second
    assert first != simulate(replace(BUSY, rate=1.5), replicas=replicas, seed=6)


def test_a_program_alone_takes_the_sum_of_its_parts() -> None:
    program = Program(0, 2.0, 100, (Turn(5000, 30, "a", 1.5), Turn(300, 1, "b", 0.25), Turn(200, 17)))
    machine = profile("8b-a100")
    outcome = Simulation(machine, engine_config("program", machine, host=False)).run([program])
    whole, length, cached = 0.0, 0, 0
    for turn in program.turns:
        length += turn.prompt
        while cached < length:
            end = min(cached + 4096, length)
            draw = Draw(Sampling(), 0) if end == length else None
            plan = StepPlan((Chunk(0, cached, np.zeros(end - cached, np.int32), draw),))
            whole += machine.step(plan, 16)
            cached = end
        whole += machine.decode_s(1, length + 1, turn.reply - 1) + turn.tool_s
        length += turn.reply
        cached = length - 1  # nobody has computed the cell of the token that was drawn last
    (done,) = outcome.programs
    assert done.seconds == pytest.approx(whole)
    assert done.bubble_s == 0
    assert outcome.counts.machine_steps == 2 + 1 + 1 + 29 + 0 + 16


def test_where_nobody_waits_steps_in_bulk_are_steps_one_by_one() -> None:
    calm, machine = Workload("swe", 5, 0.1), profile("8b-a100")
    bulk, single = (simulate(calm, machine=machine, bulk=how) for how in (None, ONE_BY_ONE))
    assert seconds(bulk) == pytest.approx(seconds(single))
    assert bulk.counts.machine_steps == single.counts.machine_steps == single.counts.steps
    assert bulk.counts.steps < single.counts.steps / 5


@pytest.mark.parametrize("policy", ["request", "continuum"])
def test_where_somebody_waits_for_the_one_replica_they_are_as_well(policy: str) -> None:
    """The cells of a bulk are taken when the step is planned, so none is missing to who is let in by it."""
    bulk, single = (seconds(simulate(BUSY, policy, bulk=how)) for how in (None, ONE_BY_ONE))
    assert bulk == pytest.approx(single)


def test_more_cells_lose_nothing() -> None:
    few, many = (simulate(BUSY, "program", machine=replace(SMALL, cells=cells)) for cells in (20_000, 400_000))
    assert len(few.programs) == len(many.programs) == BUSY.programs
    assert many.counts.preemptions == 0
    assert seconds(many).mean() < seconds(few).mean()


def test_more_replicas_share_the_programs() -> None:
    busy = replace(BUSY, rate=4.0)
    one, four = (simulate(busy, replicas=replicas) for replicas in (1, 4))
    assert len(four.programs) == BUSY.programs
    assert seconds(four).mean() < seconds(one).mean() / 1.5
    assert sum(d.cached for d in four.programs) > 0.2 * sum(d.prompt for d in four.programs)  # each stays at home
