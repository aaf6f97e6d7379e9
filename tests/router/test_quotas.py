"""Quotas against a real Redis, by a clock of the test's own, and beside them what a router does without."""

import asyncio
import heapq
import random
from collections import Counter, deque
from dataclasses import replace
from datetime import UTC, datetime
from math import sqrt
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import RedisServer
from waiting import until_async

from holdfast.replicas.requests import Usage, Work
from holdfast.router import accounts as accounts_module
from holdfast.router.accounts import Accounts, Served
from holdfast.router.config import Prices, RouterConfig
from holdfast.router.limit_headers import anthropic_headers, duration, openai_headers
from holdfast.router.protocol.errors import Refusal, api_error
from holdfast.router.quotas import DEVIATIONS, LEASE_S, PART_MS, QuotaError, Standing
from holdfast.router.records import Records, RedisAddress
from holdfast.router.round_trips import RoundTrips
from holdfast.router.tenants import Principal, Tenant, TenantLimits
from holdfast.router.usage import Books

START = 1_795_000_000_000  # ms; a day of November 2026
MINUTE = 60_000
DAY = 86_400_000
UNLIMITED = TenantLimits(output_tokens_per_minute=10**9)
REDIS = [HealthCheck.function_scoped_fixture]


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

    def __init__(self, redis, n=1, config=None, clock=None):
        Routers._space += 1
        self.clock = clock or Clock()
        self.space = f"test/{Routers._space}"
        self.stores = [Records(RedisAddress(redis.url, namespace=self.space), 5.0) for _ in range(n)]
        self.each = [
            Accounts(config, store, f"r{i}", n, lambda: self.clock.now / 1000, self.clock)
            for i, store in enumerate(self.stores)
        ]
        self.books = Books(self.stores[0])

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for accounts, store in zip(self.each, self.stores, strict=True):
            await accounts.close()
            await store.close()


def tenant(name="acme", **limits):
    return Tenant(name, limits=TenantLimits(**limits))


async def come(accounts, who, answers=1, prompt=0, output=0, program=""):
    admission = accounts.admission(Principal(who, "key-1"))
    await admission.charge(answers, prompt, output, program)
    return admission


def used(prompt=0, cached=0, output=0):
    return Usage(prompt, cached, output, work=Work(prompt - cached, cached, output))


async def go(admission, usage=None, outcome="completed", **served):
    admission.end(outcome, usage or Usage(), 0.5, Served(model="pocket", endpoint="chat", **served))
    await admission.booked()


async def let_in(accounts, who, **call):
    try:
        return await come(accounts, who, **call)
    except QuotaError:
        return None


# ---- round trips ----


class Failing:
    """A store whose round trips fail where one of their calls is bad."""

    degraded = False

    def __init__(self):
        self.trips = []
        self.go_on = asyncio.Event()

    async def try_scripts(self, calls):
        self.trips.append(len(calls))
        await self.go_on.wait()
        if any(source == "bad" for source, _, _ in calls):
            raise RuntimeError("this call cannot be sent")
        return [[source.encode()] for source, _, _ in calls]


def test_a_round_trip_that_fails_answers_everybody_and_is_the_failure_of_the_bad_call_alone():
    async def run():
        store = Failing()
        trips = RoundTrips(store.try_scripts)
        asked = [asyncio.create_task(trips.ask((source, [], []))) for source in ("bad", "a", "bad", "b")]
        while not store.trips:  # noqa: ASYNC110 (the first one is on its way)
            await asyncio.sleep(0)
        last = asyncio.create_task(trips.ask(("c", [], [])))
        store.go_on.set()
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*asked, last, return_exceptions=True)
            assert await trips.ask(("d", [], [])) == [b"d"]
        assert [type(each) for each in answers] == [RuntimeError, list, RuntimeError, list, list]
        assert answers[1::2] == [[b"a"], [b"b"]]
        assert answers[4] == [b"c"]

    asyncio.run(run())


def test_what_cannot_be_booked_is_counted_and_keeps_nothing_else_from_the_books(redis):
    async def run():
        async with Routers(redis) as routers:
            (accounts,) = routers.each
            await go(await come(accounts, tenant()), used(1), program="half a pair: \ud800")
            async with asyncio.timeout(60):
                await go(await come(accounts, tenant()), used(2))
            assert accounts.booked == Counter(booked=1, lost=1, again=0)
            assert [row["input"] for row in await routers.books.records("acme", "-", "+", 10)] == [2]
            assert accounts.unbooked == 0

    asyncio.run(run())


