"""Rows of one program put together: how long the whole job took, and where its time went. Pure.

A program's clock runs in its waves only: between them the generator is busy with other programs or other servers. So a
job's time is its waves' lengths together, as a workload's wall time is, and a tool runs from the end of an answer with
calls to the next request of the same wave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdfast.loadgen.rows import Row

ProgramKey = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Program:
    """One program on one server, every turn of it answered. Times are seconds."""

    server: str
    workload: str
    repetition: int
    name: str
    turns: int
    seconds: float  # job completion time
    last_first_token: float | None  # of the last answer, since the job began
    tool: float
    bubble: float | None  # waiting to be scheduled, all turns together; None: the server does not tell of every turn

    @property
    def key(self) -> ProgramKey:
        """The same on every server."""
        return self.workload, self.repetition, self.name


def by_program(rows: Iterable[Row]) -> dict[tuple[str, ProgramKey], list[Row]]:
    """Rows of each server and program in the order of their turns, failed ones included."""
    found: defaultdict[tuple[str, ProgramKey], list[Row]] = defaultdict(list)
    for row in rows:
        found[row.server, (row.workload, row.repetition, row.program)].append(row)
    return {key: sorted(turns, key=lambda row: row.turn) for key, turns in found.items()}


def group(rows: Iterable[Row]) -> list[Program]:
    """The programs in ``rows`` of which every turn was answered; of rows that do not tell how many, every one there."""
    return [_program(turns) for turns in by_program(rows).values() if _whole(turns)]


def tool_gap(before: Row, after: Row) -> float:
    """Seconds that tools ran between two turns that follow each other; 0 where none was called."""
    if not before.calls or before.wave != after.wave:
        return 0.0
    return max(0.0, after.began - before.ended)


def _whole(turns: Sequence[Row]) -> bool:
    return all(row.ok and row.turns in (0, len(turns)) for row in turns)


def _program(turns: Sequence[Row]) -> Program:
    first, last = turns[0], turns[-1]
    ends: dict[int, tuple[float, float]] = {}
    for row in turns:
        began, ended = ends.get(row.wave, (row.began, row.ended))
        ends[row.wave] = min(began, row.began), max(ended, row.ended)
    seconds = sum(ended - began for began, ended in ends.values())
    waits = [row.queue for row in turns if row.queue is not None]
    rest = None if last.first_token is None else ends[last.wave][1] - last.first_token
    return Program(
        server=first.server,
        workload=first.workload,
        repetition=first.repetition,
        name=first.program,
        turns=len(turns),
        seconds=seconds,
        last_first_token=None if rest is None else seconds - rest,
        tool=sum(tool_gap(a, b) for a, b in pairwise(turns)),
        bubble=sum(waits) if len(waits) == len(turns) else None,
    )
