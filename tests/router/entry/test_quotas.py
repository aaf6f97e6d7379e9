"""Quotas against a real Redis, by a clock of the test's own, and what a router does without Redis."""

from collections import deque
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count

import pytest
from fake_backend import NoRedis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import PATIENT, shared_server
from waiting import until_async

from holdfast.router.config import Prices, RouterConfig
from holdfast.router.entry.quotas import (
    LEASE_S,
    PART_MS,
    Cost,
    QuotaError,
    Quotas,
    RateLimitStatus,
    duration,
    rate_limit_headers,
)
from holdfast.router.entry.usage import SEEN_S, CallEnd, UsageBooks, UsageRecord, priced
from holdfast.router.protocol.errors import Refusal, api_error
from holdfast.router.records.store import Records, RedisAddress
from holdfast.router.tenants import Tenant, TenantLimits

pytestmark = pytest.mark.anyio

START = 1_795_000_000_000  # ms; a day of November 2026
MINUTE = 60_000
DAY = 86_400_000
ids = count()


class Clock:
    def __init__(self, now=START):
        self.now = now

    def __call__(self):
        return self.now


class Router:
    """The quotas and the books of one router, and calls that come to it."""

    def __init__(self, store, clock=None, routers=1, config=None):
        self.config, self.store, self.clock = config or RouterConfig(), store, clock or Clock()
        self.quotas = Quotas(store, routers, lambda: self.clock.now / 1000, self.clock)
        self.books = UsageBooks(self.config, self.quotas)

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
        await self.books.book(CallEnd(record, program_ended=over))


@asynccontextmanager
async def routers(n, config=None, server=None):
    """Several, each with its own connection to one Redis, and their clock."""
    clock, server, space = Clock(), server or shared_server(), f"quotas/{next(ids)}"
    stores = [Records(RedisAddress(server.url, namespace=space), PATIENT) for _ in range(n)]
    yield [Router(store, clock, n, config) for store in stores]
    for store in stores:
        await store.close()


@pytest.fixture
async def router():
    async with routers(1) as [router]:
        yield router


def tenant(name="acme", **limits):
    return Tenant(name, limits=TenantLimits(**limits))


# ---- the window ----

calls = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20_000), st.integers(1, 40)), min_size=1, max_size=40)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=calls, limit=st.integers(40, 200))
async def test_no_minute_has_more_than_the_limit_and_nobody_with_room_is_refused(calls, limit):
    """Whichever of four routers a call comes to."""
    async with routers(4) as each:
        who, taken = tenant(output_tokens_per_minute=limit), deque()
        for number, gap, n in calls:
            each[0].clock.now += gap
            now, router = each[0].clock.now, each[number]
            id_ = await router.admitted(who, output=n)
            recent = sum(each for at, each in taken if at > now - MINUTE - PART_MS)
            if id_:
                await router.end(who, id_, output=n)
                taken.append((now, n))
            else:
                assert recent + n > limit, "refused, though a minute and one part more have room"
            assert sum(each for at, each in taken if at > now - MINUTE) <= limit


async def test_the_estimate_is_corrected_when_the_call_ends(router):
    who = tenant(output_tokens_per_minute=100)
    first = await router.admit(who, output=80)
    assert await router.admitted(who, output=30) is None
    await router.end(who, first, output=20)
    second = await router.admit(who, output=80)
    await router.end(who, second, output=130)
    assert await router.admitted(who, output=1) is None
    router.clock.now += MINUTE + PART_MS
    third = await router.admit(who, output=1)
    router.clock.now += 2 * MINUTE
    await router.end(who, third, output=90)  # its own minute has gone: what exceeds the estimate counts now
    assert await router.admitted(who, output=20) is None
    assert await router.admitted(who, output=11)


async def test_uncached_tokens_are_counted_apart(router):
    who = tenant(uncached_tokens_per_minute=100)
    await router.end(who, await router.admit(who, prompt=90), prompt=90, cached=80)
    await router.admit(who, prompt=90)
    assert router.quotas.status["acme"].used["uncached_tokens_per_minute"] == 100


async def test_a_refusal_says_when_and_then_the_call_is_admitted(router):
    who = tenant(input_tokens_per_minute=100)
    for _ in range(4):
        await router.end(who, await router.admit(who, prompt=25), prompt=25)
        router.clock.now += 7000
    with pytest.raises(QuotaError) as refused:
        await router.admit(who, prompt=50)
    error = refused.value
    assert (error.refusal, error.limit) == (Refusal.RATE_LIMITED, "input_tokens_per_minute")
    assert error.status.left("input_tokens_per_minute") == 0
    router.clock.now += int(error.retry_after_s * 1000) - 1
    assert await router.admitted(who, prompt=50) is None
    router.clock.now += 1
    assert await router.admitted(who, prompt=50)


async def test_a_call_that_needs_more_than_its_limit_is_admitted_alone(router):
    who = tenant(output_tokens_per_minute=100)
    assert await router.admitted(who, output=5000)
    assert await router.admitted(who, output=1) is None


