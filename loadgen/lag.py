"""How late this process is for what it means to do: a clock in its event loop, read again and again.

Lateness here is the generator's own, and would be taken for the server's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

TICK_S = 0.02


@dataclass(slots=True)
class LoopLag:
    """Seconds that each tick came later than it should have."""

    ticks: list[float] = field(default_factory=list)

    @property
    def p99(self) -> float:
        """Seconds; 0 before the first tick."""
        return sorted(self.ticks)[len(self.ticks) * 99 // 100] if self.ticks else 0.0

    @property
    def most(self) -> float:
        """Seconds; 0 before the first tick."""
        return max(self.ticks, default=0.0)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Ticks for as long as the block runs."""
        task = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.ticks.append(time.perf_counter() - due)
