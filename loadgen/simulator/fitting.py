"""A profile of the machine at hand, measured, and how well a simulation with it foretells another workload.

    python -m holdfast.loadgen.simulator.fitting [--json FILE]

The real engine and the real model run under the virtual clock: steps take what they take, tools and pauses pass at
once. So nothing but the cost of steps is foretold, and nothing else is measured.
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
from numpy.typing import NDArray

from holdfast.loadgen.simulator.outcome import Outcome
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.programs import Workload
from holdfast.loadgen.simulator.replica import Bulk
from holdfast.loadgen.simulator.simulation import Clients, Simulation
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.model.runner import LoadedRunner, load_runner
from holdfast.replicas.scheduling.plan import Runner, StepOutput, StepPlan
from holdfast.replicas.speculation.config import DraftConfig

Array = NDArray[np.float64]

MEASURED = Bulk(free=0, blind=1)
FIT_ON = Workload("bfcl", 12, 1.0, turns_times=2, scale=0.1, context=6000)
CHECK_ON = Workload("swe", 8, 0.5, scale=0.1, context=6000)
WITHIN = 0.1  # of mean completion time
_ROUNDS = 20_000  # of the fit, which ends sooner where nothing changes


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

    def begin(self) -> None:
        self._plan, self.seconds, self.drew = None, 0.0, 0
        self._begun = time.perf_counter()

    def run(self, plan: StepPlan) -> StepOutput:
        output = self.runner.run(plan)
        self._plan, self.decoded = plan, plan.decodes
        self.drew = sum(each is not None for each in output.drawn)
        self.seconds = time.perf_counter() - self._begun
        return output

    def end(self) -> float:
        if self._plan is None:
            return 0.0
        self.seconds = time.perf_counter() - self._begun
        self.samples.append(Sample.of(self._plan, self.seconds))
        return self.seconds


def fit(samples: Sequence[Sample], name: str, cells: int) -> Profile:
    """The profile that errs least on these steps, relative to the root of what they took. No cost is negative."""
    x = np.array([(1.0, s.sequences, s.tokens, s.pairs, s.cells) for s in samples])
    y = np.array([s.seconds for s in samples])
    size = np.maximum(np.abs(x).max(axis=0), 1e-12)
    weight = 1 / np.sqrt(y)
    step_s, sequence_s, token_s, pair_s, cell_s = _not_negative(x / size * weight[:, None], y * weight) / size
    return Profile(
        name, float(step_s), 0.0, float(token_s), float(pair_s), float(cell_s), 0.0, cells, 0, float(sequence_s)
    )


def _not_negative(x: Array, y: Array) -> Array:
    """Least squares without negative coefficients, one coefficient at a time."""
    square, right = x.T @ x, x.T @ y
    found = np.zeros(len(right))
    for _ in range(_ROUNDS):
        before = found.copy()
        for i in range(len(found)):
            if square[i, i] > 0:
                found[i] = max(0.0, found[i] + (right[i] - square[i] @ found) / square[i, i])
        if np.abs(found - before).max() <= 1e-12 * max(np.abs(found).max(), 1e-30):
            break
    return found


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


def agreement(profile: Profile, config: EngineConfig, workload: Workload, seed: int, measured: Outcome) -> Agreement:
    """How well a profile foretells what was measured."""
    simulated = foretell(profile, config, workload, seed)
    means = [sum(each.seconds for each in run.programs) / len(run.programs) for run in (measured, simulated)]
    steps = [run.counts.machine_steps for run in (measured, simulated)]
    return Agreement(workload.kind, means[0], means[1], steps[0], steps[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure two workloads, fit on the first, foretell both; the exit status is 1 where one is missed by over 10 %."""
    parser = argparse.ArgumentParser(prog="fitting", description="A profile of this machine, and what it foretells.")
    parser.add_argument("--model", default="pocket", help="as for serve (default: pocket)")
    parser.add_argument("--cells", type=int, default=24576, help="of the KV cache (default: 24576)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--programs", type=int, help="of each workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the profile and both agreements there")
    options = parser.parse_args(argv)
    speculation = DraftConfig(enabled=False)
    config = EngineConfig(options.model, cells=options.cells, threads=options.threads, speculation=speculation)
    loaded = load_runner(config)
    workloads = [FIT_ON, CHECK_ON]
    if options.programs:
        workloads = [replace(workload, programs=options.programs) for workload in workloads]
    measure(loaded, replace(FIT_ON, programs=1), options.seed + 1)  # to warm up
    runs = [measure(loaded, workload, options.seed) for workload in workloads]
    profile = fit(runs[0][1], f"{options.model} here", loaded.config.cells)
    told = [
        agreement(profile, loaded.config, workload, options.seed, outcome)
        for workload, (outcome, _) in zip(workloads, runs, strict=True)
    ]
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
