"""Quotas against a real Redis, by a clock of the test's own, and what a router does without Redis."""

import asyncio
from collections import deque
from datetime import UTC, datetime
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import RedisServer
from waiting import until_async

from holdfast.router.config import Prices, RouterConfig
from holdfast.router.entry.quotas import (
    LEASE_S,
    PART_MS,
    Cost,
    QuotaError,
    Quotas,
    RateLimitStatus,
    anthropic_headers,
    duration,
    openai_headers,
)
from holdfast.router.entry.usage import SEEN_S, CallEnd, UsageBooks, UsageRecord, cost_of, priced
from holdfast.router.protocol.errors import Refusal, api_error
from holdfast.router.records.store import Records, RedisAddress
from holdfast.router.tenants import Tenant, TenantLimits

START = 1_795_000_000_000  # ms; a day of November 2026
MINUTE = 60_000
DAY = 86_400_000
ids = count()


class Clock:
    def __init__(self, now=START):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


class Routers:
    """Several, each with its own connection to one Redis, on one event loop."""

    _space = 0

    def __init__(self, redis, n=1, config=None):
        Routers._space += 1
        self.clock = Clock()
        self.space = f"test/{Routers._space}"
        self.stores = [Records(RedisAddress(redis.url, namespace=self.space), 5.0) for _ in range(n)]
        self.each = [
            Router(Quotas(store, n, lambda: self.clock.now / 1000, self.clock), store, config) for store in self.stores
        ]
        self.books = self.each[0].books

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for router, store in zip(self.each, self.stores, strict=True):
            await router.books.close()
            await store.close()


class Router:
    """The quotas and the books of one router, and calls that come to it."""

    def __init__(self, quotas, store=None, config=None):
        self.config = config or RouterConfig()
        self.quotas = quotas
        self.books = UsageBooks(self.config, quotas, store)

    async def admit(self, who, answers=1, prompt=0, output=0, program=""):
        """The id of the call. Raises QuotaError."""
        id_, units = f"call-{next(ids)}", round(priced(self.config.prices, prompt, 0, output))
        await self.quotas.admit(who, id_, Cost(answers, prompt, prompt, output, units), program, lease=True)
        return id_

    async def admitted(self, who, **call):
        """The id of the call; None where it is refused."""
        try:
            return await self.admit(who, **call)
        except QuotaError:
            return None

    async def end(self, who, id_, prompt=0, cached=0, output=0, outcome="completed", program="", over=False):
        at = self.quotas.clock()
        used = {"input": prompt, "cached": cached, "output": output, "drawn": output, "computed": prompt - cached}
        record = UsageRecord(id_, at, who.name, "key-1", "pocket", program, "chat", outcome, **used)
        cost = cost_of(self.config.prices, record)
        await self.books.book(CallEnd(who.name, id_, record, cost, at, program=program, program_ended=over))


def tenant(name="acme", **limits):
    return Tenant(name, limits=TenantLimits(**limits))


# ---- the window ----

calls = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20_000), st.integers(1, 40)), min_size=1, max_size=40)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=calls, limit=st.integers(40, 200))
def test_no_minute_has_more_than_the_limit_and_nobody_with_room_is_refused(redis, calls, limit):
    """Whichever of four routers a call comes to."""

    async def run():
        async with Routers(redis, 4) as routers:
            who, taken = tenant(output_tokens_per_minute=limit), deque()
            for number, gap, n in calls:
                routers.clock.now += gap
                now, router = routers.clock.now, routers.each[number]
                id_ = await router.admitted(who, output=n)
                recent = sum(each for at, each in taken if at > now - MINUTE - PART_MS)
                if id_:
                    await router.end(who, id_, output=n)
                    taken.append((now, n))
                else:
                    assert recent + n > limit, "refused, though a minute and one part more have room"
                assert sum(each for at, each in taken if at > now - MINUTE) <= limit

    asyncio.run(run())


