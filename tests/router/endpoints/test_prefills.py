"""Prefills over HTTP: with a fake replica what is asked of it and kept, with the shipped model what it saves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_backend import DONE, HELLO, FakeBackend, World, bearer, chat_body, keyed
from pinning import KEEP
from redis_server import records_away, shared_records, shared_server
from service_backend import ServiceBackend

from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.kv.tags import Hint, Label
from holdfast.replicas.requests import Completed, Errored, Usage
from holdfast.router.backend import ANYWHERE
from holdfast.router.config import RouterConfig

pytestmark = pytest.mark.anyio

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKS: Any = [{"role": "user", "content": "What is the weather in Oslo and in Rome?"}]
CALLS: Any = [
    {
        "id": f"call_{city}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'},
    }
    for city in ("Oslo", "Rome")
]
CALLED: Any = [*ASKS, {"role": "assistant", "content": None, "tool_calls": CALLS}]


def result(city: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": f"call_{city}", "content": f"It rains in {city}, 7 degrees, wind from west"}


def make(reason: str = "length", **settings: Any) -> World:
    done = Completed(reason, Usage(prompt=40, cached=30), DONE.timing)
    return World(FakeBackend([(done,)]), **settings)


def post(world: World, path: str = "/v1/prefills", **body: Any) -> Any:
    given = {"model": "pocket", "messages": CALLED} if path == "/v1/prefills" else {"messages": [result("Oslo")]}
    return world.call("POST", path, json={name: value for name, value in (given | body).items() if value is not None})


# ---- with a fake replica ----


def test_a_handle_says_what_was_computed_and_for_how_long_it_is_kept():
    world = make()
    made = post(world, tools=[TOOL], program_id="p", keep_s=5)
    assert made.status_code == 200
    told = made.json()
    assert told["object"] == "prefill"
    assert (told["program_id"], told["tokens"], told["cached_tokens"], told["complete"]) == ("p", 40, 30, True)
    assert told["expires_at"] - told["created"] in (5, 6)
    (request,) = world.backend.requests
    assert (request.sampling.max_tokens, request.program_id, request.background.keep_s) == (0, "default/p", 5.0)
    assert request.background.handle == told["id"]
    assert [message["role"] for message in request.prompt.messages] == ["user", "assistant"]
    shown = world.call("GET", f"/v1/prefills/{told['id']}")
    assert shown.json() == told


def test_it_is_no_turn_and_the_next_turn_goes_where_it_was_computed():
    world = make()
    world.backend.script = HELLO
    world.chat(program_id="p")
    world.now += 2.0
    world.backend.script = [(Completed("length", DONE.usage, DONE.timing),)]
    post(world, program_id="p")
    world.now += 3.0
    world.backend.script = HELLO
    world.chat(program_id="p", messages=CALLED)
    turn = world.backend.requests[-1]
    assert (turn.program_turns, world.backend.places[-1].home) == (1, "r1")


def test_without_a_name_it_is_the_program_whose_conversation_it_goes_on_with():
    world = make()
    world.backend.script = HELLO
    world.chat(messages=ASKS)
    program = world.backend.requests[-1].program_id
    world.backend.script = [(Completed("length", DONE.usage, DONE.timing),)]
    told = post(world, messages=[*ASKS, {"role": "assistant", "content": "Hello!"}])
    assert world.backend.requests[-1].program_id == program
    assert told.json()["program_id"] is None
    world.backend.script = HELLO
    world.chat(messages=[*ASKS, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "And?"}])
    assert world.backend.requests[-1].program_id == program


def test_it_is_extended_and_a_chat_goes_on_from_it():
    world = make()
    made = post(world, tools=[TOOL]).json()
    longer = post(world, f"/v1/prefills/{made['id']}/extend").json()
    assert longer["id"] == made["id"]
    first, second = world.backend.requests
    assert second.prompt.messages == [*first.prompt.messages, result("Oslo")]
    assert world.backend.places[1].home == "r1"
    world.backend.script = HELLO
    answer = world.chat(prefill_id=made["id"], messages=[result("Rome")])
    assert answer.status_code == 200
    turn = world.backend.requests[-1]
    assert turn.prompt.messages == [*second.prompt.messages, result("Rome")]
    assert (turn.prompt.tools, turn.program_id) == ((TOOL,), first.program_id)


async def test_results_that_come_at_once_are_all_in_it():
    class Slow(FakeBackend):
        async def generate(self, request, place=ANYWHERE):
            for _ in range(100):  # so that the other one is read meanwhile
                await asyncio.sleep(0)
            return await super().generate(request, place)

    backend = Slow(make().backend.script)
    async with routers(backend, 1) as [router]:
        assert await extended(await begun(router), (router, "Oslo"), (router, "Rome")) == [200, 200]
    assert backend.requests[-1].prompt.messages[len(CALLED) :] == [result("Oslo"), result("Rome")]


def hinted(*directives: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0"}
    action |= {"payload": {"directives": list(directives)}}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def test_kv_hints_are_those_of_turns_and_an_extension_may_replace_them():
    world = make()
    made = post(world, kv_hints=hinted({"messages": [0, 1], "tag": "user_query", "duration": 7.5})).json()
    at = f"/v1/prefills/{made['id']}/extend"
    post(world, at)
    post(world, at, messages=[result("Rome")], kv_hints=hinted({"messages": [2, 4], "priority": 7}))
    first, second, third = world.backend.requests
    assert first.hints == second.hints == (Hint("messages", Label("user_query", 40, 7.5), 0, 1),)
    assert third.hints == (Hint("messages", Label(priority=7), 2, 4),)
    more = {"messages": [{"role": "user", "content": "And?"}], "kv_hints": hinted({"messages": [0, 6], "priority": 7})}
    for path, body in (("/v1/prefills", {"kv_hints": hinted({"messages": [0, 3], "priority": 7})}), (at, more)):
        refused = post(world, path, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_hints")
    assert len(world.backend.requests) == 3


class Meeting(FakeBackend):
    """The first extensions of a prefill are computed only once `n` of them have come."""

    def __init__(self, n: int) -> None:
        super().__init__(make().backend.script)
        self.left = n
        self.came = asyncio.Event()
        self.all_there = asyncio.Event()

    async def generate(self, request, place=ANYWHERE):
        if len(request.prompt.messages) > len(CALLED) and self.left:
            self.left -= 1
            self.came.set()
            if not self.left:
                self.all_there.set()
            await self.all_there.wait()
        return await super().generate(request, place)


@asynccontextmanager
async def routers(backend, n=2) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients of so many routers with one Redis, before one backend."""
    async with AsyncExitStack() as stack:
        clients, first = [], shared_records()
        for _ in range(n):
            records = shared_records(first)
            stack.push_async_callback(records.close)
            clients.append(await stack.enter_async_context(World(backend, records=records).client()))
        yield clients


