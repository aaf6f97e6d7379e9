"""Pieces of a reply as server-sent events in OpenAI's chunk shapes.

What is the same in every chunk of a reply is made once, so a token costs one JSON string and one join. How the
bytes reach the client is in `event_stream`.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import orjson

from holdfast.replicas.errors import ErrorInfo
from holdfast.replicas.requests import (
    Completed,
    Piece,
    ReasoningDelta,
    Started,
    TextDelta,
    Timing,
    ToolCallDelta,
    Usage,
)
from holdfast.router.protocol.errors import api_error
from holdfast.router.protocol.usage import TextOffsets, chat_logprobs, completion_logprobs, usage_object
from holdfast.router.server_timing import stages

DONE = b"data: [DONE]\n\n"
CALL_CLOSED = "holdfast.tool_call.closed"
COMMENT = b": still working\n\n"  # every reader of server-sent events passes over it


class Encoder(Protocol):
    """Turns the pieces of one reply into events, in order."""

    def opening(self) -> bytes:
        """Events before the first piece."""
        ...

    def encode(self, pieces: Iterable[Piece]) -> bytes: ...

    def failed(self, error: ErrorInfo) -> bytes:
        """The event that ends a reply which broke off without an `Errored` among its pieces."""
        ...

    def silence(self) -> bytes:
        """What tells a client, between two events, that its reply is still being made."""
        ...


def error_event(error: ErrorInfo) -> bytes:
    """The event that ends a stream which failed."""
    return b"data: " + api_error(error).body + b"\n\n"


class Envelope:
    """The outside of every chunk of one of a reply's choices: `open` + the choice + `close`."""

    def __init__(self, kind: str, reply_id: str, created: int, model: str, include_usage: bool, index: int = 0) -> None:
        same = {"id": reply_id, "object": kind, "created": created, "model": model}
        self._same = same
        self._include_usage = include_usage
        self._index = index
        self.open = b"data: " + orjson.dumps(same)[:-1] + b',"choices":[{"index":%d,' % index
        self._close = b'}],"usage":null' if include_usage else b"}]"
        self.close = self._close + b"}\n\n"

    def close_with(self, **fields: Any) -> bytes:
        """`close` of a chunk with more fields."""
        return self._close + b"," + orjson.dumps(fields)[1:] + b"\n\n"

    def ending(self, usage: Usage, timing: Timing) -> bytes:
        """The usage chunk where one was asked for, with the request's `timing`, and the mark of the end.

        Nothing after other choices than the first, which ends last.
        """
        if self._index:
            return b""
        if not self._include_usage:
            return DONE
        last = {**self._same, "choices": [], "usage": usage_object(usage)}
        if told := stages(timing):
            drafts = {"drafted": usage.work.drafted, "accepted": usage.work.accepted} if usage.work.drafted else {}
            last["timing"] = {**{f"{name}_ms": milliseconds for name, milliseconds in told.items()}, **drafts}
        return b"data: " + orjson.dumps(last) + b"\n\n" + DONE


class ChatEncoder:
    """Chunks of `chat.completion.chunk`: the role first, then reasoning, text and tool-call deltas, then the reason.

    The chunk with which a call is whole says so in `holdfast.tool_call_closed`, its index: the call can be run while
    the reply goes on. With `event_names` that chunk is the event `CALL_CLOSED`, too. Without `thoughts` reasoning is
    left out.
    """

    def __init__(
        self,
        reply_id: str,
        created: int,
        model: str,
        include_usage: bool,
        event_names: bool = False,
        index: int = 0,
        thoughts: bool = True,
    ) -> None:
        self._thoughts = thoughts
        self._closed_name = b"event: " + CALL_CLOSED.encode() + b"\n" if event_names else b""
        self._envelope = Envelope("chat.completion.chunk", reply_id, created, model, include_usage, index)
        self._text_open = self._envelope.open + b'"delta":{"content":'
        self._text_close = b'},"logprobs":null,"finish_reason":null' + self._envelope.close

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join([self._event(piece) for piece in pieces])

    def failed(self, error: ErrorInfo) -> bytes:
        return error_event(error)

    def silence(self) -> bytes:
        return COMMENT

    def _event(self, piece: Piece) -> bytes:
        if isinstance(piece, TextDelta):
            if piece.logprobs:
                return self._chunk({"content": piece.text}, chat_logprobs(piece.logprobs))
            return self._text_open + orjson.dumps(piece.text) + self._text_close if piece.text else b""
        if isinstance(piece, ToolCallDelta):
            chunk = self._chunk({"tool_calls": [_call_delta(piece)]})
            return self._closing(chunk, piece.index) if piece.closed else chunk
        if isinstance(piece, ReasoningDelta):
            return self._chunk({"reasoning_content": piece.text}) if self._thoughts else b""
        if isinstance(piece, Completed):
            return self._chunk({}, reason=piece.reason) + self._envelope.ending(piece.usage, piece.timing)
        return b"" if isinstance(piece, Started) else error_event(piece.error)

    def _chunk(self, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = orjson.dumps({"delta": delta, "logprobs": logprobs, "finish_reason": reason})
        return self._envelope.open + choice[1:-1] + self._envelope.close

    def _closing(self, chunk: bytes, index: int) -> bytes:
        said = self._envelope.close_with(holdfast={"tool_call_closed": index})
        return self._closed_name + chunk.removesuffix(self._envelope.close) + said


class CompletionEncoder:
    """Chunks of `text_completion`. Reasoning and tool calls do not occur in plain completions."""

    def __init__(self, reply_id: str, created: int, model: str, include_usage: bool, index: int = 0) -> None:
        self._envelope = Envelope("text_completion", reply_id, created, model, include_usage, index)
        self._text_open = self._envelope.open + b'"text":'
        self._text_close = b',"logprobs":null,"finish_reason":null' + self._envelope.close
        self._offsets = TextOffsets()

    def opening(self) -> bytes:
        return b""

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join([self._event(piece) for piece in pieces])

    def failed(self, error: ErrorInfo) -> bytes:
        return error_event(error)

    def silence(self) -> bytes:
        return COMMENT

    def _event(self, piece: Piece) -> bytes:
        if isinstance(piece, TextDelta):
            if piece.logprobs:
                return self._chunk(piece.text, completion_logprobs(piece.logprobs, self._offsets))
            return self._text_open + orjson.dumps(piece.text) + self._text_close if piece.text else b""
        if isinstance(piece, Completed):
            return self._chunk("", reason=piece.reason) + self._envelope.ending(piece.usage, piece.timing)
        if isinstance(piece, Started | ToolCallDelta | ReasoningDelta):
            return b""
        return error_event(piece.error)

    def _chunk(self, text: str, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = orjson.dumps({"text": text, "logprobs": logprobs, "finish_reason": reason})
        return self._envelope.open + choice[1:-1] + self._envelope.close


def _call_delta(piece: ToolCallDelta) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}
