"""Shared parts of the benchmarks: a command with its table, timing by turns, rows that are printed and written.

`python -m holdfast.loadgen.bench NAME` runs an entry of the table in `__main__`. A benchmark yields rows; a row with a
`bar` fails the command if its `value` is above the bar.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from holdfast.replicas.errors import ConfigError

Clock: TypeAlias = Callable[[], float]
Row: TypeAlias = dict[str, Any]
FIGURES = {"name": "<58", "value": ">10.3f", "unit": "<8", "bar": ">6g"}
"""The columns of rows that `figure` makes."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One command: `measure` yields its rows from the parsed options.

    `columns`: the format of each printed field, or a function of the options that returns them. `flags`: options of
    `add_argument` by flag.
    """

    about: str
    measure: Callable[[argparse.Namespace], Iterable[Row]]
    columns: Mapping[str, str] | Callable[[argparse.Namespace], Mapping[str, str]]
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def main(self, name: str, argv: Sequence[str]) -> int:
        """Parse, measure, print and write; exit status 1 if a bar is missed."""
        command = argparse.ArgumentParser(prog=f"bench {name}", description=self.about)
        for flag, settings in self.flags.items():
            command.add_argument(flag, **settings)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
        options = command.parse_args(argv)
        columns = self.columns(options) if callable(self.columns) else self.columns
        rows = report(self.measure(options), columns, options.json)
        return int(any(row.get("bar") is not None and row["value"] > row["bar"] for row in rows))


def figure(name: str, value: float, unit: str, bar: float | None = None) -> Row:
    """One cost; `bar` is the most that it may be, None if there is no bar."""
    return {"name": name, "value": value, "unit": unit, "bar": bar}


def seconds(call: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """The time of one call."""
    start = clock()
    call()
    return clock() - start


def by_turns(ways: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Median seconds of each way over `repeat` calls. The ways take turns; the first turn warms up."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat + 1):
        for name, call in ways.items():
            samples[name].append(seconds(call))
    return {name: statistics.median(times[1:]) for name, times in samples.items()}


def report(rows: Iterable[Row], columns: Mapping[str, str], file: Path | None) -> list[Row]:
    """Print the rows as they come, and write them to `file` as JSON. A missing or None value is printed as `-`.

    Raises ConfigError before the first row if the file cannot be written.
    """
    if file:
        try:
            file.touch()
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}", "json") from error
    widths = {name: int(re.findall(r"\d+", spec)[0]) for name, spec in columns.items()}
    print(" ".join(f"{name:{'<' if spec[0] == '<' else '>'}{widths[name]}}" for name, spec in columns.items()))
    rows_kept = []
    for row in rows:
        rows_kept.append(row)
        cells = (
            f"{'-':>{widths[name]}}" if row.get(name) is None else format(row[name], spec)
            for name, spec in columns.items()
        )
        print(" ".join(cells), flush=True)
    if file:
        file.write_text(json.dumps(rows_kept, indent=1) + "\n")
    return rows_kept


def save_random_llama(folder: Path, dtype: torch.dtype, **sizes: Any) -> LlamaConfig:
    """Write a Llama with random weights of these sizes; the weights are always the same."""
    config = LlamaConfig(**sizes)
    disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return config
