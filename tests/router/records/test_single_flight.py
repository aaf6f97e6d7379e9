"""Requests that are the same, at once: through a whole router, and against a model."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import hypothesis.strategies as st
import pytest
from fake_backend import DONE, USAGE, FakeBackend, World, chat_body, config_of
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from waiting import until_async

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import Errored, TextDelta
from holdfast.router.protocol.errors import ClientGoneError
from holdfast.router.records.response_cache import SingleFlight, Unresolved

pytestmark = pytest.mark.anyio


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


@asynccontextmanager
async def client(world):
    """Starts chat completions, each with a client of its own that may leave."""
    async with world.client() as http:

        def chat(headers=None, **body):
            call = http.post("/v1/chat/completions", json=chat_body(**body), headers=headers or {})
            return asyncio.create_task(call)

        yield chat
        await world.cache.drain()


async def led(world, chat, n, **leader):
    """A request that computes, and `n` that wait for it, the second of them streamed."""
    first = chat(**leader)
    await until_async(lambda: world.backend.requests)
    rest = [chat(stream=i == 1, program_id=f"p{i}") for i in range(n)]
    await until_async(lambda: world.cache.flights.waiting == n)
    return first, rest


def results(answers):
    return [each.headers["x-holdfast-cache"] for each in answers]


@pytest.mark.parametrize("leader_streams", [False, True])
async def test_one_computes_and_each_has_it_in_its_own_shape(leader_streams):
    world = World(Gated())
    async with client(world) as chat:
        first, rest = await led(world, chat, 4, stream=leader_streams)
        world.backend.go.set()
        first, *rest = await asyncio.gather(first, *rest)
    assert len(world.backend.requests) == 1
    assert results((first, *rest)) == ["miss", *["joined"] * 4]
    assert "age" not in first.headers
    for i, each in enumerate(rest):
        assert each.headers["age"] == "0"
        if i == 1:
            assert each.text.endswith("data: [DONE]\n\n")
        else:
            assert each.json()["choices"][0]["message"]["content"] == "Hello!"
            assert each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == USAGE.prompt
    assert world.outcomes() == {"completed": 1, "cached": 4}
    assert world.in_flight() == 0
    assert not world.cache.flights.leaders


@pytest.mark.parametrize("leader_streams", [False, True])
async def test_a_leader_that_leaves_hands_over_and_pays_for_what_was_drawn(leader_streams):
    world = World(Gated())
    async with client(world) as chat:
        first, rest = await led(world, chat, 3, stream=leader_streams)
        first.cancel()
        await until_async(lambda: len(world.backend.requests) == 2)
        await until_async(lambda: world.cache.flights.waiting == 2)
        world.backend.go.set()
        assert results(await asyncio.gather(*rest)) == ["miss", "joined", "joined"]
    assert len(world.backend.requests) == 2
    assert world.backend.open_streams == 0
    assert world.outcomes() == {"aborted": 1, "completed": 1, "cached": 2}
    assert world.backend.asked == [world.backend.requests[0].request_id], "what was drawn is asked for, to be booked"


@pytest.mark.parametrize("leader_streams", [False, True])
async def test_where_the_leader_fails_each_computes_for_itself(leader_streams):
    world = World(Gated(fails=1))
    async with client(world) as chat:
        first, rest = await led(world, chat, 3, stream=leader_streams)
        world.backend.go.set()
        first, *rest = await asyncio.gather(first, *rest)
    assert "broke" in first.text
    assert [each.status_code for each in rest] == [200] * 3
    assert results(rest) == ["miss"] * 3
    assert len(world.backend.requests) == 4
    assert world.outcomes() == {"failed": 1, "completed": 3}
    assert not world.cache.flights.leaders


@pytest.mark.parametrize("control", ["no-store", "no-cache"])
async def test_a_request_that_wants_no_stored_answer_waits_for_nobody(control):
    world = World(Gated())
    async with client(world) as chat:
        first = chat()
        await until_async(lambda: world.backend.requests)
        second = chat({"cache-control": control})
        await until_async(lambda: len(world.backend.requests) == 2)
        world.backend.go.set()
        await asyncio.gather(first, second)
    assert world.outcomes() == {"completed": 2}


def test_no_store_keeps_nothing_and_no_cache_keeps_the_new_answer():
    world = World()
    for control, result in (("no-store", "bypass"), ("", "miss"), ("no-cache", "bypass"), ("", "hit")):
        headers = {"cache-control": control}
        answer = world.call("POST", "/v1/chat/completions", json=chat_body(), headers=headers)
        assert answer.headers["x-holdfast-cache"] == result
    assert len(world.backend.requests) == 3


async def test_an_answer_too_long_to_be_kept_is_had_by_those_who_wait():
    world = World(Gated(), config=config_of(cache_answer_bytes=10))
    world.backend.script = ((TextDelta("x" * 100),), (DONE,))
    async with client(world) as chat:
        both = [chat() for _ in range(2)]
        await until_async(lambda: world.cache.flights.waiting == 1)
        world.backend.go.set()
        await asyncio.gather(*both)
        assert results([await chat()]) == ["miss"]
    assert world.outcomes() == {"completed": 2, "cached": 1}


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
                self.leads[number].end(key)
        except BaseException as error:
            told = ClientGoneError() if isinstance(error, asyncio.CancelledError) else error
            for lead in adopted:
                lead.__exit__(type(told), told, None)
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
        assert len(self.flights.leaders) == len(leading)
        assert self.flights.waiting == len(waiting)

    @invariant()
    def every_request_ends_once(self):
        assert all(n == 1 for n in self.ended.values())
        assert set(self.ended) | set(self.tasks) == set(self.keys)


Crowd.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCrowd = Crowd.TestCase
