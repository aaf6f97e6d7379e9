"""A machine that runs out of memory loses its newest engine, and nothing that the others need.

Ray's own monitor would end Serve's controller first, for that is what Ray starts again by itself, and then whatever
began last, be it a router. So it is off where this one looks. Where memory goes faster than either looks the kernel
takes of Ray's workers the largest, which are engines.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from holdfast.cluster import processes
from holdfast.replicas.memory import memory

ENGINES = "ray::ServeReplica:holdfast:replicas"  # how their processes are titled
LEAST = 0.05  # of all memory; with less of it left an engine goes
LOOK_S = 0.25  # between two looks
REST_S = 5.0  # after an engine was ended, for what it had to be free again


class MemoryGuard:
    """While it is entered: when less than `LEAST` of all memory is left, the newest engine is ended.

    `room` gives all memory and what is left of it, in bytes. Serve starts another engine.
    """

    def __init__(self, say: Callable[[str], None], room: Callable[[], tuple[int, int]] = memory) -> None:
        self._say = say
        self._room = room
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryGuard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def look(self) -> bool:
        """Whether memory had run out and an engine was ended for it."""
        total, left = self._room()
        if left >= LEAST * total:
            return False
        newest = max(processes.titled(ENGINES), key=_began, default=None)
        if newest is None:
            return False
        self._say(f"{left >> 20:,} MiB of memory are left: the newest engine is ended, the others go on")
        with suppress(ProcessLookupError):
            os.kill(newest, signal.SIGKILL)
        return True

    def _watch(self) -> None:
        pause = LOOK_S
        while not self._over.wait(pause):
            pause = REST_S if self.look() else LOOK_S


def _began(pid: int) -> tuple[int, int]:
    """When a process was started, in the kernel's ticks; of two in one tick the later id."""
    return processes.started(pid), pid
