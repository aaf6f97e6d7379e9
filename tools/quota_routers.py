"""Quotas of many tenants over several router processes and a real Redis: how exact they are, and what they cost.

    python tools/quota_routers.py --seconds 150 --routers 4 --tenants 50
    python tools/quota_routers.py --cost

A tenant has one limit (`KINDS`) and about 40 programs. Half of the tenants ask for twice their limits, the others for
half. Each request comes to any of the routers, takes what it is expected to use, and ends up to two seconds later with
what it used. From what was let in, and when: the most within any minute, or at once, or of the budget, against the
limit; what those who ask for too much get of it; how many others were refused. And whether the books have each of them
once, to the token.

`--cost`: microseconds of this process for each request, of a tenant without limits and of one with all of them, with
its end in the books; alone, and 32 at a time. Blocks of both come in turns, in one run.
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
PER_MINUTE = 240  # requests; tokens accordingly
WINDOW_S = (MINUTE_MS + PART_MS) / 1000


@dataclass(frozen=True)
class Kind:
    """A limit, and how well requests are foreseen: the prompt's part that is guessed, tokens that are reserved."""

    name: str
    limit: str
    value: int
    guessed: tuple[float, float] = (1.0, 1.0)
    reserved: int | None = None  # None: what is drawn
    steady: bool = True  # half of it is never more than it by chance


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
    """By number: of each kind one that asks for too much, and one that asks for little."""
    return [Tenant(f"t{i}", limits=TenantLimits(**{kind_of(i).limit: kind_of(i).value})) for i in range(n)]


def asks_for_too_much(number: int) -> bool:
    return number % 2 == 0


CONFIG = RouterConfig()


def books_of(url: str, routers: int) -> tuple[UsageBooks, Records]:
    store = Records(RedisAddress(url, namespace=SPACE), 5.0)
    return UsageBooks(CONFIG, Quotas(store, routers)), store


def need_of(prompt: int, output: int) -> Cost:
    return Cost(1, prompt, prompt, output, round(priced(CONFIG.prices, prompt, 0, output)))


def ended(id_: str, tenant: str, prompt: int, cached: int, output: int, program: str, over: bool) -> CallEnd:
    """The end of a call that has completed."""
    at = time.time()
    record = UsageRecord(id_, at, tenant, "", "pocket", program, "chat", "completed", prompt, cached, output, output)
    return CallEnd(record, program_ended=over)


async def route(url: str, number: int, routers: int, n: int, seconds: float, seed: int) -> list[list[object]]:
    """One router: what it let in, and how many requests of each tenant it refused."""
    mine, store = books_of(url, routers)
    mine.start()
    everybody, draw, let_in, refused = tenants(n), random.Random(seed * routers + number), [], defaultdict(int)
    ends: set[asyncio.Task[None]] = set()
    rate = n * PER_MINUTE / 60 * (2 + 0.5) / 2 / routers
    begin = time.monotonic()

    async def request(i: int) -> None:
        kind, prompt, output = kind_of(i), draw.randint(*PROMPT), draw.randint(*OUTPUT)
        few = kind.limit == "max_programs" and not asks_for_too_much(i)
        program = f"p{draw.randrange(PROGRAMS // 4 if few else PROGRAMS)}"
        over, guess = draw.random() < 0.1, round(prompt * draw.uniform(*kind.guessed))
        try:
            mine.quotas.check(everybody[i])
            at, id_ = time.time(), secrets.token_hex(12)
            need = need_of(guess, output if kind.reserved is None else kind.reserved)
            await mine.quotas.admit(everybody[i], id_, need, program, lease=True)
        except QuotaError:
            refused[i] += 1
            return
        came = time.time()
        await asyncio.sleep(draw.random() * 2)
        cached = round(prompt * CACHED)
        left = time.time()
        await mine.book(ended(id_, everybody[i].name, prompt, cached, output, program, over))
        let_in.append([i, at, came, left, time.time(), prompt, prompt - cached, output, program, over])

    def after(task: asyncio.Task[None]) -> None:
        ends.discard(task)
        task.result()

    due = begin
    while (now := time.monotonic()) - begin < seconds:
        due += draw.expovariate(rate)
        if due > now:
            await asyncio.sleep(due - now)
        i = draw.randrange(n // 2) * 2 + (draw.random() < 0.2)  # four of five come from those who ask for too much
        task = asyncio.create_task(request(i))
        ends.add(task)
        task.add_done_callback(after)
    while ends:
        await asyncio.wait(ends)
    while mine.waiting:  # noqa: ASYNC110 (what Redis has not heard of is told again every two seconds)
        await asyncio.sleep(0.1)
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


def exactness(routers: int, n: int, seconds: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        try:
            command = [sys.executable, __file__, "--url", redis.url, "--routers", str(routers), "--tenants", str(n)]
            command += ["--seconds", str(seconds), "--seed", str(seed), "--router"]
            running = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE) for i in range(routers)]
            told = [json.loads(each.communicate()[0]) for each in running]
            asyncio.run(report(redis.url, told, n))
        finally:
            redis.kill()