def test_the_estimate_is_corrected_when_the_call_ends(redis):
    async def run():
        async with Routers(redis) as routers:
            (router,), who = routers.each, tenant(output_tokens_per_minute=100)
            first = await router.admit(who, output=80)
            assert await router.admitted(who, output=30) is None
            await router.end(who, first, output=20)
            second = await router.admit(who, output=80)
            await router.end(who, second, output=130)
            assert await router.admitted(who, output=1) is None
            routers.clock.now += MINUTE + PART_MS
            third = await router.admit(who, output=1)
            routers.clock.now += 2 * MINUTE
            await router.end(who, third, output=90)  # its own minute has gone: what exceeds the estimate counts now
            assert await router.admitted(who, output=20) is None
            assert await router.admitted(who, output=11)

    asyncio.run(run())


def test_uncached_tokens_are_counted_apart(redis):
    async def run():
        async with Routers(redis) as routers:
            (router,), who = routers.each, tenant(uncached_tokens_per_minute=100)
            await router.end(who, await router.admit(who, prompt=90), prompt=90, cached=80)
            await router.admit(who, prompt=90)
            assert router.quotas.status["acme"].used["uncached_tokens_per_minute"] == 100

    asyncio.run(run())


def test_a_refusal_says_when_and_then_the_call_is_admitted(redis):
    async def run():
        async with Routers(redis) as routers:
            (router,), who = routers.each, tenant(input_tokens_per_minute=100)
            for _ in range(4):
                await router.end(who, await router.admit(who, prompt=25), prompt=25)
                routers.clock.now += 7000
            with pytest.raises(QuotaError) as refused:
                await router.admit(who, prompt=50)
            error = refused.value
            assert (error.refusal, error.limit) == (Refusal.RATE_LIMITED, "input_tokens_per_minute")
            assert error.status.left("input_tokens_per_minute") == 0
            routers.clock.now += int(error.retry_after_s * 1000) - 1
            assert await router.admitted(who, prompt=50) is None
            routers.clock.now += 1
            assert await router.admitted(who, prompt=50)

    asyncio.run(run())


def test_a_call_that_needs_more_than_its_limit_is_admitted_alone(redis):
    async def run():
        async with Routers(redis) as routers:
            (router,), who = routers.each, tenant(output_tokens_per_minute=100)
            assert await router.admitted(who, output=5000)
            assert await router.admitted(who, output=1) is None

    asyncio.run(run())


def test_a_clock_that_is_set_back_begins_anew(redis):
    async def run():
        async with Routers(redis) as routers:
            (router,), who = routers.each, tenant(requests_per_minute=2)
            assert [bool(await router.admitted(who)) for _ in range(3)] == [True, True, False]
            routers.clock.now -= 10 * MINUTE
            assert [bool(await router.admitted(who)) for _ in range(3)] == [True, True, False]

    asyncio.run(run())


def test_a_refusal_that_only_time_ends_is_remembered(redis):
    """No body is read, and Redis is not asked, for those who do not wait."""

    async def run():
        async with Routers(redis) as routers:
            (router,), who = routers.each, tenant(requests_per_minute=1)
            await router.admit(who)
            assert await router.admitted(who) is None
            with pytest.raises(QuotaError):
                router.quotas.check(who)
            raised = tenant(requests_per_minute=2)  # the operator has changed it
            router.quotas.check(raised)
            assert await router.admitted(raised)
            assert router.quotas.refusals["acme", "requests_per_minute"] == 2

    asyncio.run(run())


# ---- at once ----


