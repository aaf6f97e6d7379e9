"""How much a tenant may use: in a minute, at once, in a day and a month. One truth for all routers, in Redis.

    admit    a call comes: its limits are looked at, and where all have room an estimate of what it needs is taken
    settle   it is over: what it used takes the place of the estimate. Part of the script that books it (`usage`)
    renew    it goes on: its lease, which would end with its router, is longer

An estimate is a mean and a variance. What runs may together need more than the sum of its means, so a call is let in
where there is also room for `DEVIATIONS` standard deviations of that sum: little where much runs, for its errors cancel
each other, and nothing once all of it has ended.

Each is one script in Redis, by Redis' clock. A minute is a sliding window of `WINDOW` parts: what was taken counts from
the part in which its call came until `WINDOW` whole parts are over. So never more than the limit is let in within any
minute, and never is anybody refused whose last minute and one part more have room: a part is 0.4 % of a minute.

Estimates that nobody settles, for their router has died, are given back when their lease ends.

While Redis is away each router goes by `LocalQuotas`, the same rules in memory, for its part of every limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, sub
from typing import Any

from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import Tenant, TenantLimits

MINUTE_MS = 60_000
PART_MS = 250
WINDOW = MINUTE_MS // PART_MS
LEASE_S = 30.0  # a call whose router has not renewed it for so long is over
AGAIN_MS = 1000  # when to try again what waits for another call to end
DEVIATIONS = 2.5  # that what runs may need more than was estimated
UNITS = 1000  # parts of a unit: whole numbers add up exactly

RATES = ("requests_per_minute", "input_tokens_per_minute", "uncached_tokens_per_minute", "output_tokens_per_minute")
COUNTS = ("max_concurrent", "max_programs")
BUDGETS = ("units_per_day", "units_per_month")
LIMITS = (*RATES, *COUNTS, *BUDGETS)  # in the order in which the scripts know them

WHAT: Mapping[str, str] = {
    "requests_per_minute": "requests per minute",
    "input_tokens_per_minute": "input tokens per minute",
    "uncached_tokens_per_minute": "uncached input tokens per minute",
    "output_tokens_per_minute": "output tokens per minute",
    "max_concurrent": "requests at once",
    "max_programs": "programs at once",
    "units_per_day": "units per day",
    "units_per_month": "units per month",
}

# What the scripts of this file and of `usage` share. KEYS: the window, the leases by when they end, what each holds,
# the programs by when they are over, and the periods of the sums by when those are deleted, which is also the
# beginning of the sums' names. A lease holds the part in which its call
# came, how many answers it is, tokens (input, uncached, output), units, and the variances of all four rates; `n`,
# `units` and `doubt` are the sums of all.
STATE = f"""
local W, PART = {WINDOW}, {PART_MS}
local LEASE = {int(LEASE_S * 1000)}
local window, open, held, programs, sums = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local part = math.floor(now / PART)
local first, last, used

