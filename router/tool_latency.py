"""How long tools take, for the whole cluster: statistics per tenant and set of tools, and of all, kept in Redis.

    router     notes an interval; a writer behind the requests adds it in Redis (one script, so at once)
    replicas   read the intervals that came since they last asked, add them up as Redis does, and tell their engines

Whole statistics are read at first, and by a reader that was away for longer than the log of intervals reaches back.

Where there are too many sets the tenant that has most of them loses its oldest one, in Redis as in every process.

Losing Redis fails nothing and delays nobody: a router keeps its latest intervals and adds them once Redis is back, and
readers keep the last snapshot. What an interval is stands in `replicas/retention/latency`.
"""

import asyncio
import logging
import math
import secrets
from collections import deque
from typing import Any

from holdfast.replicas.retention.latency import (
    RECENT,
    LatencyBook,
    LatencySnapshot,
    Tally,
    ToolKey,
)
from holdfast.router.records import Records

log = logging.getLogger(__name__)

BASE = "{tools}/"  # one slot of a Redis cluster, for the scripts touch several keys
MOST_SETS = 4096  # of tools, of all tenants
TTL_S = 7 * 24 * 3600  # after its last interval a set is forgotten; some eviction policies take no other keys
BATCH = 64  # intervals added, or sets read, in one script
LOG = 4096  # intervals that readers may fetch one by one, the latest
DELTAS = 512  # of them fetched in one script
PENDING = 4096  # intervals kept while Redis is away, the latest ones

_RECORD = """
local base, recent, most, ttl = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local log = tonumber(ARGV[5])
-- The router may have had no answer to this batch, and sent it again.
if not redis.call('SET', base .. 'done/' .. ARGV[4], 1, 'NX', 'EX', 60) then return {0} end
if redis.call('EXISTS', base .. 'version') == 0 then
  -- Above the versions of any server that was here before and has lost what it had.
  local time = redis.call('TIME')
  redis.call('SET', base .. 'version', time[1] * 1000000 + time[2])
end
local function add(key, seconds)
  local n = redis.call('HINCRBY', key, 'count', 1)
  local value = tonumber(seconds)
  local mean = tonumber(redis.call('HGET', key, 'mean') or '0')
  local squares = tonumber(redis.call('HGET', key, 'squares') or '0')
  local error = value - mean
  mean = mean + error / n
  squares = squares + error * (value - mean)
  redis.call('HSET', key, 'mean', string.format('%.17g', mean), 'squares', string.format('%.17g', squares))
  redis.call('LPUSH', key .. '/recent', seconds)
  redis.call('LTRIM', key .. '/recent', 0, recent - 1)
  redis.call('EXPIRE', key, ttl)
  redis.call('EXPIRE', key .. '/recent', ttl)
end
local tenants = base .. 'tenants'  -- each with how many sets it has
local function sets(tenant) return base .. 'sets/' .. tenant end
local function counted(tenant)
  local n = redis.call('ZCARD', sets(tenant))
  if n > 0 then redis.call('ZADD', tenants, n, tenant) else redis.call('ZREM', tenants, tenant) end
end
for i = 6, #ARGV, 2 do
  add(base .. 'all', ARGV[i + 1])
  add(base .. 'of/' .. ARGV[i], ARGV[i + 1])
  local version = redis.call('INCR', base .. 'version')
  redis.call('ZADD', base .. 'changed', version, ARGV[i])
  local tenant = string.match(ARGV[i], '^[^/]*')
  redis.call('ZADD', sets(tenant), version, ARGV[i])
  redis.call('EXPIRE', sets(tenant), ttl)
  counted(tenant)
  redis.call('ZADD', base .. 'log', version, string.format('%.0f', version) .. ' ' .. ARGV[i + 1] .. ' ' .. ARGV[i])
end
redis.call('ZREMRANGEBYRANK', base .. 'log', 0, -log - 1)
redis.call('EXPIRE', base .. 'log', ttl)
while redis.call('ZCARD', base .. 'changed') > most do
  local first = redis.call('ZREVRANGE', tenants, 0, 0)[1]
  -- Without any the server has evicted what said so.
  local gone = redis.call('ZPOPMIN', first and sets(first) or base .. 'changed')[1]
  if gone then
    redis.call('ZREM', base .. 'changed', gone)
    redis.call('DEL', base .. 'of/' .. gone, base .. 'of/' .. gone .. '/recent')
  end
  if first then counted(first) end
end
redis.call('EXPIRE', tenants, ttl)
redis.call('EXPIRE', base .. 'version', ttl)
redis.call('EXPIRE', base .. 'changed', ttl)
return {1}
"""

