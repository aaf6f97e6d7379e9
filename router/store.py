"""A small key-value store shared by the routers of a cluster: in Redis, or in this process where there is none.

Losing Redis fails no request: after the first failed operation everything goes to the memory of this process until
Redis answers again. Keys come in already scoped (`cache/<tenant>/...`); nothing here knows what they mean.
"""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

from holdfast.replicas.errors import HoldfastError, UnavailableError
from holdfast.router.lru import SHARE, Lru
from holdfast.router.records import Records

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECTIONS = 32

# What an owner has put since the first value of its window; the window is as long as values live. Beyond the allowance
# nothing is put, and nothing where something else stands by now than what the caller has seen. KEYS: the value's, the
# count's. ARGV: the value, milliseconds, the allowance in bytes, the version that the caller has seen or "".
SET_SHARED = """
if ARGV[4] ~= '' then
  local there = redis.call('GET', KEYS[1])
  if not there or redis.sha1hex(there) ~= ARGV[4] then return {'changed'} end
end
local used = redis.call('INCRBY', KEYS[2], #ARGV[1])
if used == #ARGV[1] then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
if used > tonumber(ARGV[3]) then return {'full'} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'done'}
"""

# KEYS: values. ARGV: for how many milliseconds they live on.
RENEW = """
local found = {}
for i = 1, #KEYS do found[i] = redis.call('GETEX', KEYS[i], 'PX', ARGV[1]) end
return found
"""
# A value, and before it those that its first line names; each lives on. The names stand in for the end of its key. They
# come as one string, behind their lengths, as the client takes long for each; nothing where one is not there.
# KEYS: the last value's. ARGV: for how many milliseconds they live on.
FOLLOW = """
local last = redis.call('GETEX', KEYS[1], 'PX', ARGV[1])
if not last then return {} end
local found, sizes = {}, {}
local begin = string.match(KEYS[1], '^.*/')
for name in string.gmatch(string.match(last, '^[^\\n]*'), '%S+') do
  local value = redis.call('GETEX', begin .. name, 'PX', ARGV[1])
  if not value then return {} end
  found[#found + 1] = value
  sizes[#sizes + 1] = #value
end
found[#found + 1] = last
sizes[#sizes + 1] = #last
return {table.concat(sizes, ' '), table.concat(found)}
"""
# A value, or where there is none the lease on making it. KEYS: the value's, the lease's. ARGV: who asks, milliseconds.
TAKE = """
local value = redis.call('GET', KEYS[1])
if value then return {value} end
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return {0} end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {1}
"""
# KEYS: leases. ARGV: who has them, milliseconds; none: they end.
EXTEND = """
for i = 1, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    if ARGV[2] then redis.call('PEXPIRE', KEYS[i], ARGV[2]) else redis.call('DEL', KEYS[i]) end
  end
end
return {1}
"""
# What an owner's growing values take is booked by name, with when they expire; those that have are taken out first.
_BOOKS = """
local sizes, deadlines = KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function booked(name) return tonumber(redis.call('HGET', sizes, name) or 0) end

local function book(name, size, ttl)
  redis.call('HINCRBY', sizes, '', size - booked(name))
  if size == 0 then
    redis.call('HDEL', sizes, name)
    redis.call('ZREM', deadlines, name)
    return
  end
  redis.call('HSET', sizes, name, size)
  redis.call('ZADD', deadlines, now + ttl, name)
  for i = 2, 3 do
    if redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
  end
end
"""
# KEYS: the value's, the owner's two of its books. ARGV: the bytes, milliseconds, the owner's allowance, what the value
# has to begin and end with ("": there must be none), '1': they come in its place.
GROW = (
    _BOOKS
    + """
local more, ttl, head, tail, anew = ARGV[1], tonumber(ARGV[2]), ARGV[4], ARGV[5], ARGV[6] == '1'
local there = redis.call('STRLEN', KEYS[1])
if head == '' then
  if there > 0 then return {'changed'} end
elseif redis.call('GETRANGE', KEYS[1], 0, #head - 1) ~= head or redis.call('GETRANGE', KEYS[1], -#tail, -1) ~= tail then
  return {'changed'}
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, 100)) do book(name, 0) end
local size = #more + (anew and 0 or there)
if #more > 0 and booked('') - booked(KEYS[1]) + size > tonumber(ARGV[3]) then return {'full'} end
if anew then
  redis.call('SET', KEYS[1], more, 'PX', ttl)
else
  redis.call('APPEND', KEYS[1], more)
  redis.call('PEXPIRE', KEYS[1], ttl)
end
book(KEYS[1], size, ttl)
return {'done'}
"""
)
DROP = (
    _BOOKS
    + """
redis.call('DEL', KEYS[1])
book(KEYS[1], 0)
return {1}
"""
)
# KEYS: a value's. ARGV: how much of its begin, and of its end.
ENDS = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
return {redis.call('GETRANGE', KEYS[1], 0, ARGV[1] - 1), redis.call('GETRANGE', KEYS[1], -ARGV[2], -1)}
"""
AT_ONCE = 128  # leases of one script
SCANNED = 1000  # keys that one step of a search looks at


class Put(Enum):
    """What became of a value: it is there, its owner has no room for it, another than the known one stands there, or
    nothing, for what all have to see cannot be reached.
    """

    DONE = "done"
    FULL = "full"
    CHANGED = "changed"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class Ends:
    """What a value that grows begins and ends with: it tells that from all that stood in its place."""

    head: bytes
    tail: bytes


def version_of(value: bytes) -> str:
    """What tells a value from all others that may stand in its place."""
    return hashlib.sha1(value).hexdigest()


class Store(Protocol):
    """Bytes under string keys, each with a time to live in seconds. No method raises for a lost server."""

    @property
    def degraded(self) -> bool:
        """Whether values are kept in this process although they should be shared."""
        ...

    async def get(self, key: str) -> bytes | None: ...

    async def renew(self, keys: Sequence[str], ttl_s: float) -> list[bytes | None]:
        """The values under `keys`; each of them lives for `ttl_s` from now on."""
        ...

    async def follow(self, key: str, ttl_s: float) -> list[bytes]:
        """The value under `key`, and before it those that its first line names: each name, without white space, stands
        in for what the key has behind its last slash. All of them live for `ttl_s` from now on. Empty where one is not
        there, or not in the same place as the others.
        """
        ...

    async def set(self, key: str, value: bytes, ttl_s: float) -> None: ...

    async def set_shared(self, key: str, value: bytes, ttl_s: float, owner: str, most: int, version: str = "") -> Put:
        """Put `value`, unless that makes it more than `most` bytes that `owner` has put in the last `ttl_s`.

        With the `version` of a value only where that stands there now: of several that change it one does.
        """
        ...

    async def take(self, key: str, lease: str, owner: str, lease_s: float) -> bytes | bool:
        """The value under `key`. Where there is none: whether `owner` has the lease from now on, for `lease_s`. Nobody
        else gets it meanwhile.
        """
        ...

    async def extend(self, leases: Sequence[str], owner: str, lease_s: float = 0.0) -> None:
        """Those of them that `owner` still has last for `lease_s` from now on; by default they end."""
        ...

    async def ends(self, key: str, head: int, tail: int) -> Ends | None:
        """The first and the last bytes of the value under `key`. None where there is none, or Redis is away."""
        ...

    async def grow(
        self, key: str, more: bytes, ttl_s: float, owner: str, most: int, at: Ends | None, *, anew: bool = False
    ) -> Put:
        """Put `more` behind the value, or `anew` in its place, where that is the one `at` these ends (None: where there
        is none), unless those of `owner` take more than `most` bytes then. The value lives for `ttl_s` from now on.

        It costs what comes, not what is there. While Redis is away nothing grows.
        """
        ...

    async def delete(self, key: str, owner: str = "") -> None:
        """`owner`: of one that grew."""
        ...

    async def forget(self, prefix: str) -> None:
        """Delete what stands under keys that begin so. Takes long, and holds nobody up."""
        ...

    async def close(self) -> None: ...


def not_found(store: Store, error: HoldfastError) -> HoldfastError:
    """What to raise for a value that is not in `store`: `error`, or UnavailableError while Redis, which may have the
    value, does not answer. Clients take a 404 for final, and try again after a 503.
    """
    return UnavailableError("Redis does not answer, and may have what you ask for; retry") if store.degraded else error


class MemoryStore:
    """The store of one process: bounded in entries and bytes. Where it is full, who has most of it gives way."""

    def __init__(self, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._values: Lru[bytes | bytearray] = Lru(max_entries, max_bytes, SHARE)
        self._clock = clock

    @property
    def degraded(self) -> bool:
        return False

    async def get(self, key: str) -> bytes | None:
        value = self._values.get(key, self._clock())
        return None if value is None else bytes(value)

    async def renew(self, keys: Sequence[str], ttl_s: float) -> list[bytes | None]:
        now = self._clock()
        found = [await self.get(key) for key in keys]
        for key in keys:
            self._values.renew(key, now + ttl_s)
        return found

    async def follow(self, key: str, ttl_s: float) -> list[bytes]:
        last = await self.get(key)
        if last is None:
            return []
        begin = key[: key.rindex("/") + 1]
        names = last.partition(b"\n")[0].decode().split()
        found = await self.renew([*(begin + name for name in names), key], ttl_s)
        return [value for value in found if value is not None] if None not in found else []

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        self._values.put(key, value, self._clock() + ttl_s, len(key) + len(value))

    async def set_shared(self, key: str, value: bytes, ttl_s: float, owner: str, most: int, version: str = "") -> Put:
        now = self._clock()
        there = await self.get(key) if version else None
        if version and (there is None or version_of(there) != version):
            return Put.CHANGED
        self._values.put(key, value, now + ttl_s, len(key) + len(value), owner, most)
        return Put.DONE if key in self._values else Put.FULL

    async def take(self, key: str, lease: str, owner: str, lease_s: float) -> bytes | bool:
        value = await self.get(key)
        return True if value is None else value  # there is nobody else

    async def extend(self, leases: Sequence[str], owner: str, lease_s: float = 0.0) -> None:
        return

    async def ends(self, key: str, head: int, tail: int) -> Ends | None:
        value = self._values.get(key, self._clock())
        return None if value is None else Ends(bytes(value[:head]), bytes(value[-tail:]))

    async def grow(
        self, key: str, more: bytes, ttl_s: float, owner: str, most: int, at: Ends | None, *, anew: bool = False
    ) -> Put:
        now = self._clock()
        there = self._values.get(key, now)
        if at is None or there is None:
            if at is not None or there is not None:
                return Put.CHANGED
        elif not (there.startswith(at.head) and there.endswith(at.tail)):
            return Put.CHANGED
        before = 0 if there is None else len(there)
        size = len(more) + (0 if anew else before)
        if more and self._values.owned(owner, now) - before + size > most:
            return Put.FULL
        value = there if isinstance(there, bytearray) and not anew else bytearray()
        value += more
        self._values.put(key, value, now + ttl_s, size, owner)
        return Put.DONE if key in self._values else Put.FULL

    async def delete(self, key: str, owner: str = "") -> None:
        self._values.remove(key)

    async def forget(self, prefix: str) -> None:
        for key in [key for key, _ in self._values.latest(self._clock()) if key.startswith(prefix)]:
            self._values.remove(key)

    async def close(self) -> None:
        return


class RedisStore:
    """Redis, with `fallback` for the time it is away."""

    def __init__(self, records: Records, fallback: Store) -> None:
        self._records = records
        self._fallback = fallback

    @property
    def degraded(self) -> bool:
        return self._records.degraded

    async def get(self, key: str) -> bytes | None:
        async def work() -> tuple[bytes | None]:
            return (await self._records._redis.get(self._records._prefix + key),)

        done = await self._records._guarded(work)
        return done[0] if done else await self._fallback.get(key)

    async def renew(self, keys: Sequence[str], ttl_s: float) -> list[bytes | None]:
        near = await self._fallback.renew(keys, ttl_s)  # what was put while Redis was away is here only
        found = await self._records.try_script(
            RENEW, keys, [_milliseconds(ttl_s)]
        )  # one command: the client takes long for each
        return near if found is None else [there or here for there, here in zip(found, near, strict=True)]

    async def follow(self, key: str, ttl_s: float) -> list[bytes]:
        told = await self._records.try_script(FOLLOW, [key], [_milliseconds(ttl_s)])
        if not told:
            return await self._fallback.follow(key, ttl_s)
        ends = list(accumulate(map(int, told[0].split())))
        return [told[1][begin:end] for begin, end in pairwise([0, *ends])]

    async def set(self, key: str, value: bytes, ttl_s: float) -> None:
        async def work() -> bool:
            await self._records._redis.set(self._records._prefix + key, value, px=_milliseconds(ttl_s))
            return True

        if not await self._records._guarded(work):
            await self._fallback.set(key, value, ttl_s)

    async def set_shared(self, key: str, value: bytes, ttl_s: float, owner: str, most: int, version: str = "") -> Put:
        arguments: list[str | bytes | float] = [value, _milliseconds(ttl_s), most, version]
        done = await self._records.try_script(SET_SHARED, [key, f"put/{owner}"], arguments)
        if done is None:
            return await self._fallback.set_shared(key, value, ttl_s, owner, most, version)
        return Put(done[0].decode())

    async def ends(self, key: str, head: int, tail: int) -> Ends | None:
        found = await self._records.try_script(ENDS, [key], [head, tail])
        return Ends(*found) if found else None

    async def grow(
        self, key: str, more: bytes, ttl_s: float, owner: str, most: int, at: Ends | None, *, anew: bool = False
    ) -> Put:
        seen = at or Ends(b"", b"")
        told: list[str | bytes | float] = [more, _milliseconds(ttl_s), most, seen.head, seen.tail, "1" if anew else ""]
        done = await self._records.try_script(GROW, [key, *_books(owner)], told)
        return Put.AWAY if done is None else Put(done[0].decode())

    async def delete(self, key: str, owner: str = "") -> None:
        async def work() -> bool:
            await self._records._redis.delete(self._records._prefix + key)
            return True

        if owner:
            await self._records.try_script(DROP, [key, *_books(owner)], [])
        else:
            await self._records._guarded(work)
        await self._fallback.delete(key)  # what was kept here while Redis was away

    async def take(self, key: str, lease: str, owner: str, lease_s: float) -> bytes | bool:
        done = await self._records.try_script(TAKE, [key, lease], [owner, _milliseconds(lease_s)])
        if done is None:
            return await self._fallback.take(key, lease, owner, lease_s)
        return done[0] if isinstance(done[0], bytes) else bool(done[0])

    async def extend(self, leases: Sequence[str], owner: str, lease_s: float = 0.0) -> None:
        arguments: list[str | bytes | float] = [owner, _milliseconds(lease_s)] if lease_s else [owner]
        for begin in range(0, len(leases), AT_ONCE):
            await self._records.try_script(EXTEND, leases[begin : begin + AT_ONCE], arguments)

    async def forget(self, prefix: str) -> None:
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", self._records._prefix + prefix) + "*"
        cursor = 0

        async def work() -> tuple[int]:
            found, keys = await self._records._redis.scan(cursor, pattern, SCANNED)
            if keys:
                await self._records._redis.unlink(*keys)
            return (int(found),)

        while (done := await self._records._guarded(work)) is not None:
            (cursor,) = done
            if cursor == 0:
                break
        await self._fallback.forget(prefix)

    async def close(self) -> None:
        await self._records.close()


def _books(owner: str) -> list[str]:
    return [f"grown/{owner}/sizes", f"grown/{owner}/deadlines"]


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
