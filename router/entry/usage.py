"""Usage: one record of each request, and sums by day and month. Each tenant has its own keys in Redis.

A record is booked once, by the request's id, however often it is sent; the same script settles the call's reservation
(`quotas`) and adds it to the sums. So records, sums and budgets agree. Two requests cost nothing once they have been
answered: one that the proxy sends again after it lost a router, and a named operation of a session that is repeated.
Their record says what the engine did again, and has no units.

While Redis is away records wait here, in order.
"""

from __future__ import annotations

import asyncio
import csv
import heapq
import io
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import orjson

from holdfast.router.background import Background, forever, stop
from holdfast.router.config import Prices, RouterConfig
from holdfast.router.entry.quotas import PROGRAM_S, STATE, UNITS, Cost, Quotas, periods, quota_keys
from holdfast.router.records import Argument

log = logging.getLogger(__name__)

SEEN_S = 3600.0  # for which the ids of booked records, and the tries of a request, are known
BEAT_S = 2.0  # between two attempts to book waiting records
RENEW_S = 10.0  # between two renewals of the reservations of calls that go on
COUNTING_S = 5.0  # a stopping router waits this long for replicas to report usage
BOOKING_S = 0.5  # and then so long for Redis
MOST_WAITING = 65536  # records that wait for Redis; beyond that the oldest are lost, and counted
COUNTED = ("requests", "input", "cached", "output", "drawn", "drafted")  # of the sums, beside units and outcomes
LISTED = "usage/tenants"  # the names of the tenants that have records

