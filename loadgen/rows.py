"""One row per request with all inputs of the figures, rows as JSON, and the rows of one program grouped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from holdfast.loadgen.workloads.script import Load
from holdfast.replicas.errors import ConfigError

Key = tuple[str, int, str, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One request to one server. Times are seconds since the run began."""

    server: str
    workload: str
    repetition: int
    wave: int
    program: str
    turn: int  # from 0
    started: float
    first_byte: float | None
    first_token: float | None
    ended: float
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not say
    output_tokens: int
    reason: str
    calls: int
    fits: bool  # every call names a declared tool, with an object that has the required arguments
    as_scripted: bool
    prompt: str  # digest of messages and tools without the ids of calls
    answer: dict[str, Any]  # text and calls without their ids
    failure: str = ""
    detail: str = ""
    cache: str = ""  # the response cache, as the server reports it
    due: float | None = None  # by the schedule; None: sent as soon as the previous answer ended
    queue: float | None = None  # seconds, by the server: from the engine's receipt to the first scheduling
    prefill: float | None = None  # from there to the first token
    decode: float | None = None  # from there to the last
    swept: str = ""  # in a sweep of loads: the workload without its load
    load: Load | None = None
    turns: int = 0  # planned for its program; 0: unknown

    @property
    def key(self) -> Key:
        """The same for the rows of every server that answer the same request."""
        return self.workload, self.repetition, self.program, self.turn

    @property
    def ok(self) -> bool:
        return not self.failure

    @property
    def began(self) -> float:
        """When the request was due, or else sent. A late start that a slow server causes counts as latency."""
        return self.started if self.due is None else self.due

    @property
    def latency(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.began

    @property
    def ttft(self) -> float | None:
        """Seconds to the first piece of text or of a call; None where none came."""
        return None if self.first_token is None else self.first_token - self.began

    @property
    def per_token(self) -> float | None:
        """Seconds of latency for each output token; None without tokens."""
        return self.latency / self.output_tokens if self.output_tokens else None


def to_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as JSON objects."""
    return [asdict(row) for row in rows]


def from_json(objects: list[dict[str, Any]]) -> list[Row]:
    """Rows from the objects of `to_json`. Raises ConfigError."""
    names = {field.name for field in fields(Row)}
    try:
        return [_row({name: value for name, value in entry.items() if name in names}) for entry in objects]
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"not rows of a comparison: {error}", "rows") from error


def _row(entry: dict[str, Any]) -> Row:
    load = entry.get("load")
    return Row(**{**entry, "load": None if load is None else Load(**load)})


# ---- programs ----

JobKey = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Job:
    """One program on one server, every turn of it answered. Times are seconds.

    A job's clock runs in its waves only: between them the generator is busy with other programs or servers. A tool runs
    from the end of an answer with calls to the next request of the same wave.

    The time to the first token of the last answer has four parts: tools, bubbles (a request is there and the engine
    does not work on it: queues, HTTP), prefills and the decoding of earlier answers. None: unknown for some turn.
    """

    server: str
    workload: str
    repetition: int
    name: str
    turns: int
    seconds: float  # job completion time
    last_first_token: float | None  # of the last answer, since the job began
    tool: float
    bubble: float | None
    prefill: float | None = None
    decode: float | None = None

    @property
    def key(self) -> JobKey:
        """The same on every server."""
        return self.workload, self.repetition, self.name


def by_program(rows: Iterable[Row]) -> dict[tuple[str, JobKey], list[Row]]:
    """Rows of each server and program in the order of their turns, failed ones included."""
    result: defaultdict[tuple[str, JobKey], list[Row]] = defaultdict(list)
    for row in rows:
        result[row.server, (row.workload, row.repetition, row.program)].append(row)
    return {key: sorted(turns, key=lambda row: row.turn) for key, turns in result.items()}


def group(rows: Iterable[Row]) -> list[Job]:
    """The programs whose turns were all answered. Without a planned number of turns, all turns in the rows count."""
    return [_job(turns) for turns in by_program(rows).values() if _complete(turns)]


def tool_times(rows: Iterable[Row]) -> dict[str, list[float]]:
    """Seconds that tools took, by the set that an answer called, in the order in which they ended."""
    ended = []
    for turns in by_program(rows).values():
        for previous, following in pairwise(turns):
            names = {name for name, _ in previous.answer.get("calls", ())}
            if names and (gap := tool_gap(previous, following)):
                ended.append((following.began, ",".join(sorted(names)), gap))
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _, tools, gap in sorted(ended):
        times[tools].append(gap)
    return dict(times)


def tool_gap(previous: Row, following: Row) -> float:
    """Seconds that tools ran between two turns that follow each other; 0 where none was called."""
    if not previous.calls or previous.wave != following.wave:
        return 0.0
    return max(0.0, following.began - previous.ended)


def _complete(turns: Sequence[Row]) -> bool:
    return all(row.ok and row.turns in (0, len(turns)) for row in turns)


def _job(turns: Sequence[Row]) -> Job:
    first_row, last_row = turns[0], turns[-1]
    waves: dict[int, tuple[float, float]] = {}
    for row in turns:
        began, ended = waves.get(row.wave, (row.began, row.ended))
        waves[row.wave] = min(began, row.began), max(ended, row.ended)
    seconds = sum(ended - began for began, ended in waves.values())
    bubble, prefill, decode = _parts(turns)
    tail_s = None if last_row.first_token is None else waves[last_row.wave][1] - last_row.first_token
    return Job(
        server=first_row.server,
        workload=first_row.workload,
        repetition=first_row.repetition,
        name=first_row.program,
        turns=len(turns),
        seconds=seconds,
        last_first_token=None if tail_s is None else seconds - tail_s,
        tool=sum(tool_gap(a, b) for a, b in pairwise(turns)),
        bubble=bubble,
        prefill=prefill,
        decode=decode,
    )


def _parts(turns: Sequence[Row]) -> tuple[float | None, float | None, float | None]:
    """Bubble, prefill and decoding until the first token of the last answer, from the server's report of its stages."""
    bubble = prefill = decode = 0.0
    for row in turns:
        seconds, drawing = (row.ttft, 0.0) if row is turns[-1] else (row.latency, row.decode)
        if seconds is None or row.prefill is None or drawing is None:
            return None, None, None
        bubble += max(0.0, seconds - row.prefill - drawing)
        prefill += row.prefill
        decode += drawing
    return bubble, prefill, decode