def test_requests_and_programs_at_once_are_those_of_all_routers(redis):
    async def run():
        async with Routers(redis, 2) as routers:
            (a, b), who = routers.each, tenant(max_concurrent=3, max_programs=2)
            one = await a.admit(who, program="p1")
            two = await b.admit(who, answers=2, program="p2")
            with pytest.raises(QuotaError, match="requests at once"):
                await a.admit(who, program="p1")
            await a.end(who, one, program="p1")
            await b.end(who, two, program="p2")
            with pytest.raises(QuotaError, match="programs at once"):
                await a.admit(who, program="p3")
            await b.end(who, await b.admit(who, program="p1"), program="p1", over=True)
            third, fourth = await a.admit(who), await a.admit(who)
            await a.quotas.admit(who, third, Cost(0), "p3", lease=True)  # a program that is found out later
            with pytest.raises(QuotaError):
                await a.quotas.admit(who, fourth, Cost(0), "p4", lease=True)
            routers.clock.now += 601_000  # nobody has come for them
            await a.quotas.admit(who, fourth, Cost(0), "p4", lease=True)

    asyncio.run(run())


def test_reservations_of_a_router_that_died_expire(redis):
    async def run():
        async with Routers(redis, 2) as routers:
            (dead, alive), who = routers.each, tenant(max_concurrent=2, output_tokens_per_minute=100, units_per_day=150)
            await dead.admit(who, output=90)
            kept = await alive.admit(who, output=10)
            assert await alive.admitted(who, output=10) is None
            routers.clock.now += int(LEASE_S * 500)
            await alive.quotas.renew()
            assert await alive.admitted(who, output=10) is None
            routers.clock.now += int(LEASE_S * 500)
            other = await alive.admit(who, output=90)  # the 90 tokens are free, in the same minute
            assert await alive.admitted(who) is None
            await alive.end(who, kept, output=10)
            await alive.end(who, other, output=90)
            assert not alive.quotas.reserved

    asyncio.run(run())


# ---- budgets and prices ----


