"""`/v1/messages`: its wire format for `turns`, its events, and the count of a prompt's tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import ErrorInfo, HoldfastError, UnavailableError
from holdfast.replicas.requests import (
    Answer,
    Completed,
    Errored,
    Piece,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from holdfast.router.backend import Backend
from holdfast.router.entry import Entry
from holdfast.router.formats import Arrival, Exchange, KeepsNothing
from holdfast.router.http import answer_headers, json_response
from holdfast.router.protocol.anthropic import (
    MessagesBody,
    anthropic_error,
    chat_prompt,
    empty_message,
    ending,
    message_object,
    message_usage,
    messages_turn,
    read_count,
    read_messages,
    signature,
)
from holdfast.router.protocol.turn import Turn, check_length, find_model
from holdfast.router.streaming import COMMENT

DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class OpenBlock:
    """The block that grows: its `kind`, its events up to the delta itself, and the text of thoughts."""

    kind: str
    delta_open: bytes
    thoughts: str = ""


class AnthropicEncoder:
    """Writes one message as events.

        message_start (how many tokens the prompt has), ping
          one block after the other:  content_block_start, its deltas, content_block_stop
        message_delta (why it ended, usage), message_stop;  or error

    A block is text, thinking or a call. One ends where another begins, and a call when it closes: then it can be run.
    What is the same in every delta of a block is made once, so a token costs one JSON string and one join.
    """

    def __init__(self, reply_id: str, model: str, most: int) -> None:
        self._message = empty_message(reply_id, model)
        self._most = most
        self._index = 0
        self._open: OpenBlock | None = None
        self._called = False
        self._begun = False

    def opening(self) -> bytes:
        return b""  # the prompt's tokens are in the first event, and nothing is known of them yet

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join([self._piece(piece) for piece in pieces])

    def silence(self) -> bytes:
        return PING if self._begun else COMMENT

    def failed(self, error: ErrorInfo) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error).body + b"\n\n"

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Errored):
            return self.failed(piece.error)
        begun = b"" if self._begun else self._begin_message(piece)
        return begun + self._told(piece)

    def _begin_message(self, piece: Piece) -> bytes:
        self._begun = True
        usage = Usage(piece.prompt, piece.cached) if isinstance(piece, Started) else Usage()
        return _event("message_start", message={**self._message, "usage": message_usage(usage)}) + PING

    def _told(self, piece: Piece) -> bytes:
        if isinstance(piece, TextDelta):
            return self._within("text", {"text": ""}) + self._delta(piece.text) if piece.text else b""
        if isinstance(piece, ReasoningDelta):
            if not piece.text:
                return b""
            begun = self._within("thinking", {"thinking": "", "signature": ""})
            assert self._open is not None
            self._open.thoughts += piece.text
            return begun + self._delta(piece.text)
        if isinstance(piece, ToolCallDelta):
            return self._call(piece)
        return self._completed(piece) if isinstance(piece, Completed) else b""

    def _call(self, piece: ToolCallDelta) -> bytes:
        events = b""
        if piece.name is not None:
            events = self._close() + self._begin("tool_use", {"id": piece.call_id, "name": piece.name, "input": {}})
        if piece.arguments:
            events += self._delta(piece.arguments)
        if piece.closed:
            self._called = True
            events += self._close()
        return events

    def _within(self, kind: str, block: dict[str, Any]) -> bytes:
        """Open a block of this kind, unless the open one is."""
        if self._open is not None and self._open.kind == kind:
            return b""
        return self._close() + self._begin(kind, block)

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        type_, field = DELTAS[kind]
        same = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._open = OpenBlock(kind, same % (self._index, type_.encode(), field.encode()))
        return _event("content_block_start", index=self._index, content_block={"type": kind, **block})

    def _delta(self, text: str) -> bytes:
        assert self._open is not None  # a block begins before its deltas
        return self._open.delta_open + orjson.dumps(text) + b"}}\n\n"

    def _close(self) -> bytes:
        """The end of the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return b""
        events = b""
        if block.kind == "thinking":
            delta = {"type": "signature_delta", "signature": signature(block.thoughts)}
            events = _event("content_block_delta", index=self._index, delta=delta)
        self._index += 1
        return events + _event("content_block_stop", index=self._index - 1)

    def _completed(self, piece: Completed) -> bytes:
        why = ending(piece.reason, piece.stop, called=self._called, usage=piece.usage, most=self._most)
        told = _event("message_delta", delta=why, usage=message_usage(piece.usage))
        return self._close() + told + _event("message_stop")


class MessagesExchange(KeepsNothing):
    """One message."""

    program = ""

    def __init__(self, body: MessagesBody, arrival: Arrival, turn: Turn, skipped: str) -> None:
        self.turn = turn
        self.skipped = skipped
        self._most = body.max_tokens
        self._reply_id = f"msg_{arrival.unique}"

    def encoder(self, choice: int = 0) -> AnthropicEncoder:
        return AnthropicEncoder(self._reply_id, self.turn.model.name, self._most)

    def reply(self, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
        return orjson.dumps(message_object(self._reply_id, self.turn.model.name, answer, self._most))


class MessagesFormat:
    """`POST /v1/messages`."""

    name = "messages"

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        body = await self._entry.read(request, read_messages)
        card = find_model(body.model, arrival.models)
        translated = chat_prompt(body)
        turn = check_length(messages_turn(body, translated, card))
        return MessagesExchange(body, arrival, turn, ", ".join(translated.skipped))


class CountTokens:
    """`POST /v1/messages/count_tokens`."""

    def __init__(self, entry: Entry, backend: Backend) -> None:
        self._entry = entry
        self._backend = backend

    async def count(self, request: Request) -> Response:
        async with self._entry.entered(request) as tenant:
            models = await self._backend.models()
            if not models:
                raise UnavailableError("No model is loaded yet")
            body = await self._entry.read(request, read_count)
            find_model(body.model, models)
            translated = chat_prompt(body)
            answer_headers(request).skipped = ", ".join(translated.skipped)
            try:
                tokens = await self._backend.tokenize(translated.prompt, tenant.name)
            except HoldfastError as error:
                raise translated.fields.error(error) from error
            return json_response(orjson.dumps({"input_tokens": len(tokens)}))


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


PING = _event("ping")