async def test_a_clock_that_is_set_back_begins_anew(router):
    who = tenant(requests_per_minute=2)
    assert [bool(await router.admitted(who)) for _ in range(3)] == [True, True, False]
    router.clock.now -= 10 * MINUTE
    assert [bool(await router.admitted(who)) for _ in range(3)] == [True, True, False]


async def test_a_refusal_that_only_time_ends_is_remembered(router):
    """No body is read, and Redis is not asked, for those who do not wait."""
    who = tenant(requests_per_minute=1)
    await router.admit(who)
    assert await router.admitted(who) is None
    with pytest.raises(QuotaError):
        router.quotas.check(who)
    raised = tenant(requests_per_minute=2)  # the operator has changed it
    router.quotas.check(raised)
    assert await router.admitted(raised)
    assert router.quotas.refusals["acme", "requests_per_minute"] == 2


# ---- at once ----


async def test_requests_and_programs_at_once_are_those_of_all_routers():
    async with routers(2) as (a, b):
        who = tenant(max_concurrent=3, max_programs=2)
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
        a.clock.now += 601_000  # nobody has come for them
        await a.quotas.admit(who, fourth, Cost(0), "p4", lease=True)


async def test_reservations_of_a_router_that_died_expire():
    async with routers(2) as (dead, alive):
        who = tenant(max_concurrent=2, output_tokens_per_minute=100, units_per_day=150)
        await dead.admit(who, output=90)
        kept = await alive.admit(who, output=10)
        assert await alive.admitted(who, output=10) is None
        alive.clock.now += int(LEASE_S * 500)
        await alive.quotas.renew()
        assert await alive.admitted(who, output=10) is None
        alive.clock.now += int(LEASE_S * 500)
        other = await alive.admit(who, output=90)  # the 90 tokens are free, in the same minute
        assert await alive.admitted(who) is None
        await alive.end(who, kept, output=10)
        await alive.end(who, other, output=90)
        assert not alive.quotas.reserved


# ---- budgets and prices ----


