"""Where grammars are compiled: threads that do nothing else, so that only requests with a new grammar wait for them.

What is being compiled cannot be stopped, and a schema of a few hundred characters may take minutes. So a tenant has one
thread at most, nobody waits for ever, and the end of the process waits for seconds only.
"""

import asyncio
import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import TypeVar
from weakref import WeakValueDictionary

from holdfast.replicas.constraints.compiler import NotCompiledError
from holdfast.replicas.errors import OverloadedError, UnavailableError

Found = TypeVar("Found")

_THREADS = 2
_NAME = "holdfast-grammar"
_GRACE_S = 5.0
TIMEOUT_S = 30.0  # the longest schema that is taken compiles in seconds, unless it was written to take longer


class CompilerThreads:
    """Used from one event loop. `timeout_s`: how long a request waits for its grammar, its place included."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(_THREADS)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of those who wait or compile
        self._closed = False

    async def run(self, ask: Callable[[], Found], scope: str | None = None) -> Found:
        """What `ask` returns or raises: at once where it knows the grammar, else from a thread that compiles it.

        New grammars of one `scope` (tenant) are compiled one after the other, None being a scope of its own each time;
        whoever asks for one in the making waits for it without a thread. A caller that is cancelled before its turn
        leaves the queue. Raises OverloadedError after `timeout_s`, what was begun going on by itself, and
        UnavailableError once closed.
        """
        try:
            return ask()
        except NotCompiledError as error:
            missing = error
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    self._check()
                    try:
                        if missing.making is None:
                            return await self._on_thread(ask, scope)
                        await asyncio.wrap_future(missing.making)
                        return ask()
                    except NotCompiledError as error:
                        missing = error
        except TimeoutError:
            why = f"its schema, or others before it, take too long to compile: more than {self._timeout_s:g} s"
            raise OverloadedError(f"'{missing.field}': {why}", missing.field) from None

    def close(self) -> None:
        """Those that wait for a place are refused at their turn; what is being compiled is not waited for."""
        self._closed = True

    async def _on_thread(self, ask: Callable[[], Found], scope: str | None) -> Found:
        turn = asyncio.Lock() if scope is None else self._turns.setdefault(scope, asyncio.Lock())
        place = ExitStack()
        try:
            await turn.acquire()  # first, so that a tenant has one request at most in the queue of all
            place.callback(turn.release)
            await self._places.acquire()
            place.callback(self._places.release)
            self._check()
            result = _started(ask, place.close)
        except BaseException:
            place.close()
            raise
        return await asyncio.wrap_future(result)

    def _check(self) -> None:
        if self._closed:
            raise UnavailableError("the engine is not running")


def _started(ask: Callable[[], Found], leave: Callable[[], None]) -> Future[Found]:
    """What `ask` will return or raise on a thread of its own; then comes `leave`, on the event loop of the caller."""
    loop = asyncio.get_running_loop()
    result: Future[Found] = Future()
    result.set_running_or_notify_cancel()  # who waits may be cancelled; the thread goes on

    def work() -> None:
        try:
            result.set_result(ask())
        except BaseException as failure:
            result.set_exception(failure)
        with suppress(RuntimeError):  # the event loop may be closed by now
            loop.call_soon_threadsafe(leave)

    threading.Thread(target=work, name=_NAME, daemon=True).start()
    return result


@atexit.register
def _let_end() -> None:
    """Before the interpreter is taken down.

    Trap: a thread that comes out of the library while that happens crashes the process. Grammars that take seconds are
    waited for, and those that take minutes will not be ready so soon.
    """
    until = time.monotonic() + _GRACE_S
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join(max(0.0, until - time.monotonic()))
