"""Work that no request waits for: writes that outlive their request, and tasks that never end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

log = logging.getLogger(__name__)


async def forever(work: Callable[[], Awaitable[object]], every_s: float, name: str) -> NoReturn:
    """Run `work` again and again, `every_s` seconds after its last end. An error is logged and ends nothing.

    `name` is the work's name in the log. Run this as a task, and cancel the task to end it.
    """
    while True:
        try:
            await work()
        except Exception:  # the supervisor of a task that nobody waits for
            log.exception("%s failed; the next try is in %g s", name, every_s)
        await asyncio.sleep(every_s)


async def stop(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks, and wait until they have ended. None: a task that was never started."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


class Background:
    """Runs coroutines beside the requests. At most `limit` of them run that nobody waits for; more are dropped."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[Any, Any, object]) -> bool:
        """Run `work` soon. False if it is dropped because too much runs already."""
        if len(self._tasks) >= self._limit:
            work.close()
            return False
        self.run(work)
        return True

    async def finish(self, work: Coroutine[Any, Any, object]) -> None:
        """Wait for `work`. It goes on to its end even if the caller is cancelled."""
        await asyncio.shield(self.run(work))

    async def drain(self, timeout_s: float | None = None) -> tuple[asyncio.Task[object], ...]:
        """Wait for everything that was started, or for so long. Returns what still runs."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)
            if timeout_s is not None:
                break
        return tuple(self._tasks)

    def run(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Run `work` regardless of the limit."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)
