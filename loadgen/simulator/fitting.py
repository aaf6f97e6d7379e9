"""A profile of the machine at hand, measured, and how well a simulation with it foretells another workload.

    python -m holdfast.loadgen.simulator.fitting [--json FILE]

The real engine and the real model run under the virtual clock: steps take what they take, tools and pauses pass at
once. So nothing but the cost of steps is foretold, and nothing else is measured. The two workloads take turns, with
other programs each time: a shared machine's speed drifts by more than a simulation errs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from holdfast.loadgen.simulator.outcome import Outcome
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.programs import Workload
from holdfast.loadgen.simulator.replica import Bulk
from holdfast.loadgen.simulator.simulation import Clients, Simulation
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.plan import Landed, Runner, StepPlan
from holdfast.replicas.retention.policy import not_negative

MEASURED = Bulk(free=0, blind=1)
FIT_ON = Workload("bfcl", 12, 1.0, turns_times=2, scale=0.1, context=6000)
CHECK_ON = Workload("swe", 8, 0.5, scale=0.1, context=6000)
WITHIN = 0.1  # of mean completion time
_REWEIGHTED = 8  # of the fit; what is said changes by less than a thousandth after three


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: seconds, and how much there was of what takes time."""

    seconds: float
    sequences: int
    tokens: int
    pairs: float  # of prompts
    cells: int  # that decodes looked at

    @classmethod
    def of(cls, plan: StepPlan, seconds: float) -> Sample:
        tokens = cells = 0
        pairs = 0.0
        for chunk in plan.chunks:
            n = len(chunk.tokens)
            tokens += n
            if n == 1:
                cells += chunk.start + 1
            else:
                pairs += n * (2 * chunk.start + n) / 2
        return cls(seconds, len(plan.chunks), tokens, pairs, cells)


@dataclass(slots=True)
class TimedRunner:
    """A real runner as a machine of the simulation; keeps what every step took."""

    runner: Runner
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 1
    drew: int = 0
    decoded: bool = False
    own: bool = True
    _begun: float = 0.0
    _plan: StepPlan | None = None

    def start(self, engine: Engine, most: int) -> None:
        self._plan, self.seconds, self.drew = None, 0.0, 0
        self._begun = time.perf_counter()

    def begin(self, plan: StepPlan) -> Landed:
        output = self.runner.begin(plan).land()
        self._plan, self.decoded = plan, plan.decodes
        self.drew = sum(each is not None for each in output.drawn)
        self.seconds = time.perf_counter() - self._begun
        return Landed(output)

    def end(self) -> float:
        if self._plan is None:
            return 0.0
        self.seconds = time.perf_counter() - self._begun
        self.samples.append(Sample.of(self._plan, self.seconds))
        return self.seconds


