"""Turns pieces of a reply into events of a stream, and has the parts that OpenAI's two completion APIs share."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, ClassVar

import orjson

from holdfast.replicas.errors import ErrorInfo
from holdfast.replicas.requests import (
    Answer,
    Completed,
    Errored,
    LogprobText,
    Piece,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from holdfast.router.protocol.errors import api_error
from holdfast.router.tracing import stages

DONE = b"data: [DONE]\n\n"
COMMENT = b": still working\n\n"  # readers of server-sent events skip it
LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have


class Encoder:
    """Turns the pieces of one reply into events, in order. A dialect writes the kinds of pieces that it has."""

    def opening(self) -> bytes:
        """The events before the first piece."""
        return b""

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join([self.piece(piece) for piece in pieces])

    def silence(self) -> bytes:
        """The bytes sent between two events to show that the reply is still in progress."""
        return COMMENT

    def piece(self, piece: Piece) -> bytes:
        """The events of one piece."""
        if isinstance(piece, TextDelta):
            return self.text(piece)
        if isinstance(piece, ToolCallDelta):
            return self.call(piece)
        if isinstance(piece, ReasoningDelta):
            return self.reasoning(piece)
        if isinstance(piece, Completed):
            return self.completed(piece)
        return self.failed(piece.error) if isinstance(piece, Errored) else b""

    def text(self, piece: TextDelta) -> bytes:
        raise NotImplementedError

    def reasoning(self, piece: ReasoningDelta) -> bytes:
        return b""

    def call(self, piece: ToolCallDelta) -> bytes:
        return b""

    def completed(self, piece: Completed) -> bytes:
        raise NotImplementedError

    def failed(self, error: ErrorInfo) -> bytes:
        """The event that ends a reply with an error."""
        raise NotImplementedError


@dataclass(slots=True)
class OpenItem:
    """The item that is being written: as it was announced, and the deltas since then."""

    kind: str
    item: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    logprobs: list[LogprobText] = field(default_factory=list)


class ItemEncoder(Encoder):
    """Writes a reply as items, one after the other: text, reasoning or a call. A piece of another kind ends an item."""

    def __init__(self) -> None:
        self._open: OpenItem | None = None

    def text(self, piece: TextDelta) -> bytes:
        if not piece.text and not piece.logprobs:
            return b""
        return self._within("text") + self._delta(piece.text, piece.logprobs)

    def reasoning(self, piece: ReasoningDelta) -> bytes:
        return self._within("reasoning") + self._delta(piece.text) if piece.text else b""

    def call(self, piece: ToolCallDelta) -> bytes:
        events = b"" if piece.name is None else self._close() + self._begin_call(piece)
        if piece.arguments:
            events += self._arguments(piece.arguments)
        return events + self._close(closed=True) if piece.closed else events

    def _within(self, kind: str) -> bytes:
        """Open an item of this kind unless one is open."""
        if self._open is not None and self._open.kind == kind:
            return b""
        return self._close() + self._begin(kind)

    def _arguments(self, arguments: str) -> bytes:
        return self._delta(arguments)

    def _begin(self, kind: str) -> bytes:
        raise NotImplementedError

    def _begin_call(self, piece: ToolCallDelta) -> bytes:
        raise NotImplementedError

    def _delta(self, text: str, logprobs: Sequence[LogprobText] = ()) -> bytes:
        raise NotImplementedError

    def _close(self, *, closed: bool = False) -> bytes:
        """The end of the open item, if there is one. A call that has not `closed` is incomplete: it must not be run."""
        raise NotImplementedError


class ChunkEncoder(Encoder):
    """Base of the encoders of chat completions and completions: everything but the choice inside a chunk."""

    KIND = ""  # the chunk's `object`
    LAST: ClassVar[Mapping[str, Any]] = {}  # the members of the last choice

    def __init__(self, reply_id: str, created: int, model: str, include_usage: bool = False, index: int = 0) -> None:
        self._head = {"id": reply_id, "object": self.KIND, "created": created, "model": model}
        self._include_usage = include_usage
        self._index = index

    def completed(self, piece: Completed) -> bytes:
        """The last chunk of the choice. The first choice ends last: usage, if asked for, and the end mark follow it."""
        last = self.chunk(None, piece.reason, **self.LAST)
        if self._index:
            return last
        if not self._include_usage:
            return last + DONE
        end = {**self._head, "choices": [], "usage": usage_object(piece.usage)}
        if times := stages(piece.timing):
            work = piece.usage.work
            drafts = {"drafted": work.drafted, "accepted": work.accepted} if work.drafted else {}
            end["timing"] = {**{f"{name}_ms": milliseconds for name, milliseconds in times.items()}, **drafts}
        return last + b"data: " + orjson.dumps(end) + b"\n\n" + DONE

    def failed(self, error: ErrorInfo) -> bytes:
        return b"data: " + api_error(error).body + b"\n\n"

    def chunk(self, logprobs: Any, reason: str | None, more: Mapping[str, Any] | None = None, **choice: Any) -> bytes:
        """A chunk with this choice; `more` are members beside the choices."""
        whole = {"index": self._index, **choice, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._include_usage else {}
        return b"data: " + orjson.dumps({**self._head, "choices": [whole], **usage, **(more or {})}) + b"\n\n"


def whole_reply(
    kind: str, reply_id: str, created: int, model: str, choices: Sequence[dict[str, Any]], usage: Usage
) -> bytes:
    """A completion object in JSON. `created` is in seconds since the epoch."""
    head = {"id": reply_id, "object": kind, "created": created, "model": model}
    return orjson.dumps({**head, "choices": choices, "usage": usage_object(usage)})


def closed_choice(index: int, answer: Answer, logprobs: Any, **content: Any) -> dict[str, Any]:
    """One choice of a whole reply."""
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": answer.reason}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts. `cached_tokens` is always there, `reasoning_tokens` only if the model reasoned."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    if usage.reasoning:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return counts


def chat_logprobs(tokens: Sequence[LogprobText]) -> dict[str, Any] | None:
    """The `logprobs` object of a chat choice; None without tokens."""
    if not tokens:
        return None
    return {"content": scored_tokens(tokens), "refusal": None}


def scored_tokens(tokens: Sequence[LogprobText]) -> list[dict[str, Any]]:
    return [{**_entry(token), "top_logprobs": [_entry(other) for other in token.top]} for token in tokens]


class TextOffsets:
    """The offsets of the tokens of one text, in characters. A split character counts once it is complete."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def next(self, token: LogprobText) -> int:
        """The offset of the next token."""
        begin = self._end
        self._end += len(self._utf8.decode(token.bytes))
        return begin


def completion_logprobs(tokens: Sequence[LogprobText], offsets: TextOffsets | None = None) -> dict[str, Any] | None:
    """The `logprobs` object of a completion, None without tokens; `offsets` has read the tokens before these."""
    if not tokens:
        return None
    offsets = offsets or TextOffsets()
    return {
        "tokens": [_name(token) for token in tokens],
        "token_logprobs": [_value(token) for token in tokens],
        "top_logprobs": [
            None if isnan(token.logprob) else {_name(other): _value(other) for other in token.top} for token in tokens
        ],
        "text_offset": [offsets.next(token) for token in tokens],
    }


def _name(token: LogprobText) -> str:
    """A token as OpenAI's completions name it: by its bytes if it is not whole characters."""
    try:
        token.bytes.decode()
    except UnicodeDecodeError:
        return f"bytes:{token.token}"
    return token.token


def _entry(token: LogprobText) -> dict[str, Any]:
    return {"token": token.token, "logprob": _value(token), "bytes": list(token.bytes)}


def _value(token: LogprobText) -> float | None:
    return None if isnan(token.logprob) else max(token.logprob, LEAST_LOGPROB)
