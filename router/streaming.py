"""Server-sent events: the HTTP response that carries a stream of them, and a streamed reply on its way to the client.

A reply comes from a replica as batches of pieces and goes out as events, with one outcome. The response closes its
source in any case, also when the client goes.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.replicas.errors import EngineError, HoldfastError
from holdfast.replicas.requests import Answer, AnswerBuilder, Completed, Errored, Started
from holdfast.router.backend import Batch
from holdfast.router.entry import Call, Drain, Outcome
from holdfast.router.protocol.errors import CHAT_FIELDS, ClientGoneError, FieldNames, ReplyError
from holdfast.router.protocol.replies import COMMENT, Encoder

log = logging.getLogger(__name__)
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


# ---- replies ----


class TurnStream:
    """A `Source` of events. Call `start` first; `close` gives back what `held` holds and the replica's generator.

    `encoders` write the answers of a request, one each. `finish` gets the replica and the whole answer; the client
    gets the last events after that, as `kept` returns them. `on_whole` gets all events before the client has the last
    one. `fields` are the request's own field names.
    """

    def __init__(
        self,
        batches: AsyncGenerator[Batch, None],
        encoders: Sequence[Encoder],
        call: Call,
        drain: Drain,
        finish: Callable[[str, Answer], Awaitable[None]],
        kept: Callable[[bytes], bytes] = lambda events: events,
        fields: FieldNames = CHAT_FIELDS,
        on_whole: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> None:
        self.replica_id = ""
        self.held = ExitStack()
        self._batches = batches
        self._encoders = encoders
        self._call = call
        self._drain = drain
        self._finish = finish
        self._kept = kept
        self._fields = fields
        self._on_whole = on_whole
        self._built = AnswerBuilder()
        self._opening = b""
        self._batches_sent: list[bytes] = []

    async def start(self) -> None:
        """Wait for the first pieces, and write the opening events.

        Raises HoldfastError if the reply is an error from the first piece on: it can still become an HTTP error. The
        caller then gives everything back.
        """
        async with self._drain.bounded():
            batch = await anext(self._batches, None)
        if batch is None:
            raise _ended_early()
        self.replica_id = batch.replica_id
        first = batch.pieces[0]
        if isinstance(first, Errored):
            raise ReplyError(first.error, first.usage)
        opening = b"".join([each.opening() for each in self._encoders])
        self._opening = opening + await self._take(batch)

    async def next(self) -> bytes | None:
        data, self._opening = self._opening, b""
        while not data and self._built.terminal is None:
            data = await self._receive()
        if data and self._on_whole is not None:
            self._batches_sent.append(data)
            if isinstance(self._built.terminal, Completed):
                await self._on_whole(b"".join(self._batches_sent))
        return data or None

    def silence(self) -> bytes:
        return self._encoders[0].silence()

    async def close(self) -> None:
        """Close the replica's generator, which aborts the request there unless it has ended."""
        try:
            await self._batches.aclose()
        finally:
            with self.held:
                self._call.end(Outcome.ABORTED)  # counts only if the request has not ended before

    async def _receive(self) -> bytes:
        try:
            async with self._drain.bounded():
                batch = await anext(self._batches, None)
            if batch is None:
                raise _ended_early()
            return await self._take(batch)
        except HoldfastError as error:
            return self._fail(error)
        except Exception as error:  # a bug, of the backend or ours: the client gets the usual event, the log all of it
            log.error("a stream failed", exc_info=error)
            return self._fail(EngineError("The server failed during the reply"))

    async def _take(self, batch: Batch) -> bytes:
        call, built, pieces, last = self._call, self._built, batch.pieces, batch.pieces[-1]
        if not isinstance(last, Started):
            call.first_token()
        if isinstance(last, Errored):
            pieces = (*pieces[:-1], replace(last, error=self._fields.info(last.error)))
        events = self._encoders[batch.choice].encode(pieces)
        if batch.choice:
            return events
        built.add(batch.pieces)
        if isinstance(built.terminal, Errored):
            call.failed(ReplyError(built.terminal.error, built.terminal.usage))
        elif isinstance(built.terminal, Completed):
            answer = built.answer()
            assert answer is not None  # the reply has completed
            call.answered(batch.replica_id, answer)
            call.completed(answer.usage, answer.timing)
            await self._finish(batch.replica_id, answer)
            return self._kept(events)
        return events

    def _fail(self, error: HoldfastError) -> bytes:
        self._built.terminal = Errored(error.info)
        self._call.failed(error)
        return self._encoders[0].failed(self._fields.info(error.info))


async def soon(
    answer: Coroutine[Any, Any, Response], within_s: float, encoder: Callable[[], Encoder]
) -> "Response | LateStream":
    """The result of `answer` if it is there within so many seconds; else a stream that goes on waiting for it."""
    answering = asyncio.create_task(answer)
    late = LateStream(answering, encoder)
    try:
        await asyncio.wait((answering,), timeout=within_s)
    except BaseException:
        await late.close()
        raise
    return answering.result() if answering.done() else late


class LateStream:
    """A `Source` whose headers are sent before its answer is there.

    `answering` makes the response and notices if the client leaves meanwhile. `encoder` writes an error instead.
    """

    def __init__(self, answering: asyncio.Task[Response], encoder: Callable[[], Encoder]) -> None:
        self._answering = answering
        self._encoder = encoder
        self._stream: EventStream | None = None
        self._over = False

    async def next(self) -> bytes | None:
        if self._over:
            return None
        if self._stream is None:
            try:
                response = await self._answering
            except HoldfastError as error:
                return self._fail(error)
            except ClientGoneError:
                raise
            except Exception as error:  # as in a stream that has begun
                log.error("a stream failed", exc_info=error)
                return self._fail(EngineError("The server failed to handle the request"))
            if not isinstance(response, EventStream):  # the answer was there already: of another request
                self._over = True
                return bytes(response.body)
            self._stream = response
        assert self._stream.connection is not None
        return await self._stream.connection.during(self._stream.source.next())

    def silence(self) -> bytes:
        return COMMENT if self._stream is None else self._stream.source.silence()

    async def close(self) -> None:
        """End the making of the answer, or the answer."""
        self._answering.cancel()  # does nothing if it is done
        await asyncio.wait((self._answering,))
        if self._answering.cancelled() or self._answering.exception() is not None:
            return
        response = self._answering.result()
        if isinstance(response, EventStream):
            if response.connection is not None:
                response.connection.close()
            await response.source.close()

    def _fail(self, error: HoldfastError) -> bytes:
        self._over = True
        encoder = self._encoder()
        return encoder.opening() + encoder.failed(error.info)


def _ended_early() -> EngineError:
    return EngineError("The replica's reply ended before it was complete")
