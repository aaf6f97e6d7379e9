"""What OpenAI's two completion APIs share in their replies: usage, log probabilities and the outside of a chunk."""

import codecs
from collections.abc import Iterable, Sequence
from math import isnan
from typing import Any, Protocol

import orjson

from holdfast.replicas.errors import ErrorInfo
from holdfast.replicas.requests import Answer, LogprobText, Piece, Timing, Usage
from holdfast.router.protocol.errors import api_error
from holdfast.router.tracing import stages

DONE = b"data: [DONE]\n\n"
COMMENT = b": still working\n\n"  # readers of server-sent events skip it
LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have


class Encoder(Protocol):
    """Turns the pieces of one reply into events, in order."""

    def opening(self) -> bytes:
        """The events before the first piece."""
        ...

    def encode(self, pieces: Iterable[Piece]) -> bytes: ...

    def failed(self, error: ErrorInfo) -> bytes:
        """The event that ends a reply without an `Errored` piece."""
        ...

    def silence(self) -> bytes:
        """What is sent between two events to say that the reply is still being made."""
        ...


class ChunkEncoder:
    """Base of the encoders of chat completions and completions: everything but the choice inside a chunk.

    `open` + choice + `close` is a chunk. They are made once, so that a token costs one JSON string and one join.
    """

    def __init__(self, kind: str, reply_id: str, created: int, model: str, include_usage: bool, index: int) -> None:
        self._head = {"id": reply_id, "object": kind, "created": created, "model": model}
        self._include_usage = include_usage
        self._index = index
        self.open = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":%d,' % index
        self._close = b'}],"usage":null' if include_usage else b"}]"
        self.close = self._close + b"}\n\n"

    def opening(self) -> bytes:
        return b""

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join([self.event(piece) for piece in pieces])

    def event(self, piece: Piece) -> bytes:
        """The events of one piece."""
        raise NotImplementedError

    def failed(self, error: ErrorInfo) -> bytes:
        return b"data: " + api_error(error).body + b"\n\n"

    def silence(self) -> bytes:
        return COMMENT

    def chunk(self, logprobs: Any, reason: str | None, **choice: Any) -> bytes:
        inside = orjson.dumps({**choice, "logprobs": logprobs, "finish_reason": reason})
        return self.open + inside[1:-1] + self.close

    def close_with(self, **fields: Any) -> bytes:
        """`close` of a chunk with more fields."""
        return self._close + b"," + orjson.dumps(fields)[1:] + b"\n\n"

    def ending(self, usage: Usage, timing: Timing) -> bytes:
        """The usage chunk, if it was asked for, and the end mark. The first choice ends last and writes them."""
        if self._index:
            return b""
        if not self._include_usage:
            return DONE
        last = {**self._head, "choices": [], "usage": usage_object(usage)}
        if times := stages(timing):
            drafts = {"drafted": usage.work.drafted, "accepted": usage.work.accepted} if usage.work.drafted else {}
            last["timing"] = {**{f"{name}_ms": milliseconds for name, milliseconds in times.items()}, **drafts}
        return b"data: " + orjson.dumps(last) + b"\n\n" + DONE


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
    """Where the tokens of one text begin, in characters. A character that is split counts once it is complete."""

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
