"""The measured client: streams cut anywhere, a server with known delays, and servers that fail in every way."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise

import numpy as np
import pytest
from fake_backend import World, chat_body
from hypothesis import given
from hypothesis import strategies as st
from stub_server import DONE, Answer, Asked, call, chunk, models, stub_server, usage

from holdfast.loadgen import chat
from holdfast.loadgen.chat import ChatClient, EventLines, Exchange, Failure, Gathered, Kind, streamed
from holdfast.loadgen.conversation import Said, WrittenCall
from holdfast.replicas.errors import UnavailableError

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
GOOD = ((0.0, chunk({"content": "hello"}) + usage(3, 1, 2) + DONE),)


STREAM = (
    b": hello\r\n\r\n"
    + chunk({"role": "assistant", "content": ""})
    + chunk({"reasoning_content": "hm"})
    + chunk({"content": "Grüße, "}).replace(b"\n", b"\r\n")
    + chunk({"content": "then"})
    + chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]})
    + chunk({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]})
    + chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]})
    + chunk({"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]})
    + usage(30, 20, 9)
    + chunk(None, timing={"queue_ms": 1.5, "prefill_ms": 20, "decode_ms": 300})
    + DONE
)


def gather(pieces: list[bytes]) -> Gathered:
    lines, gathered = EventLines(), Gathered()
    for piece in pieces:
        for data in lines.feed(piece):
            gathered.take(data)
    return gathered


# ---- streams ----


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_a_stream_cut_anywhere_gives_the_same_answer(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    answer = gather([STREAM[a:b] for a, b in pairwise(ends)])
    assert answer.done
    assert answer.said == Said("Grüße, then", (WrittenCall("a", "f", '{"x": 1}'), WrittenCall("b", "g", "{}")))
    assert (answer.reasoning, answer.closed) == (["hm"], [])  # without a finish reason no call has closed
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (30, 20, 9)
    assert (answer.queue, answer.prefill, answer.decode) == (0.0015, 0.02, 0.3)


def test_unknown_counts_and_stages_are_none() -> None:
    assert gather([usage(30, 0, 9)]).cached_tokens == 0
    for timing in ({}, {"queue_ms": float("nan"), "prefill_ms": -1, "decode_ms": "soon"}):
        answer = gather([usage(30, None, 9) + chunk(None, timing=timing).replace(b"NaN", b"null")])
        assert (answer.cached_tokens, answer.queue, answer.prefill, answer.decode) == (None,) * 4


@pytest.mark.parametrize(
    "stream",
    [b"data: {\n\n", b"data: 7\n\n", b"data: [1]\n\n", b"<html>\n\n", b"data: \xff\n\n", b'data: {"choices": 3}\n\n'],
)
def test_anything_but_a_stream_of_chunks_is_malformed(stream: bytes) -> None:
    with pytest.raises(chat.MalformedError):
        gather([stream])


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(noise: bytes) -> None:
    try:
        gather([noise])
    except (chat.MalformedError, chat.ReportedError):
        return


CALLS = [("f", '{"x": 1}'), ("g", "{}"), ("h", '{"y": "}"}')]


def events_of(calls: list[tuple[str, str]], cut: int, reason: str, *, marks: bool = False) -> list[bytes]:
    """Events of calls one after the other, arguments in two pieces, and of the answer's end."""
    events = []
    for index, (name, arguments) in enumerate(calls):
        events.append(chunk({"tool_calls": [{"index": index, "id": name, "function": {"name": name}}]}))
        pieces = (arguments[:cut], arguments[cut:])
        events += [chunk({"tool_calls": [{"index": index, "function": {"arguments": each}}]}) for each in pieces]
        if marks:
            events[-1] = events[-1].replace(b"data: {", b'data: {"holdfast": {"tool_call_closed": %d}, ' % index)
    end = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}).encode()
    return [*events, b"data: " + end + b"\n\n", DONE]


def closed_after(events: list[bytes], *, marked: bool) -> list[int]:
    """The number of closed calls after each event."""
    answer, counts = Gathered(marked=marked), [0]
    for event in events:
        pieces = answer.take(event.decode().removeprefix("data: ").strip())
        counts.append(counts[-1] + sum(kind is Kind.CLOSED for kind, _ in pieces))
    assert len(answer.closed) == counts[-1]
    return counts[1:]


