"""A profile of the machine at hand, measured, and how well a simulation with it predicts another workload.

    python -m holdfast.loadgen.simulator.fitting [--json FILE]

The real engine and the real model run under the virtual clock: steps take their measured time, tools and pauses pass at
once. So only the cost of steps is predicted, and only that is measured. The two workloads take turns, with other
programs each time: a shared machine's speed drifts by more than a simulation errs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from holdfast.loadgen.simulator.machines import Profile
from holdfast.loadgen.simulator.replica import Bulk
from holdfast.loadgen.simulator.simulation import Outcome, Simulation
from holdfast.loadgen.simulator.workloads import Workload
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.plan import Landed, Runner, StepPlan
from holdfast.replicas.retention.policy import not_negative

MEASURED = Bulk(free=0, blind=1)
FIT_ON = Workload("bfcl", 12, 1.0, turns_times=2, scale=0.1, context=6000)
CHECK_ON = Workload("swe", 8, 0.5, scale=0.1, context=6000)
ROUNDS = 3  # of both workloads, each with new programs
WITHIN = 0.1  # of mean completion time
_REWEIGHTED = 8  # rounds of the fit; the prediction changes by less than a thousandth after three


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: its seconds, and the amounts of what takes time."""

    seconds: float
    sequences: int
    tokens: int
    pairs: float  # of prompts
    cells: int  # that decodes read

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
    """A real runner as a machine of the simulation; keeps a sample of every step."""

    runner: Runner
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 1
    drew: int = 0
    decoded: bool = False
    own: bool = True
    _started_at: float = 0.0
    _plan: StepPlan | None = None

    def start(self, engine: Engine, most: int) -> None:
        self._plan, self.seconds, self.drew = None, 0.0, 0
        self._started_at = time.perf_counter()

    def begin(self, plan: StepPlan) -> Landed:
        output = self.runner.begin(plan).land()
        self._plan, self.decoded = plan, plan.decodes
        self.drew = sum(token is not None for token in output.drawn)
        self.seconds = time.perf_counter() - self._started_at
        return Landed(output)

    def end(self) -> float:
        if self._plan is None:
            return 0.0
        self.seconds = time.perf_counter() - self._started_at
        self.samples.append(Sample.of(self._plan, self.seconds))
        return self.seconds


def fit(samples: Sequence[Sample], name: str, cells: int) -> Profile:
    """The profile with the least error on these steps, relative to the root of its prediction. No cost is negative.

    A weight by the prediction, not by the measurement, makes the sum over all steps come out right.
    """
    x = np.array([(1.0, s.sequences, s.tokens, s.pairs, s.cells) for s in samples])
    y = np.array([s.seconds for s in samples])
    size = np.maximum(np.abs(x).max(axis=0), 1e-12)
    x, least = x / size, 1e-3 * y.mean()
    predicted = y
    for _ in range(_REWEIGHTED):
        weighted = x / np.maximum(predicted, least)[:, None]
        costs = not_negative(x.T @ weighted, weighted.T @ y)
        predicted = x @ costs
    step_s, sequence_s, token_s, pair_s, cell_s = (float(cost) for cost in costs / size)
    return Profile(name, step_s, 0.0, token_s, pair_s, cell_s, 0.0, cells, 0, sequence_s)


def measure(loaded: LoadedRunner, workload: Workload, seed: int) -> tuple[Outcome, list[Sample]]:
    """Run a workload on the real engine."""
    timed = TimedRunner(loaded.runner)
    nothing = Profile("unknown", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, loaded.config.cells, 0)
    real = Simulation(nothing, loaded.config, 1, MEASURED, lambda: timed, exact=True, vocabulary=loaded.vocabulary)
    return real.run(workload.draw(seed)), timed.samples


def predict(profile: Profile, config: EngineConfig, workload: Workload, seed: int) -> Outcome:
    """Simulate the same with a profile."""
    return Simulation(profile, config, exact=True).run(workload.draw(seed))


def agreement(workload: Workload, outcomes: Sequence[Outcome], simulated: Sequence[Outcome]) -> dict[str, Any]:
    """Mean completion times over some runs of a workload, measured and simulated, and the machine's steps."""
    row: dict[str, Any] = {"workload": workload.kind}
    for name, runs in (("measured", outcomes), ("simulated", simulated)):
        row[f"{name}_s"] = fmean(program.seconds for run in runs for program in run.programs)
        row[f"steps_{name}"] = sum(run.counts["machine_steps"] for run in runs)
    return row | {"ratio": row["simulated_s"] / row["measured_s"]}


def compare(
    loaded: LoadedRunner, workloads: Sequence[Workload], seeds: Sequence[int], name: str
) -> tuple[Profile, list[dict[str, Any]]]:
    """Measure the workloads in turns, fit on the first, predict all."""
    measure(loaded, replace(workloads[0], programs=1), seeds[-1] + 1)  # to warm up
    runs = [[measure(loaded, workload, seed) for workload in workloads] for seed in seeds]
    profile = fit([sample for (_, steps), *_ in runs for sample in steps], name, loaded.config.cells)
    agreements = []
    for workload, outcomes in zip(workloads, zip(*runs, strict=True), strict=True):
        simulated = [predict(profile, loaded.config, workload, seed) for seed in seeds]
        agreements.append(agreement(workload, [outcome for outcome, _ in outcomes], simulated))
    return profile, agreements


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 where one of the two workloads is missed by over 10 %."""
    parser = argparse.ArgumentParser(prog="fitting", description="Fit a profile of this machine, and check it.")
    parser.add_argument("--model", default="pocket", help="as for serve (default: pocket)")
    parser.add_argument("--cells", type=int, default=24576, help="of the KV cache (default: 24576)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the profile and both agreements there")
    options = parser.parse_args(argv)
    speculation = DraftConfig(enabled=False)
    config = EngineConfig(options.model, cells=options.cells, threads=options.threads, speculation=speculation)
    seeds = range(options.seed, options.seed + ROUNDS)
    profile, agreements = compare(load_runner(config), (FIT_ON, CHECK_ON), seeds, f"{options.model} here")
    print(profile)
    for use, row in zip(("fitted on", "checked on"), agreements, strict=True):
        print(
            use, *(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        )
    if options.json:
        options.json.write_text(json.dumps({"profile": asdict(profile), "agreements": agreements}, indent=1) + "\n")
    return int(any(abs(row["ratio"] - 1) > WITHIN for row in agreements))


if __name__ == "__main__":
    sys.exit(main())
