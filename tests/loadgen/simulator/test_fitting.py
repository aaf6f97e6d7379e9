"""Fitting, on steps whose cost is known; a runner that draws its own tokens; no clock is looked at."""

import random
from dataclasses import replace

import numpy as np
import pytest

from holdfast.loadgen.simulator.fitting import MEASURED, Sample, TimedRunner, agreement, fit, predict
from holdfast.loadgen.simulator.machines import Profile
from holdfast.loadgen.simulator.policies import engine_config
from holdfast.loadgen.simulator.simulation import Simulation
from holdfast.loadgen.simulator.workloads import Workload
from holdfast.replicas.plan import Chunk, Draw, Drawn, Landed, Sampling, StepOutput, StepPlan

KNOWN = Profile("known", 3e-3, 0.0, 1e-4, 2e-6, 1e-6, 0.0, 24576, 0, sequence_s=5e-4)
CALM = Workload("bfcl", 3, 0.5, scale=0.05, context=6000)


def plans(seed: int, count: int) -> list[StepPlan]:
    rng = random.Random(seed)
    draw = Draw(Sampling(), 0)
    made = []
    for _ in range(count):
        decodes = [Chunk(0, rng.randrange(4000), np.zeros(1, np.int32), draw) for _ in range(rng.randrange(8))]
        prompts = [Chunk(0, rng.randrange(500), np.zeros(rng.randrange(100, 2000), np.int32))] * rng.randrange(2)
        if decodes or prompts:
            made.append(StepPlan((*decodes, *prompts)))
    return made


def test_a_fit_finds_what_steps_cost() -> None:
    samples = [Sample.of(plan, KNOWN.step(plan, 16)) for plan in plans(0, 300)]
    found = fit(samples, "found", KNOWN.cells)
    for plan in plans(1, 50):
        assert found.step(plan, 16) == pytest.approx(KNOWN.step(plan, 16), rel=1e-3)


def test_no_cost_is_negative() -> None:
    samples = [replace(Sample.of(plan, 0.0), seconds=1.0 / (1 + len(plan.chunks))) for plan in plans(2, 100)]
    found = fit(samples, "found", 1)
    assert min(found.step_s, found.sequence_s, found.token_s, found.pair_s, found.cell_s) >= 0


def test_steps_that_vary_add_up_to_what_they_took() -> None:
    rng = random.Random(4)
    made = plans(3, 400)
    samples = [Sample.of(plan, KNOWN.step(plan, 16) * rng.uniform(0.5, 2.0)) for plan in made]
    found = fit(samples, "found", 1)
    assert sum(found.step(plan, 16) for plan in made) == pytest.approx(sum(s.seconds for s in samples), rel=1e-3)


def test_runs_agree_by_the_mean_over_all_their_programs() -> None:
    config = replace(engine_config("continuum", KNOWN, host=False), context_length=8192)
    few, more = (predict(KNOWN, config, replace(CALM, programs=count), 0) for count in (1, 3))
    row = agreement(CALM, [few, more], [few, few])
    seconds = [program.seconds for run in (few, more) for program in run.programs]
    assert row["measured_s"] == pytest.approx(sum(seconds) / 4)
    assert row["simulated_s"] == pytest.approx(few.programs[0].seconds)
    assert row["ratio"] == pytest.approx(row["simulated_s"] / row["measured_s"])
    assert (row["steps_measured"], row["steps_simulated"]) == (
        few.counts["machine_steps"] + more.counts["machine_steps"],
        2 * few.counts["machine_steps"],
    )


class Sevens:
    """A model that says one thing."""

    def begin(self, plan: StepPlan) -> Landed:
        return Landed(StepOutput(tuple(Drawn((7,)) if chunk.draw else None for chunk in plan.chunks)))


def test_a_model_is_measured_on_the_programs_that_are_simulated() -> None:
    config = replace(engine_config("continuum", KNOWN, host=False), context_length=8192)
    timed = TimedRunner(Sevens())
    real = Simulation(KNOWN, config, 1, MEASURED, lambda: timed, exact=True, vocabulary=100)
    measured = real.run(CALM.draw(0))
    simulated = predict(KNOWN, config, CALM, 0)
    for one, other in zip(measured.programs, simulated.programs, strict=True):
        assert (one.turns, one.prompt, one.drawn, one.cached) == (other.turns, other.prompt, other.drawn, other.cached)
    assert len(timed.samples) == measured.counts["steps"]
    assert sum(sample.tokens for sample in timed.samples) >= measured.counts["prompt_computed"]
