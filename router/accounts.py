"""A tenant's account: the one place where a call is charged before it is served, and the one where its end is booked.

    Admission.charge   its limits have room for what it is expected to need (`quotas`), or it is refused
    Admission.end      it is over: what it used is booked, with a record, and settled (`usage`)

A tenant without limits is charged nothing and asks Redis nothing. Its end, as everybody's, is booked while its
program's turn is ended there, so an answer's end is told after both. What is asked of Redis meanwhile goes with
the next round trip, all of it in one.

Losing Redis refuses and loses nothing: each router then goes by its part of every limit, and what it cannot book it
keeps, in order, until it can.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from holdfast.replicas.requests import NO_WORK, Usage
from holdfast.router.background import forever
from holdfast.router.config import RouterConfig
from holdfast.router.quotas import (
    ADMIT,
    LEASE_S,
    RENEW,
    Cost,
    LocalQuotas,
    QuotaError,
    Standing,
    admit_arguments,
    admitted,
    quota_keys,
)
from holdfast.router.records import Argument, Call, Records
from holdfast.router.round_trips import AT_ONCE, RoundTrips
from holdfast.router.tenants import Principal, Tenant, TenantLimits
from holdfast.router.usage import (
    BOOK,
    LIST,
    LISTED,
    UsageRecord,
    book_arguments,
    cost_of,
    priced,
    usage_keys,
)

log = logging.getLogger(__name__)

BEAT_S = 2.0  # between two signs of life of a router
GONE_S = 10.0  # a router that gave none for so long is none
RENEW_S = LEASE_S / 3
COUNTING_S = 5.0  # a router that stops waits so long for replicas to say what they did
BOOKING_S = 0.5  # and then so long for Redis
ALONE_S = 60.0  # a refusal that only time ends is remembered for so long at most
MOST_UNBOOKED = 65536  # ends that wait for Redis; beyond that the oldest are lost, and counted

# The routers there are. KEYS: their names by when they were heard of. ARGV: a name, ms. Returns how many.
BEAT = """
local time = redis.call('TIME')
local now, gone = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000), tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - gone)
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + gone, '+inf')  -- the clock was set back: who is there says so again
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {redis.call('ZCARD', KEYS[1])}
"""

_RESULTS = {1: "booked", 3: "lost"}  # of `BOOK`
_DRAWN_KNOWN = 8  # requests, from which on it counts how much of what others asked for they drew
_LATEST = 0.05  # weight of the latest request among those by which it is estimated what the next ones need
_LEAST_DRAWN = 0.125  # of the tokens that a request may draw, that are reserved for it however few others drew, so that
# many requests at once, unlike those before them, do not go over a limit by much


@dataclass(frozen=True, slots=True)
class Served:
    """What a router knows of a call that its record tells."""

    model: str = ""
    program: str = ""
    endpoint: str = ""
    stream: bool = False
    replica: str = ""
    http_id: str = ""
    retry: str = ""  # what its tries have in common
    over: bool = False  # its program is
    ahead: bool = False  # it computed what a later request has


@dataclass(slots=True)
class _Booking:
    """An end on its way to the books."""

    tenant: str
    keys: list[str]
    tell: Callable[[float, float], list[Argument]]  # the arguments, so long after it ended and was told first
    ended: float  # on the monotonic clock
    record: bool
    told: float | None = None  # likewise; None: Redis has not heard of it


class Accounts:
    """Those of all tenants. `store` None: there is this process alone, and its memory counts.

    Call `start` on the event loop where there is a store, and `close` at the end.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        store: Records | None = None,
        router: str = "router",
        routers: int = 1,
        clock: Callable[[], float] = time.time,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """`now_ms`: a clock for Redis' own, in tests. `routers`: how many there are, until Redis says it."""
        self._config = config or RouterConfig()
        self._store = store
        self._trips: RoundTrips[Call, list[Any]] = RoundTrips(self._send)
        self._router = router
        self.routers = max(1, routers)
        self.clock = clock
        self._now_ms = now_ms
        self._local = LocalQuotas()
        self._refused: dict[str, tuple[TenantLimits, float, QuotaError]] = {}
        self._spent: dict[tuple[str, str], float] = {}  # of a period, parts of units, as Redis said last
        self._unbooked: deque[_Booking] = deque()
        self._listed: set[str] = set()  # tenants that Redis knows to have records
        self._habits: dict[str, _Habit] = {}
        self.standings: dict[str, Standing] = {}  # of the tenants with limits, as they were told last
        self.refusals: Counter[tuple[str, str]] = Counter()  # by tenant and limit
        self.booked: Counter[str] = Counter({"booked": 0, "again": 0, "lost": 0, "uncounted": 0})
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counts: set[asyncio.Task[Any]] = set()  # of these
        self._beats: asyncio.Task[None] | None = None
        self._renewed = time.monotonic()

    # ---- what others ask ----

    @property
    def local(self) -> bool:
        """Whether this router goes by its own part of the limits although it should share them."""
        return self._store is not None and self._store.degraded

    @property
    def unbooked(self) -> int:
        """Ends that Redis does not know yet."""
        return len(self._unbooked)

    def admission(self, principal: Principal) -> Admission:
        """One call, not charged yet. Raises QuotaError where it is known already that it would be refused: no body need
        be read, and nobody asked, for that.
        """
        self._check(principal.tenant)
        return Admission(self, principal)

    def keep(self, tenants: Sequence[Tenant]) -> None:
        """From now on these are the tenants."""
        names = {tenant.name for tenant in tenants}
        self._local.keep(tuple(names))
        for known in (self._refused, self._habits, self.standings):
            for name in [name for name in known if name not in names]:
                del known[name]

    def estimate(self, tenant: Tenant, answers: int, input_tokens: int, output_tokens: int) -> Cost:
        """What a request is taken to need. `input_tokens` is a guess from its length, and `output_tokens` what it may
        draw: both are put right by what such figures of this tenant's were worth.
        """
        habit = self._habits.get(tenant.name) or _Habit()
        n, n_variance = habit.input.of(input_tokens)
        uncached, uncached_variance = habit.uncached.of(n)
        output, output_variance = habit.output.of(output_tokens)
        uncached_variance += round(habit.uncached.part**2 * n_variance)
        units = round(priced(self._config.prices, uncached, n - uncached, output))
        return Cost(answers, n, uncached, output, units, (0, n_variance, uncached_variance, output_variance))

    # ---- life ----

    def start(self) -> None:
        """Give signs of life from now on."""
        beats = forever(self._beat, BEAT_S, "the books' sign of life")
        self._beats = asyncio.get_running_loop().create_task(beats)

    async def close(self) -> None:
        """Book what is left, if Redis is there. What is still being counted has `COUNTING_S` to be known."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.wait({self._beats})
        await self._idle(COUNTING_S)
        for task in self._counts:
            task.cancel()  # booked without what is not known
        await self._idle(BOOKING_S)
        await self._catch_up()
        lost = sum(booking.record for booking in self._unbooked)
        self.booked["lost"] += lost
        if lost or self.booked["uncounted"]:
            uncounted = self.booked["uncounted"]
            log.warning("%d records of usage are lost, %d were booked without what was used", lost, uncounted)

    async def _idle(self, seconds: float) -> None:
        """Wait until nothing is being counted or booked, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._tasks:
                    await asyncio.wait(tuple(self._tasks))

    async def _beat(self) -> None:
        answer = await self._ask((BEAT, ["routers"], [self._router, int(GONE_S * 1000)]))
        if answer:
            self.routers = max(1, int(answer[0]))
        if time.monotonic() - self._renewed >= RENEW_S:
            self._renewed = time.monotonic()
            await self._renew()
        await self._catch_up()

    async def _renew(self) -> None:
        calls = [
            self._ask(
                (RENEW, quota_keys(tenant), ["" if self._now_ms is None else self._now_ms(), LEASE_S * 1000, *ids])
            )
            for tenant, ids in self._local.leases().items()
        ]
        await asyncio.gather(*calls)

    # ---- charging ----

    def _check(self, tenant: Tenant) -> None:
        known = self._refused.get(tenant.name)
        if known is None:
            return
        limits, until, error = known
        left = until - time.monotonic()
        if left <= 0 or limits != tenant.limits:
            del self._refused[tenant.name]
            return
        self.refusals[tenant.name, error.limit] += 1
        given = replace(error.standing, reset_s=left)
        raise QuotaError(tenant.name, error.limit, getattr(tenant.limits, error.limit), given, left)

    async def _charge(self, admission: Admission, cost: Cost, program: str, lease: bool) -> Standing:
        tenant, id_ = admission.principal.tenant, admission.id
        limits, rest_s = tenant.limits, self._config.program_quota_s
        now_ms = self._local_ms()
        try:
            if self._store is not None:
                told = admit_arguments(
                    None if self._now_ms is None else now_ms,
                    id_,
                    LEASE_S if lease else 0.0,
                    program if limits.max_programs is not None else "",
                    rest_s,
                    cost,
                    limits,
                )
                answer = await self._ask((ADMIT, quota_keys(tenant.name), told))
                if answer is not None:
                    standing = admitted(tenant, answer)
                    self._local.note(tenant, now_ms, id_, lease, cost)
                    self.standings[tenant.name] = standing
                    return standing
            admission.late = self._store is not None
            share = 1.0 / self.routers if self._store is not None else 1.0
            periods = _periods(self.clock())
            standing = self._local.admit(tenant, now_ms, id_, lease, program, rest_s, cost, share, periods)
        except QuotaError as error:
            self.refusals[tenant.name, error.limit] += 1
            self.standings[tenant.name] = error.standing
            if error.lasts and error.retry_after_s:
                until = time.monotonic() + min(error.retry_after_s, ALONE_S)
                self._refused[tenant.name] = limits, until, error
            raise
        self.standings[tenant.name] = standing
        return standing

    # ---- booking ----

    async def _end(self, admission: Admission, record: UsageRecord | None, used: Cost, served: Served) -> None:
        """Book it now, or keep it until Redis is back. Done when the books have it, or are known not to."""
        tenant, config = admission.principal.tenant, self._config
        limits, now_ms = tenant.limits, self._local_ms()
        program = served.program if limits.max_programs is not None else ""
        if record is not None and admission.leased:
            self._habit(tenant.name).learn(record, admission.guessed, admission.asked)
        if limits.any or admission.leased:
            periods = _periods(self.clock())
            self._local.settle(tenant.name, now_ms, admission.id, used, program, served.over, periods)
        if self._store is None:
            self.booked["booked"] += record is not None
            return
        late, fixed = admission.late, self._now_ms

        def tell(ago_s: float, told_s: float) -> list[Argument]:
            return book_arguments(
                None if fixed is None else fixed(),
                ago_s,
                record,
                admission.id,
                served.retry,
                used,
                late,
                (program, served.over, config.program_quota_s),
                config.usage_records,
                config.usage_days * 86400.0,
                told_s,
            )

        booking = _Booking(tenant.name, usage_keys(tenant.name), tell, time.monotonic(), record is not None)
        if not await self._book(booking):
            self._unbooked.append(booking)
            if len(self._unbooked) > MOST_UNBOOKED:
                self.booked["lost"] += self._unbooked.popleft().record

    async def _book(self, booking: _Booking) -> bool:
        now = time.monotonic()
        told_s = 0.0 if booking.told is None else now - booking.told
        try:
            call = (BOOK, booking.keys, booking.tell(now - booking.ended, told_s))
            if booking.told is None and not self.local:
                booking.told = now  # if its answer is lost it may be in the books
            answer = await self._ask(call)
        except Exception:  # another try would fail as well
            log.exception("a record of usage could not be booked")
            self.booked["lost"] += booking.record
            return True
        if answer is None:
            return False
        if booking.record:
            self.booked[_RESULTS.get(int(answer[0]), "again")] += 1
            if int(answer[0]) == 1 and (int(answer[2]) == 1 or booking.tenant not in self._listed):
                with suppress(Exception):  # it is booked, and the next record of this tenant tries again
                    await self._list(booking.tenant)
        return True

    async def _list(self, tenant: str) -> None:
        """It has records: so it is found when it is no tenant any more. Its own first record says so, and each router's
        first of it, for Redis may have been away.
        """
        if await self._ask((LIST, [LISTED], [tenant])) is None:
            self._listed.discard(tenant)
        else:
            self._listed.add(tenant)

    async def _catch_up(self) -> None:
        """Book what waits, in order."""
        while self._unbooked and not self.local and self._store is not None:
            batch = [self._unbooked.popleft() for _ in range(min(len(self._unbooked), AT_ONCE))]
            done = await asyncio.gather(*(self._book(each) for each in batch))
            left = [each for each, booked in zip(batch, done, strict=True) if not booked]
            if left:
                self._unbooked.extendleft(reversed(left))
                return

    # ---- parts ----

    async def _ask(self, call: Call) -> list[Any] | None:
        return None if self._store is None or self._store.degraded else await self._trips.ask(call)

    async def _send(self, calls: Sequence[Call]) -> list[list[Any]] | None:
        return None if self._store is None else await self._store.try_scripts(calls)

    def _local_ms(self) -> int:
        """By this the last minute is counted here. Not the time of day, which may be set back."""
        return int(time.monotonic() * 1000) if self._now_ms is None else self._now_ms()

    def _habit(self, tenant: str) -> _Habit:
        return self._habits.setdefault(tenant, _Habit())

    def _run(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the books: a task failed", exc_info=error)


class Admission:
    """One call from its coming to its booked end. `end` counts once; without `charge` nothing was taken."""

    def __init__(self, accounts: Accounts, principal: Principal) -> None:
        self._accounts = accounts
        self.principal = principal
        self.id = secrets.token_hex(12)
        self.standing: Standing | None = None
        self.charged = False
        self.leased = False  # it holds a place and an estimate until it ends
        self.late = False  # it was let in without Redis
        self.guessed = 0  # tokens of its prompt, by its length
        self.asked = 0  # tokens that it may draw, as far as is known
        self._ended: asyncio.Task[None] | None = None

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters how long the request is."""
        return self.principal.tenant.limits.counts_tokens

    async def charge(self, answers: int = 1, input_tokens: int = 0, output_tokens: int = 0, program: str = "") -> None:
        """Take what a generation request is expected to need. Raises QuotaError."""
        tenant = self.principal.tenant
        self.charged = True
        if not tenant.limits.any:
            return
        self.guessed, self.asked = input_tokens, output_tokens
        cost = self._accounts.estimate(tenant, answers, input_tokens, output_tokens)
        if not self.counts_tokens:
            cost = Cost(answers)
        self.standing = await self._accounts._charge(self, cost, program, lease=True)
        self.leased = True

    async def charge_call(self) -> None:
        """Count a call that generates nothing, or could not be read. Raises QuotaError."""
        tenant = self.principal.tenant
        self.charged = True
        if tenant.limits.requests_per_minute is not None:
            self.standing = await self._accounts._charge(self, Cost(), "", lease=False)

    async def charge_program(self, program: str) -> None:
        """It has turned out to be a turn of this program. Raises QuotaError where those are too many."""
        if self.leased and self.principal.tenant.limits.max_programs is not None:
            self.standing = await self._accounts._charge(self, Cost(0), program, lease=True)

    def count(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which asks what was done for the call and then ends it. A router that stops waits for that."""
        counts, task = self._accounts._counts, self._accounts._run(work)
        counts.add(task)
        task.add_done_callback(counts.discard)

    def uncounted(self) -> None:
        """What was done for the call could not be learnt: its record lacks it."""
        self._accounts.booked["uncounted"] += 1

    def end(self, outcome: str, usage: Usage, seconds: float, served: Served) -> None:
        """It is over, with this. Nothing is booked for what was never accepted."""
        if self._ended is not None:
            return
        accounts, record = self._accounts, None
        if served.model and (outcome != "rejected" or usage.work != NO_WORK):
            record = _record(self, outcome, usage, seconds, served, accounts.clock())
        used = Cost() if record is None else cost_of(accounts._config.prices, record)
        if record is None and not self.leased:
            return
        self._ended = accounts._run(accounts._end(self, record, used, served))

    async def booked(self) -> None:
        """Wait until the books have its end, or are known not to be there."""
        if self._ended is not None:
            with suppress(Exception):  # logged where it ran
                await asyncio.shield(self._ended)


@dataclass(slots=True)
class _Ratio:
    """What turns out of what was expected, by the latest of a tenant's requests: means of both, and the square of how
    far this ratio of theirs was off for one.
    """

    known: int = 1  # requests from which on it counts; before, all that is expected does
    least: float = 0.0  # of it, whatever turned out
    expected: float = 0.0
    found: float = 0.0
    off: float = 0.0
    seen: int = 0

    @property
    def part(self) -> float:
        return max(self.found / self.expected, self.least) if self.seen >= self.known else 1.0

    def of(self, expected: int) -> tuple[int, int]:
        """What will turn out, and its variance."""
        scale = expected / self.expected if self.seen >= self.known else 0.0
        return round(self.part * expected), round(self.off * scale**2)

    def learn(self, expected: int, found: int) -> None:
        if not expected:
            return
        self.seen += 1
        weight = max(_LATEST, 1 / self.seen)
        self.expected += weight * (expected - self.expected)
        self.found += weight * (found - self.found)
        self.off += weight * ((found - expected * self.found / self.expected) ** 2 - self.off)


@dataclass(slots=True)
class _Habit:
    """What a tenant's requests turn out to be: tokens of the prompt where so many were guessed, of them those that no
    cache has, and tokens drawn where so many were asked for.
    """

    input: _Ratio = field(default_factory=_Ratio)
    uncached: _Ratio = field(default_factory=_Ratio)
    output: _Ratio = field(default_factory=lambda: _Ratio(_DRAWN_KNOWN, _LEAST_DRAWN))

    def learn(self, record: UsageRecord, guessed: int, asked: int) -> None:
        if not record.input or record.outcome == "cached":
            return
        self.input.learn(guessed, record.input)
        self.uncached.learn(record.input, record.input - record.cached)
        self.output.learn(asked, record.output)


def _record(
    admission: Admission, outcome: str, usage: Usage, seconds: float, served: Served, now: float
) -> UsageRecord:
    work = usage.work
    prompt, cached = usage.prompt, usage.cached
    if outcome in ("aborted", "failed"):  # not all of its prompt, it may be
        prompt = min(prompt, work.computed + work.cached)
        cached = min(cached, prompt)
    return UsageRecord(
        id=admission.id,
        at=round(now, 3),
        tenant=admission.principal.tenant.name,
        key=admission.principal.key_id,
        model=served.model,
        program=served.program,
        endpoint=served.endpoint,
        outcome=outcome,
        input=prompt,
        cached=cached,
        output=usage.completion,
        drawn=work.drawn,
        drafted=work.drafted,
        computed=0 if served.ahead else work.computed,
        ahead=work.computed if served.ahead else 0,
        found=work.cached,
        seconds=round(seconds, 6),
        stream=served.stream,
        replica=served.replica,
        http_id=served.http_id,
    )


def _periods(at: float) -> tuple[str, str]:
    """The day and the month."""
    today = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
    return today, today[:7]
