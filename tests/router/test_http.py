"""A client without an address: gone, or unknown."""

import asyncio
import socket
import struct
from dataclasses import replace

import orjson
import pytest
import uvicorn
from fake_backend import World, chat_body
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from waiting import until_async

from holdfast.router.config import RouterConfig
from holdfast.router.entry import http
from holdfast.router.entry.admission import BodyBytes, Shares, read_body
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key

PATIENT = 60.0  # seconds a slow machine may take
ACME = Tenant("acme", (hash_key("a"),))
GONE = {"type": "http.disconnect"}
BODY = orjson.dumps(chat_body())
WHOLE = ({"type": "http.request", "body": BODY, "more_body": False},)
HALVES = (
    {"type": "http.request", "body": BODY[:9], "more_body": True},
    {"type": "http.request", "body": BODY[9:], "more_body": False},
)


def status(world, messages, headers=(), path="/v1/chat/completions", method="POST", client=None):
    """The status of the answer to a request without a peer, where no `client` is given.

    After `messages` its client says nothing more.
    """

    async def scenario():
        coming, sent = list(messages), []
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
        scope |= {"client": client, "server": ("127.0.0.1", 80)}

        async def receive():
            if not coming:
                await asyncio.Event().wait()
            return coming[0] if coming[0] is GONE else coming.pop(0)

        async def send(message):
            sent.append(message)

        await world.app(scope, receive, send)
        return sent[0]["status"]

    return asyncio.run(scenario())


@pytest.mark.parametrize("before", [(), WHOLE, HALVES])
def test_a_client_that_has_left_is_not_a_stranger(before):
    world = World()
    assert status(world, [*before, GONE]) == http.CLIENT_GONE
    assert world.outcomes() == {"aborted": 1}
    assert not world.backend.requests
    assert 'reason="forbidden"' not in world.call("GET", "/metrics").text


def test_small_endpoints_take_leave_as_well():
    assert status(World(), [GONE], path="/v1/models", method="GET") == http.CLIENT_GONE


@pytest.mark.parametrize("messages", [(), WHOLE, HALVES[:1]])
def test_a_client_that_stays_and_has_no_address_is_a_stranger(messages, monkeypatch):
    monkeypatch.setattr(http, "LEAVING_S", 0.01)
    world = World()
    assert status(world, messages) == 403
    assert world.outcomes() == {"rejected": 1}
    assert status(world, messages, path="/metrics", method="GET") == 403


@pytest.mark.parametrize("read_ahead", [1, 64])
@pytest.mark.parametrize("messages", [WHOLE, HALVES])
def test_the_key_of_a_client_without_an_address_counts(messages, read_ahead, monkeypatch):
    monkeypatch.setattr(http, "LEAVING_S", 0.01)
    monkeypatch.setattr(http, "READ_AHEAD", read_ahead)
    world = World(tenants=TenantDirectory([ACME]))
    assert status(world, messages, [(b"authorization", b"Bearer a")]) == 200
    assert world.backend.requests[0].prompt.messages == chat_body()["messages"]
    assert status(world, messages) == 401


@pytest.mark.parametrize("held_back", [0, 5])
def test_a_socket_that_was_reset_before_it_was_accepted(held_back):
    world = World()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"

    async def scenario(listening):
        server = uvicorn.Server(uvicorn.Config(world.app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await until_async(world.outcomes)
        server.should_exit = True
        await serving

    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
            client.sendall(head.encode() + BODY[: len(BODY) - held_back])
        asyncio.run(scenario(listening))
    assert world.outcomes() == {"aborted": 1}


BOUNDED = RouterConfig(max_body_bytes=1000, body_timeout_s=PATIENT)
PART = {"type": "http.request", "body": b"x" * 100, "more_body": True}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([PART, GONE], http.CLIENT_GONE),
        ([PART], 408),
        ([PART] * 20, 413),
        ([PART, {**PART, "more_body": False}], 400),
    ],
)
def test_a_body_in_parts_is_given_back_however_it_ends(messages, expected):
    world = World(config=replace(BOUNDED, body_timeout_s=0.1) if expected == 408 else BOUNDED)
    assert status(world, messages, client=("127.0.0.1", 50000)) == expected
    assert world.in_flight() == 0


def test_a_body_in_parts_is_all_that_came():
    parts = [{"type": "http.request", "body": BODY[at : at + 7], "more_body": True} for at in range(0, len(BODY), 7)]
    world = World(config=BOUNDED)
    assert status(world, [*parts, {"type": "http.request", "body": b""}], client=("127.0.0.1", 50000)) == 200
    assert world.backend.requests[0].prompt.messages[0]["content"] == "hello"


asked = st.tuples(
    st.sampled_from(["/v1/a", "/v1/b"]),
    st.binary(min_size=1, max_size=3),
    st.sampled_from([b"idempotency-key", b"x-holdfast-delivery"]),
    st.sampled_from([b"k", b"l"]),
)


@given(one=asked, other=asked, cut=st.integers(0, 3))
def test_a_retry_is_the_same_body_to_the_same_path_under_the_same_name(one, other, cut):
    """Whole or in parts."""

    async def read(path, body, name, value, cut):
        parts = [{"type": "http.request", "body": body[:cut], "more_body": True}]
        parts.append({"type": "http.request", "body": body[cut:], "more_body": False})

        async def receive():
            return parts.pop(0)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [(name, value)], "query_string": b""}
        request = Request(scope, receive)
        assert await read_body(request, 10, PATIENT, BodyBytes(Shares(64), "acme")) == body
        found = [http.retry_of(request, each) for each in ("idempotency-key", "x-holdfast-delivery")]
        assert [http.retry_of(request, each) for each in ("idempotency-key", "x-holdfast-delivery")] == found
        assert [bool(each) for each in found] == [name == b"idempotency-key", name == b"x-holdfast-delivery"]
        return max(found)

    first, second = asyncio.run(read(*one, 3)), asyncio.run(read(*other, cut))
    assert (first == second) == (one == other)
