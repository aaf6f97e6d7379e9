"""The HTTP response that carries a stream of events and always closes its source, also when the client goes."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.router.protocol.errors import ClientGoneError

T = TypeVar("T")

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies: pass every event on at once
}

SILENCE_S = 10.0  # proxies and clients take a connection that is silent for longer, often 30 s or 60 s, for dead
RAW_HEADERS = [(name.encode(), value.encode()) for name, value in EVENT_HEADERS.items()]


class Source(Protocol):
    """The source of a stream's bytes."""

    async def next(self) -> bytes | None:
        """The next bytes to send; None at the end. Errors are events: only ClientGoneError is raised."""
        ...

    def silence(self) -> bytes:
        """Bytes that tell the client, between two events, that more will come."""
        ...

    async def close(self) -> None:
        """Give everything back. Called exactly once, whatever happens."""
        ...


class Connection:
    """A client's connection, from the end of its request until its answer is sent. Watching it takes a task."""

    def __init__(self, receive: Receive) -> None:
        self._disconnected = asyncio.ensure_future(_disconnect(receive))

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client leaves: then raises ClientGoneError.

        The work is done in the caller's task. A task of its own would end some turns of the event loop later, and
        streams begin with this result.
        """
        over = False

        def gone(_: object) -> None:
            if not over:
                until.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as until:
                self._disconnected.add_done_callback(gone)
                try:
                    return await work
                finally:
                    over = True
                    self._disconnected.remove_done_callback(gone)
        except Exception:
            if until.expired():
                raise ClientGoneError from None
            raise

    def close(self) -> None:
        """Stop watching."""
        self._disconnected.cancel()


class EventStream(Response):
    """Sends the bytes of `source` until it ends or the client leaves, then closes it.

    After `silence_s` seconds without an event the client gets `source.silence()`, so that neither it nor a proxy takes
    the connection for dead. A client that takes nothing for `stall_s` seconds counts as gone, for its request would
    hold its resources as long. `connection` notices where the client leaves; None: the source does.
    """

    def __init__(
        self,
        source: Source,
        connection: Connection | None,
        stall_s: float | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(RAW_HEADERS)
        self.source = source
        self.connection = connection
        self._stall_s = stall_s
        self._silence_s = silence_s
        self._writing = asyncio.Lock()
        self._written = 0.0  # when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await (self._pump(send) if self.connection is None else self.connection.during(self._pump(send)))
        except (ClientGoneError, OSError):
            return
        finally:
            if self.connection is not None:
                self.connection.close()
            await self.source.close()

    async def _pump(self, send: Send) -> None:
        self._written = asyncio.get_running_loop().time()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        silence = asyncio.create_task(self._break_silence(send))
        try:
            while (data := await self.source.next()) is not None:
                await self._write(send, data)
            await self._write(send, b"", more=False)
        finally:
            silence.cancel()

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._writing, asyncio.timeout(self._stall_s):  # TimeoutError is an OSError
            await send({"type": "http.response.body", "body": data, "more_body": more})
        self._written = asyncio.get_running_loop().time()

    async def _break_silence(self, send: Send) -> None:
        with suppress(OSError):  # the client has left, or takes nothing: the next event finds that out
            while True:
                left = self._written + self._silence_s - asyncio.get_running_loop().time()
                if left > 0:
                    await asyncio.sleep(left)
                else:
                    await self._write(send, self.source.silence())


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: then raises ClientGoneError. The request's body
    must have been read.
    """
    connection = Connection(receive)
    try:
        return await connection.during(work)
    finally:
        connection.close()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