async def begun(router: httpx.AsyncClient) -> str:
    """The path of a new prefill."""
    made = await router.post("/v1/prefills", json={"model": "pocket", "messages": CALLED})
    return f"/v1/prefills/{made.json()['id']}"


async def extended(at: str, *by: tuple[httpx.AsyncClient, str]) -> list[int]:
    """The statuses of extensions that come at once, each of a router and a city."""
    calls = (router.post(f"{at}/extend", json={"messages": [result(city)]}) for router, city in by)
    return [answer.status_code for answer in await asyncio.gather(*calls)]


async def test_results_that_come_at_once_to_two_routers_are_all_in_it():
    backend = Meeting(2)
    async with routers(backend) as (one, two):
        at = await begun(one)
        assert await extended(at, (one, "Oslo"), (two, "Rome")) == [200, 200]
        named = chat_body(prefill_id=at.rpartition("/")[2], messages=[{"role": "user", "content": "And?"}])
        backend.script = HELLO
        assert (await one.post("/v1/chat/completions", json=named)).status_code == 200
    *computed, turn = backend.requests
    assert len(computed) == 4, "the prompt, each result, and the one of them once more behind the other"
    assert turn.prompt.messages[: len(CALLED)] == computed[0].prompt.messages
    contents = [each["content"] for each in turn.prompt.messages[len(CALLED) : -1]]
    assert sorted(contents) == [result(city)["content"] for city in ("Oslo", "Rome")]
    assert turn.prompt.messages[:-1] == computed[-1].prompt.messages


