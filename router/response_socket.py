"""`/v1/responses` over a WebSocket, as the Open Responses specification has it.

    client -- {"type": "response.create", ...} -->  one at a time
           <-- each event as a message, without [DONE]; or {"type": "error", "status": ..., "error": {...}}

A message is served as the request that it would be over HTTP, by the same application: keys, limits, bounds of bodies,
the parser, records and metrics are those of requests. A connection also remembers its latest response: the client can
go on with it there though it is not stored.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from holdfast.replicas.errors import HoldfastError, UnavailableError
from holdfast.router.drain import Drain
from holdfast.router.guard import Guard
from holdfast.router.http import DELIVERY, IDEMPOTENCY, ROUTE, error_response
from holdfast.router.limits import BodyBytes
from holdfast.router.protocol.errors import api_error
from holdfast.router.stored_responses import LATEST, LatestResponse

LONGEST_S = 3600.0  # the specification's, of a connection
WAITING = 16  # messages that a client may send ahead of their turn
OF_SCOPE = ("asgi", "http_version", "server", "client", "path", "raw_path", "root_path")
OF_HANDSHAKE = {b"connection", b"upgrade", b"content-length", b"content-type", b"x-request-id"}
OF_HANDSHAKE |= {IDEMPOTENCY.encode(), DELIVERY.encode()}  # of one request, and there are several
GOING, NORMAL = 1001, 1000  # why a socket is closed


class ResponseSocket:
    """Serves connections to `app`, which has the path over HTTP, too."""

    def __init__(self, app: ASGIApp, guard: Guard, drain: Drain, longest_s: float = LONGEST_S) -> None:
        self._app = app
        self._guard = guard
        self._drain = drain
        self._longest_s = longest_s

    async def serve(self, socket: WebSocket) -> None:
        socket.scope[ROUTE] = "/v1/responses"
        try:
            principal = self._guard.authenticate(socket)
        except HoldfastError as error:
            if "websocket.http.response" in socket.scope.get("extensions", {}):
                await socket.send_denial_response(error_response(error))
            else:
                await socket.close()  # before it is accepted: a 403
            return
        await socket.accept()
        with self._guard.messages(principal.tenant) as held:
            await Connection(self._app, socket, self._guard, held).serve(self._drain, self._longest_s)


class Connection:
    """One of them. `held` counts the bytes of the messages that wait. `_gone`: its client has left."""

    def __init__(self, app: ASGIApp, socket: WebSocket, guard: Guard, held: BodyBytes) -> None:
        self._app = app
        self._socket = socket
        self._guard = guard
        self._held = held
        self._latest = LatestResponse()
        self._messages: asyncio.Queue[bytes | HoldfastError] = asyncio.Queue(WAITING)
        self._gone = asyncio.Event()

    async def serve(self, drain: Drain, longest_s: float) -> None:
        """Answer one message after the other, until the client goes, the server stops, or so many seconds are over."""
        until, why = asyncio.get_running_loop().time() + longest_s, NORMAL
        reader = asyncio.create_task(self._read())
        leaving = asyncio.create_task(self._gone.wait())
        try:
            while not self._gone.is_set():
                coming = asyncio.ensure_future(self._messages.get())
                try:
                    async with asyncio.timeout_at(until), drain.bounded(idle=True):
                        await asyncio.wait((coming, leaving), return_when=asyncio.FIRST_COMPLETED)
                    if coming.done():
                        await self._turn(coming.result())
                finally:
                    coming.cancel()
        except TimeoutError:
            await self._tell(_error(400, _LIMIT_REACHED))
        except UnavailableError:
            why = GOING
        finally:
            reader.cancel()
            leaving.cancel()
            if not self._gone.is_set():
                with suppress(RuntimeError, WebSocketDisconnect):  # it has left meanwhile
                    await self._socket.close(why)

    async def _read(self) -> None:
        try:
            while True:
                await self._messages.put(self._taken((await self._socket.receive_text()).encode()))
        except (WebSocketDisconnect, KeyError):  # KeyError: it has sent bytes, which are no message of this protocol
            self._gone.set()

    def _taken(self, message: bytes) -> bytes | HoldfastError:
        """The message, which counts among the bodies from now on; or why it is refused, in its place."""
        try:
            self._guard.check_size(len(message))
            self._held.come(len(message))
        except HoldfastError as error:
            return error
        return message

    async def _turn(self, message: bytes | HoldfastError) -> None:
        if isinstance(message, HoldfastError):
            answer = api_error(message)
            await self._tell(_error(answer.status, orjson.loads(answer.body)["error"]))
            return
        events, waiting = Events(self._socket), [message]
        del message

        def hand_over() -> bytes:
            body = waiting.pop()
            self._held.go(len(body))  # whoever reads it counts it
            return body

        async def receive() -> Message:
            if waiting:
                return {"type": "http.request", "body": hand_over(), "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        with suppress(ConnectionError):  # it has left
            await self._app(_request(self._socket.scope, self._latest), receive, events.send)
        if waiting:  # it was refused before it was read
            hand_over()
        if not events.complete:  # its client has left, or takes nothing
            self._gone.set()

    async def _tell(self, message: bytes) -> None:
        with suppress(RuntimeError, WebSocketDisconnect):
            await self._socket.send_text(message.decode())


class Events:
    """Takes the answer over HTTP and sends its events, each as a message."""

    def __init__(self, socket: WebSocket) -> None:
        self.complete = False
        self._socket = socket
        self._status = 0
        self._rest = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        self._rest += message.get("body", b"")
        if self._status == 200:
            *blocks, self._rest = self._rest.split(b"\n\n")
            for block in blocks:
                await self._event(block)
        if not message.get("more_body", False):
            self.complete = True
            if self._status != 200:
                await self._tell(_error(self._status, orjson.loads(self._rest)["error"]))

    async def _event(self, block: bytes) -> None:
        _, named, data = block.partition(b"\ndata: ")
        if named:  # else the mark of a stream's end
            await self._tell(data)

    async def _tell(self, message: bytes) -> None:
        """Raises ConnectionError where the client has left: what answers over HTTP knows that one."""
        try:
            await self._socket.send_text(message.decode())
        except (WebSocketDisconnect, RuntimeError) as error:
            raise ConnectionError("the socket is closed") from error


def _request(scope: Scope, latest: LatestResponse) -> Scope:
    """The scope of a request with the headers of the handshake, on its connection."""
    headers = [
        pair for pair in scope["headers"] if pair[0] not in OF_HANDSHAKE and not pair[0].startswith(b"sec-websocket")
    ]
    same = {name: scope[name] for name in OF_SCOPE if name in scope}
    told = {"type": "http", "method": "POST", "scheme": "http", "query_string": b"", "headers": headers}
    return {**same, **told, LATEST: latest}


_LIMIT_REACHED = {
    "type": "invalid_request_error",
    "code": "websocket_connection_limit_reached",
    "message": "A connection lasts an hour at most: open another one",
    "param": None,
}


def _error(status: int, error: Mapping[str, Any]) -> bytes:
    """An error over HTTP as it is told here, always with a code."""
    return orjson.dumps({"type": "error", "status": status, "error": {**error, "code": error["code"] or error["type"]}})
