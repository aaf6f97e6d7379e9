"""Tool latencies of the whole cluster: the latest intervals of all tenants, in one stream in Redis.

    router     adds an interval, beside the requests
    replicas   read the intervals that came since they last asked, and add them up (`replicas/retention/latency`)

A reader that starts knows the intervals that the stream still has; one that has run longer knows more. While Redis is
away intervals are lost, and readers go by what they know.
"""

import asyncio
import math

from holdfast.replicas.retention.latency import LatencyBook, LatencySnapshot
from holdfast.router.records.store import Argument, Records

STREAM = "tools/intervals"
MOST_SETS = 4096  # of tools, of all tenants, that a reader knows
LENGTH = 16384  # intervals in the stream, the latest
TTL_S = 7 * 24 * 3600  # after its last interval the stream is forgotten; some eviction policies take no other keys
BATCH = 1024  # intervals read in one script

# ARGV: the stream's length and TTL in seconds, then sets of tools and seconds.
_ADD = """
for i = 3, #ARGV, 2 do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'tools', ARGV[i], 'seconds', ARGV[i + 1])
end
return {redis.call('EXPIRE', KEYS[1], ARGV[2])}
"""
# ARGV: the first id, and at most how many.
_READ = "return redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])"


class Reader:
    """The statistics as this process last read them. Reading costs the intervals that are new."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._next = "-"
        self._book = LatencyBook(MOST_SETS)
        self.snapshot = LatencySnapshot()

    async def refresh(self) -> bool:
        """Read what is new; False where nothing is, or Redis is away."""
        changed = False
        while rows := await self._records.try_script(_READ, [STREAM], [self._next, BATCH]):
            for _, (_, tools, _, seconds) in rows:
                tenant, _, names = tools.decode(errors="replace").partition("/")
                self._book.record(tenant, names, float(seconds))
            self._next = f"({rows[-1][0].decode()}"
            changed = True
        if changed:
            self.snapshot = self._book.snapshot()
        return changed


class ToolLatencies:
    """Takes intervals in, and shows the cluster's statistics."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._reader = Reader(records)
        self._pending: list[Argument] = []  # sets of tools, each followed by seconds
        self._writer: asyncio.Task[None] | None = None

    def record(self, tenant: str, tools: str, seconds: float) -> None:
        """An interval has ended. Redis gets it in the background."""
        if not tools or not math.isfinite(seconds):
            return
        self._pending += [f"{tenant}/{tools}", f"{max(seconds, 0.0):.6g}"]
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def known(self) -> LatencySnapshot:
        """The cluster's statistics; while Redis is away those that this router read last."""
        await self.close()
        await self._reader.refresh()
        return self._reader.snapshot

    async def close(self) -> None:
        """Wait until Redis has everything, or is away."""
        if self._writer is not None and not self._writer.done():
            await asyncio.wait({self._writer})

    async def _write(self) -> None:
        while self._pending:
            intervals, self._pending = self._pending, []
            await self._records.try_script(_ADD, [STREAM], [LENGTH, TTL_S, *intervals])