def test_a_budget_is_what_prices_make_of_the_usage_and_ends_with_the_day(redis):
    prices = Prices(input=1.0, cached_input=0.1, output=4.0, request=2.0, repeat=0.5)

    async def run():
        async with Routers(redis, 2, RouterConfig(prices=prices)) as routers:
            (a, b), who = routers.each, tenant(units_per_day=1000)
            await a.end(who, await a.admit(who, output=1), 200, 100, 50)  # 2 + 100 + 10 + 200
            await b.end(who, await b.admit(who, output=1), 200, 200, 50, "cached")  # half of 2 + 20 + 200
            await b.end(who, await b.admit(who, output=1), 200, 0, 50, "failed")
            assert b.quotas.status["acme"].used["units_per_day"] == pytest.approx(312 + 111 + 6)
            [day, _] = await routers.books.sums("acme", ["2026-11-18", "2026-11"])
            assert day["units"] == 312 + 111
            await a.end(who, await a.admit(who, output=100), output=143)  # 574: more than there was
            with pytest.raises(QuotaError) as refused:
                await b.admit(who, output=1)
            error = refused.value
            assert error.refusal is Refusal.OVER_BUDGET
            assert api_error(error).status == 429
            midnight = (START // DAY + 1) * DAY
            assert error.retry_after_s == pytest.approx((midnight - START) / 1000, abs=1)
            routers.clock.now = midnight
            assert await b.admitted(who, output=1)

    asyncio.run(run())


def test_a_budget_of_a_month_ends_with_the_month_on_every_router(redis):
    async def run():
        async with Routers(redis, 2) as routers:
            (a, b), who = routers.each, tenant(units_per_month=1000)
            await a.end(who, await a.admit(who, output=1), output=600)
            routers.clock.now += DAY
            await a.end(who, await a.admit(who, output=1), output=600)
            with pytest.raises(QuotaError) as refused:
                await b.admit(who, output=1)
            assert (refused.value.limit, refused.value.refusal) == ("units_per_month", Refusal.OVER_BUDGET)
            december = int(datetime(2026, 12, 1, tzinfo=UTC).timestamp() * 1000)
            assert refused.value.retry_after_s == (december - routers.clock.now) / 1000
            routers.clock.now = december - 1
            assert await b.admitted(who, output=1) is None
            routers.clock.now = december
            assert await b.admitted(who, output=1)

    asyncio.run(run())


def test_a_full_redis_evicts_no_sums_so_no_budget_begins_anew(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    who = tenant(units_per_month=10)

    async def run():
        async with Routers(server) as routers:
            (router,) = routers.each
            await router.end(who, await router.admit(who, prompt=5, output=5), 5, output=5)
            sums = [key for key in client.scan_iter() if b"sums/" in key]
            assert len(sums) == 2
            assert {client.ttl(key) for key in sums} == {-1}
            for n in range(200):
                client.set(f"cached/{n}", b"x" * 65536, ex=3600)
            assert client.info()["evicted_keys"] > 50
            with pytest.raises(QuotaError, match="units per month"):
                await router.admit(who, prompt=5, output=5)

    try:
        with server.client() as client:
            client.config_set("maxmemory", int(client.info()["used_memory"]) + 4 * 2**20)
            client.config_set("maxmemory-policy", "volatile-lru")
            asyncio.run(run())
    finally:
        server.kill()


def test_sums_are_deleted_once_they_have_been_kept_long_enough(redis):
    async def run():
        async with Routers(redis, config=RouterConfig(usage_days=40)) as routers:
            (router,), who = routers.each, tenant()
            await router.end(who, "a", 1)
            routers.clock.now += 39 * DAY
            await router.end(who, "b", 2)
            days = ["2026-11-18", "2026-11", "2026-12-27", "2026-12"]
            assert [row["input"] for row in await routers.books.sums("acme", days)] == [1, 1, 2, 2]
            routers.clock.now += 2 * DAY
            await router.end(who, "c", 4)
            assert [row["input"] for row in await routers.books.sums("acme", days)] == [0, 0, 2, 6]

    asyncio.run(run())


# ---- booking ----


def test_a_record_that_cannot_be_booked_is_counted_and_keeps_no_other_from_being_booked(redis):
    async def run():
        async with Routers(redis) as routers:
            (router,) = routers.each
            await router.end(tenant(), "a", 1, program="half a pair: \ud800")
            await router.end(tenant(), "b", 2)
            assert (router.books.booked["booked"], router.books.booked["lost"], router.books.waiting) == (1, 1, 0)
            assert [row["input"] for row in await routers.books.records("acme", "-", "+", 10)] == [2]

    asyncio.run(run())


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_record_whose_answer_from_redis_was_lost_is_never_booked_twice(redis, monkeypatch, forgotten):
    """After `SEEN_S` Redis may have forgotten its id: then it is not sent again, and counts as lost."""

    async def run():
        async with Routers(redis) as routers:
            (router,), (store,) = routers.each, routers.stores
            answered = store.try_script

            async def loses(*call):
                await answered(*call)

            store.try_script = loses
            await router.end(tenant(), "a", 1)
            store.try_script = answered
            assert router.books.waiting == 1
            if forgotten:
                router.books._waiting[0].sent -= SEEN_S
            await router.books.catch_up()
            assert router.books.booked["lost" if forgotten else "again"] == 1
            assert len(await router.books.records("acme", "-", "+", 10)) == 1

    asyncio.run(run())


def test_a_tenant_without_limits_asks_redis_nothing_before_its_call_is_booked(redis):
    async def run():
        async with Routers(redis) as routers:
            (router,), asked = routers.each, []
            store = routers.stores[0]
            script = store.try_script

            async def counting(source, *more):
                asked.append(source)
                return await script(source, *more)

            store.try_script = counting
            await router.end(tenant(), "a", 5)
            assert len(asked) == 2  # its end, and the first time that it has records
            await router.end(tenant(), "b", 5)
            assert len(asked) == 3

    asyncio.run(run())


# ---- without Redis ----


def test_while_redis_is_away_each_router_has_its_share_and_the_books_catch_up(tmp_path):
    async def run():
        server = RedisServer(tmp_path)
        server.start()
        async with Routers(server, 4) as routers:
            who = tenant(requests_per_minute=40)
            for router in routers.each:
                await router.end(who, await router.admit(who), 1, 0, 1)
                assert not router.quotas.local
            server.kill()
            admitted = [0] * 4
            for i, router in enumerate(routers.each):
                for _ in range(20):
                    if (id_ := await router.admitted(who)) is not None:
                        admitted[i] += 1
                        await router.end(who, id_, 10, 5, 3)
                assert router.quotas.local
            assert admitted == [10] * 4
            assert [router.books.waiting for router in routers.each] == admitted
            server.start()
            for store in routers.stores:
                await until_async(lambda store=store: not store.degraded)
            for router in routers.each:
                await router.books.catch_up()
                assert not router.books.waiting
            [day] = await routers.books.sums("acme", ["2026-11-18"])
            assert (day["requests"], day["input"], day["output"]) == (40, 400, 120)  # Redis came back empty
        server.kill()

    asyncio.run(run())


class Gone:
    degraded = True


@pytest.mark.parametrize(
    ("limits", "call", "each"),
    [
        ({"requests_per_minute": 16}, {}, 4),
        ({"input_tokens_per_minute": 400}, {"prompt": 25}, 4),
        ({"uncached_tokens_per_minute": 400}, {"prompt": 25}, 4),
        ({"output_tokens_per_minute": 400}, {"output": 25}, 4),
        ({"max_concurrent": 8}, {}, 2),
        ({"units_per_day": 400}, {"output": 25}, 4),
        ({"units_per_month": 400}, {"output": 25}, 4),
    ],
)
def test_while_redis_is_away_a_token_bucket_limits_to_the_share_of_each_limit(limits, call, each):
    """One of four routers. Its bucket fills again with time, and a call's estimate is corrected when it ends."""

    async def run():
        clock = Clock()
        router, who = Router(Quotas(Gone(), 4, lambda: clock.now / 1000, clock)), tenant(**limits)
        at_once = [await router.admitted(who, **call) for _ in range(9)]
        assert sum(id_ is not None for id_ in at_once) == each
        for id_ in filter(None, at_once):
            router.quotas.settle(id_, Cost(1, call.get("prompt", 0), call.get("prompt", 0), call.get("output", 0)))
        freed = await router.admitted(who, **call)
        assert (freed is not None) == ("max_concurrent" in limits or "units" in str(limits))
        clock.now += 31 * DAY
        assert sum([await router.admitted(who, **call) is not None for _ in range(9)]) == each - (
            freed is not None and "max_concurrent" in limits
        )

    asyncio.run(run())


# ---- headers ----


def test_the_headers_are_those_that_clients_know():
    limits = TenantLimits(requests_per_minute=60, input_tokens_per_minute=1000, output_tokens_per_minute=200)
    used = dict.fromkeys(TenantLimits.__dataclass_fields__, 0.0)
    used |= {"requests_per_minute": 10.0, "input_tokens_per_minute": 100.0, "output_tokens_per_minute": 150.0}
    status = RateLimitStatus(limits, used, 59.6)
    assert dict(openai_headers(status)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"50",
        b"x-ratelimit-reset-requests": b"1m0s",
        b"x-ratelimit-limit-tokens": b"200",
        b"x-ratelimit-remaining-tokens": b"50",
        b"x-ratelimit-reset-tokens": b"1m0s",
    }
    headers = dict(anthropic_headers(status, START / 1000))
    assert headers[b"anthropic-ratelimit-input-tokens-remaining"] == b"900"
    assert headers[b"anthropic-ratelimit-tokens-limit"] == b"200"
    assert headers[b"anthropic-ratelimit-requests-reset"] == b"2026-11-18T11:07:39Z"
    assert [duration(s) for s in (0.25, 6, 90, 3700)] == ["250ms", "6s", "1m30s", "1h1m40s"]