_READ = """
local base, since, limit, whole, deltas = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local version = redis.call('GET', base .. 'version') or '0'
if tonumber(version) < tonumber(since) then since, whole = '0', false end
if version == since then return {since, version, '', {}} end
if whole then  -- unless the log does not reach back so far
  local oldest = redis.call('ZRANGE', base .. 'log', 0, 0, 'WITHSCORES')[2]
  if oldest and tonumber(oldest) <= tonumber(since) + 1 then
    return {since, version, 'new', redis.call('ZRANGEBYSCORE', base .. 'log', '(' .. since, '+inf', 'LIMIT', 0, deltas)}
  end
end
local function read(key)
  local found = redis.call('HMGET', key, 'count', 'mean', 'squares')
  return {found[1], found[2], found[3], redis.call('LRANGE', key .. '/recent', 0, -1)}
end
local sets = {}
local changed = redis.call('ZRANGEBYSCORE', base .. 'changed', '(' .. since, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
for i = 1, #changed, 2 do
  sets[#sets + 1] = {changed[i], changed[i + 1], read(base .. 'of/' .. changed[i])}
end
return {since, version, read(base .. 'all'), sets}
"""


class Reader:
    """The statistics as this process last read them. Reading costs the intervals that are new."""

    def __init__(self, store: Records) -> None:
        self._store = store
        self._since = 0
        self._whole = False  # everything up to `since` has been read
        self._news = False  # that the snapshot does not have
        self._book = LatencyBook(MOST_SETS)
        self.snapshot = LatencySnapshot()

    async def refresh(self) -> bool:
        """Read what has changed; False where nothing has, or Redis is away."""
        while await self._read():
            self._news = True
        if not (self._news and self._whole):
            return False
        self._news = False
        self.snapshot = self._book.snapshot()
        return True

    async def _read(self) -> bool:
        """Read a part of what is there; False where that is nothing."""
        arguments = [self._since, BATCH, "1" if self._whole else "0", DELTAS]
        answer = await self._store.try_script(_READ, [BASE], arguments)
        if answer is None:
            return False
        since, version, overall, rows = answer
        # Where the server has lost what it had everything is read anew; what was read before still stands.
        self._whole &= int(since) == self._since
        self._since = int(since)
        if overall == b"":
            self._whole = True
            return False
        if overall == b"new":
            for row in rows:
                number, seconds, name = row.split(b" ", 2)
                self._book.record(*_key(name), float(seconds))
                self._since = int(number)
            return bool(rows)
        self._book.put(None, _tally(overall))
        for name, _, row in rows:
            self._book.put(_key(name), _tally(row))
        self._whole = len(rows) < BATCH
        self._since = int(version) if self._whole else int(rows[-1][1])
        return True


class ToolLatencies:
    """Takes intervals in, and shows what is known. Without a `store`, of this process alone."""

    def __init__(self, store: Records | None = None, retry_s: float = 1.0) -> None:
        self._store = store
        self._retry_s = retry_s
        self._own = LatencyBook(MOST_SETS)
        self._reader = Reader(store) if store is not None else None
        self._pending: deque[tuple[str, str]] = deque(maxlen=PENDING)
        self._writer: asyncio.Task[None] | None = None

    def record(self, tenant: str, tools: str, seconds: float) -> None:
        """An interval has ended. The store learns of it in the background."""
        if not tools or not math.isfinite(seconds):
            return
        seconds = max(seconds, 0.0)
        self._own.record(tenant, tools, seconds)
        if self._store is None:
            return
        self._pending.append((f"{tenant}/{tools}", f"{seconds:.6g}"))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write(self._store))

    async def known(self) -> LatencySnapshot:
        """The cluster's statistics; while Redis is away those of this process."""
        if self._store is None or self._reader is None:
            return self._own.snapshot()
        await self._reader.refresh()
        return self._own.snapshot() if self._store.degraded else self._reader.snapshot

    async def drain(self) -> None:
        """Wait until the store has everything, unless it is away."""
        while self._writer is not None and not self._writer.done():
            if self._store is not None and self._store.degraded:
                return
            await asyncio.wait({self._writer}, timeout=self._retry_s)

    async def close(self) -> None:
        """What the store has not got by now it will not get."""
        await self.drain()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait({self._writer})

    async def _write(self, store: Records) -> None:
        while self._pending:
            batch = list(self._pending)[:BATCH]
            arguments: list[str | bytes | float] = [RECENT, MOST_SETS, TTL_S, secrets.token_hex(8), LOG]
            for interval in batch:
                arguments += interval
            # What is given up here may run there all the same: it is sent again unchanged, and its id counts once.
            while await store.try_script(_RECORD, [BASE], arguments) is None:  # noqa: ASYNC110 (a store has no event)
                await asyncio.sleep(self._retry_s)
            for interval in batch:
                if self._pending and self._pending[0] is interval:  # else it had to go for a later one
                    self._pending.popleft()


def _key(name: bytes) -> ToolKey:
    tenant, _, tools = name.decode(errors="replace").partition("/")
    return tenant, tools


def _tally(row: list[Any]) -> Tally:
    """Nothing known, where the server has evicted a part of it."""
    count, mean, squares, recent = row
    if count is None or mean is None or squares is None:
        return Tally()
    return Tally(int(count), float(mean), max(float(squares), 0.0), [float(each) for each in reversed(recent)])