# ---- the window ----

calls = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20_000), st.integers(1, 40)), min_size=1, max_size=60)


@settings(max_examples=30, deadline=None, suppress_health_check=REDIS)
@given(calls=calls, limit=st.integers(40, 200))
def test_never_more_than_the_limit_in_any_minute_and_nobody_is_refused_who_has_room(redis, calls, limit):
    """Of four routers, whichever a call comes to."""

    async def run():
        async with Routers(redis, 4) as routers:
            who, taken = tenant(output_tokens_per_minute=limit), deque()
            for router, gap, n in calls:
                routers.clock.now += gap
                now = routers.clock.now
                admitted = await let_in(routers.each[router], who, output=n)
                recent = sum(each for at, each in taken if at > now - MINUTE - PART_MS)
                if admitted:
                    await go(admitted, used(output=n))
                    taken.append((now, n))
                else:
                    assert recent + n > limit, "refused, though a minute and one part more have room"
                last = sum(each for at, each in taken if at > now - MINUTE)
                assert last <= limit

    asyncio.run(run())


@settings(max_examples=25, deadline=None, suppress_health_check=REDIS)
@given(calls=calls, limit=st.integers(20, 200))
def test_without_redis_the_rules_are_the_same(redis, calls, limit):
    async def run():
        async with Routers(redis) as routers:
            alone = Accounts(clock=lambda: routers.clock.now / 1000, now_ms=routers.clock)
            who, going = tenant(output_tokens_per_minute=limit, max_concurrent=20), deque()
            for run_on, gap, n in calls:
                routers.clock.now += gap
                await routers.each[0]._renew()
                here, there = [await let_in(each, who, output=n) for each in (alone, routers.each[0])]
                assert (here is None) == (there is None)
                if here:
                    going.append((here, there, n // 2 if n % 3 else n))
                while len(going) > run_on:
                    *both, n = going.popleft()
                    for each in both:
                        await go(each, used(9, output=n))

    asyncio.run(run())


def test_what_was_not_needed_is_given_back_and_what_was_more_is_counted(redis):
    async def run():
        async with Routers(redis) as routers:
            (accounts,), who = routers.each, tenant(output_tokens_per_minute=100)
            first = await come(accounts, who, output=80)
            assert await let_in(accounts, who, output=30) is None
            await go(first, used(output=20))
            second = await come(accounts, who, output=80)
            await go(second, used(output=130))
            assert await let_in(accounts, who, output=1) is None
            routers.clock.now += MINUTE + PART_MS
            third = await come(accounts, who, output=1)
            routers.clock.now += 2 * MINUTE
            await go(third, used(output=90))  # its own minute has gone: what it drew more than was foreseen counts now
            assert await let_in(accounts, who, output=20) is None
            assert await let_in(accounts, who, output=11)

    asyncio.run(run())


@pytest.mark.parametrize("reserved", [512, 50])
def test_what_is_reserved_is_what_such_requests_turn_out_to_draw(redis, reserved):
    """However far off is what requests may draw: no minute has 1 % more than the limit, who asks for more gets it."""
    limit, runs_ms = 24_000, 2_000

    async def run():
        async with Routers(redis, 4) as routers:
            who, draw = tenant(output_tokens_per_minute=limit), random.Random(1)
            going, taken = [], deque()
            while routers.clock.now < START + 3 * MINUTE:
                comes = routers.clock.now + round(draw.expovariate(2 * 240 / MINUTE))
                while going and going[0][0] <= comes:
                    routers.clock.now, _, admission, n = heapq.heappop(going)
                    await go(admission, used(9, output=n))
                routers.clock.now, n = comes, draw.randint(1, 200)
                if admission := await let_in(draw.choice(routers.each), who, output=reserved):
                    heapq.heappush(going, (comes + draw.randint(1, runs_ms), len(taken), admission, n))
                    taken.append((comes, n))
            while going:
                _, _, admission, n = heapq.heappop(going)
                await go(admission, used(9, output=n))
            begins = range(START + MINUTE, START + 2 * MINUTE, 250)
            return [sum(n for at, n in taken if begin < at <= begin + MINUTE) / limit for begin in begins]

    got = asyncio.run(run())
    assert max(got) <= 1.01
    assert sum(got) / len(got) >= 0.975


@settings(max_examples=25, deadline=None, suppress_health_check=REDIS)
@given(
    drawn=st.lists(st.integers(1, 40), min_size=8, max_size=20),
    calls=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 500)), min_size=1, max_size=40),
    limit=st.integers(100, 600),
)
def test_what_runs_has_room_for_more_than_is_expected_of_it(redis, drawn, calls, limit):
    """For `DEVIATIONS` of the sum of what its tenant's other requests drew, whichever router it came to; and one alone
    is let in whatever is expected of it.
    """

    async def run():
        async with Routers(redis, 2) as routers:
            who = tenant(output_tokens_per_minute=limit)
            for accounts in routers.each:
                for n in drawn:
                    await go(await come(accounts, replace(who, limits=UNLIMITED), output=50), used(9, output=n))
            routers.clock.now += MINUTE + PART_MS
            expected = [accounts.estimate(who, 1, 9, 50) for accounts in routers.each]
            mean = variance = 0
            for router, gap in calls:
                routers.clock.now += gap
                cost = expected[router]
                if await let_in(routers.each[router], who, output=50):
                    mean, variance = mean + cost.output, variance + cost.variance[3]
                    assert mean == cost.output or mean + DEVIATIONS * sqrt(variance) <= limit
                else:
                    assert mean
                    assert mean + cost.output + DEVIATIONS * sqrt(variance + cost.variance[3]) > limit

    asyncio.run(run())


