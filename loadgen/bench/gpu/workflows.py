"""The parts that play whole workflows: by our engine, and the same by transformers, turn for turn."""

import itertools
from typing import Any

from holdfast.loadgen.bench.gpu.peers import Batching, PromptLookup, Way, load_model
from holdfast.loadgen.bench.gpu.served import Stage
from holdfast.loadgen.bench.gpu.turns import Player, play, summary
from holdfast.loadgen.bench.report import Deadline, Figures, Lines, Report


def load(stage: Stage, deadline: Deadline) -> Lines:
    """Write the conversations, wait for the files, load them, capture graphs, measure what verifying costs."""
    sizes = stage.sizes
    for turns, rows in itertools.product(sizes.turns, sizes.rows):
        stage.dialogues(turns, rows)
    stage.folder(max(deadline.left, 0.0))
    files = deadline.left
    loaded = stage.loaded()
    bounds = stage.bounds
    yield (
        "inflated Pocket",
        {
            "load_s": files - deadline.left,
            "weight_bytes": bounds.weight_bytes,
            "cells": loaded.config.cells,
            "costs_measured": int(loaded.cost is not None),
        },
    )


def turns(stage: Stage, turns: int, rows: int, deadline: Deadline, speculation: bool = True) -> Lines:
    """A workflow of `rows` programs at once: every turn, and all of them."""
    bounds = stage.bounds
    programs = stage.dialogues(turns, rows)
    warm = Player(*stage.engine(speculation), bounds, stage.dialogues(stage.sizes.warm_turns, rows, seed=1))
    for _ in play(warm, stage.sizes.warm_turns, deadline):
        pass  # compiles what has not been
    played = []
    try:
        for turn in play(Player(*stage.engine(speculation), bounds, programs), turns, deadline):
            played.append(turn)
            yield f"turn {turn.turn}", turn.figures
    finally:
        if speculation:
            stage.ours[turns, rows] = [turn.wall_s for turn in played]
    yield "all", summary(played) | {"wanted_turns": turns}


def against(stage: Stage, way: Way, turns: int, rows: int, deadline: Deadline) -> Lines:
    """The same turns by transformers, as many as there is time for; ratios over the turns that both did."""
    name = f"{turns} turns, {rows} at once"
    programs = stage.dialogues(turns, rows)
    ours = stage.ours.get((turns, rows), [])
    both_theirs, both_ours, done = 0.0, 0.0, 0
    way.ask([program.exchanges[0] for program in stage.dialogues(stage.sizes.warm_turns, rows, seed=1)])
    for turn in range(turns):
        if deadline.over:
            break
        seconds = way.ask([program.exchanges[turn] for program in programs])
        figures = {"theirs_s": seconds}
        done += 1
        if turn < len(ours):
            both_theirs, both_ours = both_theirs + seconds, both_ours + ours[turn]
            figures |= {"ours_s": ours[turn], "theirs_over_ours": seconds / ours[turn]}
        yield f"{name}, turn {turn}", figures
    total: dict[str, Any] = {"turns": done, "turns_of_both": min(done, len(ours)), "wanted_turns": turns}
    if both_ours:
        total |= {"theirs_s": both_theirs, "ours_s": both_ours, "theirs_over_ours": both_theirs / both_ours}
    yield f"{name}, all", total


def workflow(turns: int, rows: int) -> str:
    """The name of a part."""
    return f"turns, {turns}, {rows} at once"


def remember(stage: Stage, parts: dict[str, dict[str, Figures]]) -> None:
    """Take over what a process before this one has played."""
    for count, rows in itertools.product(stage.sizes.turns, stage.sizes.rows):
        lines = parts.get(workflow(count, rows), {})
        stage.ours[count, rows] = [figures["wall_s"] for line, figures in lines.items() if line != "all"]


def run_ours(stage: Stage, report: Report) -> None:
    """The parts of our engine: with drafts, then the longest one without. Each process loads the model itself."""
    longest = max(stage.sizes.turns)
    with_drafts = {workflow(*each): each for each in itertools.product(stage.sizes.turns, stage.sizes.rows)}
    without = {f"{workflow(longest, rows)}, no drafts": rows for rows in stage.sizes.rows}
    if report.wants((*with_drafts, *without)):
        report.run_anew("load", lambda deadline: load(stage, deadline), 150.0)
    for name, (count, rows) in with_drafts.items():
        report.run(name, lambda deadline, count=count, rows=rows: turns(stage, count, rows, deadline), 45.0)  # type: ignore[misc]
    for name, rows in without.items():
        report.run(name, lambda deadline, rows=rows: turns(stage, longest, rows, deadline, speculation=False), 30.0)  # type: ignore[misc]


def run_peers(stage: Stage, report: Report) -> None:
    """The parts of transformers, on the memory that our engine gives back."""
    models: list[Any] = []

    def model() -> Any:
        if not models:
            stage.release()
            models.append(load_model(str(stage.folder()), stage.sizes.device, stage.sizes.dtype))
        return models[0]

    longest_first = sorted(stage.sizes.turns, reverse=True)
    one, many = min(stage.sizes.rows), max(stage.sizes.rows)
    single = [(turns, one) for turns in longest_first]
    every = [(turns, rows) for turns in longest_first for rows in (many, one)]
    seconds = stage.sizes.peer_seconds
    report.run(
        "generate, prompt lookup",
        lambda deadline: _each(stage, PromptLookup(model(), stage.sizes), single, deadline),
        seconds,
    )
    report.run(
        "continuous batching", lambda deadline: _each(stage, Batching(model(), stage.sizes), every, deadline), seconds
    )


def _each(stage: Stage, way: Way, workflows: list[tuple[int, int]], deadline: Deadline) -> Lines:
    """Every (turns, programs); what time one leaves is the others'."""
    with way:
        for done, (turns, rows) in enumerate(workflows):
            yield from against(stage, way, turns, rows, Deadline(deadline.left / (len(workflows) - done)))
