"""What was used: one record of each request, and sums of them by day and month. In Redis, each tenant's own.

A record is booked once, by the request's id, however often that is told; the same script settles its quotas and adds it
to the sums, so records, sums and budgets agree. Two things cost nothing once they have been answered: the same request
that comes again from the proxy, which has lost a router, and the same named operation of a session. Their record says
what the engine did again, and no units.
"""

from __future__ import annotations

import csv
import heapq
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson

from holdfast.router.config import Prices
from holdfast.router.quotas import STATE, UNITS, Cost, quota_keys
from holdfast.router.records import Argument, Records

SEEN_S = 3600.0  # for which a record that is told again, and a try of a request, are known
COUNTED = ("requests", "input", "cached", "output", "drawn", "drafted")  # of the sums, beside units and outcomes

# KEYS: those of the quotas, the stream of records, the ids that were booked lately.
# ARGV: now in ms ('': Redis' clock), how long ago it ended in ms, id, what its retries have in common, whether it has
# its answer, what was used (answers, input, uncached, output), units, whether its answers are still to be counted (it
# was let in while Redis was away), program ('': none), whether that is over, its time in ms, most records, ms for which
# ids and retries are known and sums are kept, outcome, the record, the counts of the sums, whether an engine worked
# for it, and how long ago it was told first in ms.
# Returns 1 where it was booked, 2 where there was nothing to book, 0 where it was before, 3 where nobody knows that any
# more; then units, and where it was booked how many records there are.
BOOK = (
    STATE
    + """
local ago, id, retried, answered = tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5] == '1'
local more = {tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])}
local units, late = tonumber(ARGV[10]), ARGV[11] == '1'
local program, over, rest = ARGV[12], ARGV[13] == '1', tonumber(ARGV[14])
local most, known, repeats, kept = ARGV[15], tonumber(ARGV[16]), ARGV[17], tonumber(ARGV[18])
local outcome, record = ARGV[19], ARGV[20]
local stream, seen = KEYS[6], KEYS[7]
if redis.call('ZSCORE', seen, id) then return {0, 0} end
local told = tonumber(ARGV[28])
if record ~= '' and told >= known then -- ids of that time are forgotten, but its record has one
  local from = string.format('%.0f', now - told - 1000)
  repeat
    local rows = redis.call('XRANGE', stream, from, '+', 'COUNT', 1000)
    for _, row in ipairs(rows) do
      if string.find(row[2][2], '"id":"' .. id .. '"', 1, true) then return {0, 0} end
      from = '(' .. row[1]
    end
  until #rows < 1000
  local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  if redis.call('XLEN', stream) >= tonumber(most) and tonumber(string.match(oldest[1], '%d+')) > now - told then
    return {3, 0} -- it may have been among those that have gone since
  end
end
redis.call('ZADD', seen, now, id)
redis.call('ZREMRANGEBYSCORE', seen, '-inf', now - known)
redis.call('PEXPIRE', seen, known)

local lease = release(id)
if lease or late then
  roll()
  if not lease then
    local at = math.floor((now - ago) / PART)
    if at >= first then count(math.min(at, part), more) end
  else
    local news = {0, more[2] - lease[3], more[3] - lease[4], more[4] - lease[5]}
    if lease[1] >= first then
      count(lease[1], news)
    else -- its own part has gone: only what was not foreseen is new
      count(part, {0, math.max(0, news[2]), math.max(0, news[3]), math.max(0, news[4])})
    end
  end
  save()
end
if program ~= '' and redis.call('ZSCORE', programs, program) then
  if over then redis.call('ZREM', programs, program) else redis.call('ZADD', programs, now + rest, program) end
end
if record == '' then return {2, 0} end

local again = false
if retried ~= '' then
  local first_answer = seen .. '/' .. retried
  again = redis.call('EXISTS', first_answer) == 1
  if not again and answered then redis.call('SET', first_answer, id, 'PX', repeats) end
  if again then
    if ARGV[27] == '0' then return {2, 0} end
    units = 0
  end
end
redis.call('XADD', stream, 'MAXLEN', '~', most, '*', 'record', record, 'units', whole(units), 'again', again and 1 or 0)
local today = date(math.floor((now - ago) / DAY))
for _, period in ipairs({today, string.sub(today, 1, 7)}) do
  local key = sums .. '/' .. period
  for i, name in ipairs({'requests', 'input', 'cached', 'output', 'drawn', 'drafted'}) do
    if ARGV[20 + i] ~= '0' then redis.call('HINCRBY', key, name, ARGV[20 + i]) end
  end
  if units > 0 then redis.call('HINCRBY', key, 'units', whole(units)) end
  redis.call('HINCRBY', key, 'ended/' .. outcome, 1)
  -- Trap: a full Redis evicts keys that expire, and a budget would begin anew.
  redis.call('PERSIST', key)
  redis.call('ZADD', sums, whole(now + kept), period)
end
for _, period in ipairs(redis.call('ZRANGEBYSCORE', sums, '-inf', now)) do
  redis.call('DEL', sums .. '/' .. period)
  redis.call('ZREM', sums, period)
end
return {1, units, redis.call('XLEN', stream)}
"""
)
# KEYS: the names of the tenants that have records. ARGV: one more.
LIST = "return {redis.call('SADD', KEYS[1], ARGV[1])}"
LISTED = "usage/tenants"

