"""How late this process is for what it means to do: a clock in its event loop, read again and again.

Lateness here is the generator's own, and would be taken for the server's. What causes most of it is kept off here, too.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from holdfast.loadgen.measure import percentile

TICK_S = 0.02
_NEVER = 1 << 30


@dataclass(slots=True)
class LoopLag:
    """Seconds that each tick came later than it should have."""

    ticks: list[float] = field(default_factory=list)

    @property
    def p99(self) -> float:
        """Seconds; 0 before the first tick."""
        return float(percentile(99)(np.array(self.ticks))) if self.ticks else 0.0

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


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage is collected before the block; in it what is there is left alone, and only young objects are looked at.

    A whole collection takes a tenth of a second where thousands of programs are drawn, and stops every one of them.
    In a long block it is for the caller to call `gc.collect` where nothing waits. Where objects were frozen before,
    they stay frozen.
    """
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()
