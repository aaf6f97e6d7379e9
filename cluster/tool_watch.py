"""A replica's view of the cluster's tool latencies: read from Redis now and then, beside the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.router.store import RedisStore
from holdfast.router.tool_latency import Reader

log = logging.getLogger(__name__)

Learn: TypeAlias = Callable[[LatencySnapshot], Awaitable[None]]


class ToolWatch:
    """Calls `learn` with each new snapshot, once in `every_s`. While Redis is away the last one stands.

    Create it on the event loop that it is to run on.
    """

    def __init__(self, store: RedisStore, every_s: float, learn: Learn) -> None:
        self._store = store
        self._every_s = every_s
        self._learn = learn
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        reader = Reader(self._store)
        while True:
            try:
                if await reader.refresh():
                    await self._learn(reader.snapshot)
            except Exception:  # the supervisor of the watch: what it reads was written by others
                log.exception("the cluster's tool latencies could not be read")
            await asyncio.sleep(self._every_s)
