"""Leaving no process behind: everything that this process started, and what those started, however deep. Linux.

As a "subreaper" this process becomes the parent of orphans below it, so that a process whose own parent has died
can still be found.
"""

import ctypes
import os
import signal
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on orphans among the descendants become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> set[int]:
    """Process ids below this process, zombies left out."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # "pid (any name) state ppid ...": the name may hold spaces and brackets.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                children[int(parent)].append((int(entry.name), state))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        for pid, state in children[waiting.pop()]:
            waiting.append(pid)
            if state not in "ZX":
                found.add(pid)
    return found


def titled(title: str) -> set[int]:
    """Process ids below this process whose command line begins so."""
    found = set()
    for pid in descendants():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                found.add(pid)
    return found


def started(pid: int) -> int:
    """When a process began, in the kernel's ticks since the machine did; 0 where it is there no more."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def stop_all(patience_s: float = 5.0) -> int:
    """Ask every descendant to stop, kill those that have not after `patience_s`; how many there were."""
    first = descendants()
    _signal(first, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while (left := descendants()) and time.monotonic() < deadline:
        reap()
        time.sleep(0.05)
    kill_all()
    return len(first | left)


def kill_all() -> None:
    """Kill every descendant at once. Returns when none is left, or after two seconds."""
    deadline = time.monotonic() + 2.0
    while reap() and time.monotonic() < deadline:
        _signal(descendants(), signal.SIGKILL)
        time.sleep(0.02)


def kill_but(spared: set[int]) -> None:
    """Kill the descendants that are not `spared`. Returns when none of them is left, or after two seconds."""
    deadline = time.monotonic() + 2.0
    while (found := descendants() - spared) and time.monotonic() < deadline:
        _signal(found, signal.SIGKILL)
        time.sleep(0.02)


def reap() -> bool:
    """Collect children that have ended; whether there are others. Only at the very end, where nobody else waits."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
