"""Pieces of a reply as the events of `/v1/responses`, and the response object that they add up to.

    response.created, response.in_progress
      one item after the other:  output_item.added, its parts and deltas, output_item.done
    response.completed | response.incomplete | response.failed,  then [DONE]

Every event has the next `sequence_number`. An item is a message, thoughts or a call; one ends where another begins.
What is the same in every delta of an item is made once, so a token costs one JSON string and one join.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import (
    Completed,
    Errored,
    LogprobText,
    Piece,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
)
from holdfast.router.protocol.declared_tools import CustomInput, DeclaredTools
from holdfast.router.protocol.errors import TABLE
from holdfast.router.protocol.responses import response_usage
from holdfast.router.protocol.usage import chat_logprobs
from holdfast.router.streaming import COMMENT, DONE

DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
}


@dataclass(slots=True)
class OpenItem:
    """The item that grows: `item` as it was added, and what has come of its text since."""

    item: dict[str, Any]
    delta_open: bytes  # of an event, up to the delta itself
    texts: list[str] = field(default_factory=list)
    logprobs: list[LogprobText] = field(default_factory=list)
    input: CustomInput | None = None  # of a custom call: reads its text


class ResponseEncoder:
    """Writes one response. `response` is the object as it stands, whole after the last event.

    `shell` is the object before its first item. `conceal` makes the `encrypted_content` of thoughts where the client
    asked for it. A call is told as `tools` have it.
    """

    def __init__(
        self,
        shell: dict[str, Any],
        unique: str,
        conceal: Callable[[str], str] | None = None,
        tools: DeclaredTools | None = None,
    ) -> None:
        self.response = shell
        self._unique = unique
        self._conceal = conceal
        self._tools = tools or DeclaredTools()
        self._items: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._sequence = 0
        self._streams = True

    def opening(self) -> bytes:
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        told = self._sequence
        try:
            return b"".join([self._piece(piece) for piece in pieces])
        except Exception:
            self._sequence = told  # none of these events goes out, and the one that ends the stream is the next
            raise

    def whole(self, pieces: Iterable[Piece]) -> bytes:
        """The response that they make, in JSON: for one that is not streamed, whose events nobody reads."""
        self._streams = False
        self.encode(pieces)
        return orjson.dumps(self.response)

    def not_stored(self, data: bytes) -> bytes:
        """`data`, which ends with the whole response, where that turns out not to be stored: it says so."""
        before = self._told()
        self.response = {**self.response, "store": False}
        return data.removesuffix(before) + self._told()

    def _told(self) -> bytes:
        """The whole response as it was told last."""
        if not self._streams:
            return orjson.dumps(self.response)
        self._sequence -= 1
        return self._event(f"response.{self.response['status']}", response=self.response) + DONE

    def failed(self, error: ErrorInfo) -> bytes:
        # An item that was cut is no part of what a client may go on with.
        self._end("failed")
        self.response["error"] = {"code": _code(error.kind), "message": error.message}
        return self._event("response.failed", response=self.response) + DONE

    def silence(self) -> bytes:
        return COMMENT

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, TextDelta):
            if not piece.text and not piece.logprobs:
                return b""
            begun = self._begin("message")
            return begun + self._delta(piece.text, piece.logprobs)
        if isinstance(piece, ReasoningDelta):
            return self._begin("reasoning") + self._delta(piece.text) if piece.text else b""
        if isinstance(piece, ToolCallDelta):
            begun = b"" if piece.name is None else self._close() + self._add_call(piece)
            events = begun + self._arguments(piece.arguments)
            return events + self._close(closed=True) if piece.closed else events
        if isinstance(piece, Completed):
            return self._completed(piece)
        if isinstance(piece, Started):
            return b""
        assert isinstance(piece, Errored)
        return self.failed(piece.error)

    def _begin(self, kind: str) -> bytes:
        """Open an item of this kind, unless the open one is."""
        if self._open is not None and self._open.item["type"] == kind:
            return b""
        closed, index = self._close(), len(self._items)
        item: dict[str, Any]
        part: dict[str, Any]
        if kind == "message":
            item = {"id": f"msg_{self._unique}_{index}", "type": kind, "status": "in_progress", "role": "assistant"}
            item["content"] = []
            part = _text_part("")
        else:
            item = {"id": f"rs_{self._unique}_{index}", "type": kind, "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        added = self._add(item, b'"content_index":0,' + (b'"logprobs":[],' if kind == "message" else b""))
        return closed + added + self._of_item("response.content_part.added", content_index=0, part=part)

    def _add_call(self, piece: ToolCallDelta) -> bytes:
        tool = self._tools.called(piece.name or "")
        custom = tool is not None and tool.custom
        item = {
            "id": f"{'ctc' if custom else 'fc'}_{self._unique}_{len(self._items)}",
            "type": "custom_tool_call" if custom else "function_call",
            "status": "in_progress",
            "call_id": piece.call_id,
            "name": piece.name if tool is None else tool.name,
            **({"namespace": tool.namespace} if tool is not None and tool.namespace else {}),
            "input" if custom else "arguments": "",
        }
        added = self._add(item, b"")
        if custom and self._open is not None:
            self._open.input = CustomInput()
        return added

    def _arguments(self, arguments: str) -> bytes:
        opened = self._open
        text = arguments if opened is None or opened.input is None else opened.input.feed(arguments)
        return self._delta(text) if text else b""

    def _add(self, item: dict[str, Any], more: bytes) -> bytes:
        kind, index = DELTAS[item["type"]], len(self._items)
        same = orjson.dumps({"type": kind, "item_id": item["id"], "output_index": index})[:-1]
        self._open = OpenItem(item, f"event: {kind}\ndata: ".encode() + same + b"," + more + b'"delta":')
        return self._event("response.output_item.added", output_index=index, item=item)

    def _delta(self, text: str, logprobs: tuple[LogprobText, ...] = ()) -> bytes:
        opened = self._open
        assert opened is not None  # an item begins before its deltas
        opened.texts.append(text)
        if logprobs:
            opened.logprobs.extend(logprobs)
        if not self._streams:
            return b""
        if logprobs:
            told = chat_logprobs(logprobs)["content"]
            return self._of_item(DELTAS["message"], content_index=0, delta=text, logprobs=told)
        self._sequence += 1
        return b'%b%b,"sequence_number":%d}\n\n' % (opened.delta_open, orjson.dumps(text), self._sequence - 1)

    def _close(self, status: str = "completed", *, closed: bool = False) -> bytes:
        """The end of the open item, if there is one. A call that has not `closed` is not to be carried out."""
        opened = self._open
        if opened is None:
            return b""
        rest = opened.input.end() if opened.input is not None else ""
        events = self._delta(rest) if rest else b""
        item, text, index = opened.item, "".join(opened.texts), len(self._items)
        if item["type"] == "custom_tool_call":
            item = {**item, "input": text, "status": "completed" if closed else "incomplete"}
            events += self._of_item("response.custom_tool_call_input.done", input=text)
        elif item["type"] == "function_call":
            item = {**item, "arguments": text, "status": "completed" if closed else "incomplete"}
            told = {"arguments": text, "name": item["name"]}
            events = self._of_item("response.function_call_arguments.done", **told)
        elif item["type"] == "message":
            part = _text_part(text, opened.logprobs)
            item = {**item, "status": status, "content": [part]}
            done = self._of_item("response.output_text.done", content_index=0, text=text, logprobs=part["logprobs"])
            events = done + self._of_item("response.content_part.done", content_index=0, part=part)
        else:
            part = {"type": "reasoning_text", "text": text}
            item = {**item, "content": [part]}
            if self._conceal is not None:
                item["encrypted_content"] = self._conceal(text)
            done = self._of_item("response.reasoning_text.done", content_index=0, text=text)
            events = done + self._of_item("response.content_part.done", content_index=0, part=part)
        self._open = None
        self._items.append(item)
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _completed(self, piece: Completed) -> bytes:
        cut = piece.reason == "length"
        status = "incomplete" if cut else "completed"
        # A reply of nothing is a message of nothing: clients read the first item.
        begun = b"" if self._items or self._open else self._begin("message")
        events = begun + self._close(status)
        self._end(status)
        self.response["usage"] = response_usage(piece.usage)
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return events + self._event(f"response.{status}", response=self.response) + DONE

    def _end(self, status: str) -> None:
        self._open = None
        self.response = {**self.response, "status": status, "output": self._items}

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open.item["id"], output_index=len(self._items), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._streams:
            return b""
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class CompactionEncoder(ResponseEncoder):
    """Writes a response whose one item is a compaction: what the model says is its summary, and only we can read it."""

    def __init__(self, shell: dict[str, Any], unique: str, conceal: Callable[[str], str]) -> None:
        super().__init__(shell, unique)
        self._seal = conceal
        self._summary: list[str] = []

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, TextDelta):
            self._summary.append(piece.text)
            return b""
        if isinstance(piece, ReasoningDelta | ToolCallDelta):
            return b""
        return super()._piece(piece)

    def _completed(self, piece: Completed) -> bytes:
        summary = self._seal("".join(self._summary).strip())
        item = {"id": f"cmp_{self._unique}", "type": "compaction", "encrypted_content": summary}
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._event("response.output_item.done", output_index=0, item=item) + super()._completed(piece)


def _text_part(text: str, logprobs: Iterable[LogprobText] = ()) -> dict[str, Any]:
    told = chat_logprobs(tuple(logprobs))["content"]
    return {"type": "output_text", "annotations": [], "logprobs": told, "text": text}


def _code(kind: ErrorKind) -> str:
    """The error's code in a response: OpenAI has fewer there than over HTTP."""
    if kind is ErrorKind.OVERLOADED:
        return "rate_limit_exceeded"
    return TABLE[kind].code or "invalid_prompt" if kind in (ErrorKind.INVALID, ErrorKind.TOO_LONG) else "server_error"
