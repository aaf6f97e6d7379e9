"""One server over HTTP: streamed chat completions with the time of each stage, and every failure as data.

The measured client: aiohttp, whose parser is compiled; one in Python would take most of the generator's time. `client`
is leaner yet, for requests one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType, TracebackType
from typing import Any

import aiohttp
import orjson

from holdfast.loadgen.conversation import Said
from holdfast.loadgen.sse import EventLines, Gathered, MalformedError, ReportedError, from_header
from holdfast.replicas.errors import UnavailableError

PATH = "/v1/chat/completions"
IDLE_S = 4.0
"""How long a connection is kept for the next request: less than a server keeps it (uvicorn: 5 s), so that none is sent
on a connection that is being closed."""


_SHOWN = 300  # characters of an error answer
Heard = Callable[[Gathered], None]
_NONE: Mapping[str, str] = MappingProxyType({})


def _nothing(answer: Gathered) -> None:
    """Nobody listens."""


class Failure(StrEnum):
    """Why a request failed."""

    CONNECT = "connect"  # no connection
    HTTP = "http"  # a status other than 200
    REPORTED = "reported"  # an error in the stream
    TIMEOUT = "timeout"
    CUT = "cut"  # the connection, or the stream, ended early
    MALFORMED = "malformed"  # not HTTP, or not server-sent events of OpenAI chunks


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer. Times are seconds of the clock that the client was given."""

    started: float
    first_byte: float | None
    first_token: float | None
    ended: float
    answer: Gathered
    failure: Failure | None = None
    detail: str = ""
    cache: str = ""  # the server's word about its response cache
    replica: str = ""  # the replica that answered, by the server

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
            # The time limit is for a whole request, so that a server which sends a byte now and then cannot hold it.
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
        status, told = await self.call("GET", path)
        if status != 200 or isinstance(told, str):
            raise UnavailableError(f"{self._url}{path}: {status} {told}")
        return told

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
                told = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"{method} {self._url}{path}: {error!r}") from error
        try:
            return response.status, orjson.loads(told)
        except ValueError:
            return response.status, told.decode(errors="replace")[:_SHOWN]

    async def send(self, content: bytes, headers: Mapping[str, str], heard: Heard = _nothing) -> Exchange:
        """Send a chat completion, the bytes that `streamed` made of it, and read its stream to the end.

        `heard` gets the answer so far after each event, and must not raise. Raises nothing that the server could cause.
        """
        watch = _Watch(time.perf_counter(), heard)
        failure, detail = None, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        failure, detail = await self._read(content, headers, watch)
                        break
                    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                        if not watch.reused or watch.answered:
                            raise
                        # llama.cpp closes a connection after each stream without saying so: ours was on its way then.
        except TimeoutError:
            failure, detail = Failure.TIMEOUT, f"after {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            failure, detail = Failure.CONNECT, str(error)
        except (aiohttp.ClientResponseError, MalformedError) as error:
            failure, detail = Failure.MALFORMED, str(error)
        except (aiohttp.ClientError, OSError) as error:
            failure, detail = Failure.CUT, repr(error)
        except ReportedError as error:
            failure, detail = Failure.REPORTED, str(error)
        ended = time.perf_counter()
        return Exchange(
            watch.started,
            watch.first_byte,
            watch.first_token,
            ended,
            watch.answer,
            failure,
            detail,
            watch.cache,
            watch.replica,
        )

    async def _read(self, content: bytes, headers: Mapping[str, str], watch: _Watch) -> tuple[Failure | None, str]:
        watch.reused = False
        async with self._http.post(
            self._url + PATH, data=content, headers=headers, allow_redirects=False, trace_request_ctx=watch
        ) as response:
            watch.answered = True
            watch.cache = response.headers.get("x-holdfast-cache", "")
            watch.answer.marked = bool(watch.cache)
            watch.replica = response.headers.get("x-holdfast-replica", "")
            watch.answer.timing = from_header(response.headers.get("server-timing", ""))
            if response.status != 200:
                return Failure.HTTP, await _error(response)
            lines = EventLines()
            async for piece in response.content.iter_any():
                watch.piece(lines, piece)
        if not watch.answer.done:
            return Failure.CUT, "the stream ended before [DONE]"
        return None, ""


async def _error(response: aiohttp.ClientResponse) -> str:
    """The status and the beginning of an error answer."""
    body = await response.content.read(_SHOWN)
    return f"{response.status} {body.decode(errors='replace')}"


def streamed(body: Mapping[str, Any]) -> bytes:
    """The bytes of a request whose answer is to be streamed, with its counts at the end."""
    return encode({**body, "stream": True, "stream_options": {"include_usage": True}})


def encode(body: Mapping[str, Any]) -> bytes:
    """The bytes of a request's body: the same for the same body."""
    return orjson.dumps(body)


def _marking_reuse() -> aiohttp.TraceConfig:
    """Marks a request's `_Watch` when the request uses an existing connection."""

    async def reused(session: aiohttp.ClientSession, context: Any, about: Any) -> None:
        if isinstance(context.trace_request_ctx, _Watch):
            context.trace_request_ctx.reused = True

    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(reused)
    return tracing


class _Watch:
    """The progress of one request, with times."""

    __slots__ = ("answer", "answered", "cache", "first_byte", "first_token", "heard", "replica", "reused", "started")

    def __init__(self, started: float, heard: Heard) -> None:
        self.started = started
        self.heard = heard
        self.first_byte: float | None = None
        self.first_token: float | None = None
        self.answer = Gathered()
        self.cache = ""
        self.replica = ""
        self.reused = False  # the connection: another request was on it before
        self.answered = False  # with headers at least

    def piece(self, lines: EventLines, piece: bytes) -> None:
        now = time.perf_counter()
        if self.first_byte is None:
            self.first_byte = now
        for data in lines.feed(piece):
            if self.answer.take(data) and self.first_token is None:
                self.first_token = now
            self.heard(self.answer)