def fit(samples: Sequence[Sample], name: str, cells: int) -> Profile:
    """The profile that errs least on these steps, relative to the root of what it says they take. No cost is negative.

    A weight by what is said, not by what was measured, makes the sum over all steps come out right.
    """
    x = np.array([(1.0, s.sequences, s.tokens, s.pairs, s.cells) for s in samples])
    y = np.array([s.seconds for s in samples])
    size = np.maximum(np.abs(x).max(axis=0), 1e-12)
    x, least = x / size, 1e-3 * y.mean()
    said = y
    for _ in range(_REWEIGHTED):
        weighted = x / np.maximum(said, least)[:, None]
        found = not_negative(x.T @ weighted, weighted.T @ y)
        said = x @ found
    step_s, sequence_s, token_s, pair_s, cell_s = (float(cost) for cost in found / size)
    return Profile(name, step_s, 0.0, token_s, pair_s, cell_s, 0.0, cells, 0, sequence_s)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Mean completion times of a workload, and the simulated one over the measured one."""

    workload: str
    measured_s: float
    simulated_s: float
    steps_measured: int
    steps_simulated: int

    @property
    def ratio(self) -> float:
        return self.simulated_s / self.measured_s


@dataclass(frozen=True, slots=True)
class Fitted:
    """A profile, and what it foretells of the workload it was fitted on and of the other."""

    profile: Profile
    agreements: tuple[Agreement, ...]


def measure(loaded: LoadedRunner, workload: Workload, seed: int) -> tuple[Outcome, list[Sample]]:
    """Run a workload on the real engine."""
    timed = TimedRunner(loaded.runner)
    nothing = Profile("unknown", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, loaded.config.cells, 0)
    clients = Clients(exact=True, vocabulary=loaded.vocabulary)
    outcome = Simulation(nothing, loaded.config, 1, MEASURED, clients, lambda: timed).run(workload.draw(seed))
    return outcome, timed.samples


def foretell(profile: Profile, config: EngineConfig, workload: Workload, seed: int) -> Outcome:
    """Simulate the same with a profile."""
    return Simulation(profile, config, clients=Clients(exact=True)).run(workload.draw(seed))


def agreement(workload: Workload, measured: Sequence[Outcome], simulated: Sequence[Outcome]) -> Agreement:
    """How well some runs of a workload were foretold."""
    means, steps = [], []
    for runs in (measured, simulated):
        seconds = [program.seconds for run in runs for program in run.programs]
        means.append(sum(seconds) / len(seconds))
        steps.append(sum(run.counts.machine_steps for run in runs))
    return Agreement(workload.kind, means[0], means[1], steps[0], steps[1])


def compare(loaded: LoadedRunner, workloads: tuple[Workload, Workload], seeds: Sequence[int], name: str) -> Fitted:
    """Measure both workloads in turns, fit on the first, foretell both."""
    measure(loaded, replace(workloads[0], programs=1), seeds[-1] + 1)  # to warm up
    runs = [[measure(loaded, workload, seed) for workload in workloads] for seed in seeds]
    samples = [sample for (_, steps), _ in runs for sample in steps]
    profile = fit(samples, name, loaded.config.cells)
    told = []
    for workload, measured in zip(workloads, zip(*runs, strict=True), strict=True):
        simulated = [foretell(profile, loaded.config, workload, seed) for seed in seeds]
        told.append(agreement(workload, [outcome for outcome, _ in measured], simulated))
    return Fitted(profile, tuple(told))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 where one of the two workloads is missed by over 10 %."""
    parser = argparse.ArgumentParser(prog="fitting", description="A profile of this machine, and what it foretells.")
    parser.add_argument("--model", default="pocket", help="as for serve (default: pocket)")
    parser.add_argument("--cells", type=int, default=24576, help="of the KV cache (default: 24576)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--programs", type=int, help="of each workload")
    parser.add_argument("--seed", type=int, default=0, help="of the first round (default: 0)")
    parser.add_argument("--rounds", type=int, default=3, help="of both workloads, each with new programs (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the profile and both agreements there")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    speculation = DraftConfig(enabled=False)
    config = EngineConfig(options.model, cells=options.cells, threads=options.threads, speculation=speculation)
    workloads = FIT_ON, CHECK_ON
    if options.programs:
        workloads = replace(FIT_ON, programs=options.programs), replace(CHECK_ON, programs=options.programs)
    seeds = range(options.seed, options.seed + options.rounds)
    fitted = compare(load_runner(config), workloads, seeds, f"{options.model} here")
    profile, told = fitted.profile, fitted.agreements
    print(profile)
    for use, each in zip(("fitted on", "checked on"), told, strict=True):
        print(f"{use} {each.workload}: measured {each.measured_s:.3f} s, simulated {each.simulated_s:.3f} s a program, "
              f"ratio {each.ratio:.3f}; steps {each.steps_measured} and {each.steps_simulated}")  # fmt: skip
    if options.json:
        content = {"profile": asdict(profile), "agreements": [asdict(each) | {"ratio": each.ratio} for each in told]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(each.ratio - 1) > WITHIN for each in told))


if __name__ == "__main__":
    sys.exit(main())
