"""A client of one server: streamed chat completions with the time of each stage, and every failure as data.

The measured client uses aiohttp for its compiled parser: a parser in Python would take most of the generator's time.
`client` is leaner yet, for requests one at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType, SimpleNamespace, TracebackType
from typing import Any

import aiohttp
import orjson

from holdfast.loadgen.conversation import Said, WrittenCall
from holdfast.replicas.errors import UnavailableError

PATH = "/v1/chat/completions"
IDLE_S = 4.0
"""Seconds that an idle connection is kept. Less than a server keeps it (uvicorn: 5 s), so no request meets a closing
connection."""
DONE = "[DONE]"
_CUT = frozenset(("length", "content_filter"))
"""Finish reasons of a reply whose last call may be incomplete."""
_FIELDS = frozenset(("data", "event", "id", "retry", ""))
_SHOWN = 300  # characters of an error answer
_NONE: Mapping[str, str] = MappingProxyType({})


# ---- the stream ----


class MalformedError(ValueError):
    """The answer is not a stream of OpenAI chunks."""


class ReportedError(RuntimeError):
    """The server said in its stream that the request failed."""


@dataclass(slots=True)
class EventLines:
    """Bytes in, the data of whole server-sent events out."""

    _partial_line: bytes = b""
    _data: list[str] = field(default_factory=list)

    def feed(self, piece: bytes) -> list[str]:
        """The data of every event that ``piece`` completes. Raises MalformedError."""
        *lines, self._partial_line = (self._partial_line + piece).split(b"\n")
        events = []
        for line in lines:
            if line := line.removesuffix(b"\r"):
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


class Kind(StrEnum):
    """The kind of a piece of an answer."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"  # a part of a call
    CLOSED = "closed"  # a call is complete; the piece is its index


Piece = tuple[Kind, Any]
_TOKENS = (Kind.TEXT, Kind.CALL)


@dataclass(slots=True)
class Gathered:
    """The answer so far. Stages are seconds as the server reports them, None without a report."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # index: id, name, then pieces of the arguments
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    output_tokens: int = 0
    done: bool = False
    queue: float | None = None  # from the engine's receipt to the first scheduling
    prefill: float | None = None  # from there to the first token
    decode: float | None = None  # from there to the last
    drafted: int = 0  # draft tokens
    accepted: int = 0  # accepted draft tokens
    closed: list[int] = field(default_factory=list)  # complete calls, in the order in which they closed
    marked: bool = False  # the server marks closed calls itself: it is Holdfast

    def take(self, data: str) -> list[Piece]:
        """Add one event's data; the pieces that it brought. Raises MalformedError, ReportedError."""
        if data == DONE:
            self.done = True
            return []
        try:
            chunk = orjson.loads(data)
            if chunk.get("error"):
                raise ReportedError(json.dumps(chunk["error"])[:_SHOWN])
            self._usage(chunk.get("usage"))
            if timing := chunk.get("timing"):
                self.queue, self.prefill, self.decode = (
                    _seconds(timing.get(f"{stage}_ms")) for stage in ("queue", "prefill", "decode")
                )
                self.drafted, self.accepted = (int(timing.get(name) or 0) for name in ("drafted", "accepted"))
            pieces = [piece for choice in chunk.get("choices") or () for piece in self._choice(choice)]
            if (mark := (chunk.get("holdfast") or {}).get("tool_call_closed")) is not None:
                pieces += self._close((int(mark),))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise MalformedError(f"not a chunk: {data[:80]!r}") from error
        return pieces

    @property
    def said(self) -> Said:
        """The answer so far."""
        return Said("".join(self.text), tuple(self.call(index) for index in sorted(self.calls)))

    def call(self, index: int) -> WrittenCall:
        """One call so far."""
        call_id, name, *arguments = self.calls[index]
        return WrittenCall(call_id, name, "".join(arguments))

    def _choice(self, choice: dict[str, Any]) -> Iterator[Piece]:
        delta = choice.get("delta") or {}
        self.reason = choice.get("finish_reason") or self.reason
        for kind, name, texts in (
            (Kind.REASONING, "reasoning_content", self.reasoning),
            (Kind.TEXT, "content", self.text),
        ):
            if delta.get(name):
                texts.append(str(delta[name]))
                yield kind, texts[-1]
        for call in delta.get("tool_calls") or ():
            index = int(call.get("index", 0))
            if index not in self.calls and not self.marked:
                # A server without marks: a call is complete when the next one begins, if its arguments are JSON.
                ended = [i for i in self.calls if i < index and self.call(i).parsed is not None]
                yield from self._close(ended)
            call_parts = self.calls.setdefault(index, ["", ""])
            function = call.get("function") or {}
            call_parts[0] = call_parts[0] or str(call.get("id") or "")
            call_parts[1] = call_parts[1] or str(function.get("name") or "")
            call_parts.append(str(function.get("arguments") or ""))
            yield Kind.CALL, call_parts[-1]
        if self.reason and self.reason not in _CUT and not self.marked:
            yield from self._close(self.calls)

    def _close(self, indexes: Any) -> Iterator[Piece]:
        for index in indexes:
            if index in self.calls and index not in self.closed:
                self.closed.append(index)
                yield Kind.CLOSED, index

    def _usage(self, usage: dict[str, Any] | None) -> None:
        if usage:
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.output_tokens = int(usage.get("completion_tokens") or 0)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self.cached_tokens = self.cached_tokens if cached is None else int(cached)


OnPieces = Callable[[Gathered, list[Piece]], None]