local function numbers(text)
  local found = {{}}
  for each in string.gmatch(text or '', '%S+') do found[#found + 1] = tonumber(each) end
  return found
end

local function whole(value) return string.format('%.0f', value) end

local function save()
  redis.call('HSET', window, 'first', whole(first), 'last', whole(last),
    'used', table.concat({{whole(used[1]), whole(used[2]), whole(used[3]), whole(used[4])}}, ' '))
  redis.call('PEXPIRE', window, 2 * W * PART)
end

-- Forget what has left the window. A clock that was set back by more than a window begins anew.
local function roll()
  local state = redis.call('HMGET', window, 'first', 'last', 'used')
  first, last, used = tonumber(state[1]), tonumber(state[2]), numbers(state[3])
  if not first or part - last > W or last - part > W then
    redis.call('DEL', window)
    first, last, used = part, part, {{0, 0, 0, 0}}
    return
  end
  part = math.max(part, last)
  local edge = math.min(part - W - 1, last)
  if first <= edge then
    local names = {{}}
    for each = first, edge do names[#names + 1] = whole(each) end
    local values = redis.call('HMGET', window, unpack(names))
    for _, value in ipairs(values) do
      for i, n in ipairs(numbers(value or '')) do used[i] = used[i] - n end
    end
    redis.call('HDEL', window, unpack(names))
    first = edge + 1
  end
  first = math.max(first, part - W)
  last = part
end

-- More, or less, was used in a part of the window.
local function count(at, more)
  local name = whole(at)
  local there = numbers(redis.call('HGET', window, name) or '')
  for i = 1, 4 do
    there[i] = (there[i] or 0) + more[i]
    used[i] = used[i] + more[i]
    there[i] = whole(there[i])
  end
  redis.call('HSET', window, name, table.concat(there, ' '))
end

-- The variances of all leases, of each rate: with so much more.
local function doubt(more)
  local sums = numbers(redis.call('HGET', held, 'doubt'))
  for i = 1, 4 do sums[i] = math.max(0, (sums[i] or 0) + (more[i] or 0)) end
  return sums
end

local function save_doubt(sums)
  local texts = {{whole(sums[1]), whole(sums[2]), whole(sums[3]), whole(sums[4])}}
  redis.call('HSET', held, 'doubt', table.concat(texts, ' '))
end

-- Take a lease away: what it held, nil where there is none of this id.
local function release(id)
  local text = redis.call('HGET', held, id)
  if not text then return nil end
  local lease = numbers(text)
  redis.call('HDEL', held, id)
  redis.call('ZREM', open, id)
  redis.call('HINCRBY', held, 'n', whole(0 - lease[2]))
  redis.call('HINCRBY', held, 'units', whole(0 - lease[6]))  -- Trap: -0 is no number to Redis
  local less = {{}}
  for i = 1, 4 do less[i] = 0 - (lease[6 + i] or 0) end
  save_doubt(doubt(less))
  return lease
end

-- Nothing ends later than this, unless the clock was set back.
local function ends_by(key, latest)
  for _, each in ipairs(redis.call('ZRANGEBYSCORE', key, '(' .. whole(latest), '+inf')) do
    redis.call('ZADD', key, latest, each)
  end
end

-- Calls whose router has died: nothing is known to have been used, but that they came.
local function sweep()
  ends_by(open, now + LEASE)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', open, '-inf', now)) do
    local lease = release(id)
    if lease and lease[1] >= first then count(lease[1], {{0, -lease[3], -lease[4], -lease[5]}}) end
  end
end

-- The days of the Gregorian calendar since 1970-01-01 as a date (Hinnant, chrono-compatible date algorithms).
local function date(days)
  local z = days + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02d', year, month, doy - math.floor((153 * mp + 2) / 5) + 1)
end
local DAY = 86400000
"""

# ARGV: now in ms ('': Redis' clock), id, lease in ms (0: none), program, its time in ms, answers, tokens (input,
# uncached, output), units, the variances of the rates, and the limits in their order, 0 where there is none.
# Returns whether it is let in, else the number of the limit and ms until it may be; then what is used of each limit.
ADMIT = (
    STATE
    + """
local id, lease, program, rest = ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local need = {tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])}
local units, variance, limit = tonumber(ARGV[10]), {}, {}
for i = 1, 4 do variance[i] = tonumber(ARGV[10 + i]) end
for i = 1, 8 do limit[i] = tonumber(ARGV[14 + i]) end
local answers = need[1]
roll()
sweep()
local inside = redis.call('HGET', held, id)
local at_once = tonumber(redis.call('HGET', held, 'n') or 0)
local reserved = tonumber(redis.call('HGET', held, 'units') or 0)
local running, runs = 0, true
if limit[6] > 0 then
  ends_by(programs, now + rest)
  redis.call('ZREMRANGEBYSCORE', programs, '-inf', now)
  running = redis.call('ZCARD', programs)
  runs = program == '' or redis.call('ZSCORE', programs, program)
end
local days = math.floor(now / DAY)
local today, spent = date(days), {0, 0}
if limit[7] > 0 then spent[1] = tonumber(redis.call('HGET', sums .. '/' .. today, 'units') or 0) end
if limit[8] > 0 then
  spent[2] = tonumber(redis.call('HGET', sums .. '/' .. string.sub(today, 1, 7), 'units') or 0)
end

