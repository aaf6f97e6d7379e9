"""Accuracy and cost of the quotas of many tenants, over several router processes and a real Redis.

    python tools/quota_routers.py --seconds 150 --routers 4 --tenants 50
    python tools/quota_routers.py --cost

A tenant has one limit (`KINDS`) and about 40 programs. Half of the tenants request twice their limits, the others half.
Each request goes to a random router and reserves its expected use. It ends up to two seconds later with its real use.

From the admitted requests and their times the report computes, for each limit:

- the most that was admitted within any minute, at once or of the budget, as a share of the limit;
- the share that the greedy tenants got;
- how many requests of the other tenants were refused.

It also checks that the books have each request once, to the token.

`--cost`: microseconds of this process for each request and its booking. It compares a tenant without limits and one
with all of them, alone and 32 at a time, in alternating blocks of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from redis_server import RedisServer

from holdfast.router.config import RouterConfig
from holdfast.router.entry import (
    MINUTE_MS,
    PART_MS,
    CallEnd,
    Cost,
    QuotaError,
    Quotas,
    UsageBooks,
    UsageRecord,
    priced,
)
from holdfast.router.records import Records, RedisAddress
from holdfast.router.tenants import Tenant, TenantLimits

SPACE = "quotas"
PROMPT, OUTPUT = (500, 1500), (1, 200)  # tokens of a request
CACHED = 0.75  # of a prompt
PROGRAMS = 42  # of a tenant
PER_MINUTE = 240  # requests; the token limits follow from it
WINDOW_S = (MINUTE_MS + PART_MS) / 1000


@dataclass(frozen=True)
class Kind:
    """A limit, and the estimates of its requests: prompt tokens as a factor of the real ones, and reserved output."""

    name: str
    limit: str
    value: int
    estimate_factors: tuple[float, float] = (1.0, 1.0)
    reserved: int | None = None  # None: the real output
    steady: bool = True  # requests at half the limit never exceed it by chance


KINDS = (
    Kind("requests", "requests_per_minute", PER_MINUTE),
    Kind("input, guessed to a half", "input_tokens_per_minute", PER_MINUTE * 1000, (0.5, 1.5)),
    Kind("uncached input, guessed to a half", "uncached_tokens_per_minute", PER_MINUTE * 250, (0.5, 1.5)),
    Kind("output, as reserved", "output_tokens_per_minute", PER_MINUTE * 100),
    Kind("output, 512 reserved, 1 to 200 drawn", "output_tokens_per_minute", PER_MINUTE * 100, reserved=512),
    Kind("output, 50 reserved, 1 to 200 drawn", "output_tokens_per_minute", PER_MINUTE * 100, reserved=50),
    Kind("requests at once", "max_concurrent", 4, steady=False),
    Kind("programs at once", "max_programs", PROGRAMS // 2),
    Kind("budget of the day", "units_per_day", PER_MINUTE * 1100, steady=False),
)


def kind_of(number: int) -> Kind:
    return KINDS[number // 2 % len(KINDS)]


def tenants(n: int) -> list[Tenant]:
    """`n` tenants: for each kind, one that requests too much and one that requests little."""
    return [Tenant(f"t{i}", limits=TenantLimits(**{kind_of(i).limit: kind_of(i).value})) for i in range(n)]


def is_greedy(number: int) -> bool:
    return number % 2 == 0


CONFIG = RouterConfig()


def books_of(url: str, routers: int) -> tuple[UsageBooks, Records]:
    store = Records(RedisAddress(url, namespace=SPACE), 5.0)
    return UsageBooks(CONFIG, Quotas(store, routers)), store


def cost_of(prompt: int, output: int) -> Cost:
    return Cost(1, prompt, prompt, output, round(priced(CONFIG.prices, prompt, 0, output)))


def completed_call(
    id_: str, tenant: str, prompt: int, cached: int, output: int, program: str, program_ended: bool
) -> CallEnd:
    """The end of a completed call."""
    at = time.time()
    record = UsageRecord(id_, at, tenant, "", "pocket", program, "chat", "completed", prompt, cached, output, output)
    return CallEnd(record, program_ended=program_ended)


async def route(url: str, number: int, routers: int, n: int, seconds: float, seed: int) -> list[list[object]]:
    """Run one router. Returns the requests it admitted, and the number it refused for each tenant."""
    books, store = books_of(url, routers)
    books.start()
    all_tenants, rng, admitted, refused = tenants(n), random.Random(seed * routers + number), [], defaultdict(int)
    ends: set[asyncio.Task[None]] = set()
    rate = n * PER_MINUTE / 60 * (2 + 0.5) / 2 / routers
    start = time.monotonic()

    async def request(i: int) -> None:
        kind, prompt, output = kind_of(i), rng.randint(*PROMPT), rng.randint(*OUTPUT)
        few = kind.limit == "max_programs" and not is_greedy(i)
        program = f"p{rng.randrange(PROGRAMS // 4 if few else PROGRAMS)}"
        program_ended, estimate = rng.random() < 0.1, round(prompt * rng.uniform(*kind.estimate_factors))
        try:
            books.quotas.check(all_tenants[i])
            at, id_ = time.time(), secrets.token_hex(12)
            need = cost_of(estimate, output if kind.reserved is None else kind.reserved)
            await books.quotas.admit(all_tenants[i], id_, need, program, lease=True)
        except QuotaError:
            refused[i] += 1
            return
        admitted_at = time.time()
        await asyncio.sleep(rng.random() * 2)
        cached = round(prompt * CACHED)
        ended_at = time.time()
        await books.book(completed_call(id_, all_tenants[i].name, prompt, cached, output, program, program_ended))
        admitted.append(
            [i, at, admitted_at, ended_at, time.time(), prompt, prompt - cached, output, program, program_ended]
        )

    def after(task: asyncio.Task[None]) -> None:
        ends.discard(task)
        task.result()

    due = start
    while (now := time.monotonic()) - start < seconds:
        due += rng.expovariate(rate)
        if due > now:
            await asyncio.sleep(due - now)
        i = rng.randrange(n // 2) * 2 + (rng.random() < 0.2)  # greedy tenants send four of five requests
        task = asyncio.create_task(request(i))
        ends.add(task)
        task.add_done_callback(after)
    while ends:
        await asyncio.wait(ends)
    while books.waiting:  # noqa: ASYNC110 (the books retry every two seconds)
        await asyncio.sleep(0.1)
    await books.close()
    await store.close()
    return [admitted, list(refused.items())]


def most_in_a_minute(events: list[tuple[float, float, int]]) -> int:
    """The most that was certainly counted within a minute. A request was counted between its two times."""
    begins = sorted((before, n) for before, _, n in events)
    ends = sorted((after, n) for _, after, n in events)
    # For a minute that begins with a request: the requests admitted by its end, less those that came before it. Some of
    # the latter were admitted within the minute, so the figure is a lower bound.
    most = answered = last = earlier = 0
    for begin, n in begins:
        while last < len(ends) and ends[last][0] < begin + MINUTE_MS / 1000:
            answered += ends[last][1]
            last += 1
        most = max(most, answered - earlier)
        earlier += n
    return most


def exactness(routers: int, n: int, seconds: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        try:
            command = [sys.executable, __file__, "--url", redis.url, "--routers", str(routers), "--tenants", str(n)]
            command += ["--seconds", str(seconds), "--seed", str(seed), "--router"]
            running = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE) for i in range(routers)]
            reports = [json.loads(process.communicate()[0]) for process in running]
            asyncio.run(report(redis.url, reports, n))
        finally:
            redis.kill()


@dataclass
class QuotaResult:
    """Results of one kind: the most that was admitted and the greedy tenants' shares, both of the limit; refusals."""

    most: float = 0.0
    shares: list[float] = field(default_factory=list)
    refused_modest: int = 0


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """The largest number of spans that certainly overlapped."""
    changes = sorted((at, change) for begin, end in spans for at, change in ((begin, 1), (end, -1)) if end > begin)
    return max(accumulate(change for _, change in changes), default=0)


