"""Requests that are the same, at once, through a whole router."""

import asyncio

import httpx
import pytest
from fake_backend import DONE, HELLO, USAGE, FakeBackend, World, chat_body, config_of
from waiting import until_async

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import Errored, TextDelta
from holdfast.router.tenants import Tenant, TenantCache, TenantDirectory, hash_key


class Gated(FakeBackend):
    """Gives its first piece, and goes on once it may. The n-th request fails where `fails` says so."""

    def __init__(self, fails=0):
        super().__init__()
        self.go = asyncio.Event()
        self.fails = fails

    async def stream(self, request, place=None):
        number = len(self.requests)
        async for batch in super().stream(request, place):
            yield batch
            if not self.go.is_set():
                await self.go.wait()
            if number < self.fails:
                yield type(batch)("r1", (Errored(ErrorInfo(ErrorKind.INTERNAL, "broke")),))
                return


def run(world, scenario):
    async def whole():
        transport = httpx.ASGITransport(world.app, client=("127.0.0.1", 50000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            def chat(headers=None, **body):
                call = client.post("/v1/chat/completions", json=chat_body(**body), headers=headers or {})
                return asyncio.create_task(call)

            answers = await scenario(chat)
            await world.cache.drain()
            return answers

    return asyncio.run(whole())


@pytest.mark.parametrize("leader_streams", [False, True])
def test_one_computes_and_each_has_it_in_its_own_shape(leader_streams):
    world = World(Gated())

    async def scenario(chat):
        first = chat(stream=leader_streams)
        await until_async(lambda: world.backend.requests)
        rest = [chat(stream=i % 2 == 1, program_id=f"p{i}") for i in range(4)]
        await until_async(lambda: world.cache.flights.waiting == 4)
        world.backend.go.set()
        return await asyncio.gather(first, *rest)

    first, *rest = run(world, scenario)
    assert len(world.backend.requests) == 1
    assert [each.headers["x-holdfast-cache"] for each in (first, *rest)] == ["miss", *["joined"] * 4]
    assert "age" not in first.headers
    for i, each in enumerate(rest):
        assert each.headers["age"] == "0"
        if i % 2:
            assert each.text.endswith("data: [DONE]\n\n")
        else:
            assert each.json()["choices"][0]["message"]["content"] == "Hello!"
            assert each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == USAGE.prompt
    assert world.outcomes() == {"completed": 1, "cached": 4}
    assert world.in_flight() == 0
    assert len(world.cache.flights) == 0


@pytest.mark.parametrize("leader_streams", [False, True])
def test_a_leader_that_leaves_hands_over_and_pays_for_what_was_drawn(leader_streams):
    world = World(Gated())

    async def scenario(chat):
        first = chat(stream=leader_streams)
        await until_async(lambda: world.backend.requests)
        rest = [chat(stream=i == 1) for i in range(3)]
        await until_async(lambda: world.cache.flights.waiting == 3)
        first.cancel()
        await until_async(lambda: len(world.backend.requests) == 2)
        await until_async(lambda: world.cache.flights.waiting == 2)
        world.backend.go.set()
        return await asyncio.gather(*rest)

    rest = run(world, scenario)
    assert [each.headers["x-holdfast-cache"] for each in rest] == ["miss", "joined", "joined"]
    assert len(world.backend.requests) == 2
    assert world.backend.open_streams == 0
    assert world.outcomes() == {"aborted": 1, "completed": 1, "cached": 2}
    assert world.backend.asked == [world.backend.requests[0].request_id], "what was drawn is asked for, to be booked"


def test_a_follower_that_leaves_changes_nothing_for_the_others():
    world = World(Gated())

    async def scenario(chat):
        first = chat()
        await until_async(lambda: world.backend.requests)
        rest = [chat() for _ in range(3)]
        await until_async(lambda: world.cache.flights.waiting == 3)
        rest[0].cancel()
        await until_async(lambda: world.cache.flights.waiting == 2)
        world.backend.go.set()
        return await asyncio.gather(first, *rest[1:])

    told = run(world, scenario)
    assert [each.headers["x-holdfast-cache"] for each in told] == ["miss", "joined", "joined"]
    assert world.outcomes() == {"completed": 1, "cached": 2, "aborted": 1}
    assert not world.backend.asked, "no engine worked for it"


@pytest.mark.parametrize("leader_streams", [False, True])
def test_where_the_leader_fails_each_computes_for_itself(leader_streams):
    world = World(Gated(fails=1))

    async def scenario(chat):
        first = chat(stream=leader_streams)
        await until_async(lambda: world.backend.requests)
        rest = [chat() for _ in range(3)]
        await until_async(lambda: world.cache.flights.waiting == 3)
        world.backend.go.set()
        return await asyncio.gather(first, *rest)

    first, *rest = run(world, scenario)
    assert ("broke" in first.text) is True
    assert [each.status_code for each in rest] == [200] * 3
    assert [each.headers["x-holdfast-cache"] for each in rest] == ["miss"] * 3
    assert len(world.backend.requests) == 4
    assert world.outcomes() == {"failed": 1, "completed": 3}
    assert len(world.cache.flights) == 0


@pytest.mark.parametrize(
    "headers",
    [{"cache-control": "no-store"}, {"cache-control": "no-cache"}],
)
def test_who_waits_for_nobody(headers):
    world = World(Gated())

    async def scenario(chat):
        first = chat()
        await until_async(lambda: world.backend.requests)
        second = chat(headers)
        await until_async(lambda: len(world.backend.requests) == 2)
        world.backend.go.set()
        return await asyncio.gather(first, second)

    run(world, scenario)
    assert world.outcomes() == {"completed": 2}


def test_no_store_keeps_nothing_and_no_cache_keeps_the_new_answer():
    world = World()
    for control, told in (("no-store", "bypass"), (None, "miss"), ("no-cache", "bypass"), (None, "hit")):
        answer = world.call(
            "POST", "/v1/chat/completions", json=chat_body(), headers={"cache-control": control} if control else {}
        )
        assert answer.headers["x-holdfast-cache"] == told
    assert len(world.backend.requests) == 3
    fresh = World()
    for _ in range(2):
        fresh.call("POST", "/v1/chat/completions", json=chat_body(), headers={"cache-control": "no-cache"})
    assert fresh.chat().headers["x-holdfast-cache"] == "hit"


def test_a_tenant_without_a_cache():
    off = Tenant("acme", (hash_key("a"),), cache=TenantCache(enabled=False))
    world = World(tenants=TenantDirectory([off, Tenant("other", (hash_key("b"),))]))
    for key, results in (("a", ["bypass", "bypass"]), ("b", ["miss", "hit"])):
        head = {"authorization": f"Bearer {key}"}
        told = [world.call("POST", "/v1/chat/completions", json=chat_body(), headers=head) for _ in results]
        assert [each.headers["x-holdfast-cache"] for each in told] == results


def test_an_answer_too_long_to_be_kept_is_had_by_those_who_wait():
    world = World(Gated(), config=config_of(cache_answer_bytes=10))
    world.backend.script = ((TextDelta("x" * 100),), (DONE,))

    async def scenario(chat):
        told = [chat() for _ in range(2)]
        await until_async(lambda: world.cache.flights.waiting == 1)
        world.backend.go.set()
        await asyncio.gather(*told)
        return await chat()

    assert run(world, scenario).headers["x-holdfast-cache"] == "miss"
    assert world.outcomes() == {"completed": 2, "cached": 1}


def test_the_age_of_a_hit():
    world = World(FakeBackend(HELLO))
    now = [1000.0]
    world.cache._now = lambda: now[0]
    world.chat()
    now[0] += 7.5
    assert world.chat().headers["age"] == "7"