def test_a_refusal_says_when_and_then_it_is_let_in(redis):
    async def run():
        async with Routers(redis) as routers:
            (accounts,), who = routers.each, tenant(input_tokens_per_minute=100)
            for _ in range(4):
                await go(await come(accounts, who, prompt=25), used(25, 0, 0))
                routers.clock.now += 7000
            with pytest.raises(QuotaError) as refused:
                await come(accounts, who, prompt=50)
            error = refused.value
            assert (error.refusal, error.limit) == (Refusal.RATE_LIMITED, "input_tokens_per_minute")
            assert error.standing.left("input_tokens_per_minute") == 0
            routers.clock.now += int(error.retry_after_s * 1000) - 1
            assert await let_in(accounts, who, prompt=50) is None
            routers.clock.now += 1
            assert await let_in(accounts, who, prompt=50)

    asyncio.run(run())


def test_a_request_that_is_larger_than_its_limit_is_let_in_alone(redis):
    async def run():
        async with Routers(redis) as routers:
            (accounts,), who = routers.each, tenant(output_tokens_per_minute=100)
            assert await let_in(accounts, who, output=5000)
            assert await let_in(accounts, who, output=1) is None

    asyncio.run(run())


def test_a_clock_that_is_set_back_begins_anew(redis):
    async def run():
        async with Routers(redis) as routers:
            (accounts,), who = routers.each, tenant(requests_per_minute=2)
            for _ in range(2):
                await come(accounts, who)
            routers.clock.now -= 10 * MINUTE
            assert await let_in(accounts, who)
            assert await let_in(accounts, who)
            assert await let_in(accounts, who) is None

    asyncio.run(run())


def test_what_nobody_ends_does_not_last_longer_for_a_clock_that_is_set_back(redis):
    """A router died with a call; a program has gone away."""

    async def run():
        async with Routers(redis, 2) as routers:
            (dead, alive), calls, programs = routers.each, tenant("a", max_concurrent=1), tenant("b", max_programs=1)
            await come(dead, calls)
            await go(await come(alive, programs, program="p1"), program="p1")
            routers.clock.now -= 60 * MINUTE
            assert await let_in(alive, calls) is None
            assert await let_in(alive, programs, program="p2") is None
            routers.clock.now += int(LEASE_S * 1000)
            assert await let_in(alive, calls)
            routers.clock.now += 10 * MINUTE
            assert await let_in(alive, programs, program="p2")

    asyncio.run(run())


