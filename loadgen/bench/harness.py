"""What the benchmarks share: timing by turns, a printed table, the JSON file, and figures with bars."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

Clock: TypeAlias = Callable[[], float]
Row: TypeAlias = dict[str, Any]


def seconds(call: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """What one call takes."""
    began = clock()
    call()
    return clock() - began


def by_turns(
    ways: Mapping[str, Callable[[], object]],
    repeat: int,
    clock: Clock = time.perf_counter,
    pick: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, float]:
    """Seconds of each way, `pick`ed from `repeat` calls. The ways take turns; the first turn warms up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat + 1):
        for name, call in ways.items():
            taken[name].append(seconds(call, clock))
    return {name: pick(each[1:]) for name, each in taken.items()}


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """A benchmark's command line, with `--json`."""
    made = argparse.ArgumentParser(prog=f"bench {name}", description=about)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    return made


def report(rows: Iterable[Row], columns: Mapping[str, str], file: Path | None) -> list[Row]:
    """Print the rows as they come, and write them to `file`. `columns`: the format of each printed field.

    A missing or None value is printed as `-`.
    """
    widths = {name: int(re.findall(r"\d+", spec)[0]) for name, spec in columns.items()}
    print(" ".join(f"{name:{'<' if spec[0] == '<' else '>'}{widths[name]}}" for name, spec in columns.items()))
    found = []
    for row in rows:
        found.append(row)
        cells = (
            f"{'-':>{widths[name]}}" if row.get(name) is None else format(row[name], spec)
            for name, spec in columns.items()
        )
        print(" ".join(cells), flush=True)
    write(file, found)
    return found


def write(file: Path | None, content: object) -> None:
    """Write JSON, if a file was asked for."""
    if file:
        file.write_text(json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Figure:
    """One cost. `bar`: the most that it may be; None if there is no bar."""

    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def missed(self) -> bool:
        return self.bar is not None and self.value > self.bar


def report_figures(figures: Iterator[Figure], file: Path | None) -> int:
    """Print the figures as they come, and write them to `file`. The exit status: 1 if a bar is missed."""
    found = []
    for figure in figures:
        found.append(figure)
        bar = "" if figure.bar is None else f"   bar {figure.bar:g} {'MISSED' if figure.missed else 'met'}"
        print(f"{figure.name:<58} {figure.value:>10.3f} {figure.unit}{bar}", flush=True)
    write(file, [asdict(figure) for figure in found])
    return int(any(figure.missed for figure in found))


def save_random_llama(folder: Path, dtype: torch.dtype, **sizes: Any) -> LlamaConfig:
    """Write a Llama with random weights of these sizes; always the same weights."""
    config = LlamaConfig(**sizes)
    disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return config
