"""Where grammars are compiled: threads that do nothing else, so that only requests with a new grammar wait for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.replicas.constraints.compiler import NotCompiledError
from holdfast.replicas.errors import UnavailableError

Found = TypeVar("Found")

_THREADS = 2


class CompilerThreads:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "holdfast-grammar")
        self._closed = False

    async def run(self, ask: Callable[[], Found]) -> Found:
        """What `ask` returns or raises: at once where it knows the grammar, else from a thread that compiles it.

        A caller that is cancelled before its turn leaves the queue. Raises UnavailableError once closed.
        """
        try:
            return ask()
        except NotCompiledError:
            self._check()
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._on_thread, ask)

    def close(self) -> None:
        """Those that wait for a thread are refused; what is being compiled cannot be stopped, and is not waited for."""
        self._closed = True
        self._threads.shutdown(wait=False)

    def _on_thread(self, ask: Callable[[], Found]) -> Found:
        self._check()
        return ask()

    def _check(self) -> None:
        if self._closed:
            raise UnavailableError("the engine is not running")
