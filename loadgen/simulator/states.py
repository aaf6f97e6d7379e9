"""Policies for keeping recurrent states in a cache, compared on programs whose states do not fit.

ours       the ends of prompts and replies, and prefixes seen a second time; the cheapest goes first
every N    each N tokens of what is computed, wherever turns begin and end
none       a turn computes all of its prompt
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np

from holdfast.loadgen.program import Program
from holdfast.loadgen.simulator.machines import Profile
from holdfast.loadgen.simulator.policies import engine_config
from holdfast.loadgen.simulator.replica import ONE_BY_ONE
from holdfast.loadgen.simulator.simulation import Simulation
from holdfast.loadgen.simulator.workloads import CONTEXT
from holdfast.replicas.kv.radix import Node, Prefix
from holdfast.replicas.kv.states import RunningState, States
from holdfast.replicas.types import TokenIds


class Unmarked(RunningState):
    """A state for which the cache sets no marks."""

    def mark(self, position: int) -> None:
        return


class NoCheckpoints(States):
    """Keeps no state of a sequence that has ended."""

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


WAYS: dict[str, type[States]] = {
    "ours": States,
    **{f"every {n}": type(f"Every{n}", (FixedInterval,), {"interval": n}) for n in (512, 2048, 8192)},
    "none": NoCheckpoints,
}


def play(machine: Profile, programs: list[Program], way: str, slots: int) -> dict[str, float]:
    """One run. `hits`: tokens of follow-up turns that were cached, of those that the previous turn had computed."""
    rows = slots // 2
    config = engine_config("default", machine, host=False)
    config = replace(config, state_slots=slots, max_sequences=rows, session_rows=rows // 2)
    simulation = Simulation(machine, config, bulk=ONE_BY_ONE)
    engine = simulation.sites[0].replica.engine
    engine.cache.states = WAYS[way](engine.cache.tree, slots)
    outcome = simulation.run(programs)
    hits = total = 0
    for result, program in zip(outcome.programs, programs, strict=True):
        ends = np.cumsum([turn.added + turn.reply for turn in program.turns])
        earlier = int(sum(ends[:-1]))
        hits, total = hits + min(result.cached, earlier), total + earlier
    seconds = [result.seconds for result in outcome.programs]
    p90 = float(np.percentile(seconds, 90))
    evicted = engine.stats.checkpoints_evicted
    return {"mean_s": fmean(seconds), "p90_s": p90, "hits": hits / total, "evicted": evicted}
