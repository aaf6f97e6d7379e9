"""Tenants and keys that were made while the cluster runs: in Redis, for all routers. Of a key only its hash is stored.

    change   one tenant's record becomes another, or goes, if it is still the one that the caller saw; the audit log
             has the act in the same step, and routers look for changes every `LOOK_S`
    purge    the cached answers of a tenant are not found any more, which routers see in the same way

They are added to the tenants of the configuration; a tenant of the same name there only gets their keys. While Redis is
away the tenants stay as they are. A router that starts meanwhile has those of the configuration until Redis is back. If
Redis comes back empty, or as it was before, a router writes back what it knows.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain

import orjson
from pydantic import TypeAdapter, ValidationError

from holdfast.replicas.errors import ConfigError
from holdfast.router.background import forever, stop
from holdfast.router.entry.audit import STREAM
from holdfast.router.records import Argument, Records
from holdfast.router.tenants import Tenant, TenantDirectory

log = logging.getLogger(__name__)

LOOK_S = 1.0
ROUNDS = 5  # of looking, for one that stores when keys were used
TENANTS, VERSION, USED, PURGES = "tenants", "tenants/version", "keys/used", "tenants/purges"
_TENANT = TypeAdapter(Tenant)

# KEYS: the records by name, their version, the purges by name. ARGV: the version that the router has. Returns the
# version, and the records and purges where it is another one.
LOAD = """
local version = redis.call('GET', KEYS[2]) or '0'
if version == ARGV[1] then return {version} end
return {version, redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[3])}
"""
# KEYS: the records by name, their version, the purges by name. ARGV: a version, how many records there are, their names
# and texts, and those of purges. Returns whether they were stored: Redis had no later version.
RESTORE = """
if tonumber(redis.call('GET', KEYS[2]) or '0') >= tonumber(ARGV[1]) then return {0} end
redis.call('DEL', KEYS[1], KEYS[3])
local records = tonumber(ARGV[2])
for i = 0, (#ARGV - 2) / 2 - 1 do
  redis.call('HSET', i < records and KEYS[1] or KEYS[3], ARGV[3 + 2 * i], ARGV[4 + 2 * i])
end
redis.call('SET', KEYS[2], ARGV[1])
return {1}
"""
# KEYS: the records by name, their version, the audit log. ARGV: name, the record before and after ('': none), most
# entries of the log, the entry. Returns the version, or 0 where the record is another one by now.
CHANGE = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return {0} end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'entry', ARGV[5])
return {redis.call('INCR', KEYS[2])}
"""
# KEYS: the purges by name, the version, the audit log. ARGV: name, the purge, most entries of the log, the entry.
PURGE = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'entry', ARGV[4])
return {redis.call('INCR', KEYS[2])}
"""
READ = "return redis.call('HGETALL', KEYS[1])"
FIND = "return {redis.call('HGET', KEYS[1], ARGV[1]) or ''}"
STORE_USED = "return {redis.call('HSET', KEYS[1], unpack(ARGV))}"


class TenantStore:
    """Keeps `directory` as Redis has it. Create it, `start` it on the event loop, and `close` it."""

    def __init__(self, records: Records, directory: TenantDirectory, most_audit: int = 10000) -> None:
        self._records = records
        self._directory = directory
        self._most_audit = most_audit
        self._version = b"0"
        self._tenants: dict[bytes, bytes] = {}  # as they stand in Redis, by name
        self._purges: dict[str, str] = {}
        self._watchers: list[Callable[[Mapping[str, str]], None]] = []  # of purges
        self._used: dict[tuple[str, str], float] = {}  # as stored
        self._rounds = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load them, and look for changes from now on."""
        await self._look()
        self._task = asyncio.get_running_loop().create_task(forever(self._watch, LOOK_S, "looking for tenants"))

    async def close(self) -> None:
        await stop(self._task)
        await self._store_used()

    async def find(self, name: str) -> tuple[Tenant | None, bytes]:
        """A tenant's record and its text, which `change` takes; None and b"" for none. Raises UnavailableError."""
        (text,) = await self._records.script(FIND, [TENANTS], [name])
        return (_TENANT.validate_json(text) if text else None), text

    async def change(self, name: str, before: bytes, after: Tenant | None, entry: bytes) -> bool:
        """Store the record in place of `before`. True if it was stored; this router then uses it at once.

        Raises UnavailableError.
        """
        text = b"" if after is None else orjson.dumps(asdict(after))
        arguments: list[Argument] = [name, before, text, self._most_audit, entry]
        (version,) = await self._records.script(CHANGE, [TENANTS, VERSION, STREAM], arguments)
        await self._look()
        return int(version) > 0

    async def purge(self, name: str, entry: bytes) -> None:
        """Hide the cached answers of a tenant: from this router now, from the others soon.

        Raises UnavailableError.
        """
        arguments: list[Argument] = [name, secrets.token_hex(4), self._most_audit, entry]
        await self._records.script(PURGE, [PURGES, VERSION, STREAM], arguments)
        await self._look()

    def watch_purges(self, watch: Callable[[Mapping[str, str]], None]) -> None:
        """Call `watch` with each tenant's latest purge, a word that no other one has: now, and after each purge."""
        self._watchers.append(watch)
        watch(self._purges)

    async def last_used(self) -> dict[tuple[str, str], float]:
        """When keys were used last, by tenant and id, seconds since the epoch. Raises UnavailableError."""
        await self._store_used()
        reply = await self._records.script(READ, [USED], [])
        return {_pair(name.decode()): float(at) for name, at in zip(reply[::2], reply[1::2], strict=True)}

    async def _watch(self) -> None:
        self._rounds += 1
        await self._look()
        if self._rounds % ROUNDS == 0:
            await self._store_used()

    async def _look(self) -> None:
        reply = await self._records.try_script(LOAD, [TENANTS, VERSION, PURGES], [self._version])
        if reply is not None and int(reply[0]) < int(self._version):
            await self._restore()
            reply = await self._records.try_script(LOAD, [TENANTS, VERSION, PURGES], [self._version])
        if reply is not None and len(reply) > 1 and int(reply[0]) >= int(self._version):
            self._take(*reply)

    async def _restore(self) -> None:
        """Restore tenants that Redis has lost. The router with the latest version wins."""
        purges = [(name.encode(), purge.encode()) for name, purge in self._purges.items()]
        pairs = [*self._tenants.items(), *purges]
        arguments: list[Argument] = [self._version, len(self._tenants), *chain.from_iterable(pairs)]
        reply = await self._records.try_script(RESTORE, [TENANTS, VERSION, PURGES], arguments)
        if reply is not None and int(reply[0]):
            log.warning("Redis has lost the tenants that were made: %d of them are put back", len(self._tenants))
            self._used.clear()  # when keys were used is lost, too

    def _take(self, version: bytes, tenants: Sequence[bytes], purges: Sequence[bytes]) -> None:
        """Use these tenants and purges from now on."""
        self._tenants = dict(zip(tenants[::2], tenants[1::2], strict=True))
        try:
            self._directory.add([_TENANT.validate_json(text) for text in self._tenants.values()])
        except (ConfigError, ValidationError) as error:  # written by something else
            log.error("the tenants in Redis stay as they were: %s", error)
        latest = {name.decode(): purge.decode() for name, purge in zip(purges[::2], purges[1::2], strict=True)}
        if latest != self._purges:
            self._purges = latest
            for watch in self._watchers:
                watch(latest)
        self._version = version

    async def _store_used(self) -> None:
        news = {key: at for key, at in self._directory.used.items() if self._used.get(key) != at}
        if not news:
            return
        arguments = [each for (tenant, key_id), at in news.items() for each in (f"{tenant}/{key_id}", f"{at:.3f}")]
        if await self._records.try_script(STORE_USED, [USED], arguments) is not None:
            self._used.update(news)


def _pair(name: str) -> tuple[str, str]:
    tenant, _, key_id = name.partition("/")
    return tenant, key_id
