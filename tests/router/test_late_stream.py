"""Streams that begin late: their headers go out, then comments, and then what the stream would have been."""

import asyncio
import json
from collections.abc import AsyncGenerator

import anthropic
import openai
import pytest
from fake_backend import FORMATS, HELLO, FakeBackend, World, http_scope

from holdfast.replicas.errors import ErrorInfo, ErrorKind, UnavailableError
from holdfast.replicas.requests import Errored, GenerateRequest, Started
from holdfast.router.backend import ANYWHERE, Batch, RoutingHint
from holdfast.router.endpoints import turns
from holdfast.router.protocol.replies import COMMENT

BEGUN = ((Started("q", 10, 4),), *HELLO)
MESSAGE = {"model": "pocket", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}


class SlowBackend(FakeBackend):
    """Waits before each of `late` (numbers of batches) until its client has had two comments more."""

    def __init__(self, script, late):
        super().__init__(script)
        self.late = late
        self.heard = asyncio.Event()

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        self.heard.clear()
        if 0 in self.late:
            await self.heard.wait()
        number = 0
        async for batch in super().stream(request, place):
            if number and number in self.late:
                self.heard.clear()
                await self.heard.wait()
            number += 1
            yield batch


class SlowWorld(World):
    """A router whose application counts what tells of silence, for its backend."""

    def __init__(self, script, late=(0,)):
        super().__init__(SlowBackend(script, late))
        inner, backend, self.sent = self.app, self.backend, []

        async def app(scope, receive, send):
            n = 0

            async def counting(message):
                nonlocal n
                self.sent.append(message)
                await send(message)
                body = message.get("body", b"")
                n = n + 1 if body in (COMMENT, b'event: ping\ndata: {"type":"ping"}\n\n') else 0
                if n >= 2:
                    backend.heard.set()

            await inner(scope, receive, counting)

        self.app = app


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(turns, "HEADERS_S", 0.0)
    monkeypatch.setattr(turns, "SILENCE_S", 0.001)


def plain(text):
    """A stream without what tells of silence."""
    return "".join(f"{block}\n\n" for block in text.split("\n\n")[:-1] if not block.startswith((":", "event: ping")))


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("late", [(0,), (1,), (2,), (0, 1, 3)])
def test_a_stream_that_is_silent_for_long_is_whole(format_, late):
    world = SlowWorld(BEGUN, late)
    answer = world.call("POST", format_.path, json=format_.streamed())
    assert answer.status_code == 200
    assert "Hel" in answer.text
    assert format_.ends(plain(answer.text)) == [format_.whole]
    assert COMMENT.decode() in answer.text or "event: ping" in answer.text
    assert 0 not in late or answer.text.startswith(COMMENT.decode() * 2)
    assert (world.outcomes(), world.in_flight(), world.backend.open_streams) == ({"completed": 1}, 0, 0)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize(
    "end", [(Errored(ErrorInfo(ErrorKind.OVERLOADED, "full")),), UnavailableError("full"), ValueError("full")]
)
def test_a_stream_that_fails_late_ends_once_in_an_error(format_, end):
    world = SlowWorld([end])
    answer = world.call("POST", format_.path, json=format_.streamed())
    assert answer.status_code == 200
    text = plain(answer.text)
    assert format_.ends(text) == [format_.failed]
    assert format_.path != "/v1/responses" or text.startswith("event: response.created\n")
    assert list(world.outcomes().values()) == [1]
    assert (world.in_flight(), world.backend.open_streams) == (0, 0)


@pytest.mark.parametrize("format_", FORMATS, ids=str)
def test_what_is_refused_at_once_has_its_status(format_, monkeypatch):
    monkeypatch.setattr(turns, "HEADERS_S", 60.0)
    world = World(FakeBackend([(Errored(ErrorInfo(ErrorKind.OVERLOADED, "full")),)]))
    assert world.call("POST", format_.path, json=format_.streamed()).status_code == 429


@pytest.mark.anyio
async def test_a_client_that_leaves_while_it_waits_is_noticed():
    world, gone = World(), asyncio.Event()
    world.backend.stall = 0
    asked = [{"type": "http.request", "body": json.dumps({**MESSAGE, "stream": True}).encode(), "more_body": False}]

    async def receive():
        if asked:
            return asked.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message.get("body") == COMMENT:
            gone.set()

    await asyncio.wait_for(world.app(http_scope("/v1/messages"), receive, send), 60)
    assert world.backend.aborted.is_set()
    assert (world.outcomes(), world.in_flight(), world.backend.open_streams) == ({"aborted": 1}, 0, 0)


def test_the_official_clients_pass_over_silence():
    world = SlowWorld(BEGUN, (0, 1, 2))
    fresh = {"cache-control": "no-store"}
    with world.served() as url:
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with client, client.messages.stream(**MESSAGE, extra_headers=fresh) as stream:
            message = stream.get_final_message()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with client.chat.completions.stream(
                model="pocket", messages=MESSAGE["messages"], extra_headers=fresh
            ) as stream:
                chat = stream.get_final_completion()
            with client.responses.stream(model="pocket", input="hello", extra_headers=fresh) as stream:
                response = stream.get_final_response()
    assert [block.text for block in message.content] == ["Hello!"]
    assert (chat.choices[0].message.content, response.output_text) == ("Hello!", "Hello!")


def test_the_official_clients_are_told_of_a_late_failure():
    world = SlowWorld([(Errored(ErrorInfo(ErrorKind.OVERLOADED, "The queue is full")),)])
    with world.served() as url:
        with (
            anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
            pytest.raises(anthropic.APIStatusError, match="The queue is full"),
            client.messages.stream(**MESSAGE) as stream,
        ):
            stream.get_final_message()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="The queue is full"):
                list(client.chat.completions.create(model="pocket", messages=MESSAGE["messages"], stream=True))
            with client.responses.stream(model="pocket", input="hello") as stream:
                last = [event.type for event in stream][-1]
            assert last == "response.failed"


@pytest.mark.parametrize("late", [(), (0,), (1,)])
def test_a_message_begins_with_the_tokens_of_its_prompt(late):
    world = SlowWorld(BEGUN, late)
    answer = world.call("POST", "/v1/messages", json={**MESSAGE, "stream": True})
    events = [json.loads(block.split("data: ")[1]) for block in plain(answer.text).split("\n\n")[:-1]]
    begun, ended = events[0], events[-2]
    assert (begun["type"], ended["type"]) == ("message_start", "message_delta")
    told = {name: begun["message"]["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")}
    assert told == {"input_tokens": 6, "cache_read_input_tokens": 4}
    assert told.items() <= ended["usage"].items()
    assert answer.text.count("message_start\n") == 1
