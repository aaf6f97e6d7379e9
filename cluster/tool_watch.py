"""A replica's view of the cluster's tool latencies: read from Redis now and then, beside the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.router.config import RouterConfig
from holdfast.router.store import MemoryStore, RedisAddress, RedisStore
from holdfast.router.tool_latency import Reader

log = logging.getLogger(__name__)

Learn: TypeAlias = Callable[[LatencySnapshot], Awaitable[None]]


class ToolWatch:
    """Calls `learn` with each new snapshot. While Redis is away the last one stands.

    Create it on the event loop that it is to run on.
    """

    def __init__(self, redis: RedisAddress, config: RouterConfig, learn: Learn) -> None:
        # Nothing is kept in this store: a reader needs no memory of its own while Redis is away.
        self._store = RedisStore(redis, MemoryStore(1, 1), config.store_timeout_s, config.store_retry_s)
        self._interval_s = config.tool_latency_s
        self._learn = learn
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._store.close()

    async def _watch(self) -> None:
        reader = Reader(self._store)
        while True:
            try:
                if await reader.refresh():
                    await self._learn(reader.snapshot)
            except Exception:  # the supervisor of the watch: what it reads was written by others
                log.exception("the cluster's tool latencies could not be read")
            await asyncio.sleep(self._interval_s)
