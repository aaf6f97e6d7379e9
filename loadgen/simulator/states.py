"""Where a cache keeps recurrent states, compared: the real engine over a cost model, programs whose states do not fit.

    python -m holdfast.loadgen.simulator.states [--workload swe] [--programs 64] [--slots 48] [--seeds 3]

    ours       the ends of prompts and replies, prefixes seen a second time; the cheapest to compute again goes first
    every N    each N tokens of what is computed, wherever turns begin and end
    none       a turn computes all of its prompt

The machine is an H100 with Qwen3.5-27B in FP8: 16 of 64 layers have cells, 64 KiB a
token, and a state is 155 MB. Hits are tokens of follow-up turns that were cached, of all that the turn before had
computed and this one begins with.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from holdfast.loadgen.simulator.policies import engine_config
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.programs import CONTEXT, Program, Workload
from holdfast.loadgen.simulator.replica import ONE_BY_ONE
from holdfast.loadgen.simulator.simulation import Simulation
from holdfast.replicas.kv.radix import Node, Prefix
from holdfast.replicas.kv.states import RunningState, States
from holdfast.replicas.types import TokenIds

PROFILE = Profile(
    "27b-hybrid-h100",
    2e-3,
    weights_s=27e9 / (0.8 * 3.35e12),
    token_s=2 * 27e9 / (0.5 * 1979e12),
    pair_s=4 * 16 * 6144 / (0.5 * 989e12),
    cell_s=65536 / (0.8 * 3.35e12),
    reload_s=65536 / (0.8 * 64e9),
    cells=320_000,
    host_cells=0,
    sequence_s=2 * 155e6 / (0.8 * 3.35e12),  # its state is read and written
)


class Unmarked(RunningState):
    """A state whose marks are not the cache's."""

    def mark(self, position: int) -> None:
        return


class NoCheckpoints(States):
    """Keeps no state of what has ended."""

    def begin(self, prefix: Prefix, longest: int = 0) -> RunningState | None:
        state = super().begin(prefix, longest)
        return state and Unmarked(state.slot, state.source, state.at)

    def keep(self, running: RunningState, root: Node, tokens: TokenIds, n_computed: int, *, last: bool = False) -> None:
        super().keep(running, root, tokens, n_computed)


class FixedInterval(NoCheckpoints):
    """Keeps the state after every `interval` tokens."""

    interval = 1024

    def begin(self, prefix: Prefix, longest: int = 0) -> RunningState | None:
        state = super().begin(prefix, longest)
        if state is not None:
            first = (prefix.length // self.interval + 1) * self.interval
            state.marks = list(range(first, CONTEXT, self.interval))
        return state


def every(interval: int) -> type[States]:
    return type(f"Every{interval}", (FixedInterval,), {"interval": interval})


WAYS: dict[str, type[States]] = {
    "ours": States,
    **{f"every {n}": every(n) for n in (512, 2048, 8192)},
    "none": NoCheckpoints,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Of one run: seconds of programs, mean and 90th percentile, and the share of follow-up tokens that were cached."""

    mean_s: float
    p90_s: float
    hits: float
    evicted: int


def run(way: str, programs: list[Program], slots: int) -> Row:
    rows = slots // 2
    config = replace(
        engine_config("default", PROFILE, host=False), state_slots=slots, max_sequences=rows, session_rows=rows // 2
    )
    hits = [0, 0]
    turns: dict[str, Program] = {program.name: program for program in programs}
    simulation = Simulation(PROFILE, config, bulk=ONE_BY_ONE)
    (site,) = simulation.sites
    cache = site.replica.engine.cache
    cache.states = WAYS[way](cache.tree, slots)
    outcome = simulation.run(programs)
    for done in outcome.programs:
        program = turns[f"program-{done.number}"]
        known = sum(_known(program))
        hits[0] += min(done.cached, known)
        hits[1] += known
    seconds = np.array([done.seconds for done in outcome.programs])
    p90 = float(np.percentile(seconds, 90))
    return Row(float(seconds.mean()), p90, hits[0] / hits[1], site.replica.engine.stats.checkpoints_evicted)


def _known(program: Program) -> list[int]:
    """Of each follow-up turn's prompt, the tokens that the turn before had."""
    ends = np.cumsum([turn.prompt + turn.reply for turn in program.turns])
    return [int(end) for end in ends[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="swe")
    parser.add_argument("--programs", type=int, default=64)
    parser.add_argument("--slots", type=int, default=48)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    workload = Workload(asked.workload, asked.programs, asked.rate)
    print("way | seconds of a program | over ours | p90 over ours | hits | checkpoints evicted")
    found: dict[str, list[Row]] = {way: [] for way in WAYS}
    for seed in range(asked.seeds):
        programs = list(workload.draw(seed))
        for way, rows in found.items():
            rows.append(run(way, programs, asked.slots))
    for way, rows in found.items():
        mean = _mean(rows, lambda row: row.mean_s)
        over = [row.mean_s / ours.mean_s for row, ours in zip(rows, found["ours"], strict=True)]
        p90 = [row.p90_s / ours.p90_s for row, ours in zip(rows, found["ours"], strict=True)]
        hits = _mean(rows, lambda row: row.hits)
        evicted = sum(row.evicted for row in rows)
        print(
            f"{way} | {mean:.1f} | {np.mean(over):.2f} ({min(over):.2f} to {max(over):.2f}) | {np.mean(p90):.2f} | "
            f"{hits:.1%} | {evicted}"
        )


def _mean(rows: list[Row], figure: Callable[[Row], float]) -> float:
    return float(np.mean([figure(row) for row in rows]))


if __name__ == "__main__":
    main()