@dataclass
class Found:
    """Of the tenants of one kind: the most that was let in, and what those got who asked for too much, of the limit."""

    most: float = 0.0
    got: list[float] = field(default_factory=list)
    wrongly: int = 0


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """Of what certainly was there at the same time."""
    changes = sorted((at, change) for begin, end in spans for at, change in ((begin, 1), (end, -1)) if end > begin)
    return max(accumulate(change for _, change in changes), default=0)


def alive(events: list[list[Any]]) -> Iterator[tuple[float, float]]:
    """When programs certainly counted: from their first turn's admission to the first end of a turn after it that may
    have been their last.
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
            # A turn that ran over this end may have kept it, or not: only one that comes after its booking is sure.
            begin = next((turn[4] for turn in turns if turn[3] == end), end)


def look(kind: Kind, events: list[list[Any]], last: float, greedy: bool) -> tuple[float, float | None]:
    """Of the limit: the most that was let in; and what those got who ask for too much, where that is a rate."""
    if kind.limit == "max_concurrent":
        return most_at_once((event[2], event[3]) for event in events) / kind.value, None
    if kind.limit == "max_programs":
        return most_at_once(alive(events)) / kind.value, None
    if kind.limit == "units_per_day":
        part = sum(event[5] + event[7] for event in events) / kind.value
        return part, part if greedy else None
    column = {"input": 5, "uncached": 6, "output": 7}.get(kind.limit.partition("_")[0])
    counted = [(event[1], event[2], 1 if column is None else event[column]) for event in sorted(events)]
    most = most_in_a_minute(counted) / kind.value
    if not greedy:
        return most, None
    first = counted[0][0]
    windows = int((last - first) // WINDOW_S)
    within = sum(number for at, _, number in counted if at < first + windows * WINDOW_S)
    return most, within / kind.value / windows if windows else None


async def report(url: str, told: list[list[list[Any]]], n: int) -> None:
    events: dict[int, list[list[Any]]] = defaultdict(list)
    refused: dict[int, int] = defaultdict(int)
    for let_in, not_let_in in told:
        for event in let_in:
            events[event[0]].append(event)
        for i, number in not_let_in:
            refused[i] += number
    found = {kind: Found() for kind in KINDS}
    last = max(event[2] for each in events.values() for event in each)
    for i, each in events.items():
        kind, greedy = kind_of(i), asks_for_too_much(i)
        most, got = look(kind, each, last, greedy)
        mine = found[kind]
        mine.most = max(mine.most, most)
        mine.got += [] if got is None else [got]
        mine.wrongly += 0 if greedy else refused[i]
    store = Records(RedisAddress(url, namespace=SPACE), 5.0)
    books, equal = UsageBooks(CONFIG, Quotas(store)), 0
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(event[3])) for each in events.values() for event in each})
    for i, each in events.items():
        sums = await books.sums(f"t{i}", days)
        asked = (len(each), sum(event[5] for event in each), sum(event[7] for event in each))
        equal += asked == tuple(sum(day[name] for day in sums) for name in ("requests", "input", "output"))
    await store.close()
    programs = len({(event[0], event[8]) for each in events.values() for event in each})
    total, not_let_in = sum(map(len, events.values())), sum(refused.values())
    print(f"{len(told)} routers, {len(events)} tenants, {programs} programs: {total} let in, {not_let_in} refused")
    print("| limit | most, of it | those who ask for twice it get | refused of those who ask for half |")
    print("|---|---|---|---|")
    for kind, mine in found.items():
        got = f"{min(mine.got):.3f} to {max(mine.got):.3f}" if mine.got else ""
        wrongly = mine.wrongly if kind.steady else ""
        print(f"| {kind.name} | {mine.most:.4f} | {got} | {wrongly} |")
    print(f"tenants whose books have each request once, to the token: {equal} of {len(events)}")


async def cost() -> None:
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        mine, store = books_of(redis.url, 1)
        big = 10**9
        limits = TenantLimits(big, big, big, big, 10**6, 10**6, float(big), float(big))
        kinds = {"no limits": Tenant("free"), "all limits": Tenant("limited", limits=limits)}
        took: dict[tuple[str, int, str], list[float]] = defaultdict(list)

        async def request(who: Tenant) -> None:
            id_ = secrets.token_hex(12)
            if who.limits.any:
                await mine.quotas.admit(who, id_, need_of(500, 100), "p1", lease=True)
            await mine.book(ended(id_, who.name, 500, 400, 50, "p1" if who.limits.any else "", False))

        for block in range(40):
            for name, tenant in kinds.items():
                for at_once in (1, 32):
                    began, cpu = time.perf_counter(), time.process_time()
                    for _ in range(64 // at_once):
                        await asyncio.gather(*(request(tenant) for _ in range(at_once)))
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
    parser.add_argument("--seed", type=int, default=0, help="of what comes when, and how long it is")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--router", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        asyncio.run(cost())
    elif options.router is not None:
        told = route(options.url, options.router, options.routers, options.tenants, options.seconds, options.seed)
        print(json.dumps(asyncio.run(told)))
    else:
        exactness(options.routers, options.tenants, options.seconds, options.seed)


if __name__ == "__main__":
    main()
