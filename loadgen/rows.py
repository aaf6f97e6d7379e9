"""One row per request: everything a figure is made of, and its form in JSON. No statistics here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
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
    cache: str = ""  # what the server says of its response cache
    due: float | None = None  # when a schedule wanted it sent; None: when the answer before had come
    queue: float | None = None  # seconds, as the server tells: from when its engine was sent it to first scheduled
    prefill: float | None = None  # from there to the first token
    decode: float | None = None  # from there to the last
    swept: str = ""  # in a sweep of loads: the workload without its load
    load: Load | None = None
    turns: int = 0  # that its program was to have; 0: not told

    @property
    def key(self) -> Key:
        """The same for the rows of every server that answer to the same request."""
        return self.workload, self.repetition, self.program, self.turn

    @property
    def ok(self) -> bool:
        return not self.failure

    @property
    def began(self) -> float:
        """When the request was due, or else sent: what a slow server delays in sending counts as its own."""
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
    """Rows from what `to_json` made. Raises ConfigError."""
    names = {field.name for field in fields(Row)}
    try:
        return [_row({name: value for name, value in entry.items() if name in names}) for entry in objects]
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"not rows of a comparison: {error}", "rows") from error


def _row(entry: dict[str, Any]) -> Row:
    load = entry.get("load")
    return Row(**{**entry, "load": None if load is None else Load(**load)})