async def test_of_one_result_that_two_routers_get_one_is_in_it():
    backend = Meeting(2)
    async with routers(backend) as (one, two):
        at = await begun(one)
        assert sorted(await extended(at, (one, "Oslo"), (two, "Oslo"))) == [200, 400]
        assert await extended(at, (one, "Rome")) == [200]
    assert backend.requests[-1].prompt.messages[len(CALLED) :] == [result("Oslo"), result("Rome")]


async def test_what_is_released_as_it_is_extended_elsewhere_is_gone():
    backend = Meeting(2)
    async with routers(backend) as (one, two):
        at = await begun(one)
        extending = asyncio.create_task(one.post(f"{at}/extend", json={"messages": [result("Oslo")]}))
        await backend.came.wait()
        assert (await two.delete(at)).status_code == 200
        backend.all_there.set()
        gone = await extending
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "prefill_not_found")
        assert (await two.get(at)).status_code == 404
    released = [("default", at.rpartition("/")[2])]
    assert backend.released == released * 2, "what was computed meanwhile goes, too"


def assert_gone(world: World, made: str) -> None:
    at = f"/v1/prefills/{made}"
    calls = [world.call("GET", at), world.call("DELETE", at), post(world, f"{at}/extend"), world.chat(prefill_id=made)]
    for answer in calls:
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "prefill_not_found")
    assert answer.json()["error"]["param"] == "prefill_id"


def test_it_lives_as_long_as_it_was_asked_for_and_a_whole_time_from_each_extension():
    world = make()
    made = post(world, keep_s=300).json()["id"]
    key = f"{world.records.namespace}/records/prefills/default/{made}"
    with shared_server().client() as redis:
        assert 0 < redis.pttl(key) <= 300_000
        redis.pexpire(key, 100_000)
        assert post(world, f"/v1/prefills/{made}/extend").status_code == 200
        assert 200_000 < redis.pttl(key) <= 300_000
        redis.delete(key)  # as Redis does at the end of its time
    assert_gone(world, made)


def test_it_is_released_once():
    world = make()
    made = post(world).json()["id"]
    assert world.call("DELETE", f"/v1/prefills/{made}").json() == {"id": made, "object": "prefill", "deleted": True}
    assert_gone(world, made)
    assert world.backend.released == [("default", made)]


def test_one_of_another_tenant_is_not_found():
    world = make(tenants=keyed("one", "two"))
    body = {"model": "pocket", "messages": CALLED}
    made = world.call("POST", "/v1/prefills", json=body, headers=bearer("one")).json()
    calls = (("GET", "one", 200), ("GET", "two", 404), ("DELETE", "two", 404), ("GET", "one", 200))
    for method, who, status in calls:
        assert world.call(method, f"/v1/prefills/{made['id']}", headers=bearer(who)).status_code == status


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"model": None}, "model"),
        ({"keep_s": 0}, "keep_s"),
        ({"keep_s": 1e9}, "keep_s"),
        ({"keep_s": "long"}, "keep_s"),
        ({"program_id": ""}, "program_id"),
        ({"program_id": "a\nb"}, "program_id"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"kv_hints": 5}, "kv_hints"),
    ],
)
def test_bad_input_names_its_field(changes, field):
    world = make()
    refused = post(world, **changes)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert not world.backend.requests