async def test_a_budget_is_what_prices_make_of_the_usage_and_ends_with_the_day():
    prices = Prices(input=1.0, cached_input=0.1, output=4.0, request=2.0, repeat=0.5)
    async with routers(2, RouterConfig(prices=prices)) as (a, b):
        who = tenant(units_per_day=1000)
        await a.end(who, await a.admit(who, output=1), 200, 100, 50)  # 2 + 100 + 10 + 200
        await b.end(who, await b.admit(who, output=1), 200, 200, 50, "cached")  # half of 2 + 20 + 200
        await b.end(who, await b.admit(who, output=1), 200, 0, 50, "failed")
        assert b.quotas.status["acme"].used["units_per_day"] == pytest.approx(312 + 111 + 6)
        [day, _] = await a.books.sums("acme", ["2026-11-18", "2026-11"])
        assert day["units"] == 312 + 111
        await a.end(who, await a.admit(who, output=100), output=143)  # 574: more than there was
        with pytest.raises(QuotaError) as refused:
            await b.admit(who, output=1)
        error = refused.value
        assert error.refusal is Refusal.OVER_BUDGET
        assert api_error(error).status == 429
        midnight = (START // DAY + 1) * DAY
        assert error.retry_after_s == pytest.approx((midnight - START) / 1000, abs=1)
        a.clock.now = midnight
        assert await b.admitted(who, output=1)


async def test_a_budget_of_a_month_ends_with_the_month_on_every_router():
    async with routers(2) as (a, b):
        who = tenant(units_per_month=1000)
        await a.end(who, await a.admit(who, output=1), output=600)
        a.clock.now += DAY
        await a.end(who, await a.admit(who, output=1), output=600)
        with pytest.raises(QuotaError) as refused:
            await b.admit(who, output=1)
        assert (refused.value.limit, refused.value.refusal) == ("units_per_month", Refusal.OVER_BUDGET)
        december = int(datetime(2026, 12, 1, tzinfo=UTC).timestamp() * 1000)
        assert refused.value.retry_after_s == (december - a.clock.now) / 1000
        a.clock.now = december - 1
        assert await b.admitted(who, output=1) is None
        a.clock.now = december
        assert await b.admitted(who, output=1)


async def test_a_full_redis_evicts_no_sums_so_no_budget_begins_anew(server):
    who = tenant(units_per_month=10)
    with server.client() as client:
        client.config_set("maxmemory", int(client.info()["used_memory"]) + 4 * 2**20)
        client.config_set("maxmemory-policy", "volatile-lru")
        async with routers(1, server=server) as [router]:
            await router.end(who, await router.admit(who, prompt=5, output=5), 5, output=5)
            sums = [key for key in client.scan_iter() if b"sums/" in key]
            assert len(sums) == 2
            assert {client.ttl(key) for key in sums} == {-1}
            for n in range(200):
                client.set(f"cached/{n}", b"x" * 65536, ex=3600)
            assert client.info()["evicted_keys"] > 50
            with pytest.raises(QuotaError, match="units per month"):
                await router.admit(who, prompt=5, output=5)


async def test_sums_are_deleted_once_they_have_been_kept_long_enough():
    async with routers(1, RouterConfig(usage_days=40)) as [router]:
        who = tenant()
        await router.end(who, "a", 1)
        router.clock.now += 39 * DAY
        await router.end(who, "b", 2)
        days = ["2026-11-18", "2026-11", "2026-12-27", "2026-12"]
        assert [row["input"] for row in await router.books.sums("acme", days)] == [1, 1, 2, 2]
        router.clock.now += 2 * DAY
        await router.end(who, "c", 4)
        assert [row["input"] for row in await router.books.sums("acme", days)] == [0, 0, 2, 6]


# ---- booking ----


async def test_a_record_that_cannot_be_booked_is_counted_and_keeps_no_other_from_being_booked(router):
    await router.end(tenant(), "a", 1, program="half a pair: \ud800")
    await router.end(tenant(), "b", 2)
    assert (router.books.booked["booked"], router.books.booked["lost"], router.books.waiting) == (1, 1, 0)
    assert [row["input"] for row in await router.books.records("acme", "-", "+", 10)] == [2]


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_record_whose_answer_from_redis_was_lost_is_never_booked_twice(router, monkeypatch, forgotten):
    """After `SEEN_S` Redis may have forgotten its id: then it is not sent again, and counts as lost."""

    async def loses(*call):
        await Records.try_script(router.store, *call)

    with monkeypatch.context() as patch:
        patch.setattr(router.store, "try_script", loses)
        await router.end(tenant(), "a", 1)
    assert router.books.waiting == 1
    if forgotten:
        router.books._waiting[0].sent -= SEEN_S
    await router.books.catch_up()
    assert router.books.booked["lost" if forgotten else "again"] == 1
    assert len(await router.books.records("acme", "-", "+", 10)) == 1


async def test_a_tenant_without_limits_asks_redis_nothing_before_its_call_is_booked(router):
    asked, script = [], router.store.try_script

    async def counting(source, *more):
        asked.append(source)
        return await script(source, *more)

    router.store.try_script = counting
    await router.end(tenant(), "a", 5)
    assert len(asked) == 2  # its end, and the first time that it has records
    await router.end(tenant(), "b", 5)
    assert len(asked) == 3


# ---- without Redis ----


async def test_while_redis_is_away_each_router_has_its_share_and_the_books_catch_up(server):
    async with routers(4, server=server) as each:
        who = tenant(requests_per_minute=40)
        for router in each:
            await router.end(who, await router.admit(who), 1, 0, 1)
            assert not router.quotas.local
        server.kill()
        admitted = [0] * 4
        for i, router in enumerate(each):
            for _ in range(20):
                if (id_ := await router.admitted(who)) is not None:
                    admitted[i] += 1
                    await router.end(who, id_, 10, 5, 3)
            assert router.quotas.local
        assert admitted == [10] * 4
        assert [router.books.waiting for router in each] == admitted
        server.start()
        for router in each:
            await until_async(lambda router=router: not router.store.degraded)
            await router.books.catch_up()
            assert not router.books.waiting
        [day] = await each[0].books.sums("acme", ["2026-11-18"])
        assert (day["requests"], day["input"], day["output"]) == (40, 400, 120)  # Redis came back empty


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
async def test_while_redis_is_away_a_token_bucket_limits_to_the_share_of_each_limit(limits, call, each):
    """One of four routers. Its bucket fills again with time, and a call's estimate is corrected when it ends."""
    clock = Clock()
    router, who = Router(NoRedis(), clock, 4), tenant(**limits)
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


# ---- headers ----


def test_the_headers_are_those_that_clients_know():
    limits = TenantLimits(requests_per_minute=60, input_tokens_per_minute=1000, output_tokens_per_minute=200)
    used = dict.fromkeys(TenantLimits.__dataclass_fields__, 0.0)
    used |= {"requests_per_minute": 10.0, "input_tokens_per_minute": 100.0, "output_tokens_per_minute": 150.0}
    status = RateLimitStatus(limits, used, 59.6)
    assert dict(rate_limit_headers(status, anthropic=False, now=START / 1000)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"50",
        b"x-ratelimit-reset-requests": b"1m0s",
        b"x-ratelimit-limit-tokens": b"200",
        b"x-ratelimit-remaining-tokens": b"50",
        b"x-ratelimit-reset-tokens": b"1m0s",
    }
    headers = dict(rate_limit_headers(status, anthropic=True, now=START / 1000))
    assert headers[b"anthropic-ratelimit-input-tokens-remaining"] == b"900"
    assert headers[b"anthropic-ratelimit-tokens-limit"] == b"200"
    assert headers[b"anthropic-ratelimit-requests-reset"] == b"2026-11-18T11:07:39Z"
    assert [duration(s) for s in (0.25, 6, 90, 3700)] == ["250ms", "6s", "1m30s", "1h1m40s"]
