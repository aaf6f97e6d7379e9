"""What the plots show, as numbers: from rows, without any drawing. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.loadgen.rows import Row
from holdfast.loadgen.timeline import Phase, Track, tracks, wave_shifts

Value = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class ByTurn:
    """A measure of one server's requests at each turn: its 10th, 50th and 90th percentile."""

    turns: list[int]  # from 1
    low: list[float]
    middle: list[float]
    high: list[float]


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase of a program, in seconds since its server's repetition began."""

    phase: Phase
    begin: float
    length: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One program's bars."""

    program: str
    bars: tuple[Bar, ...]


def by_turn(rows: Iterable[Row], value: Value) -> ByTurn:
    """``value`` of the requests that succeeded, gathered by their turn."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        told = value(row)
        if row.ok and told is not None:
            found[row.turn + 1].append(told)
    turns = sorted(found)
    low, middle, high = ([float(np.percentile(found[turn], percent)) for turn in turns] for percent in (10, 50, 90))
    return ByTurn(turns, low, middle, high)


def cumulative(rows: Iterable[Row], value: Value) -> tuple[list[float], list[float]]:
    """The empirical distribution of ``value``: sorted values, and the share of requests at or below each."""
    values = sorted(told for row in rows if row.ok and (told := value(row)) is not None)
    return values, [(number + 1) / len(values) for number in range(len(values))]


def loads(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Of each sweep, by its workload's name: the load at which each of its workloads was sent, in rising order."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.load is not None:
            found[row.swept][row.workload] = row.load.value
    return {name: dict(sorted(told.items(), key=lambda item: item[1])) for name, told in found.items()}


def lanes(rows: Sequence[Row], most: int) -> list[Lane]:
    """Bars of the first ``most`` programs of one server's repetition, whose waves are put one after another."""
    shifts = wave_shifts(rows)
    found = sorted(tracks(rows), key=lambda track: track.rows[0].began)
    return [_lane(track, shifts) for track in found[:most]]


def _lane(track: Track, shifts: dict[int, float]) -> Lane:
    bars = (Bar(span.phase, span.begin - shifts[span.row.wave], span.end - span.begin) for span in track.spans)
    return Lane(track.program, tuple(bars))
