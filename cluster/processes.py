"""Finds and ends all descendants of this process, and ends the newest engine when memory runs out. Linux.

As a subreaper this process becomes the parent of orphans below it, so a process whose parent has died is still found.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from holdfast.replicas.memory import memory

ENGINES = "ray::ServeReplica:holdfast:replicas"  # the title of their processes
LEAST = 0.05  # of all memory: with less left, an engine is ended
LOOK_S = 0.25  # between two looks
REST_S = 5.0  # after an engine was ended, until its memory is free again
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on orphans among the descendants become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> set[int]:
    """Process ids below this process, without zombies."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # "pid (any name) state ppid ...": the name may hold spaces and brackets.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                children[int(parent)].append((int(entry.name), state))
    ids: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        for pid, state in children[waiting.pop()]:
            waiting.append(pid)
            if state not in "ZX":
                ids.add(pid)
    return ids


def titled(title: str) -> set[int]:
    """Process ids below this process whose command line begins with `title`."""
    ids = set()
    for pid in descendants():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                ids.add(pid)
    return ids


def started(pid: int) -> int:
    """When a process began, in the kernel's ticks since boot; 0 if it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def stop_all(patience_s: float = 5.0) -> int:
    """Terminate every descendant, kill those left after `patience_s`, and return how many there were."""
    first = descendants()
    _signal(first, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while (running := descendants()) and time.monotonic() < deadline:
        reap()
        time.sleep(0.05)
    kill_all()
    return len(first | running)


def kill_all() -> None:
    """Kill every descendant. Returns when none is left, or after two seconds."""
    deadline = time.monotonic() + 2.0
    while reap() and time.monotonic() < deadline:
        _signal(descendants(), signal.SIGKILL)
        time.sleep(0.02)


def kill_but(spared: set[int]) -> None:
    """Kill the descendants that are not `spared`. Returns when none of them is left, or after two seconds."""
    deadline = time.monotonic() + 2.0
    while (others := descendants() - spared) and time.monotonic() < deadline:
        _signal(others, signal.SIGKILL)
        time.sleep(0.02)


def reap() -> bool:
    """Reap children that have ended; True if others are left. Only at the end: it takes exits from other waiters."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class MemoryGuard:
    """While it is entered, it ends the newest engine when less than `LEAST` of all memory is left.

    Serve then starts another engine. Ray's own monitor is off: it ends Serve's controller first, and then whatever is
    newest, even a router. `room` gives all memory and the free part, in bytes.
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
        """End an engine if memory runs out. True if one was ended."""
        total, free = self._room()
        if free >= LEAST * total:
            return False
        newest = max(titled(ENGINES), key=_began, default=None)
        if newest is None:
            return False
        self._say(f"{free >> 20:,} MiB of memory are left: ending the newest engine, the others go on")
        with suppress(ProcessLookupError):
            os.kill(newest, signal.SIGKILL)
        return True

    def _watch(self) -> None:
        pause = LOOK_S
        while not self._over.wait(pause):
            pause = REST_S if self.look() else LOOK_S


def _began(pid: int) -> tuple[int, int]:
    """Sorts processes by their start, two of one tick by their ids."""
    return started(pid), pid
