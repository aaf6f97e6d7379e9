"""Tenants and keys that were made while the cluster runs: in Redis, for all routers, by hash alone.

    change   one tenant's record becomes another, or goes, if it is still what whoever asks has seen; the audit log
             has the act in the same step, and routers look within `LOOK_S`
    purge    what the response caches keep for a tenant is as good as gone, which routers see in the same way

They come beside those of the configuration: of a tenant that stands there, only keys are added. While Redis is away the
tenants stay who they were; at a start without it those of the configuration are there alone, until it is back. If it
comes back empty, or as it was before, what a router knows is later: it is written back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from holdfast.replicas.errors import ConfigError
from holdfast.router.audit import STREAM
from holdfast.router.background import forever
from holdfast.router.records import Argument, Records
from holdfast.router.tenants import Tenant, TenantDirectory

log = logging.getLogger(__name__)

LOOK_S = 1.0
TELL_USED_S = 5.0
TENANTS, VERSION, USED, PURGES = "tenants", "tenants/version", "keys/used", "tenants/purges"
_TENANT = TypeAdapter(Tenant)

LOOK = "return {redis.call('GET', KEYS[1]) or '0'}"
LOAD = "return {redis.call('GET', KEYS[2]) or '0', redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[3])}"
# KEYS: the records by name, their version, the purges by name. ARGV: a version, how many records there are, their names
# and texts, and those of purges. Returns whether they were put there: nobody else knew of a later version.
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
# entries of the log, the entry. Returns the version, 0 where the record is another one by now.
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
# KEYS: when keys were used last. ARGV: names and times.
TELL_USED = """
for i = 1, #ARGV, 2 do
  if tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or 0) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return {}
"""


class TenantStore:
    """Keeps `directory` as Redis has it. Create it, `start` it on the event loop, and `close` it."""

    def __init__(self, store: Records, directory: TenantDirectory, most_audit: int = 10000) -> None:
        self._store = store
        self._directory = directory
        self._most_audit = most_audit
        self._version = b"0"
        self._records: dict[bytes, bytes] = {}  # as they stand in Redis, by name
        self._told_purges: list[Callable[[Mapping[str, str]], None]] = []
        self._purges: dict[str, str] = {}
        self._told: dict[tuple[str, str], float] = {}
        self._rounds = 0  # of looking
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load them, and look for changes from now on."""
        await self._look()
        self._task = asyncio.get_running_loop().create_task(forever(self._watch, LOOK_S, "looking for tenants"))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._tell_used()

    async def find(self, name: str) -> tuple[Tenant | None, bytes]:
        """A tenant's record as it stands in Redis now, and its text, which `change` wants; None, b"" for none.

        Raises UnavailableError.
        """
        found = await self._ask("return {redis.call('HGET', KEYS[1], ARGV[1]) or ''}", [TENANTS], [name])
        return (_TENANT.validate_json(found[0]) if found[0] else None), found[0]

    async def change(self, name: str, before: bytes, after: Tenant | None, entry: bytes) -> bool:
        """Whether the record could be put in the place of `before`. This router goes by it from now on.

        Raises UnavailableError.
        """
        text = b"" if after is None else orjson.dumps(asdict(after))
        arguments: list[Argument] = [name, before, text, self._most_audit, entry]
        done = await self._ask(CHANGE, [TENANTS, VERSION, STREAM], arguments)
        await self._load()
        return int(done[0]) > 0

    async def purge(self, name: str, entry: bytes) -> None:
        """What is cached for a tenant is not found any more: from now on by this router, soon by the others.

        Raises UnavailableError.
        """
        arguments: list[Argument] = [name, secrets.token_hex(4), self._most_audit, entry]
        await self._ask(PURGE, [PURGES, VERSION, STREAM], arguments)
        await self._load()

    def watch_purges(self, tell: Callable[[Mapping[str, str]], None]) -> None:
        """Tell of each tenant's latest purge, a word that no other one has: now, and whenever there is another."""
        self._told_purges.append(tell)
        tell(self._purges)

    async def last_used(self) -> dict[tuple[str, str], float]:
        """When keys were used last, by tenant and id, seconds since the epoch. Raises UnavailableError."""
        await self._tell_used()
        found = await self._ask(READ, [USED], [])
        return {_pair(name.decode()): float(at) for name, at in zip(found[::2], found[1::2], strict=True)}

    async def _ask(self, source: str, keys: Sequence[str], arguments: Sequence[Argument]) -> list[Any]:
        return await self._store.script(source, keys, arguments)

    async def _watch(self) -> None:
        self._rounds += 1
        await self._look()
        if self._rounds * LOOK_S % TELL_USED_S < LOOK_S:
            await self._tell_used()

    async def _look(self) -> None:
        found = await self._store.try_script(LOOK, [VERSION], [])
        if found is None or found[0] == self._version:
            return
        if int(found[0]) < int(self._version):
            await self._restore()
        await self._load()

    async def _restore(self) -> None:
        """Redis has forgotten what it told. Of several routers that know, the one with the latest version has the last
        word.
        """
        purges = [(name.encode(), purge.encode()) for name, purge in self._purges.items()]
        pairs = [*self._records.items(), *purges]
        arguments: list[Argument] = [self._version, len(self._records), *chain.from_iterable(pairs)]
        done = await self._store.try_script(RESTORE, [TENANTS, VERSION, PURGES], arguments)
        if done is not None and int(done[0]):
            log.warning("Redis has lost the tenants that were made: %d of them are put back", len(self._records))
            self._told.clear()  # when keys were used is lost, too

    async def _load(self) -> None:
        found = await self._store.try_script(LOAD, [TENANTS, VERSION, PURGES], [])
        if found is None or int(found[0]) < int(self._version):
            return  # it is away, or has forgotten: the next look tells
        version, records, purges = found
        self._records = dict(zip(records[::2], records[1::2], strict=True))
        try:
            self._directory.add([_TENANT.validate_json(record) for record in self._records.values()])
        except (ConfigError, ValidationError) as error:  # written by others
            log.error("the tenants in Redis stay as they were: %s", error)
        told = {name.decode(): purge.decode() for name, purge in zip(purges[::2], purges[1::2], strict=True)}
        if told != self._purges:
            self._purges = told
            for tell in self._told_purges:
                tell(told)
        self._version = version

    async def _tell_used(self) -> None:
        used = self._directory.used
        news = {key: at for key, at in used.items() if self._told.get(key) != at}
        if not news:
            return
        arguments = [each for (tenant, key_id), at in news.items() for each in (f"{tenant}/{key_id}", f"{at:.3f}")]
        if await self._store.try_script(TELL_USED, [USED], arguments) is not None:
            self._told.update(news)


def _pair(name: str) -> tuple[str, str]:
    tenant, _, key_id = name.partition("/")
    return tenant, key_id