@given(st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_a_call_closes_at_its_mark_or_else_when_the_next_one_begins(cut: int, n: int, marks: bool) -> None:
    counts = closed_after(events_of(CALLS[:n], cut, "tool_calls", marks=marks), marked=marks)
    assert counts == [index + (marks and piece == 2) for index in range(n) for piece in range(3)] + [n, n]


def test_a_call_that_is_cut_or_goes_on_has_not_closed() -> None:
    for reason in ("length", "content_filter"):
        assert closed_after(events_of(CALLS, 1, reason), marked=False)[-1] == 2
    unmarked = [*events_of(CALLS[:1], 1, "stop")[:-2], *events_of(CALLS, 1, "stop", marks=True)[3:]]
    assert closed_after(unmarked, marked=True)[-1] == 2
    one, two = events_of(CALLS[:2], 4, "tool_calls")[:3], events_of(CALLS[:2], 4, "tool_calls")[3:]
    late = one.pop()  # the first call's arguments end after the second one has begun
    assert closed_after([*one, two[0], late, *two[1:]], marked=False) == [0, 0, 0, 0, 0, 0, 2, 2]


# ---- requests ----


def ask(answer: Answer, times: int = 1, timeout_s: float = 20.0) -> tuple[list[Exchange], list[Asked]]:
    async def all_of_them(url: str) -> list[Exchange]:
        async with ChatClient(url, timeout_s) as client:
            return [await client.send(streamed(BODY), {}) for _ in range(times)]

    with stub_server(lambda asked: answer) as stub:
        return asyncio.run(all_of_them(stub.url)), stub.asked


async def asked(answering: Callable[..., Awaitable[None]], times: int = 1) -> list[Exchange]:
    """Exchanges with a server that is written by hand."""
    async with await asyncio.start_server(answering, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with ChatClient(f"http://127.0.0.1:{port}", 20.0) as client:
            return [await client.send(streamed(BODY), {}) for _ in range(times)]


def test_measured_times_are_the_servers_own() -> None:
    pieces = ((0.02, chunk({"role": "assistant"})), (0.02, call("f", {"x": 1})), (0.02, usage(30, 20, 9)), (0.0, DONE))
    exchanges, received = ask(Answer(pieces), times=16)
    late = []
    for exchange, truth in zip(exchanges[1:], received[1:], strict=True):  # the first one connects
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

    (exchange,) = asyncio.run(asked(answering))
    assert exchange.failure in failures


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

    assert [exchange.failure for exchange in asyncio.run(asked(answering, times=3))] == failures
    assert read == (5 if closing else 3)


@pytest.mark.parametrize("pieces", [(), ((0.0, chunk({"content": "h"})),)])
def test_a_server_that_hangs_is_left_when_its_time_is_up(pieces: tuple[tuple[float, bytes], ...]) -> None:
    ((exchange,), _) = ask(Answer(pieces, hang=True), timeout_s=1.0)
    assert exchange.failure == Failure.TIMEOUT
    assert exchange.ended - exchange.started >= 1.0
    assert (exchange.first_token is not None) == bool(pieces)


def test_our_server_reports_its_stages() -> None:
    async def both(url: str) -> list[Gathered]:
        async with ChatClient(url, 20.0) as client:
            return [(await client.send(streamed(chat_body()), {})).answer for _ in range(2)]

    with World().served() as url:
        computed, cached = asyncio.run(both(url))
    assert (computed.queue, computed.prefill, computed.decode) == (0.125, 0.125, 0.25)
    assert cached.queue is None  # from the response cache: no engine worked for it


def test_no_server_is_a_failure_to_connect() -> None:
    async def nobody() -> Exchange:
        async with ChatClient("http://127.0.0.1:1", 5.0) as client:
            with pytest.raises(UnavailableError):
                await client.get("/v1/models")
            return await client.send(streamed(BODY), {})

    assert asyncio.run(nobody()).failure == Failure.CONNECT


def test_the_key_goes_with_every_request() -> None:
    async def both(url: str) -> None:
        async with ChatClient(url, 5.0, "secret") as client:
            assert await client.model() == "m"
            await client.send(streamed(BODY), {"x-session-id": "s"})
            with pytest.raises(UnavailableError, match="/v1/else: 401 Give your key"):
                await client.get("/v1/else")

    def answer(asked: Asked) -> Answer:
        if asked.path == "/v1/else":
            return Answer.of(b"Give your key", status=401)
        return models() if asked.method == "GET" else Answer(GOOD)

    with stub_server(answer) as stub:
        asyncio.run(both(stub.url))
    assert [asked.headers["authorization"] for asked in stub.asked] == ["Bearer secret"] * 3
    assert stub.asked[1].headers["x-session-id"] == "s"
    assert stub.asked[1].body["stream_options"] == {"include_usage": True}
