"""Plays the runs of a scenario, prints its tables, writes files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from holdfast.loadgen.measure import mean, ratio
from holdfast.loadgen.progress import bar, uncollected
from holdfast.loadgen.report.page import check_plotting
from holdfast.loadgen.simulator.machines import profile
from holdfast.loadgen.simulator.scenarios import SCENARIOS, Column, Row, Scenario, summary
from holdfast.loadgen.table import cell, check_writable, print_table, share


def main(options: argparse.Namespace) -> int:
    """Play, print, write; the exit status. Raises ConfigError."""
    scenario = SCENARIOS[options.scenario]
    pictures: Path | None = vars(options).get("pictures")
    if options.json is not None:
        check_writable(options.json, "json")
    if pictures is not None:
        check_plotting()
        pictures.mkdir(parents=True, exist_ok=True)
    rows = play(scenario, options)
    for title, columns in scenario.tables.items():
        _print(title, columns, rows)
    for line in scenario.notes(rows):
        print(line)
    if options.json is not None:
        options.json.write_text(as_json(options, rows), encoding="utf-8")
    if pictures is not None:
        from holdfast.loadgen.simulator.pictures import write

        write(rows, options.profile, pictures)
    return 0


def play(scenario: Scenario, options: argparse.Namespace) -> list[Row]:
    """The rows of all runs that the options ask for. Raises ConfigError before the first run where it can."""
    runs = scenario.runs(options)
    rows = []
    with bar("runs", len(runs)) as progress:
        for run in runs:
            progress.describe(f"{run.case}, {run.way}, seed {run.seed}")
            with uncollected():
                results = run.play()
            rows += [Row(case, run.way, run.seed, run.load, figures) for case, figures in results.items()]
            progress.advance()
    return rows


def as_json(options: argparse.Namespace, rows: Sequence[Row]) -> str:
    """The file of a simulation: equal for equal options, times of this machine (`took_s`) aside."""
    values = {name: value for name, value in vars(options).items() if name not in ("run", "json", "pictures")}
    content = {"options": values, "machine": asdict(profile(options.profile, options.cells))}
    return json.dumps(content | {"rows": [asdict(row) for row in rows]}, indent=1, default=str) + "\n"


def _print(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> None:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.way), []).append(row)
    visible = [column for column in columns if any(column.figure in row.figures for row in rows)]
    cases = list(dict.fromkeys(case for case, _ in groups))
    for case in [None] if len(cases) > 4 else cases:  # a table for each case, or one where there are many
        lines = [
            [*([of] if case is None else []), way, *(_cell(column, groups, of, way) for column in visible)]
            for of, way in groups
            if case in (None, of)
        ]
        heads = [*(["case"] if case is None else []), "way", *(column.head for column in visible)]
        print_table(": ".join(filter(None, (case, title))), heads, lines, left=1 + (case is None))


def _cell(column: Column, groups: dict[tuple[str, str], list[Row]], case: str, way: str) -> str:
    baseline = next(rows for (of, _), rows in groups.items() if of == case)
    mine = {row.seed: row.figures[column.figure] for row in groups[case, way] if column.figure in row.figures}
    base = {row.seed: row.figures[column.figure] for row in baseline if column.figure in row.figures}
    if not mine:
        return ""
    if column.kind in ("", "%"):
        value = summary(list(mine.values()))
        return cell(value) if column.kind == "" else share(value.value)
    seeds = [seed for seed in mine if seed in base]
    over, under = [mine[seed] for seed in seeds], [base[seed] for seed in seeds]
    if column.kind == "under":
        over, under = under, over
    estimate = ratio(over, under, mean, 0)
    if column.kind == "gained" and estimate is not None:
        low, high = estimate.ends
        return f"{1 - estimate.value:.1%}" + (f"\n{1 - high:.1%}–{1 - low:.1%}" if low < high else "")
    return cell(estimate, unit="x")
