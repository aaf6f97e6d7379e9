"""What a router has served is gone as soon as nobody holds it: no cycles, for which Python's collector would have to
look through everything that there is, and hold every stream up meanwhile.
"""

import asyncio

import orjson
import pytest
from cycles import left_in_cycles
from fake_backend import CALL, FORMATS, FakeBackend, World, chat_body, http_scope, keyed

from holdfast.replicas.errors import DeadlineError, UnavailableError
from holdfast.replicas.requests import TextDelta

CHAT = "/v1/chat/completions"
SAID = chat_body()["messages"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}
FAILS = [(TextDelta("Hel"),), UnavailableError("gone")]


def stalling():
    backend = FakeBackend()
    backend.stall = 1
    return World(backend)


def failing(*script):
    return World(FakeBackend(script))


CASES = {
    **{f"whole {each}": (World, each.path, {"model": "pocket", **each.body}) for each in FORMATS},
    **{f"stream {each}": (World, each.path, each.streamed()) for each in FORMATS},
    "calls": (lambda: World(FakeBackend(CALL)), CHAT, chat_body(stream=True, tools=[TOOL])),
    "a schema": (World, CHAT, chat_body(response_format=SCHEMA)),
    "several answers": (World, CHAT, chat_body(n=3)),
    "from the cache": (World, CHAT, chat_body(temperature=0)),
    "a program": (World, CHAT, chat_body(program_id="p")),
    "wrong": (World, CHAT, chat_body(messages="x")),
    "no JSON": (World, CHAT, None),
    "no key": (lambda: World(tenants=keyed("acme")), CHAT, chat_body()),
    "refused": (lambda: failing(DeadlineError("late", retry_after_s=1.0)), CHAT, chat_body()),
    "failing": (lambda: failing(*FAILS), CHAT, chat_body()),
    "failing stream": (lambda: failing(*FAILS), CHAT, chat_body(stream=True)),
    "a bug": (lambda: failing(ValueError("a bug")), CHAT, chat_body(stream=True)),
    "its client leaves": (stalling, CHAT, chat_body()),
    "its client leaves a stream": (stalling, CHAT, chat_body(stream=True)),
    "counted": (World, "/v1/messages/count_tokens", {"model": "pocket", "messages": SAID}),
    "ahead": (World, "/v1/prefills", {"model": "pocket", "messages": SAID}),
    "tokens": (World, "/tokenize", {"model": "pocket", "prompt": "hello"}),
    "looked at": (World, "/v1/cluster/status", None),
}


async def serve(world, path, body):
    """One request whose client has left by the time that something is asked of it again, if it was not answered."""
    scope = http_scope(path, "GET" if path == "/v1/cluster/status" else "POST", [(b"host", b"localhost")])
    asked, answered = [], asyncio.Event()

    async def receive():
        if not asked:
            asked.append(True)
            return {"type": "http.request", "body": b"" if body is None else orjson.dumps(body), "more_body": False}
        if world.backend.stall is None:
            await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    await world.app(scope, receive, send)
    await world.cache.drain()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.anyio
async def test_what_was_served_leaves_no_cycles(case):
    make, path, body = CASES[case]
    world = make()
    for _ in range(3):  # the first ones make what stays
        await serve(world, path, body)
    with left_in_cycles() as found:
        for _ in range(3):
            await serve(world, path, body)
        await asyncio.sleep(0)
    assert found == {}