# KEYS: those of the quotas, the stream of records, the ids booked lately.
# ARGV: now in ms ('': Redis' clock), id, what its tries have in common, whether it has its answer, what was used
# (answers, tokens input, uncached, output, units), program ('': none), whether that has ended, its time in ms, most
# records, ms for which ids and tries are known, ms for which sums are kept, day, month, outcome, the record ('': there
# is nothing to book), whether an engine worked for it, and the counts of the sums.
# Returns 1 where it was booked, 2 where there was nothing to book, 0 where it was booked before; and how many records
# there are.
BOOK = (
    STATE
    + """
local id, retried, answered = ARGV[2], ARGV[3], ARGV[4] == '1'
local used, units = {}, tonumber(ARGV[9])
for i = 1, 4 do used[i] = tonumber(ARGV[4 + i]) end
local program, over, rest = ARGV[10], ARGV[11] == '1', tonumber(ARGV[12])
local most, known, kept = ARGV[13], tonumber(ARGV[14]), tonumber(ARGV[15])
local outcome, record = ARGV[18], ARGV[19]
local stream, seen = KEYS[6], KEYS[7]
if redis.call('ZSCORE', seen, id) then return {0, 0} end
redis.call('ZADD', seen, now, id)
redis.call('ZREMRANGEBYSCORE', seen, '-inf', now - known)
redis.call('PEXPIRE', seen, known)

local lease = release(id)
if lease then settle(lease, used) end
if program ~= '' and redis.call('ZSCORE', programs, program) then
  if over then redis.call('ZREM', programs, program) else redis.call('ZADD', programs, now + rest, program) end
end
if record == '' then return {2, 0} end

local again = false
if retried ~= '' then
  local first_answer = seen .. '/' .. retried
  again = redis.call('EXISTS', first_answer) == 1
  if not again and answered then redis.call('SET', first_answer, id, 'PX', known) end
  if again then
    if ARGV[20] == '0' then return {2, 0} end
    units = 0
  end
end
redis.call('XADD', stream, 'MAXLEN', '~', most, '*', 'record', record, 'units', whole(units), 'again', again and 1 or 0)
for _, period in ipairs({ARGV[16], ARGV[17]}) do
  local key = sums .. '/' .. period
  for i, name in ipairs({'requests', 'input', 'cached', 'output', 'drawn', 'drafted'}) do
    if ARGV[20 + i] ~= '0' then redis.call('HINCRBY', key, name, ARGV[20 + i]) end
  end
  if units > 0 then redis.call('HINCRBY', key, 'units', whole(units)) end
  redis.call('HINCRBY', key, 'ended/' .. outcome, 1)
  -- Trap: a full Redis evicts keys that expire, and a budget would begin anew. So sums are deleted here.
  redis.call('PERSIST', key)
  redis.call('ZADD', sums, whole(now + kept), period)
end
for _, period in ipairs(redis.call('ZRANGEBYSCORE', sums, '-inf', now)) do
  redis.call('DEL', sums .. '/' .. period)
  redis.call('ZREM', sums, period)
end
return {1, redis.call('XLEN', stream)}
"""
)
ADD_MEMBER = "return {redis.call('SADD', KEYS[1], ARGV[1])}"
MEMBERS = "return redis.call('SMEMBERS', KEYS[1])"
# KEYS: a stream. ARGV: from and to as ids, at most how many.
READ = "return redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])"
# KEYS: the prefix of the names of sums. ARGV: periods.
SUMS = """
local rows = {}
for i, period in ipairs(ARGV) do rows[i] = redis.call('HGETALL', KEYS[1] .. '/' .. period) end
return rows
"""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One request, as it is booked. Names, counts and times: no texts, no keys.

    The client was told `input` to `output`. `drawn` to `found` is the engines' work. Engines draw more than `output` if
    a reply was ended early, and count the prompt for every answer. `replica` is the last attempt's.
    """

    id: str
    at: float  # when it ended, seconds since the epoch
    tenant: str
    key: str  # id of the API key
    model: str
    program: str
    endpoint: str
    outcome: str
    input: int = 0
    cached: int = 0  # of the input tokens
    output: int = 0
    drawn: int = 0
    drafted: int = 0
    computed: int = 0
    ahead: int = 0  # computed before the turn that has these tokens came
    found: int = 0  # in the engines' caches
    seconds: float = 0.0
    stream: bool = False
    replica: str = ""
    http_id: str = ""

    @property
    def worked(self) -> bool:
        """Whether an engine worked for the request."""
        return bool(self.computed or self.ahead or self.drawn)


COLUMNS = ("place", *(each.name for each in fields(UsageRecord)), "units", "again")


@dataclass(slots=True)
class CallEnd:
    """The end of a call, on its way to Redis. `kept` False: nothing is booked, and its reservation is given back."""

    record: UsageRecord
    kept: bool = True
    retry: str = ""  # what the tries of one request have in common
    program_ended: bool = False
    sent: float | None = None  # when it was sent first, on the monotonic clock


class UsageBooks:
    """Books what was used, and reads it, in the Redis of the quotas. Call `start` on the event loop, and `close` at the
    end.
    """

    def __init__(self, config: RouterConfig, quotas: Quotas) -> None:
        self._config = config
        self.quotas = quotas
        self._store = quotas.store
        self._waiting: deque[CallEnd] = deque()
        self._listed: set[str] = set()  # tenants that Redis knows to have records
        self.booked: Counter[str] = Counter({"booked": 0, "again": 0, "lost": 0, "uncounted": 0})
        self.counting = Background()  # asks replicas for the usage of calls that were cut off, and then books it
        self._booking = Background()
        self._beats: list[asyncio.Task[None]] = []

    @property
    def waiting(self) -> int:
        """Ends of calls that Redis does not know yet."""
        return len(self._waiting)

    def start(self) -> None:
        """Renew reservations and book what waits, from now on."""
        loop = asyncio.get_running_loop()
        self._beats.append(loop.create_task(forever(self.catch_up, BEAT_S, "booking what waits")))
        self._beats.append(loop.create_task(forever(self.quotas.renew, RENEW_S, "renewing reservations")))

    async def close(self) -> None:
        """Book what is left, if Redis is there. Replicas have `COUNTING_S` to report the usage of calls that were cut
        off; a record that lacks it is counted as `uncounted`.
        """
        await stop(*self._beats)
        await stop(*await self.counting.drain(COUNTING_S))  # these are booked without the missing usage
        booking = await self._booking.drain(BOOKING_S)
        await self.catch_up()
        lost = len(booking) + sum(end.kept for end in self._waiting)
        self.booked["lost"] += lost
        if lost or self.booked["uncounted"]:
            uncounted = self.booked["uncounted"]
            log.warning("%d records of usage are lost, %d were booked without what was used", lost, uncounted)

    # ---- booking ----

    def book(self, end: CallEnd) -> asyncio.Task[object]:
        """Book the end of a call. The task ends when Redis has stored it, or is known to be away."""
        self.quotas.settle(end.record.id, self._used(end))
        return self._booking.run(self._book_or_wait(end))

    async def catch_up(self) -> None:
        """Book what waits, in order."""
        while self._waiting and not self._store.degraded:
            end, booked = self._waiting.popleft(), False
            try:
                booked = await self._book(end)
            finally:  # also where this is cancelled: a record that is sent twice is booked once
                if not booked:
                    self._waiting.appendleft(end)
            if not booked:
                return

    async def _book_or_wait(self, end: CallEnd) -> None:
        if await self._book(end):
            return
        self._waiting.append(end)
        if len(self._waiting) > MOST_WAITING:
            self.booked["lost"] += self._waiting.popleft().kept

    async def _book(self, end: CallEnd) -> bool:
        """False where Redis is away."""
        now, tenant = time.monotonic(), end.record.tenant
        if end.sent is not None and now - end.sent >= SEEN_S:  # it may have been booked, and its id be forgotten
            self.booked["lost"] += end.kept
            return True
        if self._store.degraded:
            return False
        end.sent = end.sent or now
        try:
            answer = await self._store.try_script(BOOK, usage_keys(tenant), self._arguments(end))
        except Exception:  # another try would fail as well
            log.exception("a record of usage could not be booked")
            self.booked["lost"] += end.kept
            return True
        if answer is None:
            return False
        if end.kept:
            self.booked["booked" if int(answer[0]) == 1 else "again"] += 1
            if int(answer[0]) == 1 and (int(answer[1]) == 1 or tenant not in self._listed):
                with suppress(Exception):  # the record is booked, and the next one of this tenant tries again
                    if await self._store.try_script(ADD_MEMBER, [LISTED], [tenant]) is not None:
                        self._listed.add(tenant)
        return True

    def _arguments(self, end: CallEnd) -> list[Argument]:
        config, record = self._config, end.record
        used, answered = self._used(end), end.kept and record.outcome in ("completed", "cached")
        head: list[Argument] = [self.quotas.redis_now(), record.id, end.retry, int(answered)]
        head += [*used.rates, used.units, record.program, int(end.program_ended), int(PROGRAM_S * 1000)]
        head += [config.usage_records, int(SEEN_S * 1000), int(config.usage_days * 86_400_000), *periods(record.at)]
        if not end.kept:
            return [*head, "", ""]
        counts = (1, record.input, record.cached, record.output, record.drawn, record.drafted)
        return [*head, record.outcome, orjson.dumps(record), int(record.worked), *counts]

    def _used(self, end: CallEnd) -> Cost:
        return cost_of(self._config.prices, end.record) if end.kept else Cost()

    # ---- reading ----

    async def records(self, tenant: str, begin: str, end: str, most: int) -> list[dict[str, Any]]:
        """A tenant's records between two places of its stream, the oldest first. Raises UnavailableError, as all that
        reads does while Redis is away.
        """
        rows = await self._store.script(READ, usage_keys(tenant)[5:6], [begin, end, most])
        return [{"place": place, **row} for place, row in _record_rows(rows)]

    async def tenants(self) -> list[str]:
        """The tenants that have records, also those that have been removed."""
        return [name.decode() for name in await self._store.script(MEMBERS, [LISTED], [])]

    async def sums(self, tenant: str, period_names: Sequence[str]) -> list[dict[str, Any]]:
        """Of days (`2026-11-23`) and months (`2026-11`)."""
        rows = await self._store.script(SUMS, quota_keys(tenant)[4:5], period_names)
        return [_sums_row(period, each) for period, each in zip(period_names, rows, strict=True)]


def cost_of(prices: Prices, record: UsageRecord) -> Cost:
    """The cost of a request, which counts against its tenant's limits. Failures of the server cost nothing."""
    if record.outcome in ("failed", "rejected"):
        return Cost()
    uncached = record.input - record.cached
    part = prices.repeat if record.outcome == "cached" else 1.0
    units = round(priced(prices, uncached, record.cached, record.output) * part)
    return Cost(1, int(record.input * part), int(uncached * part), int(record.output * part), units)