def test_a_chat_with_a_handle_of_another_model_or_none_is_refused():
    world = make()
    world.backend.cards = (world.backend.cards[0], type(world.backend.cards[0])("other", 4096, 1000))
    made = post(world).json()
    refused = world.chat(model="other", prefill_id=made["id"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


def test_an_extension_that_answers_no_open_call_is_refused():
    world = make()
    made = post(world).json()
    for path, body in (
        (f"/v1/prefills/{made['id']}/extend", {"messages": [result("Bonn")]}),
        ("/v1/chat/completions", chat_body(prefill_id=made["id"], messages=[result("Bonn")])),
    ):
        refused = world.call("POST", path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.tool_call_id")


def test_a_result_is_told_once():
    world = make()
    made = post(world).json()
    at = f"/v1/prefills/{made['id']}/extend"
    assert post(world, at).status_code == 200
    named = chat_body(prefill_id=made["id"], messages=[result("Rome"), result("Oslo")])
    for path, body, index in ((at, {"messages": [result("Oslo")]}, 0), ("/v1/chat/completions", named, 1)):
        refused = world.call("POST", path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"messages.{index}.tool_call_id")
    again = [{"role": "assistant", "content": None, "tool_calls": CALLS[:1]}, result("Oslo")]
    assert post(world, at, messages=[result("Rome"), *again]).status_code == 200, "the model calls with that id again"
    assert post(world, at, messages=[result("Oslo")]).status_code == 400


def test_what_fails_on_the_replica_fails_here_and_leaves_no_handle():
    world = make()
    world.backend.script = [(Errored(ErrorInfo(ErrorKind.INVALID, "the chat template refuses", "messages")),)]
    refused = post(world)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert world.in_flight() == 0
    assert world.outcomes() == {"rejected": 1.0}


@pytest.mark.parametrize("away", [False, True])
def test_one_that_cannot_be_stored_is_refused_and_nothing_is_kept_for_it(away):
    """Because the tenant's prefills take their limit, or Redis is away."""
    settings = {"records": records_away()} if away else {"config": RouterConfig(prefill_tenant_bytes=10)}
    world = make(**settings)
    refused = post(world)
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        (503, "unavailable") if away else (429, "overloaded")
    )
    (request,) = world.backend.requests
    assert world.backend.released == [("default", request.background.handle)]


# ---- with the shipped model ----


CONFIG = EngineConfig(cells=4096, threads=1, retention=RetentionConfig(KEEP))
CHAT = "/v1/chat/completions"
FULL = [*CALLED, result("Oslo"), result("Rome")]
FIRST: Any = {"max_tokens": 20, "temperature": 0}


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[ServiceBackend, Any]]:
    """A new engine, and what posts a body to the router before it."""
    backend = ServiceBackend(CONFIG)
    async with World(backend, config=RouterConfig(response_cache=False)).client() as client:

        async def posted(path: str, body: Any) -> Any:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield backend, posted
    await backend.service.close()


@pytest.fixture(scope="module")
def plain() -> Any:
    """The answer to the whole conversation where nothing was computed ahead."""

    async def ask() -> Any:
        async with engine() as (_, posted):
            return await posted(CHAT, chat_body(messages=FULL, tools=[TOOL], program_id="p", **FIRST))

    return asyncio.run(ask())


async def test_the_turn_pays_for_what_no_one_knew_and_answers_the_same(plain):
    async with engine() as (backend, posted):
        ahead = {"model": "pocket", "messages": CALLED, "tools": [TOOL], "program_id": "p"}
        made = await posted("/v1/prefills", ahead)
        longer = await posted(f"/v1/prefills/{made['id']}/extend", {"messages": [result("Oslo")]})
        turn = await posted(CHAT, chat_body(messages=FULL, tools=[TOOL], program_id="p", **FIRST))
        stats = backend.service.engine.stats
    assert made["complete"]
    assert longer["complete"]
    assert longer["cached_tokens"] == made["tokens"]
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] == longer["tokens"]
    assert turn["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    rest = turn["usage"]["prompt_tokens"] - longer["tokens"]
    assert (stats.prompt_computed, stats.ahead_used) == (rest, longer["tokens"])
    assert rest < 45  # one result, and what stands around it


@pytest.mark.parametrize("lost", [False, True])
async def test_the_chat_that_names_the_handle_is_the_same_chat(plain, lost):
    """Where what was computed ahead is `lost` with its replica, the turn computes it."""
    async with engine() as (backend, posted):
        ahead = {"model": "pocket", "messages": [*CALLED, result("Oslo")], "tools": [TOOL]}
        made = await posted("/v1/prefills", ahead)
        if lost:
            await backend.service.close()
            backend.loaded = None  # it is loaded anew, and knows nothing
        turn = await posted(CHAT, chat_body(messages=[result("Rome")], prefill_id=made["id"], **FIRST))
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] == (0 if lost else made["tokens"])
    assert turn["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert turn["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