local refused, wait = 0, 0
local function refuse(by, ms)
  if ms > wait then refused, wait = by, ms end
end
local doubts = doubt(variance)
if not inside then
  for i = 1, 4 do
    local most = need[i] > 0 and limit[i] or 0
    -- How far over the limit it would be, if what runs and itself need so much more than is expected of them.
    local function over_by(doubted)
      return most > 0 and used[i] + math.min(need[i] + DEVIATIONS * math.sqrt(doubted), most) - most or 0
    end
    need[i] = limit[i] > 0 and math.min(need[i], limit[i]) or need[i]
    if over_by(doubts[i]) > 0 then
      -- Of what runs now one knows sooner what it needed.
      local over, leaves = over_by(variance[i]), last
      for each = first, last do
        over = over - (numbers(redis.call('HGET', window, whole(each)) or '')[i] or 0)
        if over <= 0 then leaves = each break end
      end
      refuse(i, over_by(variance[i]) > 0 and (leaves + W + 1) * PART - now or AGAIN)
    end
  end
  if lease > 0 and limit[5] > 0 and at_once + answers > limit[5] then refuse(5, AGAIN) end
  for i = 1, 2 do
    local most = limit[6 + i]
    if most > 0 and lease > 0 and spent[i] + reserved + math.min(units, most) > most then
      local ends = days + 1
      while i == 2 and string.sub(date(ends), 1, 7) == string.sub(today, 1, 7) do ends = ends + 1 end
      -- Where what runs may yet give something back, that is sooner.
      refuse(6 + i, spent[i] + math.min(units, most) <= most and AGAIN or ends * DAY - now)
    end
  end
end
if limit[6] > 0 and not runs and running >= limit[6] then refuse(6, AGAIN) end
if refused == 0 and not inside then
  count(part, need)
  if lease > 0 then
    redis.call('ZADD', open, now + lease, id)
    redis.call('HSET', held, id, table.concat(
      {whole(part), whole(answers), whole(need[2]), whole(need[3]), whole(need[4]), whole(units),
       whole(variance[1]), whole(variance[2]), whole(variance[3]), whole(variance[4])}, ' '))
    save_doubt(doubts)
    redis.call('HINCRBY', held, 'n', answers)
    redis.call('HINCRBY', held, 'units', whole(units))
    at_once, reserved = at_once + answers, reserved + units
  end
end
if refused == 0 and limit[6] > 0 and program ~= '' then
  redis.call('ZADD', programs, now + rest, program)
  running = redis.call('ZCARD', programs)
  redis.call('PEXPIRE', programs, rest)
end
save()
return {refused, wait, used[1], used[2], used[3], used[4], at_once, running, spent[1] + reserved, spent[2] + reserved}
""".replace("AGAIN", str(AGAIN_MS)).replace("DEVIATIONS", str(DEVIATIONS))
)

# ARGV: now, the lease in ms, ids of calls that go on. Those that are over stay so.
RENEW = (
    STATE
    + """
for i = 3, #ARGV do redis.call('ZADD', open, 'XX', now + tonumber(ARGV[2]), ARGV[i]) end
return {}
"""
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call needs, or has used. `units` are in parts, `UNITS` of which are one."""

    answers: int = 1
    input: int = 0
    uncached: int = 0  # of the input
    output: int = 0
    units: int = 0
    variance: tuple[int, int, int, int] = (0, 0, 0, 0)  # of its `rates`, where those are an estimate

    @property
    def rates(self) -> tuple[int, int, int, int]:
        """In the order of `RATES`."""
        return self.answers, self.input, self.uncached, self.output


@dataclass(frozen=True, slots=True)
class Standing:
    """How a tenant stands with its limits, by their names: what is used of each, and when a minute's use has gone."""

    limits: TenantLimits
    used: Mapping[str, float]
    reset_s: float = 60.0

    def left(self, name: str) -> int:
        allowed: float = getattr(self.limits, name)
        return max(0, math.floor(allowed - self.used[name]))


