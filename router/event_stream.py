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


class EventStream(Response):
    """Sends what `source` gives until it ends or the client goes, then closes it.

    A client that takes nothing for `stall_s` seconds counts as gone: it would hold what its request holds for as long
    as it likes.
    """

    def __init__(self, source: Source, stall_s: float | None = None) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(EVENT_HEADERS)
        self._source = source
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._pump(send))
        except (ClientGoneError, OSError):
            return
        finally:
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
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watch):
            if not each.done():
                each.cancel()
                await asyncio.wait((each,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
