"""Work that no request waits for, or that goes on when the one that waited has gone: writes to the store."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Background:
    """Runs coroutines beside the requests and keeps them referenced until they end.

    Of those that nobody waits for so many at most; what does not fit is dropped.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[Any, Any, object]) -> bool:
        """Run `work` soon. False where too much is under way: it is dropped."""
        if len(self._tasks) >= self._limit:
            work.close()
            return False
        self._run(work)
        return True

    async def finish(self, work: Coroutine[Any, Any, object]) -> None:
        """Wait for `work`, which goes on to its end though who waits is cancelled."""
        await asyncio.shield(self._run(work))

    async def drain(self) -> None:
        """Wait for everything that was started."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _run(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)
