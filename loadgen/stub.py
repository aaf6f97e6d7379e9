"""``python -m holdfast.loadgen.stub FIRST_S TOKEN_S TOKENS``: a server that computes nothing, with known delays.

The load generator is measured against it. It prints its port, and serves until its standard input ends. It takes
little processor time, so the two can share a machine of two cores.
"""

from __future__ import annotations

import asyncio
import sys
import time

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"done "},"finish_reason":null}]}\n\n'
_MODELS = b'{"data":[{"id":"stub"}]}'


class Connection(asyncio.Protocol):
    """One client's requests: the first token comes after ``first_s``, each further one after ``token_s``."""

    def __init__(self, first_s: float, token_s: float, tokens: int) -> None:
        self._first_s, self._token_s, self._tokens = first_s, token_s, tokens
        self._unparsed = b""
        self._received = self._first_token_at = 0.0
        self._tokens_sent = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        head, separator, body = self._unparsed.partition(b"\r\n\r\n")
        if not separator or len(body) < (length := _length(head)):
            return
        self._unparsed = body[length:]
        self._received, self._tokens_sent = time.perf_counter(), 0
        if head.startswith(b"GET"):
            self._write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS))
        else:
            asyncio.get_running_loop().call_later(self._first_s, self._token)

    def _token(self) -> None:
        now = time.perf_counter()
        opening = b"" if self._tokens_sent else _HEAD
        self._first_token_at = self._first_token_at if self._tokens_sent else now
        self._tokens_sent += 1
        if self._tokens_sent < self._tokens:
            self._write(opening + _chunk(_TOKEN))
            asyncio.get_running_loop().call_later(self._token_s, self._token)
        else:
            self._write(opening + _chunk(_TOKEN + self._end(now)) + b"0\r\n\r\n")

    def _end(self, now: float) -> bytes:
        """Counts, and how long the answer really took: a timer may fire late."""
        stages = (1e3 * (self._first_token_at - self._received), 1e3 * (now - self._first_token_at))
        timing = b'"timing":{"queue_ms":0,"prefill_ms":%.3f,"decode_ms":%.3f}' % stages
        usage = b'"usage":{"prompt_tokens":100,"completion_tokens":%d}' % self._tokens
        return b'data: {"choices":[],%s,%s}\n\ndata: [DONE]\n\n' % (usage, timing)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _length(head: bytes) -> int:
    """The length of the body, in bytes."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(first_s: float, token_s: float, tokens: int) -> None:
    """Serve on a port of its own, which is printed, until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(first_s, token_s, tokens), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
