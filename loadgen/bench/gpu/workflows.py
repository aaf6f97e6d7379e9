"""Recorded conversations, turn by turn, through the whole engine as it is served.

A turn's ideal time over its measured time is the figure:

    ideal = (forwards x weights + KV read) / bandwidth + operations of the new tokens / matrix rate

Turns run in waves: all programs begin a turn together, and the wave ends with the last of them. A turn draws as many
tokens as the recorded reply has, so every run does the same work. The parts of `Turn.spent` add up to the time.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from holdfast.loadgen.bench.gpu.accounting import Bounds, CountingRunner, Totals, drain
from holdfast.loadgen.bench.gpu.stage import Dialogue, Exchange, Stage
from holdfast.loadgen.bench.parts import Deadline, Figures, Lines, Report
from holdfast.replicas.engine import Engine
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Submit
from holdfast.replicas.types import TokenIds


@dataclass(frozen=True, slots=True)
class Turn:
    """One wave. `prompt`, `new` and `completion`: tokens of all programs; `new` ones had never been seen."""

    turn: int
    prompt: int
    new: int
    completion: int
    as_recorded: int  # programs that said what is on record
    wall_s: float
    ideal_s: float
    total: Totals

    @property
    def efficiency(self) -> float:
        return self.ideal_s / self.wall_s

    @property
    def spent(self) -> dict[str, float]:
        """Seconds, which add up to the measured time.

        The host's times may overlap with the device. So `prepare_s` is bounded by what forwards took beyond their
        ideal, and `plan_s` and `commit_s` by the time when no step ran.
        """
        total = self.total
        beyond = total.forward_s - self.ideal_s
        prepare = min(total.prepare_s, max(beyond, 0.0))
        between = self.wall_s - total.forward_s - total.sample_s
        plan = min(total.schedule_s, max(between, 0.0))
        commit = min(total.commit_s, max(between - plan, 0.0))
        return {
            "ideal_s": self.ideal_s,
            "prepare_s": prepare,
            "kernels_s": beyond - prepare,
            "sample_s": total.sample_s,
            "plan_s": plan,
            "commit_s": commit,
            "idle_s": between - plan - commit,
        }

    @property
    def figures(self) -> Figures:
        """As they are written down."""
        total = self.total
        return {
            "efficiency": self.efficiency,
            "wall_s": self.wall_s,
            **self.spent,
            "prompt": self.prompt,
            "new": self.new,
            "completion": self.completion,
            "forwards": total.forwards,
            "drafted": total.drafted,
            "accepted": total.accepted,
            "as_recorded": self.as_recorded,
        }


class Player:
    """Plays the turns of programs to an engine, one wave after the other."""

    def __init__(self, engine: Engine, counting: CountingRunner, bounds: Bounds, programs: Sequence[Dialogue]) -> None:
        self._engine, self._counting, self._bounds = engine, counting, bounds
        self._programs = programs
        self._seen: list[TokenIds] = [np.empty(0, np.int32) for _ in programs]  # by the program's last turn

    def wave(self, turn: int) -> Turn:
        """All programs do a turn. Raises RuntimeError where one of them fails."""
        exchanges = [program[turn] for program in self._programs]
        known = [_common(seen, each.prompt) for seen, each in zip(self._seen, exchanges, strict=True)]
        before = Totals.of(self._engine, self._counting)
        began = time.perf_counter()
        for row, exchange in enumerate(exchanges):
            self._engine.handle(self._submit(row, turn, exchange), began)
        answers = drain(self._engine)
        wall = time.perf_counter() - began
        total = Totals.of(self._engine, self._counting).since(before)
        said = [answers[f"{row} {turn}"] for row in range(len(exchanges))]
        self._seen = [np.concatenate((each.prompt, answer)) for each, answer in zip(exchanges, said, strict=True)]
        new = [len(each.prompt) - cached for each, cached in zip(exchanges, known, strict=True)]
        ideal = self._bounds.read_s(int(total.positions), int(total.forwards))
        ideal += sum(self._bounds.compute_s(*each) for each in zip(new, known, strict=True))
        return Turn(
            turn,
            prompt=sum(len(each.prompt) for each in exchanges),
            new=sum(new),
            completion=sum(len(answer) for answer in said),
            as_recorded=sum(np.array_equal(e.reply, answer) for e, answer in zip(exchanges, said, strict=True)),
            wall_s=wall,
            ideal_s=ideal,
            total=total,
        )

    def _submit(self, row: int, turn: int, exchange: Exchange) -> Submit:
        return Submit(
            f"{row} {turn}",
            tokens=exchange.prompt,
            sampling=Sampling(len(exchange.reply), ignore_eos=True),
            program_id=f"{row}",
            program_turns=turn,
        )


def _common(a: TokenIds, b: TokenIds) -> int:
    """Tokens at the beginning of both; the last of `b` is computed anyway."""
    length = min(len(a), len(b) - 1)
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def play(player: Player, turns: int, deadline: Deadline) -> Iterator[Turn]:
    """Every turn, or as many as there is time for."""
    for turn in itertools.count():
        if turn == turns or (turn and deadline.over):
            return
        yield player.wave(turn)


def summary(turns: Sequence[Turn]) -> Figures:
    """All turns together: their efficiency, what each second went to, and what drafts were worth."""
    wall = sum(turn.wall_s for turn in turns)
    spent = {name: sum(turn.spent[name] for turn in turns) for name in turns[0].spent}
    drafted, forwards = (sum(getattr(turn.total, name) for turn in turns) for name in ("drafted", "forwards"))
    completion = sum(turn.completion for turn in turns)
    return {
        "efficiency": spent["ideal_s"] / wall,
        "median_of_turns": statistics.median(turn.efficiency for turn in turns),
        "turns": len(turns),
        "wall_s": wall,
        **spent,
        "completion": completion,
        "tokens_per_forward": completion / forwards,
        "accepted_share": sum(turn.total.accepted for turn in turns) / drafted if drafted else 0.0,
        "as_recorded": sum(turn.as_recorded for turn in turns),
    }


def load(stage: Stage) -> Lines:
    """Write the inflated model and load it, capture graphs, measure what verifying costs."""
    began = time.perf_counter()
    stage.folder()
    written = time.perf_counter()
    loaded = stage.loaded()
    figures = {"written_s": written - began, "load_s": time.perf_counter() - written}
    figures |= {"weight_bytes": stage.bounds.weight_bytes, "cells": loaded.config.cells}
    yield "inflated Pocket", figures | {"costs_measured": int(loaded.cost is not None)}


def turns(stage: Stage, turns: int, rows: int, deadline: Deadline, speculation: bool = True) -> Lines:
    """A workflow of `rows` programs at once: every turn, and all of them."""
    bounds = stage.bounds
    programs = stage.dialogues(turns, rows)
    warm = Player(*stage.engine(speculation), bounds, stage.dialogues(stage.sizes.warm_turns, rows, seed=1))
    for _ in play(warm, stage.sizes.warm_turns, deadline):
        pass  # compiles what has not been
    played = []
    for turn in play(Player(*stage.engine(speculation), bounds, programs), turns, deadline):
        played.append(turn)
        yield f"turn {turn.turn}", turn.figures
    yield "all", summary(played) | {"wanted_turns": turns}


def run(stage: Stage, report: Report) -> None:
    """Workflows with drafts, then the longest one without. Each process writes and loads the model itself."""
    sizes, loaded = stage.sizes, stage.loaded
    report.run("load", lambda deadline: load(stage), 150.0)
    for count, rows in itertools.product(sizes.turns, sizes.rows):
        report.run(_workflow(count, rows), partial(turns, stage, count, rows), 45.0, loaded)
    longest = max(sizes.turns)
    for rows in sizes.rows:
        part = partial(turns, stage, longest, rows, speculation=False)
        report.run(f"{_workflow(longest, rows)}, no drafts", part, 15.0, loaded)


def _workflow(turns: int, rows: int) -> str:
    """The name of a part."""
    return f"turns, {turns}, {rows} at once"
