"""Quotas of many tenants over several router processes and a real Redis: how exact they are, and what they cost.

    python tests/support/quota_routers.py --seconds 150 --routers 4 --tenants 50
    python tests/support/quota_routers.py --cost

Half of the tenants ask for twice their limits of requests, or of output tokens, the others for half. Each request comes
to any of the routers, takes what it is going to draw, and ends up to two seconds later with what it drew. From what was
let in, and when: the most within any minute against the limit; what those who ask for too much get of it; how many
others were refused. And whether the books have each of them once, to the token.

`--cost`: microseconds of this process for each request, of a tenant without limits and of one with all of them, with
its end in the books; alone, and 32 at a time. Blocks of both come in turns, in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from redis_server import RedisServer

from holdfast.replicas.events import Usage, Work
from holdfast.router.accounts import Accounts, Served
from holdfast.router.quotas import MINUTE_MS, PART_MS, QuotaError
from holdfast.router.store import MemoryStore, RedisAddress, RedisStore
from holdfast.router.tenants import Principal, Tenant, TenantLimits
from holdfast.router.usage import Books

SPACE = "quotas"
TOKENS = (1, 200)  # that a request draws
PER_MINUTE = 240  # requests; tokens accordingly
WINDOW_S = (MINUTE_MS + PART_MS) / 1000


def tenants(n: int) -> list[Tenant]:
    """By number: asks for too much of requests, for little, for too many tokens, for little."""
    mean = sum(TOKENS) // 2
    kinds = (TenantLimits(requests_per_minute=PER_MINUTE), TenantLimits(output_tokens_per_minute=PER_MINUTE * mean))
    return [Tenant(f"t{i}", limits=kinds[i // 2 % 2]) for i in range(n)]


def asks_for_too_much(number: int) -> bool:
    return number % 2 == 0


def accounts(url: str, name: str, routers: int) -> tuple[Accounts, RedisStore]:
    store = RedisStore(RedisAddress(url, namespace=SPACE), MemoryStore(10, 1000), 5.0)
    return Accounts(store=store, router=name, routers=routers), store


async def route(url: str, number: int, routers: int, n: int, seconds: float) -> list[list[object]]:
    """One router: what it let in, and how many requests of each tenant it refused."""
    mine, store = accounts(url, f"r{number}", routers)
    mine.start()
    everybody, draw, let_in, refused = tenants(n), random.Random(number), [], defaultdict(int)
    ends: set[asyncio.Task[None]] = set()
    rate = n * PER_MINUTE / 60 * (2 + 0.5) / 2 / routers
    begin = time.monotonic()

    async def request(i: int, tokens: int) -> None:
        try:
            admission = mine.admission(Principal(everybody[i]))
            at = time.time()
            await admission.charge(1, 0, tokens)
        except QuotaError:
            refused[i] += 1
            return
        let_in.append([i, at, time.time(), tokens])
        await asyncio.sleep(draw.random() * 2)
        usage = Usage(0, 0, tokens, work=Work(0, 0, tokens))
        admission.end("completed", usage, 1.0, Served("pocket", endpoint="chat"))
        await admission.booked()

    def after(task: asyncio.Task[None]) -> None:
        ends.discard(task)
        task.result()

    due = begin
    while (now := time.monotonic()) - begin < seconds:
        due += draw.expovariate(rate)
        if due > now:
            await asyncio.sleep(due - now)
        i = draw.randrange(n // 2) * 2 + (draw.random() < 0.2)  # four of five come from those who ask for too much
        task = asyncio.create_task(request(i, draw.randint(*TOKENS)))
        ends.add(task)
        task.add_done_callback(after)
    while ends:
        await asyncio.wait(ends)
    await mine.close()
    await store.close()
    return [let_in, list(refused.items())]


def most_in_a_minute(events: list[tuple[float, float, int]]) -> int:
    """Of what certainly fell within one: a request was counted between its two times."""
    begins = sorted((before, n) for before, _, n in events)
    ends = sorted((after, n) for _, after, n in events)
    # Of a minute that begins as a request comes: those that had their answer by its end, less those that came before
    # it begins. Some of these had none by then, so it is no more than there were.
    most = answered = last = come = 0
    for begin, n in begins:
        while last < len(ends) and ends[last][0] < begin + MINUTE_MS / 1000:
            answered += ends[last][1]
            last += 1
        most = max(most, answered - come)
        come += n
    return most


def exactness(routers: int, n: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        try:
            command = [sys.executable, __file__, "--url", redis.url, "--routers", str(routers), "--tenants", str(n)]
            running = [
                subprocess.Popen([*command, "--seconds", str(seconds), "--router", str(i)], stdout=subprocess.PIPE)
                for i in range(routers)
            ]
            told = [json.loads(each.communicate()[0]) for each in running]
            asyncio.run(report(redis.url, told, n))
        finally:
            redis.kill()


async def report(url: str, told: list[list[list[object]]], n: int) -> None:
    everybody = tenants(n)
    events: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    refused: dict[int, int] = defaultdict(int)
    for let_in, not_let_in in told:
        for i, before, after, tokens in let_in:
            events[i].append((before, after, tokens))
        for i, count in not_let_in:
            refused[i] += count
    over, got, wrongly = [], [], 0
    last = min(max(after for _, after, _ in each) for each in events.values())
    for i, each in events.items():
        limits = everybody[i].limits
        limit = limits.requests_per_minute or limits.output_tokens_per_minute
        counted = [
            (before, after, 1 if limits.requests_per_minute else tokens) for before, after, tokens in sorted(each)
        ]
        over.append(most_in_a_minute(counted) / limit)
        if asks_for_too_much(i):
            first = counted[0][0]
            windows = int((last - first) // WINDOW_S)
            within = sum(number for at, _, number in counted if at < first + windows * WINDOW_S)
            got.append(within / limit / windows)
        else:
            wrongly += refused[i]
    store = RedisStore(RedisAddress(url, namespace=SPACE), MemoryStore(10, 1000), 5.0)
    books, equal = Books(store), 0
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(at)) for each in events.values() for at, *_ in each})
    for i, each in events.items():
        found = await books.sums(everybody[i].name, days)
        asked = (len(each), sum(tokens for *_, tokens in each))
        equal += asked == (sum(day["requests"] for day in found), sum(day["output"] for day in found))
    await store.close()
    total = sum(map(len, events.values()))
    print(f"{len(told)} routers, {len(events)} tenants: {total} let in, {sum(refused.values())} refused")
    print(f"most that was let in within any minute, of the limit: {max(over):.4f}")
    print(f"what those who ask for twice their limit get of it: {min(got):.4f} to {max(got):.4f}")
    print(f"refused of those who ask for half of theirs: {wrongly}")
    print(f"tenants whose books have each request once, to the token: {equal} of {len(events)}")


async def cost() -> None:
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        mine, store = accounts(redis.url, "r0", 1)
        big = 10**9
        limits = TenantLimits(big, big, big, big, 10**6, 10**6, float(big), float(big))
        kinds = {"no limits": Tenant("free"), "all limits": Tenant("limited", limits=limits)}
        took: dict[tuple[str, int, str], list[float]] = defaultdict(list)

        async def request(who: Principal) -> None:
            admission = mine.admission(who)
            await admission.charge(1, 500, 100, "p1")
            usage = Usage(500, 400, 50, work=Work(100, 400, 50))
            admission.end("completed", usage, 1.0, Served("pocket", "p1", "chat"))
            await admission.booked()

        for block in range(40):
            for name, tenant in kinds.items():
                who = Principal(tenant)
                for at_once in (1, 32):
                    began, cpu = time.perf_counter(), time.process_time()
                    for _ in range(64 // at_once):
                        await asyncio.gather(*(request(who) for _ in range(at_once)))
                    if block:
                        took[name, at_once, "of the router"].append((time.process_time() - cpu) / 64 * 1e6)
                        took[name, at_once, "in all"].append((time.perf_counter() - began) / 64 * 1e6)
        for (name, at_once, what), each in sorted(took.items()):
            print(f"{name}, {at_once} at once: {statistics.median(each):.0f} µs {what} a request")
        redis_us = await store._redis.info("commandstats")
        calls = redis_us["cmdstat_evalsha"]
        print(f"Redis: {calls['usec_per_call']:.0f} µs a script, {calls['calls']} of them")
        await mine.close()
        await store.close()
        redis.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--router", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        asyncio.run(cost())
    elif options.router is not None:
        told = route(options.url, options.router, options.routers, options.tenants, options.seconds)
        print(json.dumps(asyncio.run(told)))
    else:
        exactness(options.routers, options.tenants, options.seconds)


if __name__ == "__main__":
    main()