def certain_spans(events: list[list[Any]]) -> Iterator[tuple[float, float]]:
    """Spans in which programs certainly counted.

    A span begins with the admission of a program's first turn. It ends with the first later turn that may be the last.
    """
    by_program: dict[str, list[list[Any]]] = defaultdict(list)
    for event in events:
        by_program[event[8]].append(event)
    for turns in by_program.values():
        ends = sorted(turn[3] for turn in turns if turn[9])
        comes = sorted(turn[2] for turn in turns)
        last = max(turn[4] for turn in turns)
        begin = 0.0
        for end in [*ends, last]:
            first = next((each for each in comes if each > begin), None)
            if first is not None and first < end:
                yield first, end
            # A turn that ran at this end may have kept the program. Only a turn after the booking is certain.
            begin = next((turn[4] for turn in turns if turn[3] == end), end)


def measure_kind(kind: Kind, events: list[list[Any]], last: float, greedy: bool) -> tuple[float, float | None]:
    """The most that was admitted and, for rates, the share of a greedy tenant. Both are shares of the limit."""
    if kind.limit == "max_concurrent":
        return most_at_once((event[2], event[3]) for event in events) / kind.value, None
    if kind.limit == "max_programs":
        return most_at_once(certain_spans(events)) / kind.value, None
    if kind.limit == "units_per_day":
        share = sum(event[5] + event[7] for event in events) / kind.value
        return share, share if greedy else None
    column = {"input": 5, "uncached": 6, "output": 7}.get(kind.limit.partition("_")[0])
    counted = [(event[1], event[2], 1 if column is None else event[column]) for event in sorted(events)]
    most = most_in_a_minute(counted) / kind.value
    if not greedy:
        return most, None
    first = counted[0][0]
    windows = int((last - first) // WINDOW_S)
    admitted = sum(number for at, _, number in counted if at < first + windows * WINDOW_S)
    return most, admitted / kind.value / windows if windows else None


async def report(url: str, reports: list[list[list[Any]]], n: int) -> None:
    events: dict[int, list[list[Any]]] = defaultdict(list)
    refused: dict[int, int] = defaultdict(int)
    for admitted, rejected in reports:
        for event in admitted:
            events[event[0]].append(event)
        for i, number in rejected:
            refused[i] += number
    results = {kind: QuotaResult() for kind in KINDS}
    last = max(event[2] for rows in events.values() for event in rows)
    for i, rows in events.items():
        kind, greedy = kind_of(i), is_greedy(i)
        most, share = measure_kind(kind, rows, last, greedy)
        result = results[kind]
        result.most = max(result.most, most)
        result.shares += [] if share is None else [share]
        result.refused_modest += 0 if greedy else refused[i]
    store = Records(RedisAddress(url, namespace=SPACE), 5.0)
    books, equal = UsageBooks(CONFIG, Quotas(store)), 0
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(event[3])) for rows in events.values() for event in rows})
    for i, rows in events.items():
        sums = await books.sums(f"t{i}", days)
        expected = (
            len(rows),
            sum(event[5] for event in rows),
            sum(event[7] for event in rows),
        )
        equal += expected == tuple(sum(day[name] for day in sums) for name in ("requests", "input", "output"))
    await store.close()
    programs = len({(event[0], event[8]) for rows in events.values() for event in rows})
    total, rejected = sum(map(len, events.values())), sum(refused.values())
    print(f"{len(reports)} routers, {len(events)} tenants, {programs} programs: {total} admitted, {rejected} refused")
    print("| limit | most admitted, of the limit | greedy tenants got | refused of the others |")
    print("|---|---|---|---|")
    for kind, result in results.items():
        share = f"{min(result.shares):.3f} to {max(result.shares):.3f}" if result.shares else ""
        refused_modest = result.refused_modest if kind.steady else ""
        print(f"| {kind.name} | {result.most:.4f} | {share} | {refused_modest} |")
    print(f"tenants whose books have each request once, to the token: {equal} of {len(events)}")


