"""The measured client against a server with known delays, and against servers that fail in every way."""

import asyncio
import threading

import numpy as np
import pytest
from stub_server import DONE, Answer, Asked, call, chunk, models, stub_server, usage

from holdfast.loadgen.chat import ChatClient, Exchange, Failure, streamed
from holdfast.replicas.errors import UnavailableError

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
GOOD = ((0.0, chunk({"content": "hello"}) + usage(3, 1, 2) + DONE),)


def ask(answer: Answer, times: int = 1, timeout_s: float = 20.0) -> tuple[list[Exchange], list[Asked]]:
    async def all_of_them(url: str) -> list[Exchange]:
        async with ChatClient(url, timeout_s) as client:
            return [await client.send(streamed(BODY), {}) for _ in range(times)]

    with stub_server(lambda asked: answer) as stub:
        return asyncio.run(all_of_them(stub.url)), stub.asked


def test_measured_times_are_the_servers_own() -> None:
    pieces = (
        (0.02, chunk({"role": "assistant"})),
        (0.02, call("f", {"x": 1})),
        (0.02, usage(30, 20, 9)),
        (0.0, DONE),
    )
    exchanges, asked = ask(Answer(pieces), times=30)
    late = []
    for exchange, truth in zip(exchanges[1:], asked[1:], strict=True):  # the first one connects
        assert exchange.failure is None
        assert exchange.started <= truth.received
        for seen, sent in ((exchange.first_byte, truth.sent[0]), (exchange.first_token, truth.sent[1])):
            assert seen >= sent
            late.append(seen - sent)
        late.append(exchange.ended - truth.sent[3])
        late.append(truth.received - exchange.started)
    # A busy machine delays some; what the client itself adds is in all of them.
    quick = np.percentile(late, 25) * 1e3
    assert quick < 2, f"{quick:.2f} ms between the server's clock and ours"
    assert exchanges[0].said.calls[0].name == "f"
    assert exchanges[0].answer.cached_tokens == 20


@pytest.mark.parametrize(
    ("answer", "failure", "detail"),
    [
        (Answer.of(b'{"error": "busy"}', 503), Failure.HTTP, "503"),
        (Answer(((0.0, chunk({"content": "hel"})),), cut=True), Failure.CUT, ""),
        (Answer(((0.0, chunk({"content": "hel"})),)), Failure.CUT, "DONE"),
        (Answer(cut=True), Failure.CUT, ""),
        (Answer.of(b"data: {oops\n\n"), Failure.MALFORMED, "oops"),
        (Answer.of(b"<html>\n"), Failure.MALFORMED, "html"),
        (Answer.of(b'data: {"error": {"message": "no cells"}}\n\n'), Failure.REPORTED, "no cells"),
    ],
)
def test_each_failure_is_told_by_its_kind(answer: Answer, failure: Failure, detail: str) -> None:
    ((exchange,), _) = ask(answer)
    assert exchange.failure == failure
    assert detail in exchange.detail
    assert exchange.said is None


@pytest.mark.parametrize(
    ("said", "failures"),
    [
        (b"", {Failure.CUT}),
        (b"hello\r\n\r\n", {Failure.MALFORMED}),
        (b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", {Failure.MALFORMED}),
        (b"HTTP/1.1 200 OK\r\nx: " + 70000 * b"y" + b"\r\n\r\n", {Failure.MALFORMED}),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", {Failure.CUT, Failure.MALFORMED}),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope", {Failure.CUT}),
        (b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", {Failure.HTTP}),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\ndata: [", {Failure.CUT}),
    ],
)
def test_what_is_no_http_is_a_failure_like_any_other(said: bytes, failures: set[Failure]) -> None:
    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        writer.close()

    async def asked() -> Exchange:
        async with await asyncio.start_server(answering, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with ChatClient(f"http://127.0.0.1:{port}", 20.0) as client:
                return await client.send(streamed(BODY), {})

    assert asyncio.run(asked()).failure in failures


@pytest.mark.parametrize(("closing", "failures"), [(1, [None, None, None]), (0, ["cut", "cut", "cut"])])
def test_what_meets_a_connection_that_is_being_closed_is_sent_on_another(closing: int, failures: list[str]) -> None:
    """``closing``: which request on a connection, from 0, is read and not answered."""
    read = 0

    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal read
        for number in range(closing + 1):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            read += 1
            if number < closing:
                body = GOOD[0][1]
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()

    async def asked() -> list[Exchange]:
        async with await asyncio.start_server(answering, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with ChatClient(f"http://127.0.0.1:{port}", 20.0) as client:
                return [await client.send(streamed(BODY), {}) for _ in range(3)]

    assert [exchange.failure for exchange in asyncio.run(asked())] == failures
    assert read == (5 if closing else 3)


@pytest.mark.parametrize("pieces", [(), ((0.0, chunk({"content": "h"})),)])
def test_a_server_that_hangs_is_left_when_its_time_is_up(pieces: tuple[tuple[float, bytes], ...]) -> None:
    ((exchange,), _) = ask(Answer(pieces, hang=True), timeout_s=1.0)
    assert exchange.failure == Failure.TIMEOUT
    assert exchange.ended - exchange.started >= 1.0
    assert (exchange.first_token is not None) == bool(pieces)


def test_no_server_is_a_failure_to_connect() -> None:
    async def nobody() -> Exchange:
        async with ChatClient("http://127.0.0.1:1", 5.0) as client:
            with pytest.raises(UnavailableError):
                await client.get("/v1/models")
            return await client.send(streamed(BODY), {})

    assert asyncio.run(nobody()).failure == Failure.CONNECT


def test_who_is_refused_is_told_the_servers_words() -> None:
    async def refused(url: str) -> None:
        async with ChatClient(url, 5.0) as client:
            with pytest.raises(UnavailableError, match="/v1/models: 401 Give your key"):
                await client.get("/v1/models")

    with stub_server(lambda asked: Answer.of(b"Give your key", status=401)) as stub:
        asyncio.run(refused(stub.url))


def test_the_key_goes_with_every_request() -> None:
    async def both(url: str) -> None:
        async with ChatClient(url, 5.0, "secret") as client:
            await client.get("/v1/models")
            await client.send(streamed(BODY), {"x-session-id": "s"})

    with stub_server(lambda asked: models() if asked.method == "GET" else Answer(GOOD)) as stub:
        asyncio.run(both(stub.url))
    assert [asked.headers["authorization"] for asked in stub.asked] == ["Bearer secret"] * 2
    assert stub.asked[1].headers["x-session-id"] == "s"
    assert stub.asked[1].body["stream_options"] == {"include_usage": True}


def test_many_requests_at_once_do_not_wait_for_each_other() -> None:
    async def crowd(url: str) -> list[Exchange]:
        async with ChatClient(url, 90.0) as client:
            return await asyncio.gather(*(client.send(streamed(BODY), {}) for _ in range(64)))

    all_there = threading.Barrier(64)

    def slow(asked: Asked) -> Answer:
        all_there.wait(60)
        return Answer(GOOD)

    with stub_server(slow) as stub:
        exchanges = asyncio.run(crowd(stub.url))
    assert [exchange.failure for exchange in exchanges] == [None] * 64
