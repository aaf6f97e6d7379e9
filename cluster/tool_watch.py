"""A replica's view of the cluster's tool latencies: read from Redis now and then, beside the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.router.background import forever
from holdfast.router.records import Records
from holdfast.router.tool_latency import Reader

Learn: TypeAlias = Callable[[LatencySnapshot], Awaitable[None]]


class ToolWatch:
    """Calls `learn` with each new snapshot, once in `every_s`. While Redis is away the last one stands.

    Create it on the event loop that it is to run on.
    """

    def __init__(self, store: Records, every_s: float, learn: Learn) -> None:
        self._reader = Reader(store)
        self._learn = learn
        watching = forever(self._look, every_s, "reading the cluster's tool latencies")
        self._task = asyncio.get_running_loop().create_task(watching)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _look(self) -> None:
        if await self._reader.refresh():
            await self._learn(self._reader.snapshot)