async def cost() -> None:
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        books, store = books_of(redis.url, 1)
        unlimited = 10**9
        limits = TenantLimits(
            unlimited, unlimited, unlimited, unlimited, 10**6, 10**6, float(unlimited), float(unlimited)
        )
        kinds = {"no limits": Tenant("free"), "all limits": Tenant("limited", limits=limits)}
        times: dict[tuple[str, int, str], list[float]] = defaultdict(list)

        async def request(tenant: Tenant) -> None:
            id_ = secrets.token_hex(12)
            if tenant.limits.any:
                await books.quotas.admit(tenant, id_, cost_of(500, 100), "p1", lease=True)
            await books.book(completed_call(id_, tenant.name, 500, 400, 50, "p1" if tenant.limits.any else "", False))

        for block in range(40):
            for name, tenant in kinds.items():
                for at_once in (1, 32):
                    start, cpu = time.perf_counter(), time.process_time()
                    for _ in range(64 // at_once):
                        await asyncio.gather(*(request(tenant) for _ in range(at_once)))
                    if block:
                        times[name, at_once, "of the router"].append((time.process_time() - cpu) / 64 * 1e6)
                        times[name, at_once, "in all"].append((time.perf_counter() - start) / 64 * 1e6)
        for (name, at_once, part), microseconds in sorted(times.items()):
            print(f"{name}, {at_once} at once: {statistics.median(microseconds):.0f} µs {part} a request")
        redis_us = await store._redis.info("commandstats")
        calls = redis_us["cmdstat_evalsha"]
        print(f"Redis: {calls['usec_per_call']:.0f} µs a script, {calls['calls']} of them")
        await books.close()
        await store.close()
        redis.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of arrival times and lengths")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--router", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        asyncio.run(cost())
    elif options.router is not None:
        outcome = route(options.url, options.router, options.routers, options.tenants, options.seconds, options.seed)
        print(json.dumps(asyncio.run(outcome)))
    else:
        exactness(options.routers, options.tenants, options.seconds, options.seed)


if __name__ == "__main__":
    main()
