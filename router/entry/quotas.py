"""A tenant's limits: in a minute, at once, in a day and in a month. All routers share one count in Redis.

    admit    a call arrives: every limit is checked, and an estimate of what the call needs is reserved
    settle   the call ends: what it used replaces the estimate. Part of the script that books it (`usage`)
    renew    the call goes on: its reservation, which expires with its router, lasts longer

A minute is a sliding window of `WINDOW` parts, by Redis' clock. What a call takes counts from the part in which it
came until `WINDOW` whole parts are over. So the calls admitted within any minute never exceed the limit, and nobody is
refused whose last minute and one more part have room.

While Redis is away each router limits by a token bucket of its own, which holds the router's share of the limit.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.records import Argument, Records
from holdfast.router.tenants import Tenant, TenantLimits

MINUTE_MS = 60_000
PART_MS = 1000
WINDOW = MINUTE_MS // PART_MS
LEASE_S = 30.0  # the reservation of a call that its router has not renewed for so long expires
AGAIN_MS = 1000  # when to retry a call that waits for another one to end
REMEMBER_S = 60.0  # a refusal that only time ends is remembered for so long at most
PROGRAM_S = 600.0  # a program counts against `max_programs` for so long after a turn, unless it has ended
UNITS = 1000  # parts of a unit: whole numbers add up exactly

RATES = ("requests_per_minute", "input_tokens_per_minute", "uncached_tokens_per_minute", "output_tokens_per_minute")
BUDGETS = ("units_per_day", "units_per_month")
LIMITS = (*RATES, "max_concurrent", "max_programs", *BUDGETS)  # in the order in which the scripts know them
PERIOD_S: Mapping[str, float] = {**dict.fromkeys(RATES, 60.0), "units_per_day": 86400.0, "units_per_month": 2592000.0}

WORDS: Mapping[str, str] = {"max_concurrent": "requests at once", "max_programs": "programs at once"}  # in errors

# Shared by the scripts of this file and of `usage`. KEYS: the window, the ids of leases by expiry, what each lease
# holds, programs by expiry, and the sums (periods by expiry; also the prefix of the sums' own keys).
# A lease holds the part in which its call came, answers, tokens (input, uncached, output) and units.
# The fields `answers` and `units` are the sums over all leases.
STATE = f"""
local W, PART = {WINDOW}, {PART_MS}
local window, open, held, programs, sums = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local part = math.floor(now / PART)

