"""What an operator may have to account for: acts of administration, and keys that were refused. No keys, no prompts.

In a stream of Redis, the latest ones, and in the log of this process. Refusals come in floods: those of one kind from
one address are one entry with a count, every `FLUSH_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from holdfast.replicas import logs
from holdfast.router.background import forever
from holdfast.router.store import Scripts

log = logging.getLogger(__name__)

STREAM = "audit"
FLUSH_S = 5.0
MOST_KINDS = 1000  # of refusals between two looks; what is beyond that is counted together

# KEYS: the stream. ARGV: most entries, then the entries.
TELL = """
for i = 2, #ARGV do redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'entry', ARGV[i]) end
return {#ARGV - 1}
"""
# KEYS: the stream. ARGV: from and to as ids, at most how many.
READ = "return redis.call('XREVRANGE', KEYS[1], ARGV[2], ARGV[1], 'COUNT', ARGV[3])"


class Audit:
    """`store` None: the log has it alone."""

    def __init__(
        self,
        store: Scripts | None = None,
        most: int = 10000,
        router: str = "router",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._most = most
        self._router = router
        self._clock = clock
        self._refused: Counter[tuple[str, str, str]] = Counter()
        self._waiting: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Tell Redis of refusals from now on."""
        self._task = asyncio.get_running_loop().create_task(forever(self.flush, FLUSH_S, "writing the audit log"))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self.flush()

    def entry(self, act: str, who: str, tenant: str = "", **more: object) -> bytes:
        """An act of administration, as it stands in the stream. `who`: the id of the key that did it. It is logged."""
        told = {"at": round(self._clock(), 3), "act": act, "who": who, "tenant": tenant, "router": self._router, **more}
        log.info("audit: %s", act, extra=logs.fields(**{name: value for name, value in told.items() if name != "at"}))
        return orjson.dumps(told)

    def refused(self, reason: str, peer: str, path: str) -> None:
        """A caller's key, or its address, was refused."""
        kind = (reason, peer, path)
        if kind not in self._refused and len(self._refused) >= MOST_KINDS:
            kind = (reason, "others", "")
        self._refused[kind] += 1

    def tell(self, entry: bytes) -> None:
        """Put an entry into the stream with the next look."""
        self._waiting.append(entry)
        del self._waiting[: -self._most]

    async def flush(self) -> None:
        """Put what was noted into the stream; it is kept for the next time where Redis is away."""
        refused, self._refused = self._refused, Counter()
        for (reason, peer, path), n in refused.items():
            self.tell(self.entry("refused", "", reason=reason, peer=peer, path=path, count=n))
        if not self._waiting:
            return
        entries, self._waiting = self._waiting, []
        if self._store is None:
            return
        if await self._store.script(TELL, [STREAM], [self._most, *entries]) is None:
            self._waiting = [*entries, *self._waiting][-self._most :]

    async def read(self, begin: str, end: str, most: int) -> Iterator[tuple[str, dict[str, Any]]] | None:
        """Entries, the latest first, each with its place in the stream; None where Redis is away."""
        if self._store is None:
            return iter(())
        found = await self._store.script(READ, [STREAM], [begin, end, most])
        return None if found is None else _entries(found)


def _entries(found: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, values in found:
        yield place.decode(), orjson.loads(values[1])
