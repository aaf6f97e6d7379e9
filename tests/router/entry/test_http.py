"""Bodies that come in parts, and requests that are tries of one another."""

import asyncio
from dataclasses import replace

import orjson
import pytest
from fake_backend import World, chat_body, event_loop, http_scope
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from holdfast.router.config import RouterConfig
from holdfast.router.entry import http
from holdfast.router.entry.admission import BodyBytes, Shares, read_body

pytestmark = pytest.mark.anyio

PATIENT = 60.0  # seconds a slow machine may take
PATH = "/v1/chat/completions"
GONE = {"type": "http.disconnect"}
BODY = orjson.dumps(chat_body())


async def status(world, messages):
    """The status of the answer to a chat completion. After `messages` its client says nothing more."""
    coming, sent = list(messages), []

    async def receive():
        if not coming:
            await asyncio.Event().wait()
        return coming[0] if coming[0] is GONE else coming.pop(0)

    async def send(message):
        sent.append(message)

    await world.app(http_scope(PATH), receive, send)
    return sent[0]["status"]


BOUNDED = RouterConfig(max_body_bytes=1000, body_timeout_s=PATIENT)
PART = {"type": "http.request", "body": b"x" * 100, "more_body": True}


@pytest.mark.parametrize(
    ("messages", "expected", "outcome"),
    [
        pytest.param([PART, GONE], http.CLIENT_GONE, "aborted", id="its client leaves"),
        pytest.param([PART], 408, "rejected", id="no more comes"),
        pytest.param([PART] * 20, 413, "rejected", id="too long"),
        pytest.param([PART, {**PART, "more_body": False}], 400, "rejected", id="no JSON"),
    ],
)
async def test_a_body_in_parts_is_given_back_however_it_ends(messages, expected, outcome):
    world = World(config=replace(BOUNDED, body_timeout_s=0.1) if expected == 408 else BOUNDED)
    assert await status(world, messages) == expected
    assert (world.outcomes(), world.in_flight()) == ({outcome: 1}, 0)


async def test_a_body_in_parts_is_all_that_came():
    parts = [{"type": "http.request", "body": BODY[at : at + 7], "more_body": True} for at in range(0, len(BODY), 7)]
    world = World(config=BOUNDED)
    assert await status(world, [*parts, {"type": "http.request", "body": b""}]) == 200
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

        request = Request(http_scope(path, headers=[(name, value)]), receive)
        assert await read_body(request, 10, PATIENT, BodyBytes(Shares(64), "acme")) == body
        found = [http.retry_of(request, each) for each in ("idempotency-key", "x-holdfast-delivery")]
        assert [http.retry_of(request, each) for each in ("idempotency-key", "x-holdfast-delivery")] == found
        assert [bool(each) for each in found] == [name == b"idempotency-key", name == b"x-holdfast-delivery"]
        return max(found)

    first, second = event_loop().run(read(*one, 3)), event_loop().run(read(*other, cut))
    assert (first == second) == (one == other)
