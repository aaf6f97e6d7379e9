"""When prompts have their first token and how long replies wait between tokens, by how long prompts may make a step.

`bench prefill_order [--machine 8b-h200]` runs the real engine over the simulator's cost model, so it takes seconds and
no GPU. `--programs`, programs with tools, takes a minute. `MS ms` lets prompts add that many milliseconds to a step
(`engine.step_ms`); 0 sets no bound.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from holdfast.loadgen.bench.harness import Row
from holdfast.loadgen.program import Program, sized, sized_turn
from holdfast.loadgen.simulator import machines
from holdfast.loadgen.simulator.machines import Profile
from holdfast.loadgen.simulator.policies import PAGE, engine_config
from holdfast.loadgen.simulator.replica import CostRunner
from holdfast.loadgen.simulator.simulation import Outcome, Simulation
from holdfast.loadgen.simulator.workloads import Workload
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Landed, StepPlan

PROFILE = machines.profile("8b-a100")
BUDGETS = (0, 12.5, 25, 50, 100, 200, 400)  # milliseconds
WORKLOADS = {"swe": (40, 0.12, 1.0), "bfcl": (60, 0.15, 1.0), "mixed": (30, 0.12, 1.0), "coding": (30, 0.3, 0.1)}
"""Programs, those that begin in a second on an A100, and the scale of their lengths."""
COLUMNS = {"load": "<27", "step_ms": ">7g"}
COLUMNS |= {f"first_{name}": ">12.3f" for name in ("mean", "median", "p99", "longest")} | {"whole": ">8.3f"}
COLUMNS |= {f"gap_{name}": ">11.3f" for name in ("median", "p99", "longest")} | {"wall": ">8.3f", "a_second": ">8.3f"}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of `sizes` tokens that come at `came`, in seconds, and draw `replies` tokens; each is a program."""

    name: str
    sizes: npt.NDArray[np.int64]
    came: Floats
    replies: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Played:
    """Seconds from each prompt's arrival to its first and last token, between the tokens of replies, and in all."""

    first: Floats
    whole: Floats
    gaps: Floats
    wall: float

    @property
    def figures(self) -> Row:
        """Seconds, gaps in milliseconds; `whole` is the mean."""
        first, gaps = np.percentile(self.first, (50, 99, 100)), np.percentile(self.gaps * 1e3, (50, 99, 100))
        names = ("median", "p99", "longest")
        row: Row = {"first_mean": self.first.mean(), "whole": self.whole.mean(), "wall": self.wall}
        row |= {f"first_{name}": value for name, value in zip(names, first, strict=True)}
        return row | {f"gap_{name}": value for name, value in zip(names, gaps, strict=True)}


def loads(pace: float = 1.0) -> Iterator[Load]:
    """Bursts, which order helps, and streams of prompts of very different lengths, where sharing helps the short.

    Time goes `pace` times as fast.
    """
    rng = np.random.default_rng(1)
    yield Load("16 prompts of 4,096 at once", np.full(16, 4096), np.zeros(16), np.full(16, 32))
    yield Load("64 of 200 to 12,000 at once", rng.integers(200, 12_000, 64), np.zeros(64), np.full(64, 64))
    sizes = np.minimum(rng.lognormal(7.6, 1.0, 300), 30_000).astype(np.int64) + 10
    came = np.cumsum(rng.exponential(1 / 3, 300)) / pace
    yield Load("300 log-normal, 3 a second", sizes, came, rng.integers(16, 200, 300))
    turns = np.minimum(rng.lognormal(5.7, 0.9, 300), 4_000).astype(np.int64) + 10
    greetings = np.arange(20)  # while the long prompt is computed, each after the one before
    yield Load(
        "20 of 40 behind one of 30,000",
        np.array([30_000, *np.full(20, 40)]),
        np.array([0.0, *(0.02 + 0.05 * greetings) / pace]),
        np.array([1, *np.full(20, 8)]),
    )
    yield Load(
        "300 turns, 8 a second", turns, np.cumsum(rng.exponential(1 / 8, 300)) / pace, rng.integers(16, 120, 300)
    )


class TimedRunner(CostRunner):
    """Notes the seconds of each step and how many sequences have their next token from it."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile, PAGE)
        self.took: list[tuple[float, int]] = []

    def begin(self, plan: StepPlan) -> Landed:
        flight = super().begin(plan)
        self.took.append((self.seconds / self.steps, sum(chunk.decodes for chunk in plan.chunks) * self.steps))
        return flight


def simulate(
    programs: Iterable[Program], config: EngineConfig, profile: Profile, exact: bool = False
) -> tuple[Played, Outcome]:
    """Programs on one replica; `first` is of each turn, `whole` of each program."""
    runner, first = TimedRunner(profile), list[float]()
    simulation = Simulation(
        profile, config, machine=lambda: runner, served=lambda turn: first.append(turn.first_s), exact=exact
    )
    outcome = simulation.run(programs)
    whole = np.array([program.seconds for program in outcome.programs])
    seconds, times = zip(*runner.took, strict=True)
    return Played(np.array(first), whole, np.repeat(seconds, times), outcome.wall_s), outcome


def play(load: Load, config: EngineConfig, profile: Profile = PROFILE) -> Played:
    """All requests of a load, each a program of one turn."""
    requests = enumerate(zip(load.sizes.tolist(), load.replies.tolist(), load.came.tolist(), strict=True))
    programs = (sized(i, [sized_turn(size, reply)], came + 1.0) for i, (size, reply, came) in requests)
    return simulate(programs, config, profile, exact=True)[0]


def work(name: str, config: EngineConfig, profile: Profile, seed: int) -> Row:
    """Programs of a workload, as many in a second as make an A100 as busy."""
    programs, rate, scale = WORKLOADS[name]
    workload = Workload(name, programs, rate * PROFILE.token_s / profile.token_s, scale=scale).within(profile.cells)
    played, outcome = simulate(workload.draw(seed), config, profile)
    return played.figures | {"a_second": outcome.programs_per_s}


def prefill_order(options: Namespace) -> Iterator[Row]:
    """A row for each load, or with `--programs` for each workload over three seeds, under each bound."""
    machine = machines.profile(options.machine)
    base = engine_config("default", machine, host=False)
    names = WORKLOADS if options.programs else ()
    for load in () if options.programs else loads(PROFILE.token_s / machine.token_s):
        for budget in BUDGETS:
            yield {"load": load.name, "step_ms": budget} | play(load, replace(base, step_ms=budget), machine).figures
    for name in names:
        for budget in BUDGETS:
            runs = [work(name, replace(base, step_ms=budget), machine, seed) for seed in range(3)]
            yield {"load": name, "step_ms": budget} | {key: np.mean([run[key] for run in runs]) for key in runs[0]}
