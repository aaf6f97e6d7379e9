"""Long request bodies are parsed in a process beside the router, one after the other.

A JSON parser keeps the interpreter's lock until it is done, so a thread would hold up the event loop all the same: 31
MiB take a quarter of a second. Calls and results cross a pipe, pickled, each behind its length. The process ends when
the pipe closes, so it always ends with its router.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from holdfast.replicas.errors import HoldfastError, UnavailableError

T = TypeVar("T")

LENGTH = 8  # bytes
NICE = 10  # short requests do not wait for a core that parses a long one


class LongBodies:
    """Calls functions of modules in the other process, which the first call starts."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """The result of `function(*arguments)`. Raises its HoldfastError, UnavailableError if the process is lost."""
        # A caller that leaves must not leave half a message in the pipe.
        call = asyncio.ensure_future(self._call(function, arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _call(self, function: Callable[..., T], arguments: tuple[object, ...]) -> T:
        data = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
        async with self._lock:
            try:
                process = self._process = self._process or await self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(len(data).to_bytes(LENGTH))
                process.stdin.write(data)
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH))
                result, error = pickle.loads(await process.stdout.readexactly(length))
            except (OSError, asyncio.IncompleteReadError) as lost:
                await self.close()
                raise UnavailableError("The process that parses long bodies ended; retry") from lost
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, stdin=pipe, stdout=pipe)


def work(calls: BinaryIO, results: BinaryIO) -> None:
    """Answer calls until there are no more."""
    while head := calls.read(LENGTH):
        function, arguments = pickle.loads(calls.read(int.from_bytes(head)))
        result: tuple[Any, Exception | None]
        try:
            result = function(*arguments), None
        except HoldfastError as error:
            result = None, error
        except Exception as error:  # a bug, raised again in the router
            result = None, RuntimeError(repr(error))
        data = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        results.write(len(data).to_bytes(LENGTH))
        results.write(data)
        results.flush()


if __name__ == "__main__":
    # Out of reach of a Ctrl-C, but no session of its own: Linux shares cores among sessions first.
    os.setpgid(0, 0)
    os.nice(NICE)
    work(sys.stdin.buffer, sys.stdout.buffer)
