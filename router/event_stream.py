"""The HTTP response that carries a stream of events and always closes its source, also when the client goes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies: pass every event on at once
}

RAW_HEADERS = [(name.encode(), value.encode()) for name, value in EVENT_HEADERS.items()]


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer; there is nobody to tell."""


class Source(Protocol):
    """Where the bytes of a stream come from."""

    async def next(self) -> bytes | None:
        """What to send next; None at the end. Errors are events: this does not raise."""
        ...

    async def close(self) -> None:
        """Give everything back. Called exactly once on every path."""
        ...


class Connection:
    """A client's connection, from when its request has been read until its answer is sent, or it goes.

    One for a request: watching it takes a task.
    """

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.ensure_future(_disconnect(receive))

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client goes: then raises ClientGoneError.

        The work is done in the caller's task. In one of its own the end of it would be known some turns of the event
        loop later, and a stream begins with what this returns.
        """
        over = False

        def gone(_: object) -> None:
            if not over:
                until.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as until:
                self._gone.add_done_callback(gone)
                try:
                    return await work
                finally:
                    over = True
                    self._gone.remove_done_callback(gone)
        except Exception:
            if until.expired():
                raise ClientGoneError from None
            raise

    def close(self) -> None:
        """Watch it no longer."""
        self._gone.cancel()


class EventStream(Response):
    """Sends what `source` gives until it ends or the client goes, then closes it.

    A client that takes nothing for `stall_s` seconds counts as gone: it would hold what its request holds for as long
    as it likes. `connection`: where it is watched already.
    """

    def __init__(self, source: Source, stall_s: float | None = None, connection: Connection | None = None) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(RAW_HEADERS)
        self._source = source
        self._stall_s = stall_s
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = self._connection or Connection(receive)
        try:
            await connection.during(self._pump(send))
        except (ClientGoneError, OSError):
            return
        finally:
            connection.close()
            await self._source.close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while (data := await self._source.next()) is not None:
            async with asyncio.timeout(self._stall_s):  # TimeoutError is an OSError
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes: then raises ClientGoneError.

    The request's body must have been read.
    """
    connection = Connection(receive)
    try:
        return await connection.during(work)
    finally:
        connection.close()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