class QuotaError(RefusedError):
    """One of a tenant's limits is reached: `limit`."""

    def __init__(self, tenant: str, limit: str, allowed: float, standing: Standing, retry_after_s: float) -> None:
        refusal = Refusal.OVER_BUDGET if limit in BUDGETS else Refusal.RATE_LIMITED
        message = f"Tenant '{tenant}' is limited to {allowed:g} {WHAT[limit]}"
        super().__init__(refusal, message, retry_after_s=retry_after_s)
        self.limit = limit
        self.standing = standing
        self._arguments = (tenant, limit, allowed, standing, retry_after_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    @property
    def lasts(self) -> bool:
        """Whether nothing but time ends it."""
        return self.limit == "requests_per_minute"


def limits_of(limits: TenantLimits) -> list[int]:
    """As the scripts take them: 0 for none, units in parts."""
    values = [getattr(limits, name) or 0 for name in LIMITS]
    return [round(value * UNITS) if name in BUDGETS else int(value) for name, value in zip(LIMITS, values, strict=True)]


def quota_keys(tenant: str) -> list[str]:
    """What the scripts of a tenant work on. The braces keep them in one slot of a Redis cluster."""
    return [f"{{{tenant}}}/{name}" for name in ("window", "open", "held", "programs", "sums")]


def admit_arguments(
    now_ms: int | None, id_: str, lease_s: float, program: str, rest_s: float, cost: Cost, limits: TenantLimits
) -> list[str | bytes | float]:
    """What `ADMIT` is told."""
    head: list[str | bytes | float] = ["" if now_ms is None else now_ms, id_, int(lease_s * 1000)]
    return [*head, program, int(rest_s * 1000), *cost.rates, cost.units, *cost.variance, *limits_of(limits)]


def admitted(tenant: Tenant, answer: Sequence[Any]) -> Standing:
    """What an answer of `ADMIT` says. Raises QuotaError."""
    refused, wait_ms, *used = (int(each) for each in answer)
    told = {name: n / UNITS if name in BUDGETS else float(n) for name, n in zip(LIMITS, used, strict=True)}
    if not refused:
        return Standing(tenant.limits, told)
    name = LIMITS[refused - 1]
    wait_s = wait_ms / 1000
    raise QuotaError(tenant.name, name, getattr(tenant.limits, name), Standing(tenant.limits, told, wait_s), wait_s)


# ---- without Redis ----


@dataclass(slots=True)
class _Lease:
    part: int
    cost: Cost


@dataclass(slots=True)
class _Local:
    """One tenant's: parts of the window with what was used in each, oldest first."""

    parts: deque[list[int]] = field(default_factory=deque)  # the number of the part, then as `Cost.rates`
    used: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    leases: dict[str, _Lease] = field(default_factory=dict)
    programs: dict[str, int] = field(default_factory=dict)  # by when they are over, in ms
    spent: dict[str, int] = field(default_factory=dict)  # parts of units by day and month
    at_once: int = 0
    reserved: int = 0
    doubt: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # variances of `used`, for what runs

    def roll(self, part: int) -> None:
        while self.parts and self.parts[0][0] < part - WINDOW:
            for i, n in enumerate(self.parts.popleft()[1:]):
                self.used[i] -= n

    def count(self, part: int, more: Sequence[int]) -> None:
        """In its part, or where that has left the window what there is more of in the latest."""
        at = next((each for each in reversed(self.parts) if each[0] <= part), None)
        if at is None or at[0] < part:
            if self.parts and part < self.parts[-1][0]:  # the clock, or a part without anything
                at = self.parts[-1]
            else:
                at = [part, 0, 0, 0, 0]
                self.parts.append(at)
        for i, n in enumerate(more):
            at[i + 1] += n
            self.used[i] += n


class LocalQuotas:
    """The rules of the scripts in this process's memory. It is told of all that this router lets in, also while Redis
    decides, so that it knows the last minute when Redis is lost.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Local] = {}

    def admit(
        self,
        tenant: Tenant,
        now_ms: int,
        id_: str,
        lease: bool,
        program: str,
        rest_s: float,
        cost: Cost,
        share: float = 1.0,
        periods: Sequence[str] = ("", ""),
    ) -> Standing:
        """As `ADMIT` does, with `share` of each limit, in these `periods`: the day, the month. Raises QuotaError."""
        local, part = self._of(tenant.name, now_ms), now_ms // PART_MS
        local.programs = {name: ends for name, ends in local.programs.items() if ends > now_ms}
        used = [*local.used, local.at_once, len(local.programs)]
        used += [local.spent.get(period, 0) + local.reserved for period in periods]
        told = {name: n / UNITS if name in BUDGETS else float(n) for name, n in zip(LIMITS, used, strict=True)}
        needs = [*cost.rates, cost.answers if lease else 0, int(bool(program) and program not in local.programs)]
        needs += [cost.units if lease else 0] * 2
        doubts = [*map(add, local.doubt, cost.variance), 0, 0, 0, 0]
        own = [*cost.variance, 0, 0, 0, 0]
        for name, need, n, doubt, variance in zip(LIMITS, needs, used, doubts, own, strict=True):
            given = getattr(tenant.limits, name)
            if given is None or not need:
                continue
            most = max(1.0, given * share) * (UNITS if name in BUDGETS else 1)
            counts, later = (
                need if name in COUNTS else min(need + DEVIATIONS * math.sqrt(each), most) for each in (doubt, variance)
            )
            if n + counts > most:
                wait_s = self._wait_ms(local, name, n + later - most, now_ms) / 1000
                raise QuotaError(tenant.name, name, given, Standing(tenant.limits, told, wait_s), wait_s)
        if id_ not in local.leases:
            self._take(local, part, id_, lease, cost)
        if program and tenant.limits.max_programs is not None:
            local.programs[program] = now_ms + int(rest_s * 1000)
        return Standing(tenant.limits, told)

    def note(self, tenant: Tenant, now_ms: int, id_: str, lease: bool, cost: Cost) -> None:
        """Redis has let it in."""
        local = self._of(tenant.name, now_ms)
        if id_ not in local.leases:
            self._take(local, now_ms // PART_MS, id_, lease, cost)

    def settle(
        self, tenant: str, now_ms: int, id_: str, used: Cost, program: str, over: bool, periods: Sequence[str]
    ) -> None:
        """It is over, and has used so much."""
        local = self._of(tenant, now_ms)
        lease = local.leases.pop(id_, None)
        if over:
            local.programs.pop(program, None)
        for period in periods:
            local.spent[period] = local.spent.get(period, 0) + used.units
        for old in [period for period in local.spent if period not in periods]:
            del local.spent[old]
        if lease is None:
            return
        local.at_once -= lease.cost.answers
        local.reserved -= lease.cost.units
        local.doubt = [*map(sub, local.doubt, lease.cost.variance)]
        more = [a - b for a, b in zip(used.rates[1:], lease.cost.rates[1:], strict=True)]
        if lease.part < now_ms // PART_MS - WINDOW:  # its own part has gone: only what was not foreseen is new
            more = [max(0, n) for n in more]
            lease.part = now_ms // PART_MS
        local.count(lease.part, [0, *more])

    def leases(self) -> Mapping[str, list[str]]:
        """The calls that go on, by tenant."""
        return {name: list(local.leases) for name, local in self._tenants.items() if local.leases}

    def keep(self, names: Sequence[str]) -> None:
        """Forget tenants that are no longer there."""
        known = set(names)
        self._tenants = {name: each for name, each in self._tenants.items() if name in known or each.leases}

    def _of(self, tenant: str, now_ms: int) -> _Local:
        local = self._tenants.setdefault(tenant, _Local())
        local.roll(now_ms // PART_MS)
        return local

    def _take(self, local: _Local, part: int, id_: str, lease: bool, cost: Cost) -> None:
        local.count(part, cost.rates)
        if lease:
            local.leases[id_] = _Lease(part, cost)
            local.at_once += cost.answers
            local.reserved += cost.units
            local.doubt = [*map(add, local.doubt, cost.variance)]

    def _wait_ms(self, local: _Local, name: str, over: float, now_ms: int) -> int:
        if name not in RATES or over <= 0:
            return AGAIN_MS
        column = RATES.index(name) + 1
        for each in local.parts:
            over -= each[column]
            if over <= 0:
                return (each[0] + WINDOW + 1) * PART_MS - now_ms
        return MINUTE_MS