local function numbers(text)
  local values = {{}}
  for each in string.gmatch(text or '', '%S+') do values[#values + 1] = tonumber(each) end
  return values
end

local function whole(value) return string.format('%.0f', value) end

-- Count more (or less) use in a part of the window.
local function count(at, more)
  local values = numbers(redis.call('HGET', window, whole(at)))
  for i = 1, 4 do values[i] = whole((values[i] or 0) + more[i]) end
  redis.call('HSET', window, whole(at), table.concat(values, ' '))
  redis.call('PEXPIRE', window, 2 * W * PART)
end

-- Take a lease away. Returns what it held, nil where there is none of this id.
local function release(id)
  local lease = numbers(redis.call('HGET', held, id))
  if #lease == 0 then return nil end
  redis.call('HDEL', held, id)
  redis.call('ZREM', open, id)
  redis.call('HINCRBY', held, 'answers', whole(0 - lease[2]))
  redis.call('HINCRBY', held, 'units', whole(0 - lease[6]))  -- Trap: -0 is no number to Redis
  return lease
end

-- Replace what a lease reserved by what was used: answers, tokens (input, uncached, output).
local function settle(lease, used)
  local more = {{0, used[2] - lease[3], used[3] - lease[4], used[4] - lease[5]}}
  if lease[1] >= part - W then
    count(lease[1], more)
  else  -- its part has left the window: only what exceeds the estimate is new
    for i = 1, 4 do more[i] = math.max(0, more[i]) end
    count(part, more)
  end
end
"""

# ARGV: now in ms ('': Redis' clock), id, lease in ms (0: none), program ('': none), its time in ms, then what the call
# needs (answers, tokens input, uncached, output, units), day, month, ms until they end, and the limits (0: none).
# Returns 0 where the call is admitted, else the number of the limit, with ms until a retry; then the use of each limit.
ADMIT = (
    STATE
    + """
local id, lease, program, rest = ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local need, units, limit = {}, tonumber(ARGV[10]), {}
for i = 1, 4 do need[i] = tonumber(ARGV[5 + i]) end
for i = 1, 8 do limit[i] = tonumber(ARGV[14 + i]) end
local answers = need[1]
-- Calls whose router has died: nothing is known to have been used.
for _, each in ipairs(redis.call('ZRANGEBYSCORE', open, '-inf', now)) do
  local lost = release(each)
  if lost and lost[1] >= part - W then settle(lost, {0, 0, 0, 0}) end
end
local used, parts, rows = {0, 0, 0, 0}, {}, redis.call('HGETALL', window)
for i = 1, #rows, 2 do
  local at, values = tonumber(rows[i]), numbers(rows[i + 1])
  if at < part - W or at > part + W then  -- over, or of a clock that was set back
    redis.call('HDEL', window, rows[i])
  else
    parts[#parts + 1] = {at, values}
    for k = 1, 4 do used[k] = used[k] + values[k] end
  end
end
table.sort(parts, function(one, other) return one[1] < other[1] end)
local reserved = redis.call('HMGET', held, id, 'answers', 'units')
local known, at_once, promised = reserved[1], tonumber(reserved[2] or 0), tonumber(reserved[3] or 0)
local running, runs, spent = 0, true, {0, 0}
if limit[6] > 0 then
  redis.call('ZREMRANGEBYSCORE', programs, '-inf', now)
  running = redis.call('ZCARD', programs)
  runs = program == '' or redis.call('ZSCORE', programs, program)
end
for i = 1, 2 do
  if limit[6 + i] > 0 then spent[i] = tonumber(redis.call('HGET', sums .. '/' .. ARGV[10 + i], 'units') or 0) end
end

local refused, wait = 0, 0
local function refuse(by, ms)
  if ms > wait then refused, wait = by, ms end
end
if not known then
  for i = 1, 4 do
    if limit[i] > 0 and need[i] > 0 then
      need[i] = math.min(need[i], limit[i])  -- a call that needs more than the limit is admitted alone
      local over, leaves = used[i] + need[i] - limit[i], part
      if over > 0 then
        for _, each in ipairs(parts) do
          over = over - each[2][i]
          if over <= 0 then leaves = each[1] break end
        end
        refuse(i, (leaves + W + 1) * PART - now)
      end
    end
  end
  if lease > 0 and limit[5] > 0 and at_once + answers > limit[5] then refuse(5, AGAIN) end
  for i = 1, 2 do
    local most = limit[6 + i]
    if most > 0 and lease > 0 and spent[i] + promised + math.min(units, most) > most then
      -- What runs may yet give some of its reservation back.
      refuse(6 + i, spent[i] + math.min(units, most) <= most and AGAIN or tonumber(ARGV[12 + i]))
    end
  end
end
if limit[6] > 0 and not runs and running >= limit[6] then refuse(6, AGAIN) end
if refused == 0 and not known then
  count(part, need)
  for i = 1, 4 do used[i] = used[i] + need[i] end
  if lease > 0 then
    redis.call('ZADD', open, now + lease, id)
    redis.call('HSET', held, id, table.concat(
      {whole(part), whole(answers), whole(need[2]), whole(need[3]), whole(need[4]), whole(units)}, ' '))
    redis.call('HINCRBY', held, 'answers', whole(answers))
    redis.call('HINCRBY', held, 'units', whole(units))
    at_once, promised = at_once + answers, promised + units
  end
end
if refused == 0 and limit[6] > 0 and program ~= '' then
  redis.call('ZADD', programs, now + rest, program)
  redis.call('PEXPIRE', programs, rest)
  running = redis.call('ZCARD', programs)
end
return {refused, wait, used[1], used[2], used[3], used[4], at_once, running, spent[1] + promised, spent[2] + promised}
""".replace("AGAIN", str(AGAIN_MS))
)

# ARGV: now, the lease in ms, ids of calls that go on. A lease that has ended stays ended.
RENEW = (
    STATE
    + """
for i = 3, #ARGV do redis.call('ZADD', open, 'XX', now + tonumber(ARGV[2]), ARGV[i]) end
return {}
"""
)


@dataclass(frozen=True, slots=True)
class Cost:
    """The need or the usage of a call. `units` count parts: `UNITS` of them are one unit."""

    answers: int = 1
    input: int = 0
    uncached: int = 0  # of the input
    output: int = 0
    units: int = 0

    @property
    def rates(self) -> tuple[int, int, int, int]:
        """In the order of `RATES`."""
        return self.answers, self.input, self.uncached, self.output


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """A tenant's use of each of its limits, by their names, and the seconds until a minute's use has gone."""

    limits: TenantLimits
    used: Mapping[str, float]
    reset_s: float = 60.0

    def left(self, name: str) -> int:
        allowed: float = getattr(self.limits, name)
        return max(0, math.floor(allowed - self.used[name]))


class QuotaError(RefusedError):
    """One of a tenant's limits is reached: `limit`. The call may be retried when `status` is reset."""

    def __init__(self, tenant: str, limit: str, status: RateLimitStatus) -> None:
        refusal = Refusal.OVER_BUDGET if limit in BUDGETS else Refusal.RATE_LIMITED
        words = f"{getattr(status.limits, limit):g} {WORDS.get(limit, limit.replace('_', ' '))}"
        super().__init__(refusal, f"Tenant '{tenant}' is limited to {words}", retry_after_s=status.reset_s)
        self.limit = limit
        self.status = status
        self._arguments = (tenant, limit, status)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments


def quota_keys(tenant: str) -> list[str]:
    """The keys of a tenant's scripts. The braces keep them in one slot of a Redis cluster."""
    return [f"{{{tenant}}}/{name}" for name in ("window", "open", "held", "programs", "sums")]


def periods(at: float) -> tuple[str, str]:
    """The day and the month, in UTC, of a time in seconds since the epoch."""
    today = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
    return today, today[:7]


@dataclass(slots=True)
class Reservation:
    """The reservation of a running call. `local`: in this router's buckets, because Redis was away."""

    tenant: str
    cost: Cost
    local: bool


@dataclass(slots=True)
class _Bucket:
    """A token bucket: full at first, refilled evenly within a period."""

    level: float
    at: float

    def refill(self, capacity: float, period_s: float, now: float) -> None:
        self.level = min(capacity, self.level + (now - self.at) * capacity / period_s)
        self.at = now


@dataclass(slots=True)
class Quotas:
    """Checks the limits of all tenants. `routers` share the limits while Redis is away.

    `now_ms` replaces Redis' clock in tests.
    """

    store: Records
    routers: int = 1
    clock: Callable[[], float] = time.time
    now_ms: Callable[[], int] | None = None
    status: dict[str, RateLimitStatus] = field(default_factory=dict)  # of tenants with limits, as known last
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)  # by tenant and limit
    reserved: dict[str, Reservation] = field(default_factory=dict)  # calls that run here, by id
    _buckets: dict[tuple[str, str], _Bucket] = field(default_factory=dict)  # by tenant and limit
    _refused: dict[str, tuple[TenantLimits, float, QuotaError]] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether this router limits by its own buckets, because Redis is away."""
        return self.store.degraded

    def keep(self, tenants: Sequence[Tenant]) -> None:
        """Replace the tenants, and forget the state of all others."""
        names = {tenant.name for tenant in tenants}
        for states in (self._refused, self.status):
            for name in [name for name in states if name not in names]:
                del states[name]
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key[0] in names}

    def check(self, tenant: Tenant) -> None:
        """Raises QuotaError where the tenant is known to have used up `requests_per_minute`: no body need be read, and
        Redis need not be asked.
        """
        limits, until, error = self._refused.get(tenant.name, (None, 0.0, None))
        left = until - time.monotonic()
        if error is None or left <= 0 or limits != tenant.limits:
            self._refused.pop(tenant.name, None)
            return
        self.refusals[tenant.name, error.limit] += 1
        raise QuotaError(tenant.name, error.limit, replace(error.status, reset_s=left))

    async def admit(self, tenant: Tenant, id_: str, cost: Cost, program: str = "", *, lease: bool) -> RateLimitStatus:
        """Admit a call, and with `lease` reserve its cost until it is settled. Admitted again, it only adds its
        program. Raises QuotaError.
        """
        try:
            arguments = self._arguments(tenant, id_, cost, program, lease)
            answer = await self.store.try_script(ADMIT, quota_keys(tenant.name), arguments)
            status = self._admit_locally(tenant, id_, cost, lease) if answer is None else _admitted(tenant, answer)
        except QuotaError as error:
            self.refusals[tenant.name, error.limit] += 1
            self.status[tenant.name] = error.status
            if error.limit == "requests_per_minute" and error.retry_after_s:  # nothing but time ends it
                until = time.monotonic() + min(error.retry_after_s, REMEMBER_S)
                self._refused[tenant.name] = tenant.limits, until, error
            raise
        if lease and id_ not in self.reserved:
            self.reserved[id_] = Reservation(tenant.name, cost, local=answer is None)
        self.status[tenant.name] = status
        return status

    def settle(self, id_: str, used: Cost) -> None:
        """A call has ended here with the usage `cost`."""
        reservation = self.reserved.pop(id_, None)
        if reservation is None or not reservation.local:
            return
        back = dict(zip(RATES, map(int.__sub__, reservation.cost.rates, used.rates), strict=True))
        back |= dict.fromkeys(BUDGETS, reservation.cost.units - used.units)
        for name, tokens in back.items():
            bucket = self._buckets.get((reservation.tenant, name))
            if bucket is not None and name != "requests_per_minute":
                bucket.level += tokens

    async def renew(self) -> None:
        """Extend the reservations of running calls."""
        by_tenant: dict[str, list[str]] = {}
        for id_, reservation in self.reserved.items():
            by_tenant.setdefault(reservation.tenant, []).append(id_)
        for tenant, ids in by_tenant.items():
            await self.store.try_script(RENEW, quota_keys(tenant), [self.redis_now(), LEASE_S * 1000, *ids])

    def redis_now(self) -> int | str:
        """The first argument of each script: "" for Redis' own clock."""
        return "" if self.now_ms is None else self.now_ms()

    def _arguments(self, tenant: Tenant, id_: str, cost: Cost, program: str, lease: bool) -> list[Argument]:
        now = datetime.fromtimestamp(self.clock(), UTC)
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        ends = (midnight + timedelta(days=1), (midnight.replace(day=1) + timedelta(days=32)).replace(day=1))
        left_ms = [math.ceil((end - now).total_seconds() * 1000) for end in ends]
        limits = [(getattr(tenant.limits, name) or 0) * (UNITS if name in BUDGETS else 1) for name in LIMITS]
        head = [self.redis_now(), id_, int(LEASE_S * 1000) if lease else 0, program, int(PROGRAM_S * 1000)]
        return [*head, *cost.rates, cost.units, *periods(self.clock()), *left_ms, *map(round, limits)]

    def _admit_locally(self, tenant: Tenant, id_: str, cost: Cost, lease: bool) -> RateLimitStatus:
        """Admit by this router's share of every limit but `max_programs`. Raises QuotaError."""
        if id_ in self.reserved:
            return self.status.get(tenant.name) or RateLimitStatus(tenant.limits, dict.fromkeys(LIMITS, 0.0))
        now = time.monotonic() if self.now_ms is None else self.now_ms() / 1000
        at_once = sum(each.cost.answers for each in self.reserved.values() if each.tenant == tenant.name)
        used, taken = {**dict.fromkeys(LIMITS, 0.0), "max_concurrent": float(at_once)}, []
        refused: tuple[str, float] | None = None
        needs = dict(zip(RATES, cost.rates, strict=True)) | dict.fromkeys(BUDGETS, cost.units)
        for name, need in needs.items():
            limit = getattr(tenant.limits, name)
            if limit is None:
                continue
            unit = UNITS if name in BUDGETS else 1
            capacity = max(1.0, limit / self.routers) * unit
            bucket = self._buckets.setdefault((tenant.name, name), _Bucket(capacity, now))
            bucket.refill(capacity, PERIOD_S[name], now)
            need = min(need, capacity)
            used[name] = limit - bucket.level / unit
            taken.append((bucket, need))
            if need and bucket.level < need - 1e-9:
                refused = refused or (name, (need - bucket.level) * PERIOD_S[name] / capacity)
        most = tenant.limits.max_concurrent
        if lease and most is not None and at_once + cost.answers > max(1.0, most / self.routers):
            refused = refused or ("max_concurrent", AGAIN_MS / 1000)
        if refused is not None:
            name, wait_s = refused
            raise QuotaError(tenant.name, name, RateLimitStatus(tenant.limits, used, wait_s))
        for bucket, need in taken:
            bucket.level -= need
        return RateLimitStatus(tenant.limits, used)


def _admitted(tenant: Tenant, answer: Sequence[Any]) -> RateLimitStatus:
    """The status in an answer of `ADMIT`. Raises QuotaError."""
    refused, wait_ms, *values = (int(each) for each in answer)
    used = {name: n / UNITS if name in BUDGETS else float(n) for name, n in zip(LIMITS, values, strict=True)}
    if refused:
        raise QuotaError(tenant.name, LIMITS[refused - 1], RateLimitStatus(tenant.limits, used, wait_ms / 1000))
    return RateLimitStatus(tenant.limits, used)


# ---- headers ----

TOKENS = ("input_tokens_per_minute", "uncached_tokens_per_minute", "output_tokens_per_minute")
# The first that is limited counts. Anthropic counts no cached tokens as input; without a limit of these, all count.
KINDS: Mapping[str, Sequence[str]] = {
    "requests": ("requests_per_minute",),
    "input-tokens": ("uncached_tokens_per_minute", "input_tokens_per_minute"),
    "output-tokens": ("output_tokens_per_minute",),
}


def rate_limit_headers(status: RateLimitStatus, *, anthropic: bool, now: float) -> Iterator[tuple[bytes, bytes]]:
    """`x-ratelimit-*`, or `anthropic-ratelimit-*`. `tokens` is the limit of tokens with the least left."""
    reset = duration(status.reset_s)
    if anthropic:
        reset = (datetime.fromtimestamp(now, UTC) + timedelta(seconds=status.reset_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    limits = {name: value for name in LIMITS if (value := getattr(status.limits, name)) is not None}
    kinds = [(kind, names) for kind, names in KINDS.items() if anthropic or kind == "requests"]
    kinds.append(("tokens", sorted(TOKENS, key=lambda name: status.left(name) / limits[name] if name in limits else 2)))
    for kind, names in kinds:
        name = next((each for each in names if each in limits), None)
        if name is None:
            continue
        for part, value in (("limit", int(limits[name])), ("remaining", status.left(name)), ("reset", reset)):
            header = f"anthropic-ratelimit-{kind}-{part}" if anthropic else f"x-ratelimit-{part}-{kind}"
            yield header.encode(), str(value).encode()


def duration(seconds: float) -> str:
    """Seconds as Go and OpenAI's headers write them: `250ms`, `6s`, `1m30s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"
