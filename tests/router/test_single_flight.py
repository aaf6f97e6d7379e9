"""Requests that are the same, at once: through a whole router, and against a model."""

import asyncio
from collections import Counter

import httpx
import hypothesis.strategies as st
import pytest
from fake_backend import DONE, HELLO, USAGE, FakeBackend, World, chat_body, config_of
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from waiting import until_async

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import Errored, TextDelta
from holdfast.router.protocol.errors import ClientGoneError
from holdfast.router.records.single_flight import SingleFlight, Unresolved
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


KEYS = st.sampled_from(["a", "b"])


class Crowd(RuleBasedStateMachine):
    """Single flight against a model. Requests come, and each ends once: with an answer, its own failure, or because its
    client left.
    """

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.flights = SingleFlight()
        self.tasks = {}  # of each request, by number
        self.keys = {}
        self.leads = {}  # requests that compute for others, by number
        self.alone = set()  # that compute for themselves
        self.end = {}  # what each that computes is told to do
        self.computed = Counter()
        self.ended = Counter()
        self.answers = {}

    def teardown(self):
        for number in list(self.tasks):
            self.tasks[number].cancel()
        self.settle()
        self.loop.close()

    def settle(self):
        async def spin():
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run_until_complete(spin())

    async def serve(self, number, key):
        adopted = []
        try:
            result = None
            while (leader := self.flights.lead(key)) is None:
                result = await self.flights.follow(key)
                if isinstance(result, str):
                    self.answers[number] = result
                    return
                if result is Unresolved.FAILED:
                    break
            if leader is None:
                self.alone.add(number)
            else:
                adopted.append(leader)
                self.leads[number] = leader
            self.end[number] = self.loop.create_future()
            how = await self.end[number]
            if how == "fail":
                raise ValueError
            self.computed[key] += 1
            self.answers[number] = key
            if number in self.leads:
                self.leads[number].resolve(key)
        except BaseException as error:
            for lead in adopted:
                lead.__exit__(ClientGoneError, ClientGoneError(), None) if isinstance(
                    error, asyncio.CancelledError
                ) else lead.__exit__(type(error), error, None)
        finally:
            self.ended[number] += 1
            self.leads.pop(number, None)
            self.alone.discard(number)
            self.end.pop(number, None)
            self.tasks.pop(number, None)

    @rule(target=requests, key=KEYS)
    def come(self, key):
        number = len(self.keys)
        self.keys[number] = key
        self.tasks[number] = self.loop.create_task(self.serve(number, key))
        self.settle()
        return number

    @rule(number=requests, how=st.sampled_from(["compute", "fail"]))
    def finish(self, number, how):
        if number in self.end:
            waited = [n for n in self.tasks if self.keys[n] == self.keys[number] and n not in self.end]
            led = number in self.leads
            self.end[number].set_result(how)
            self.settle()
            if led and how == "compute":
                assert all(self.answers.get(n) == self.keys[number] for n in waited)
            if led and how == "fail":
                assert all(n in self.alone for n in waited), "each tries for itself"

    @rule(number=requests, others=st.booleans())
    def leave(self, number, others):
        """Its client goes; `others`: and in the same moment its answer comes, or the next leader's client goes."""
        if number not in self.tasks:
            return
        waiting = [n for n in self.tasks if self.keys[n] == self.keys[number] and n not in self.end]
        led = number in self.leads
        if others and led and waiting:
            self.leads[number].leave()  # the next one leads, and does not know it yet
            self.tasks[waiting[0]].cancel()
        self.tasks[number].cancel()
        rival = next((n for n in self.leads if self.keys[n] == self.keys[number] and n != number), None)
        if others and rival is not None:
            self.end[rival].set_result("compute")
        self.settle()
        if led and waiting and not others:
            assert waiting[0] in self.leads, "who has waited longest goes on"

    @invariant()
    def one_computes_for_all(self):
        leading = Counter(self.keys[number] for number in self.leads)
        assert all(n == 1 for n in leading.values())
        waiting = [number for number in self.tasks if number not in self.end]
        assert all(leading[self.keys[number]] == 1 for number in waiting), "nobody waits for nobody"
        assert len(self.flights) == len(leading)
        assert self.flights.waiting == len(waiting)

    @invariant()
    def every_request_ends_once(self):
        assert all(n == 1 for n in self.ended.values())
        assert set(self.ended) | set(self.tasks) == set(self.keys)


Crowd.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCrowd = Crowd.TestCase