def _seconds(milliseconds: object) -> float | None:
    if not isinstance(milliseconds, int | float) or isinstance(milliseconds, bool):
        return None
    return round(milliseconds / 1e3, 6) if 0 <= milliseconds < math.inf else None


# ---- requests ----


class Failure(StrEnum):
    """Why a request failed."""

    CONNECT = "connect"  # no connection
    HTTP = "http"  # a status other than 200
    REPORTED = "reported"  # an error in the stream
    TIMEOUT = "timeout"
    CUT = "cut"  # the connection, or the stream, ended early
    MALFORMED = "malformed"  # not HTTP, or not server-sent events of OpenAI chunks


@dataclass(slots=True)
class Exchange:
    """One request and its answer. Times are seconds of `time.perf_counter`."""

    started: float
    first_byte: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    answer: Gathered = field(default_factory=Gathered)
    failure: Failure | None = None
    detail: str = ""
    cache: str = ""  # the response cache, as the server reports it

    @property
    def said(self) -> Said | None:
        """The answer, None for a request that failed."""
        return None if self.failure else self.answer.said


class ChatClient:
    """Keep-alive connections to one server, any number of requests at once. An async context manager on its loop."""

    def __init__(self, url: str, timeout_s: float, api_key: str = "") -> None:
        headers = {"accept": "text/event-stream", "content-type": "application/json"}
        headers |= {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._url, self._timeout_s = url, timeout_s
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            # The time limit covers a whole request: a server that sends a byte now and then cannot extend it.
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            headers=headers,
            skip_auto_headers=("user-agent", "accept-encoding"),
            trace_configs=[_marking_reuse()],
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def get(self, path: str) -> Any:
        """The JSON at ``path``. Raises UnavailableError."""
        status, content = await self.call("GET", path)
        if status != 200 or isinstance(content, str):
            raise UnavailableError(f"{self._url}{path}: {status} {content}")
        return content

    async def model(self) -> str:
        """The first model that the server names. Raises UnavailableError."""
        try:
            return str((await self.get("/v1/models"))["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise UnavailableError(f"{self._url} names no model at /v1/models; give --model") from error

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] = _NONE
    ) -> tuple[int, Any]:
        """The status of a request and the JSON of its answer, or the beginning of its text if it is no JSON.

        Raises UnavailableError.
        """
        content = None if body is None else encode(body)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.request(method, self._url + path, data=content, headers=headers) as response,
            ):
                reply = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{method} {self._url}{path}: {error!r}") from error
        try:
            return response.status, orjson.loads(reply)
        except ValueError:
            return response.status, reply.decode(errors="replace")[:_SHOWN]

    async def send(self, content: bytes, headers: Mapping[str, str], on_pieces: OnPieces | None = None) -> Exchange:
        """Send a chat completion, the bytes that `streamed` made of it, and read its stream to the end.

        `on_pieces` gets the answer so far and its new pieces after each event, and must not raise. A failure of the
        server is returned, not raised.
        """
        exchange, connection = Exchange(time.perf_counter()), SimpleNamespace(reused=False)
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        await self._stream_answer(content, headers, exchange, on_pieces, connection)
                        break
                    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                        if not connection.reused:
                            raise
                        # llama.cpp closes a connection after each stream without notice, also after a new request.
        except TimeoutError:
            exchange.failure, exchange.detail = Failure.TIMEOUT, f"after {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            exchange.failure, exchange.detail = Failure.CONNECT, str(error)
        except (aiohttp.ClientResponseError, MalformedError) as error:
            exchange.failure, exchange.detail = Failure.MALFORMED, str(error)
        except (aiohttp.ClientError, OSError) as error:
            exchange.failure, exchange.detail = Failure.CUT, repr(error)
        except ReportedError as error:
            exchange.failure, exchange.detail = Failure.REPORTED, str(error)
        exchange.ended = time.perf_counter()
        return exchange

    async def _stream_answer(
        self,
        content: bytes,
        headers: Mapping[str, str],
        exchange: Exchange,
        on_pieces: OnPieces | None,
        connection: SimpleNamespace,
    ) -> None:
        connection.reused, answer, lines = False, exchange.answer, EventLines()
        async with self._http.post(
            self._url + PATH, data=content, headers=headers, allow_redirects=False, trace_request_ctx=connection
        ) as response:
            connection.reused = False  # from here on, nothing is sent again
            exchange.cache = response.headers.get("x-holdfast-cache", "")
            answer.marked = bool(exchange.cache)
            if response.status != 200:
                body = await response.content.read(_SHOWN)
                exchange.failure = Failure.HTTP
                exchange.detail = f"{response.status} {body.decode(errors='replace')}"
                return
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                exchange.first_byte = exchange.first_byte or now
                for data in lines.feed(piece):
                    pieces = answer.take(data)
                    if exchange.first_token is None and any(kind in _TOKENS for kind, _ in pieces):
                        exchange.first_token = now
                    if on_pieces is not None:
                        on_pieces(answer, pieces)
        if not answer.done:
            exchange.failure, exchange.detail = Failure.CUT, "the stream ended before [DONE]"


def streamed(body: Mapping[str, Any]) -> bytes:
    """The bytes of a request for a streamed answer with token counts at its end."""
    return encode({**body, "stream": True, "stream_options": {"include_usage": True}})


def encode(body: Mapping[str, Any]) -> bytes:
    """The bytes of a request's body: the same for the same body."""
    return orjson.dumps(body)


def _marking_reuse() -> aiohttp.TraceConfig:
    """Sets `reused` in a request's trace context when the request uses an existing connection."""

    async def reused(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.reused = True

    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(reused)
    return tracing