COLUMNS_AFTER = ("units", "again")


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One request, as it is booked. Names, counts and times: no texts, no keys.

    `input` to `output` are what the client was told, of which `drawn` and `drafted` are what engines did for it: more
    than `output` was drawn where a reply was ended early. `computed`, `ahead` and `found` count the prompt for every
    answer. `replica` and `seconds` are the last attempt's and the request's.
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
    drawn: int = 0  # by engines
    drafted: int = 0  # by engines
    computed: int = 0  # by engines
    ahead: int = 0  # likewise, before the turn came that has them
    found: int = 0  # by engines, in their caches
    seconds: float = 0.0
    stream: bool = False
    replica: str = ""
    http_id: str = ""

    @property
    def worked(self) -> bool:
        """Whether an engine did anything for it."""
        return bool(self.computed or self.ahead or self.drawn)


COLUMNS = ("place", *(each.name for each in fields(UsageRecord)), *COLUMNS_AFTER)


def cost_of(prices: Prices, record: UsageRecord, answers: int = 1) -> Cost:
    """What a request counts against its tenant's limits, and costs. Failures of ours cost nothing."""
    uncached = record.input - record.cached
    part = prices.repeat if record.outcome == "cached" else 1.0
    units = priced(prices, uncached, record.cached, record.output) * part
    if record.outcome in ("failed", "rejected"):
        return Cost(answers)
    if record.outcome == "cached":
        return Cost(answers, int(record.input * part), int(uncached * part), int(record.output * part), round(units))
    return Cost(answers, record.input, uncached, record.output, round(units))


def priced(prices: Prices, uncached: float, cached: float, output: float) -> float:
    """Parts of units that a request costs."""
    return (prices.request + uncached * prices.input + cached * prices.cached_input + output * prices.output) * UNITS


def usage_keys(tenant: str) -> list[str]:
    return [*quota_keys(tenant), f"{{{tenant}}}/usage", f"{{{tenant}}}/booked"]


def book_arguments(
    now_ms: int | None,
    ago_s: float,
    record: UsageRecord | None,
    id_: str,
    retry: str,
    used: Cost,
    late: bool,
    program: tuple[str, bool, float],
    most: int,
    kept_s: float,
    told_s: float = 0.0,
) -> list[Argument]:
    """What `BOOK` is told. `program`: its name, whether it is over, and how long it counts after a turn. `told_s`: how
    long ago it was told first.

    `record` None: the call is over, and there is nothing to book.
    """
    name, over, rest_s = program
    answered = record is not None and record.outcome in ("completed", "cached")
    now: str | int = "" if now_ms is None else now_ms
    told: list[Argument] = [now, max(0, int(ago_s * 1000)), id_, retry, int(answered), *used.rates]
    told += [used.units, int(late), name, int(over), int(rest_s * 1000), most, int(SEEN_S * 1000)]
    told += [int(SEEN_S * 1000), int(kept_s * 1000)]
    if record is None:
        return [*told, "", ""]
    counts = (1, record.input, record.cached, record.output, record.drawn, record.drafted)
    return [*told, record.outcome, orjson.dumps(record), *counts, int(record.worked), int(told_s * 1000)]


# ---- reading ----

# KEYS: a stream. ARGV: from and to as ids, at most how many.
READ = "return redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])"
# KEYS: the beginning of the names of sums. ARGV: periods.
SUMS = """
local found = {}
for i, period in ipairs(ARGV) do found[i] = redis.call('HGETALL', KEYS[1] .. '/' .. period) end
return found
"""


class Books:
    """Reads what was booked. Its methods raise UnavailableError while Redis is away."""

    def __init__(self, store: Records) -> None:
        self._store = store

    async def records(self, tenant: str, begin: str, end: str, most: int) -> list[dict[str, Any]]:
        """A tenant's records between two places of its stream, the oldest first."""
        found = await self._ask(READ, usage_keys(tenant)[5], [begin, end, most])
        return [{"place": place, **row} for place, row in record_rows(found)]

    async def tenants(self) -> list[str]:
        """Those that have records, also where they are no tenants any more."""
        return [name.decode() for name in await self._ask("return redis.call('SMEMBERS', KEYS[1])", LISTED, [])]

    async def sums(self, tenant: str, periods: Sequence[str]) -> list[dict[str, Any]]:
        """Of days (`2026-11-23`) and months (`2026-11`)."""
        found = await self._ask(SUMS, quota_keys(tenant)[4], periods)
        return [sums_row(period, each) for period, each in zip(periods, found, strict=True)]

    async def _ask(self, source: str, key: str, arguments: Sequence[Argument]) -> list[Any]:
        return await self._store.script(source, [key], arguments)


def first_rows(rows: Iterable[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The first of several tenants' rows, in the order in which they were booked."""
    return heapq.nsmallest(most, rows, key=lambda row: (*map(int, row["place"].split("-")), row["tenant"]))


def record_rows(answer: Iterable[Sequence[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records that `READ` found, each with its place in the stream."""
    for place, values in answer:
        pairs = dict(zip(values[::2], values[1::2], strict=True))
        row = orjson.loads(pairs[b"record"])
        yield place.decode(), {**row, "units": int(pairs[b"units"]) / UNITS, "again": pairs[b"again"] == b"1"}


def sums_row(period: str, answer: Sequence[bytes]) -> dict[str, Any]:
    """The sums of a day or a month that `SUMS` found; all 0 where there are none."""
    found = {name.decode(): int(n) for name, n in zip(answer[::2], answer[1::2], strict=True)}
    units = found.pop("units", 0) / UNITS
    counts = {name: found.pop(name, 0) for name in COUNTED}
    outcomes = {name.removeprefix("ended/"): n for name, n in found.items()}
    return {"period": period, **counts, "units": units, "outcomes": outcomes}


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


def _plain(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value