def test_without_redis_a_minute_is_one_though_the_time_of_day_is_set_back(monkeypatch):
    day, clock = [START / 1000], Clock(0)
    monkeypatch.setattr(accounts_module, "time", SimpleNamespace(monotonic=lambda: clock.now / 1000))

    async def run():
        accounts, who = Accounts(clock=lambda: day[0]), tenant(requests_per_minute=1)
        await go(await come(accounts, who))
        day[0] -= 3600
        clock.now += MINUTE + PART_MS
        await go(await come(accounts, who))
        assert await let_in(accounts, who) is None

    asyncio.run(run())


def test_a_refusal_that_only_time_ends_is_not_asked_for_again(redis):
    """No body is read, and no Redis asked, for those who do not wait."""

    async def run():
        async with Routers(redis) as routers:
            (accounts,), who = routers.each, tenant(requests_per_minute=1)
            await come(accounts, who)
            assert await let_in(accounts, who) is None
            with pytest.raises(QuotaError):
                accounts.admission(Principal(who))
            raised = tenant(requests_per_minute=2)  # the operator has changed it
            assert await let_in(accounts, raised)
            assert accounts.refusals["acme", "requests_per_minute"] == 2

    asyncio.run(run())


# ---- at once ----


def test_requests_and_programs_at_once_are_those_of_all_routers(redis):
    async def run():
        async with Routers(redis, 2) as routers:
            (a, b), who = routers.each, tenant(max_concurrent=3, max_programs=2)
            one = await come(a, who, program="p1")
            two = await come(b, who, answers=2, program="p2")
            with pytest.raises(QuotaError) as refused:
                await come(a, who, program="p1")
            assert refused.value.limit == "max_concurrent"
            await go(one, used(5, 0, 5), program="p1")
            await go(two, used(5, 0, 5), program="p2")
            with pytest.raises(QuotaError) as refused:
                await come(a, who, program="p3")
            assert refused.value.limit == "max_programs"
            again = await come(b, who, program="p1")
            await go(again, used(5, 0, 5), program="p1", over=True)
            third = await come(a, who)  # a program that is found out later
            await third.charge_program("p3")
            fourth = await come(a, who)
            with pytest.raises(QuotaError):
                await fourth.charge_program("p4")
            routers.clock.now += 601_000  # nobody has come for them
            await fourth.charge_program("p4")

    asyncio.run(run())


def test_what_a_router_had_when_it_died_is_given_back_when_its_leases_end(redis):
    async def run():
        async with Routers(redis, 2) as routers:
            (dead, alive), who = routers.each, tenant(max_concurrent=2, output_tokens_per_minute=100, units_per_day=150)
            await come(dead, who, output=90)
            kept = await come(alive, who, output=10)
            assert await let_in(alive, who, output=10) is None
            routers.clock.now += int(LEASE_S * 500)
            await alive._renew()
            assert await let_in(alive, who, output=10) is None
            routers.clock.now += int(LEASE_S * 500)
            other = await come(alive, who, output=90)  # its 90 tokens are free, in the same minute
            assert await let_in(alive, who) is None
            await go(kept, used(0, 0, 10))
            await go(other, used(0, 0, 90))

    asyncio.run(run())


# ---- budgets and prices ----


