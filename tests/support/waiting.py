"""How tests wait: for a condition, and long enough for a machine whose cores are taken. No other test code sleeps."""

import asyncio
import inspect
import selectors
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0  # for anything that a free machine does in a moment


def until(holds: Callable[[], object], within_s: float = PATIENCE_S, every_s: float = 0.01) -> None:
    """Return once `holds()` is true. Raises TimeoutError after `within_s`."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {inspect.getsource(holds).strip()}")
        time.sleep(every_s)


def until_read(sent: socket.socket) -> None:
    """Return once the process at the other end of a loopback connection has read all that was sent."""
    here, there = f":{sent.getsockname()[1]:04X}", f":{sent.getpeername()[1]:04X}"

    def read() -> bool:
        ends = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
        queues = [words[4] for words in ends if words[1].endswith(there) and words[2].endswith(here)]
        return [queue.partition(":")[2] for queue in queues] == ["00000000"]

    until(read)


async def until_async(
    holds: Callable[[], object | Awaitable[object]], within_s: float = PATIENCE_S, every_s: float = 0.005
) -> None:
    """The same on an event loop; `holds` may be a coroutine function."""
    deadline = time.monotonic() + within_s
    while True:
        held = holds()
        if await held if inspect.isawaitable(held) else held:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {inspect.getsource(holds).strip()}")
        await asyncio.sleep(every_s)


async def work(seconds: float) -> None:
    """What a fake server does takes so long. Nothing may depend on its being over by some time."""
    await asyncio.sleep(seconds)


class _NoWait(selectors.DefaultSelector):
    """Does not wait for a timer: its time goes by at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout if timeout is None else 0)
        if not found and timeout:
            self.now += timeout
        return found


class _Virtual(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _NoWait()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a loop whose clock jumps to the next timer when nothing else is left to do.

    So timers cost no time, and a busy machine changes nothing. For what waits for timers alone: no socket, no thread,
    and no `time.monotonic`.
    """
    with asyncio.Runner(loop_factory=_Virtual) as runner:
        return runner.run(main)


VIRTUAL = ("asyncio", {"loop_factory": _Virtual})  # an `anyio_backend` for tests whose every wait is for timers


async def go_by(seconds: float) -> None:
    """Let time go by on a loop whose clock jumps."""
    assert isinstance(asyncio.get_running_loop(), _Virtual), "real time must not be waited for"
    await asyncio.sleep(seconds)
