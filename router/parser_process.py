"""Work that would hold up the event loop, done in a process of its own: a large request body is parsed there.

A thread would not do: a JSON parser keeps the interpreter lock until it is through. Calls and results cross two pipes,
pickled, each behind its length in eight bytes. The process ends with the pipe, so with its router, however that ends.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

from holdfast.replicas.errors import HoldfastError, UnavailableError

T = TypeVar("T")

LENGTH = 8  # bytes


class ParserProcess:
    """Calls functions of modules in a process beside this one, one after the other.

    It is started by the first call, and again by the next one after it has died.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What `function` returns there. Raises the HoldfastError that it raises, UnavailableError where it is lost."""
        # A caller that leaves must not leave half of a message in the pipe.
        return await asyncio.shield(asyncio.ensure_future(self._call(function, arguments)))

    async def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _call(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        async with self._turn:
            try:
                process = self._process = self._process or await self._start()
                assert process.stdin is not None  # both are pipes
                assert process.stdout is not None
                data = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
                process.stdin.writelines((len(data).to_bytes(LENGTH), data))
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH))
                result, error = pickle.loads(await process.stdout.readexactly(length))
            except (OSError, asyncio.IncompleteReadError) as lost:
                await self.close()
                raise UnavailableError("the process that reads large requests ended") from lost
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    async def _start(self) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "holdfast.router.parser_process"]
        return await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )


def work(calls: BinaryIO, results: BinaryIO) -> None:
    """Answer calls until there are no more."""
    while head := calls.read(LENGTH):
        function, arguments = pickle.loads(calls.read(int.from_bytes(head)))
        answer: tuple[Any, Exception | None]
        try:
            answer = function(*arguments), None
        except HoldfastError as error:
            answer = None, error
        except Exception as error:  # a bug, raised again where the call came from
            answer = None, RuntimeError(repr(error))
        data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        results.write(len(data).to_bytes(LENGTH))
        results.write(data)
        results.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as told:
        os.dup2(2, 1)  # what anything prints must not stand between results
        work(sys.stdin.buffer, told)