def test_a_budget_is_what_prices_make_of_what_was_used_and_ends_with_the_day(redis):
    prices = Prices(input=1.0, cached_input=0.1, output=4.0, request=2.0, repeat=0.5)

    async def run():
        async with Routers(redis, 2, RouterConfig(prices=prices, output_estimate=1)) as routers:
            (a, b), who = routers.each, tenant(units_per_day=1000)
            first = await come(a, who, output=1)
            await go(first, used(200, 100, 50))  # 2 + 100 + 10 + 200
            repeated = await come(b, who, output=1)
            await go(repeated, Usage(200, 200, 50), "cached")  # half of 2 + 20 + 200
            failed = await come(b, who, output=1)
            await go(failed, used(200, 0, 50), "failed")
            assert b.standings["acme"].used["units_per_day"] == pytest.approx(312 + 111 + 6)
            [day, _] = await routers.books.sums("acme", ["2026-11-18", "2026-11"])
            assert day["units"] == 312 + 111
            last = await come(a, who, output=100)
            await go(last, used(0, 0, 143))  # 574: it was more than there was
            with pytest.raises(QuotaError) as refused:
                await come(b, who, output=1)
            error = refused.value
            assert error.refusal is Refusal.OVER_BUDGET
            assert api_error(error).status == 429
            midnight = (START // 86_400_000 + 1) * 86_400_000
            assert error.retry_after_s == pytest.approx((midnight - START) / 1000, abs=1)
            routers.clock.now = midnight
            assert await let_in(b, who, output=1)

    asyncio.run(run())


def test_a_budget_of_a_month_ends_with_the_month_on_every_router(redis):
    async def run():
        async with Routers(redis, 2, RouterConfig(output_estimate=1)) as routers:
            (a, b), who = routers.each, tenant(units_per_month=1000)
            await go(await come(a, who, output=1), used(output=600))
            routers.clock.now += 24 * 60 * MINUTE  # of two days
            await go(await come(a, who, output=1), used(output=600))
            with pytest.raises(QuotaError) as refused:
                await come(b, who, output=1)
            assert (refused.value.limit, refused.value.refusal) == ("units_per_month", Refusal.OVER_BUDGET)
            december = int(datetime(2026, 12, 1, tzinfo=UTC).timestamp() * 1000)
            assert refused.value.retry_after_s == (december - routers.clock.now) / 1000
            routers.clock.now = december - 1
            assert await let_in(b, who, output=1) is None
            routers.clock.now = december
            assert await let_in(b, who, output=1)

    asyncio.run(run())


def test_a_full_redis_evicts_no_sums_so_no_budget_begins_anew(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    who = tenant(units_per_month=10)

    async def run():
        async with Routers(server) as routers:
            (accounts,) = routers.each
            await go(await come(accounts, who, prompt=5, output=5), used(5, output=5))
            sums = [key for key in client.scan_iter() if b"sums/" in key]
            assert len(sums) == 2
            assert {client.ttl(key) for key in sums} == {-1}
            for n in range(200):
                client.set(f"cached/{n}", b"x" * 65536, ex=3600)
            assert client.info()["evicted_keys"] > 50
            with pytest.raises(QuotaError) as refused:
                await come(accounts, who, prompt=5, output=5)
            assert refused.value.limit == "units_per_month"

    try:
        with server.client() as client:
            client.config_set("maxmemory", int(client.info()["used_memory"]) + 4 * 2**20)
            client.config_set("maxmemory-policy", "volatile-lru")
            asyncio.run(run())
    finally:
        server.kill()


def test_sums_are_deleted_once_they_have_been_kept_long_enough(redis):
    async def run():
        clock = Clock()
        async with Routers(redis, config=RouterConfig(usage_days=40), clock=clock) as routers:
            (accounts,) = routers.each
            await go(await come(accounts, tenant()), used(1))
            clock.now += 39 * DAY
            await go(await come(accounts, tenant()), used(2))
            days = ["2026-11-18", "2026-11", "2026-12-27", "2026-12"]
            assert [row["input"] for row in await routers.books.sums("acme", days)] == [1, 1, 2, 2]
            clock.now += 2 * DAY
            await go(await come(accounts, tenant()), used(4))
            assert [row["input"] for row in await routers.books.sums("acme", days)] == [0, 0, 2, 6]

    asyncio.run(run())


def test_uncached_tokens_are_charged_apart(redis):
    async def run():
        async with Routers(redis) as routers:
            (accounts,), who = routers.each, tenant(uncached_tokens_per_minute=100)
            for _ in range(8):
                turn = await come(accounts, who, prompt=90)
                await go(turn, used(90, 80, 5))
                routers.clock.now += 1000
            assert 70 < accounts.standings["acme"].used["uncached_tokens_per_minute"] <= 100

    asyncio.run(run())


# ---- without Redis ----


def test_while_redis_is_gone_each_router_has_its_part_and_the_books_catch_up(tmp_path):
    async def run():
        server = RedisServer(tmp_path)
        server.start()
        async with Routers(server, 4) as routers:
            who = tenant(requests_per_minute=40)
            for accounts in routers.each:
                await go(await come(accounts, who), used(1, 0, 1))
            server.kill()
            let = [0] * 4
            for i, accounts in enumerate(routers.each):
                for _ in range(20):
                    if (turn := await let_in(accounts, who)) is not None:
                        let[i] += 1
                        await go(turn, used(10, 5, 3))
                assert accounts.local
            assert let == [9] * 4  # ten each, with the one that Redis let in
            assert [accounts.unbooked for accounts in routers.each] == let
            server.start()
            for store in routers.stores:
                await until_async(lambda store=store: not store.degraded)
            for accounts in routers.each:
                await accounts._catch_up()
                assert not accounts.unbooked
            [day] = await routers.books.sums("acme", ["2026-11-18"])
            assert (day["requests"], day["input"], day["output"]) == (36, 360, 108)  # Redis came back empty
        server.kill()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("limits", "call", "each"),
    [
        ({"input_tokens_per_minute": 400}, {"prompt": 25}, 4),
        ({"uncached_tokens_per_minute": 400}, {"prompt": 25}, 4),
        ({"output_tokens_per_minute": 400}, {"output": 25}, 4),
        ({"max_concurrent": 8}, {}, 2),
        ({"max_programs": 8}, {}, 2),
        ({"units_per_day": 400}, {"output": 25}, 4),
        ({"units_per_month": 400}, {"output": 25}, 4),
    ],
)
def test_while_redis_is_gone_a_router_has_its_part_of_every_limit(limits, call, each):
    """One of four, which has heard of the others before."""

    class Gone:
        degraded = True

        async def try_scripts(self, calls):
            return None

    async def run():
        clock = Clock()
        accounts = Accounts(None, Gone(), "r0", 4, lambda: clock.now / 1000, clock)
        who, calls = tenant(**limits), [{**call, "program": f"p{i}"} for i in range(9)]
        at_once = [await let_in(accounts, who, **one) for one in calls]
        assert sum(one is not None for one in at_once) == each
        for one, told in zip(at_once, calls, strict=True):
            if one is not None:
                await go(one, used(told.get("prompt", 0), 0, told.get("output", 0)), program=told["program"])
        one_more = await let_in(accounts, who, **call, program="p9")
        assert (one_more is not None) == ("max_concurrent" in limits), "only who runs at once has room by an end"

    asyncio.run(run())


def test_a_tenant_without_limits_asks_nothing_of_redis_before_it_is_served(redis):
    async def run():
        async with Routers(redis) as routers:
            asked = []
            store = routers.stores[0]
            scripts = store.try_scripts

            async def counting(calls):
                asked.append(len(calls))
                return await scripts(calls)

            store.try_scripts = counting
            turn = await come(routers.each[0], tenant(), prompt=100, output=100)
            await turn.charge_program("p")
            assert asked == []
            await go(turn, used(5, 0, 5))
            assert asked == [1, 1]  # its end, and the first time that it has records
            limited = tenant("other", requests_per_minute=60, output_tokens_per_minute=6000, max_concurrent=60)
            turns = await asyncio.gather(*(come(routers.each[0], limited) for _ in range(50)))
            assert sum(asked) == 52
            assert len(asked) <= 4, "what comes together goes together"
            await asyncio.gather(*(go(turn, used(5, 0, 5)) for turn in turns))

    asyncio.run(run())


# ---- headers ----


def test_the_headers_are_those_that_clients_know():
    limits = TenantLimits(requests_per_minute=60, input_tokens_per_minute=1000, output_tokens_per_minute=200)
    used_ = dict.fromkeys(TenantLimits.__dataclass_fields__, 0.0)
    used_ |= {"requests_per_minute": 10.0, "input_tokens_per_minute": 100.0, "output_tokens_per_minute": 150.0}
    standing = Standing(limits, used_, 59.6)
    assert dict(openai_headers(standing)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"50",
        b"x-ratelimit-reset-requests": b"1m0s",
        b"x-ratelimit-limit-tokens": b"200",
        b"x-ratelimit-remaining-tokens": b"50",
        b"x-ratelimit-reset-tokens": b"1m0s",
    }
    told = dict(anthropic_headers(standing, START / 1000))
    assert told[b"anthropic-ratelimit-input-tokens-remaining"] == b"900"
    assert told[b"anthropic-ratelimit-tokens-limit"] == b"200"
    assert told[b"anthropic-ratelimit-requests-reset"] == b"2026-11-18T11:07:39Z"
    assert [duration(s) for s in (0.25, 6, 90, 3700)] == ["250ms", "6s", "1m30s", "1h1m40s"]
