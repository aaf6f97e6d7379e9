"""When prompts have their first token and how long replies stand still, by how long prompts may make a step.

``python -m holdfast.loadgen.bench.prefill_order [--machine 8b-h200]``: the real engine over the simulator's cost model
(8B on an A100 by default), so it takes seconds and no GPU. `--programs`, programs with tools, takes a minute. `MS ms`
lets prompts add that many milliseconds to a step (`engine.step_ms`); 0 sets no bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from holdfast.loadgen.simulator import machines
from holdfast.loadgen.simulator.machines import Profile
from holdfast.loadgen.simulator.policies import PAGE, engine_config
from holdfast.loadgen.simulator.replica import CostRunner
from holdfast.loadgen.simulator.simulation import Simulation
from holdfast.loadgen.simulator.workloads import Workload
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.plan import Landed, Sampling, StepPlan
from holdfast.replicas.requests import Submit, Tokens

PROFILE = machines.profile("8b-a100")
BUDGETS = (0, 12.5, 25, 50, 100, 200, 400)  # milliseconds
WORKLOADS = {"swe": (40, 0.12, 1.0), "bfcl": (60, 0.15, 1.0), "mixed": (30, 0.12, 1.0), "coding": (30, 0.3, 0.1)}
"""Programs, those that begin in a second on an A100, and the scale of their lengths."""

COLUMNS = ("mean", "median", "p99", "longest", "whole", "median", "p99", "longest", "wall")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of `sizes` tokens that come at `came`, in seconds, and draw `replies` tokens; each another program."""

    name: str
    sizes: npt.NDArray[np.int64]
    came: Floats
    replies: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Played:
    """Seconds: from each prompt's arrival to its first token and to its last, between the tokens of replies, and until
    all was said.
    """

    first: Floats
    whole: Floats
    gaps: Floats
    wall: float


def loads(pace: float = 1.0) -> Iterator[Load]:
    """Bursts, which order helps, and streams of prompts of very different lengths, where sharing helps the short; time
    goes `pace` times as fast.
    """
    rng = np.random.default_rng(1)
    yield Load("16 prompts of 4,096 at once", np.full(16, 4096), np.zeros(16), np.full(16, 32))
    yield Load("64 of 200 to 12,000 at once", rng.integers(200, 12_000, 64), np.zeros(64), np.full(64, 64))
    sizes = np.minimum(rng.lognormal(7.6, 1.0, 300), 30_000).astype(np.int64) + 10
    came = np.cumsum(rng.exponential(1 / 3, 300)) / pace
    yield Load("300 log-normal, 3 a second", sizes, came, rng.integers(16, 200, 300))
    turns = np.minimum(rng.lognormal(5.7, 0.9, 300), 4_000).astype(np.int64) + 10
    greetings = np.arange(20)  # while it is computed, each after the one before
    yield Load(
        "20 of 40 behind one of 30,000",
        np.array([30_000, *np.full(20, 40)]),
        np.array([0.0, *(0.02 + 0.05 * greetings) / pace]),
        np.array([1, *np.full(20, 8)]),
    )
    yield Load(
        "300 turns, 8 a second", turns, np.cumsum(rng.exponential(1 / 8, 300)) / pace, rng.integers(16, 120, 300)
    )


def play(load: Load, config: EngineConfig, profile: Profile = PROFILE) -> Played:
    """All requests of a load, each served as it comes."""
    runner = CostRunner(profile, PAGE)
    engine = Engine(config, runner, stopwatch=lambda: 0.0)
    rng = np.random.default_rng(0)
    first: dict[str, float] = {}
    latest: dict[str, float] = {}
    gaps = []
    now, i, n = 0.0, 0, len(load.sizes)
    while i < n or engine.busy:
        while i < n and (load.came[i] <= now or not engine.busy):
            now, came = max(now, float(load.came[i])), float(load.came[i])
            tokens = (rng.integers(1, 30_000) + np.arange(load.sizes[i]) % 20_000).astype(np.int32)
            reply = Sampling(int(load.replies[i]))
            engine.handle(
                Submit(
                    str(i),
                    tokens=tokens,
                    sampling=reply,
                    scope="",
                    program_id=f"program {i}",
                    program_arrival=came + 1.0,
                ),
                now,
                came,
            )
            i += 1
        begun = now
        events = engine.step(begun, lambda begun=begun: begun + runner.seconds)  # type: ignore[misc]
        now = begun + runner.seconds
        for event in events:
            if isinstance(event, Tokens):
                if event.request_id in first:
                    gaps.append(now - latest[event.request_id])
                else:
                    first[event.request_id] = now
                latest[event.request_id] = now
    answered, over = (np.array([when[str(i)] for i in range(n)]) - load.came for when in (first, latest))
    return Played(answered, over, np.array(gaps), now)


