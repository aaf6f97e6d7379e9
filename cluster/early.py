"""The first pieces of a stream by a short way, where its replica and its router share a machine: a datagram.

    replica --- gRPC, Serve -----> router    every batch
            --- over loopback ---> router    the first one, too

Through Serve a batch takes half a millisecond, most of it threads that wake each other, and a first token is what a
client waits for. So its batch is sent both ways, and the router takes the one that is there first. A datagram that is
lost or late changes nothing. It counts by a name that its request alone has, so nobody else puts words into a reply.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import suppress
from typing import Any, Self

import orjson

from holdfast.replicas.requests import EarlyTo, Piece, ReasoningDelta, ReplyTokens, Started, TextDelta, ToolCallDelta
from holdfast.router.backend import Batch

LOOPBACK = "127.0.0.1"
NAME = 16  # bytes
HELD_S = 0.002  # until then the copy that goes through Serve takes none of the time in which the router passes it on
MOST = 4096  # bytes of a datagram; what is longer comes through Serve alone
PIECES: dict[str, Any] = {kind.__name__: kind for kind in (Started, TextDelta, ReasoningDelta, ToolCallDelta)}


class EarlySender:
    """A replica's side. `node`: the address of its machine, as Ray knows it."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def tell(self, to: EarlyTo | None, batch: Batch) -> bool:
        """Send the first batch of a stream to whoever waits for it on this machine. Whether it was sent."""
        if to is None or to.node != self._node:
            return False
        told = written(batch)
        if told is not None:
            with suppress(OSError):  # no room, or nobody there: it comes through Serve
                return self._socket.sendto(to.name + told, (LOOPBACK, to.port)) > 0
        return False

    def close(self) -> None:
        self._socket.close()


class EarlyPieces(asyncio.DatagramProtocol):
    """A router's side: who waits for a first batch, by name. So many streams have `taken` theirs from here."""

    def __init__(self, node: str) -> None:
        self.taken = 0
        self._node = node
        self._waiting: dict[bytes, asyncio.Future[Batch | None]] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._port = 0

    @classmethod
    async def listen(cls, node: str) -> Self:
        """`node`: as a replica's."""
        loop = asyncio.get_running_loop()
        transport, pieces = await loop.create_datagram_endpoint(lambda: cls(node), local_addr=(LOOPBACK, 0))
        pieces._transport, pieces._port = transport, transport.get_extra_info("sockname")[1]
        return pieces

    def expect(self) -> EarlyBatch:
        """A stream is about to be asked for."""
        told = asyncio.get_running_loop().create_future()
        name = secrets.token_bytes(NAME)
        self._waiting[name] = told
        told.add_done_callback(lambda _: self._waiting.pop(name, None))
        return EarlyBatch(EarlyTo(self._node, self._port, name), told)

    def datagram_received(self, data: bytes, addr: object) -> None:
        told = self._waiting.get(data[:NAME])
        if told is not None and not told.done():
            told.set_result(read(data[NAME:]))
            self.taken += 1

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class EarlyBatch:
    """The first batch of one stream, which is sent `to` its router."""

    def __init__(self, to: EarlyTo, told: asyncio.Future[Batch | None]) -> None:
        self.to = to
        self._told = told

    async def before(self, call: AsyncIterable[Batch]) -> AsyncGenerator[Batch, None]:
        """The batches of `call`, each once; the first as soon as it is known."""
        told, batches = self._told, aiter(call)
        coming = asyncio.ensure_future(_first(batches))
        coming.add_done_callback(self._come)
        try:
            early = await told
            if early is not None:
                yield early
            first = await coming
            if early is None and first is not None:
                yield first
            async for batch in batches:
                yield batch
        finally:
            told.cancel()
            coming.cancel()
            if coming.done() and not coming.cancelled():
                coming.exception()  # who has left is not told

    def _come(self, _: object) -> None:
        """Serve has brought something, or failed: nothing earlier is waited for."""
        if not self._told.done():
            self._told.set_result(None)


async def _first(batches: AsyncIterator[Batch]) -> Batch | None:
    return await anext(batches, None)


def written(batch: Batch) -> bytes | None:
    """`batch` as it is sent; None where it is not: it is no beginning of a text or a call, or too long."""
    drawn = batch.drawn
    if drawn.logprobs or batch.choice or any(getattr(piece, "logprobs", ()) for piece in batch.pieces):
        return None
    if any(type(piece).__name__ not in PIECES for piece in batch.pieces):
        return None
    pieces = [(type(piece).__name__, piece) for piece in batch.pieces]
    try:
        told = orjson.dumps([batch.replica_id, pieces, drawn.tokens, drawn.seed, drawn.start, drawn.at, drawn.over])
    except TypeError:  # half a character, or a number that is none to JSON
        return None
    return told if len(told) <= MOST else None


def read(told: bytes) -> Batch:
    """The batch that was `written`."""
    replica_id, pieces, tokens, *drawn = orjson.loads(told)
    return Batch(replica_id, tuple(_piece(*each) for each in pieces), drawn=ReplyTokens(tuple(tokens), (), *drawn))


def _piece(kind: str, fields: dict[str, Any]) -> Piece:
    fields.pop("logprobs", None)
    piece: Piece = PIECES[kind](**fields)
    return piece
