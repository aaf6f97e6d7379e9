"""Efficiency of turns against the limits of this CPU: `bench efficiency --model DIR`; `forwards` has the formula.

Recorded conversations run through the engine as it is served, one program or several at once. Bandwidth and product
rate are measured in the same run. A row shows which share of the wall time is ideal, and where the rest went. `busy` is
the process's CPU time over that of its threads: far below 1 other programs had the cores, and the turn says little.
On a GPU: `bench.gpu`. A model that `holdfast inflate` made of Pocket repeats the recorded replies; of other models only
the time counts.
"""

import time
from argparse import Namespace
from collections.abc import Iterator

import torch

from holdfast.kernels.ceilings import Ceilings
from holdfast.loadgen.bench.cpu import Limits
from holdfast.loadgen.bench.forwards import described
from holdfast.loadgen.bench.gpu.accounting import Bounds, CountingRunner
from holdfast.loadgen.bench.gpu.stage import dialogues
from holdfast.loadgen.bench.gpu.workflows import Player, Turn, play, summary
from holdfast.loadgen.bench.harness import Row
from holdfast.loadgen.bench.parts import Deadline, Figures
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.startup import load_runner

TOKENS = 7000  # of a conversation at most
SECONDS = 120.0  # of a workflow; turns that are left then are left out
WARM_TURNS = 3
PARTS = ("ideal_s", "prepare_s", "kernels_s", "sample_s", "plan_s", "commit_s", "idle_s")
COLUMNS = {"name": "<24", "efficiency": ">10.2f", "gb_s": ">6.1f", "gflop_s": ">7.0f", "wall_s": ">7.2f"}
COLUMNS |= {part.removesuffix("_s"): ">7.2f" for part in PARTS}
COLUMNS |= {"median_of_turns": ">15.2f", "busy": ">5.2f", "new": ">5", "completion": ">10", "forwards": ">8.0f"}


def efficiency(options: Namespace) -> Iterator[Row]:
    """A row for each workflow and, with `--each`, for each of its turns. The first run of a few turns warms up."""
    shape, programs = described(options.model), max(options.programs)
    cells = int(programs * (TOKENS + 16) / EngineConfig().admission_ceiling)
    loaded = load_runner(
        EngineConfig(
            model=options.model,
            device="cpu",
            dtype=options.dtype,
            threads=options.threads,
            cells=-(-cells // 16) * 16,
            session_rows=programs,
            max_sequences=2 * programs,
        )
    )
    kv = loaded.runner.kv
    for at_once in options.programs:
        for turns in options.turns:
            limits = Limits()
            bounds = Bounds(shape, kv.dtype.itemsize, kv.cell_bytes, Ceilings(limits.bandwidth, limits.rate))
            recorded = dialogues(loaded.tokenizer, at_once, turns, TOKENS)
            for most in (min(WARM_TURNS, turns), turns):
                counting = CountingRunner(loaded.runner)
                settings = (loaded.eos, loaded.vocabulary, loaded.cost)
                engine = Engine(loaded.config, counting, *settings, window=loaded.window)
                played: list[tuple[Turn, float]] = []
                start = time.process_time()
                for turn in play(Player(engine, counting, bounds, recorded), most, Deadline(SECONDS)):
                    ended = time.process_time()
                    played.append((turn, (ended - start) / turn.wall_s / torch.get_num_threads()))
                    start = ended
            speeds = {"gb_s": limits.bandwidth / 1e9, "gflop_s": limits.rate / 1e9}
            yield _row(f"{turns} turns, {at_once} at once", summary([turn for turn, _ in played])) | speeds
            for turn, busy in played if options.each else ():
                yield _row(f"  turn {turn.turn}", turn.figures) | {"busy": busy}


def _row(name: str, figures: Figures) -> Row:
    shares = {part.removesuffix("_s"): figures[part] / figures["wall_s"] for part in PARTS}
    return {"name": name} | figures | shares
