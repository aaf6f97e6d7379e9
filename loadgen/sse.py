"""A stream of server-sent events, put together from pieces of any size, and the answer that its chunks add up to.

Also the times of a request's stages, which a server tells in a `Server-Timing` header or in its last chunk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from holdfast.loadgen.conversation import Said, WrittenCall

DONE = "[DONE]"
_CUT = frozenset(("length", "content_filter"))
"""Finish reasons of a reply whose last call may be incomplete."""
_STAGES = ("queue", "prefill", "decode")
_FIELDS = frozenset(("data", "event", "id", "retry", ""))


class MalformedError(ValueError):
    """The answer is not a stream of OpenAI chunks."""


class ReportedError(RuntimeError):
    """The server said in its stream that the request failed."""


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """Seconds of each stage of a request, by the server; None: unknown."""

    queue: float | None = None  # from the engine's receipt to the first scheduling
    prefill: float | None = None  # from there to the first token
    decode: float | None = None  # from there to the last


def from_header(value: str) -> ServerTiming:
    """From `queue;dur=1.5, prefill;dur=20` (W3C Server Timing; milliseconds). Other metrics are passed over."""
    values: dict[str, str] = {}
    for entry in value.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, number = parameter.partition("=")
            if key.strip().lower() == "dur":
                values.setdefault(name, number.strip().strip('"'))
    return ServerTiming(*(_seconds(values.get(name)) for name in _STAGES))


def from_object(value: object) -> ServerTiming:
    """From a chunk's `timing`: `{"queue_ms": 1.5, "prefill_ms": 20, "decode_ms": 300}`."""
    known: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    return ServerTiming(*(_seconds(known.get(f"{name}_ms")) for name in _STAGES))


def _seconds(milliseconds: object) -> float | None:
    if not isinstance(milliseconds, str | int | float) or isinstance(milliseconds, bool):
        return None
    try:
        seconds = float(milliseconds) / 1e3
    except (ValueError, OverflowError):
        return None
    return round(seconds, 6) if math.isfinite(seconds) and seconds >= 0 else None


@dataclass(slots=True)
class EventLines:
    """Bytes in, the data of whole events out."""

    _rest: bytes = b""
    _data: list[str] = field(default_factory=list)

    def feed(self, piece: bytes) -> list[str]:
        """The data of every event that ``piece`` completes. Raises MalformedError."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line:
                self._take(line)
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _take(self, line: bytes) -> None:
        try:
            name, _, value = line.decode().partition(":")
        except UnicodeDecodeError as error:
            raise MalformedError(f"not UTF-8: {line[:80]!r}") from error
        if name not in _FIELDS:
            raise MalformedError(f"not a field of an event: {line[:80]!r}")
        if name == "data":
            self._data.append(value.removeprefix(" "))


@dataclass(slots=True)
class Gathered:
    """The answer so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # index: id, name, then pieces of the arguments
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    output_tokens: int = 0
    done: bool = False
    timing: ServerTiming = field(default_factory=ServerTiming)
    drafted: int = 0  # draft tokens
    accepted: int = 0  # accepted draft tokens
    closed: list[int] = field(default_factory=list)  # complete calls, in the order in which they closed
    marked: bool = False  # the server marks closed calls itself: it is Holdfast

    def take(self, data: str) -> bool:
        """Add one event's data; whether it held a piece of the answer. Raises MalformedError, ReportedError."""
        if data == DONE:
            self.done = True
            return False
        try:
            chunk = orjson.loads(data)
            if chunk.get("error"):
                raise ReportedError(json.dumps(chunk["error"])[:300])
            self._usage(chunk.get("usage"))
            if chunk.get("timing"):
                self.timing = from_object(chunk["timing"])
                self.drafted = int(chunk["timing"].get("drafted") or 0)
                self.accepted = int(chunk["timing"].get("accepted") or 0)
            pieces = [self._choice(choice) for choice in chunk.get("choices") or ()]
            if (mark := (chunk.get("holdfast") or {}).get("tool_call_closed")) is not None:
                self._close(int(mark))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise MalformedError(f"not a chunk: {data[:80]!r}") from error
        return any(pieces)

    @property
    def said(self) -> Said:
        """The answer so far."""
        return Said("".join(self.text), tuple(self.call(index) for index in sorted(self.calls)))

    def call(self, index: int) -> WrittenCall:
        """One call so far."""
        call_id, name, *arguments = self.calls[index]
        return WrittenCall(call_id, name, "".join(arguments))

    def _choice(self, choice: dict[str, Any]) -> bool:
        delta = choice.get("delta") or {}
        self.reason = choice.get("finish_reason") or self.reason
        if delta.get("content"):
            self.text.append(str(delta["content"]))
        if delta.get("reasoning_content"):
            self.reasoning.append(str(delta["reasoning_content"]))
        for call in delta.get("tool_calls") or ():
            index = int(call.get("index", 0))
            if index not in self.calls and not self.marked:
                self._close_before(index)
            known = self.calls.setdefault(index, ["", ""])
            function = call.get("function") or {}
            known[0] = known[0] or str(call.get("id") or "")
            known[1] = known[1] or str(function.get("name") or "")
            known.append(str(function.get("arguments") or ""))
        if self.reason and self.reason not in _CUT and not self.marked:
            for index in self.calls:
                self._close(index)
        return bool(delta.get("content") or delta.get("tool_calls"))

    def _close(self, index: int) -> None:
        if index in self.calls and index not in self.closed:
            self.closed.append(index)

    def _close_before(self, index: int) -> None:
        """For a server without marks: a call is complete when the next one begins, if its arguments are JSON."""
        for earlier in self.calls:
            if earlier < index and self.call(earlier).parsed is not None:
                self._close(earlier)

    def _usage(self, usage: dict[str, Any] | None) -> None:
        if usage:
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.output_tokens = int(usage.get("completion_tokens") or 0)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self.cached_tokens = self.cached_tokens if cached is None else int(cached)
