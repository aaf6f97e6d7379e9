"""When each program queued, prefilled, decoded and ran its tools: rows to spans, and to a trace for Perfetto. Pure.

The server reports the lengths of the stages, which end with the answer; the time before them is spent outside the
engine (HTTP, tokenising, a router's queue). Of a server without such reports only the time to the first token and the
rest are known, as the client saw them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast.loadgen.rows import Row, by_program, tool_gap


class Phase(StrEnum):
    """A phase of a program."""

    OUTSIDE = "outside the engine"
    QUEUE = "queue"
    PREFILL = "prefill"
    WAIT = "until first token"  # queue and prefill together, of a server that does not separate them
    DECODE = "decode"
    TOOL = "tool"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of one turn, in seconds since the run began. A tool belongs to the turn that called it."""

    phase: Phase
    begin: float
    end: float
    row: Row


@dataclass(frozen=True, slots=True)
class Track:
    """One program on one server."""

    rows: tuple[Row, ...]
    spans: tuple[Span, ...]


def tracks(rows: Iterable[Row]) -> list[Track]:
    """A track for each program on each server, in the order in which the rows name them."""
    tracks_ = []
    for turns in by_program(rows).values():
        spans: list[Span] = []
        for number, row in enumerate(turns):
            spans += _turn(row)
            gap = tool_gap(row, turns[number + 1]) if number + 1 < len(turns) else 0.0
            if gap > 0:
                spans.append(Span(Phase.TOOL, row.ended, row.ended + gap, row))
        tracks_.append(Track(tuple(turns), tuple(spans)))
    return tracks_


def wave_shifts(rows: Iterable[Row]) -> dict[int, float]:
    """Seconds to take from the times of each wave so that the waves of one server's repetition follow each other.

    What lies between them is the generator's: the other servers' turns.
    """
    waves: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        waves[row.wave].append(row)
    shifts, now = {}, 0.0
    for wave, members in sorted(waves.items()):
        began, ended = min(row.began for row in members), max(row.ended for row in members)
        shifts[wave] = began - now
        now += ended - began
    return shifts


def trace(rows: Sequence[Row]) -> dict[str, Any]:
    """Chrome trace events, which Perfetto reads: a process for each server, in it a track for each program.

    A turn is a slice, its phases lie within it, tools between turns. Times are microseconds since the run began.
    """
    servers = list(dict.fromkeys(row.server for row in rows))
    events = [_name("process_name", process, 0, server) for process, server in enumerate(servers, 1)]
    for thread, track in enumerate(tracks(rows), 1):
        first_row = track.rows[0]
        process = servers.index(first_row.server) + 1
        name = f"{first_row.workload} {first_row.repetition} {first_row.program}"
        events.append(_name("thread_name", process, thread, name))
        slices = [(f"turn {row.turn}", row.began, row.ended, row) for row in track.rows]
        slices += [(span.phase, span.begin, span.end, span.row) for span in track.spans]
        for name, begin, end, row in slices:
            start, stop = round(begin * 1e6), round(end * 1e6)
            arguments = {field: getattr(row, field) for field in _SHOWN}
            event = {"ph": "X", "name": name, "ts": start, "dur": stop - start, "pid": process, "tid": thread}
            events.append(event | {"args": arguments})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_SHOWN = ("workload", "repetition", "turn", "prompt_tokens", "cached_tokens", "output_tokens", "failure")


def _turn(row: Row) -> list[Span]:
    if not row.ok:
        return [Span(Phase.FAILED, row.began, row.ended, row)]
    if row.queue is None or row.prefill is None or row.decode is None:
        first_token = row.ended if row.first_token is None else row.first_token
        phase_ends = [(Phase.WAIT, first_token), (Phase.DECODE, row.ended)]
    else:
        decode = row.ended - row.decode
        prefill = decode - row.prefill
        phase_ends = [(Phase.OUTSIDE, prefill - row.queue), (Phase.QUEUE, prefill)]
        phase_ends += [(Phase.PREFILL, decode), (Phase.DECODE, row.ended)]
    spans, begin = [], row.began
    for phase, end in phase_ends:
        end = max(begin, end)  # two clocks measured this, so a stage might begin before the request
        if end > begin:
            spans.append(Span(phase, begin, end, row))
        begin = end
    return spans


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