def priced(prices: Prices, uncached: float, cached: float, output: float) -> float:
    """Parts of units that a request costs."""
    return (prices.request + uncached * prices.input + cached * prices.cached_input + output * prices.output) * UNITS


def usage_keys(tenant: str) -> list[str]:
    return [*quota_keys(tenant), f"{{{tenant}}}/usage", f"{{{tenant}}}/booked"]


def first_rows(rows: Iterable[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The first of several tenants' rows, in the order in which they were booked."""
    return heapq.nsmallest(most, rows, key=lambda row: (*map(int, row["place"].split("-")), row["tenant"]))


def as_csv(rows: Iterable[Mapping[str, Any]], head: bool = True) -> str:
    """Records as CSV. A text that a spreadsheet would take for a formula has an apostrophe before it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if head:
        writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_plain(row.get(name, "")) for name in COLUMNS])
    return text.getvalue()


def as_json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def _record_rows(answer: Iterable[Sequence[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records in an answer of `READ`, each with its place in the stream."""
    for place, values in answer:
        pairs = dict(zip(values[::2], values[1::2], strict=True))
        row = orjson.loads(pairs[b"record"])
        yield place.decode(), {**row, "units": int(pairs[b"units"]) / UNITS, "again": pairs[b"again"] == b"1"}


def _sums_row(period: str, answer: Sequence[bytes]) -> dict[str, Any]:
    """The sums of a day or a month in an answer of `SUMS`; all 0 where there are none."""
    values = {name.decode(): int(n) for name, n in zip(answer[::2], answer[1::2], strict=True)}
    units = values.pop("units", 0) / UNITS
    counts = {name: values.pop(name, 0) for name in COUNTED}
    outcomes = {name.removeprefix("ended/"): n for name, n in values.items()}
    return {"period": period, **counts, "units": units, "outcomes": outcomes}


def _plain(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value
