"""The audit log: acts of administration, and calls whose key or address was refused. It holds no keys and no prompts.

Redis keeps the latest acts in one stream and the latest refusals in another, so callers without a key cannot push acts
out. This process's log has both. Refusals of one kind from one address are one entry with a count, every `FLUSH_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

import orjson

from holdfast.replicas import logs
from holdfast.router.background import forever, stop
from holdfast.router.records import Records

log = logging.getLogger(__name__)

STREAM = "audit"  # acts of administration
REFUSALS = "audit/refusals"
FLUSH_S = 5.0
MOST_KINDS = 1000  # of refusals between two flushes; more kinds are counted together

# KEYS: the stream. ARGV: most entries, then the entries.
TELL = """
for i = 2, #ARGV do redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'entry', ARGV[i]) end
return {#ARGV - 1}
"""
# KEYS: the streams. ARGV: from and to as ids, at most how many of each.
READ = """
local rows = {}
for i, stream in ipairs(KEYS) do rows[i] = redis.call('XREVRANGE', stream, ARGV[2], ARGV[1], 'COUNT', ARGV[3]) end
return rows
"""


class Audit:
    """Writes and reads both streams. Call `start` on the event loop, and `close` at the end."""

    def __init__(self, store: Records, most: int = 10000, router: str = "router") -> None:
        self._store = store
        self._most = most
        self._router = router
        self._refused: Counter[tuple[str, str, str]] = Counter()
        self._waiting: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Write refusals to Redis from now on."""
        self._task = asyncio.get_running_loop().create_task(forever(self.flush, FLUSH_S, "writing the audit log"))

    async def close(self) -> None:
        await stop(self._task)
        await self.flush()

    def entry(self, act: str, actor: str, tenant: str = "", **more: object) -> bytes:
        """An entry of the stream, which is logged, too. `actor`: the id of an administrator's key."""
        place = {"tenant": tenant, "router": self._router}
        values = {"at": round(time.time(), 3), "act": act, "who": actor, **place, **more}
        log.info("audit: %s", act, extra=logs.fields(**{name: value for name, value in values.items() if name != "at"}))
        return orjson.dumps(values)

    def refused(self, reason: str, peer: str, path: str) -> None:
        """A caller's key or address was refused. `path`: the route's template, never a path as it was sent."""
        kind = (reason, peer, path)
        if kind not in self._refused and len(self._refused) >= MOST_KINDS:
            kind = (reason, "others", "")
        self._refused[kind] += 1

    async def flush(self) -> None:
        """Write the refusals so far. While Redis is away they are kept for the next time."""
        refused, self._refused = self._refused, Counter()
        for (reason, peer, path), n in refused.items():
            self._waiting.append(self.entry("refused", "", reason=reason, peer=peer, path=path, count=n))
        del self._waiting[: -self._most]
        if not self._waiting:
            return
        entries, self._waiting = self._waiting, []
        if await self._store.try_script(TELL, [REFUSALS], [self._most, *entries]) is None:
            self._waiting = [*entries, *self._waiting][-self._most :]

    async def read(self, begin: str, end: str, most: int) -> list[tuple[str, dict[str, Any]]]:
        """At most `most` acts and as many refusals, the latest first, each with its place. Raises UnavailableError."""
        streams = await self._store.script(READ, [STREAM, REFUSALS], [begin, end, most])
        entries = [(place.decode(), orjson.loads(values[1])) for stream in streams for place, values in stream]
        return sorted(entries, key=lambda entry: tuple(map(int, entry[0].split("-"))), reverse=True)
