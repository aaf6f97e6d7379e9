"""A progress bar for long commands, and the lateness of the measuring process itself."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from holdfast.loadgen.measure import percentile


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar on the screen."""

    advance: Callable[[], None]  # one more is done
    describe: Callable[[str], None]  # sets the text beside the bar


@contextmanager
def bar(description: str, total: int) -> Iterator[Bar]:
    """A bar until ``total`` are done, or the block is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawing takes processor time from the servers, so it runs only twice a second.
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, refresh_per_second=2) as progress:
        task = progress.add_task(description, total=total)
        yield Bar(lambda: progress.advance(task), lambda text: progress.update(task, description=text))


TICK_S = 0.02
_NEVER = 1 << 30


@dataclass(slots=True)
class LoopLag:
    """The lateness of this process: a repeated timer in its event loop. `ticks`: seconds that each tick was late.

    This lateness is the generator's own, and would otherwise count as the server's.
    """

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
        """Tick for as long as the block runs."""
        task = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _tick(self) -> None:
        while True:
            tick_at = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.ticks.append(time.perf_counter() - tick_at)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect garbage before the block, and only young objects in it.

    A whole collection takes a tenth of a second with thousands of programs, and stops all of them. In a long block the
    caller calls `gc.collect` where nothing waits. Objects that were frozen before stay frozen.
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