class TimedRunner(CostRunner):
    """Notes the seconds of each step and how many sequences have their next token from it."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile, PAGE)
        self.took: list[tuple[float, int]] = []

    def begin(self, plan: StepPlan) -> Landed:
        flight = super().begin(plan)
        decoding = sum(chunk.decodes for chunk in plan.chunks)
        self.took.append((self.seconds / self.steps, decoding * self.steps))
        return flight

    @property
    def gaps(self) -> Floats:
        """Seconds between tokens, of all replies."""
        seconds, times = zip(*self.took, strict=True)
        return np.repeat(seconds, times)


def work(name: str, config: EngineConfig, profile: Profile, seed: int) -> tuple[Played, float]:
    """Programs of the workload of that name, as many in a second as make an A100 as busy; and how many end in one.

    `first` is of each turn, `whole` of each program.
    """
    programs, rate, scale = WORKLOADS[name]
    workload = Workload(name, programs, rate * PROFILE.token_s / profile.token_s, scale=scale).within(profile.cells)
    runner, first = TimedRunner(profile), list[float]()
    simulation = Simulation(profile, config, machine=lambda: runner, served=lambda turn: first.append(turn.first_s))
    outcome = simulation.run(workload.draw(seed))
    whole = np.array([program.seconds for program in outcome.programs])
    return Played(np.array(first), whole, runner.gaps, outcome.wall_s), outcome.programs_per_s


def main(argv: Sequence[str] | None = None) -> int:
    """Print seconds to first tokens and to last ones (`whole`, the mean), milliseconds between tokens, and seconds in
    all, of each load under each rule.
    """
    parser = argparse.ArgumentParser(prog="bench prefill_order", description="How prefills share a step.")
    parser.add_argument("--machine", choices=machines.names(), default=PROFILE.name)
    parser.add_argument("--programs", action="store_true", help="programs with tools, under each `step_ms`; 3 seeds")
    options = parser.parse_args(argv)
    machine = machines.profile(options.machine)
    base = engine_config("default", machine, host=False)
    rules = {f"{budget:g} ms": replace(base, step_ms=budget) for budget in BUDGETS}
    if options.programs:
        _compare_programs(base, machine)
        return 0
    for load in loads(PROFILE.token_s / machine.token_s):
        print(f"{load.name:<28} " + " ".join(f"{column:>8}" for column in COLUMNS))
        for rule, config in rules.items():
            print(f"  {rule:<26} {_told(figures(play(load, config, machine)))}", flush=True)
    return 0


def _compare_programs(base: EngineConfig, machine: Profile) -> None:
    for name in WORKLOADS:
        print(f"{name:<28} " + " ".join(f"{column:>8}" for column in (*COLUMNS, "a second")))
        for budget in BUDGETS:
            runs = [work(name, replace(base, step_ms=budget), machine, seed) for seed in range(3)]
            mean = np.mean([[*figures(played), pace] for played, pace in runs], axis=0)
            print(f"  {budget:<4g} ms{'':19} {_told(mean)}", flush=True)


def figures(played: Played) -> list[float]:
    """Those of `COLUMNS`."""
    waits, gaps = played.first, played.gaps * 1e3
    spread = np.percentile(waits, (50, 99, 100)), np.percentile(gaps, (50, 99, 100))
    return [waits.mean(), *spread[0], played.whole.mean(), *spread[1], played.wall]


def _told(values: Iterable[float]) -> str:
    return " ".join(f"{value:8.3f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
