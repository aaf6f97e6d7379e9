"""Work that would hold up the event loop, done in a process of its own: a large request body is parsed there.

A thread would not do: a JSON parser keeps the interpreter lock until it is through. Calls and results cross a socket,
pickled, each behind its length in eight bytes. A body stands in a file, and what crosses is a descriptor of
that. The process ends with the socket, so with its router, however that ends.
"""

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, BinaryIO, TypeVar

from holdfast.replicas.errors import HoldfastError, UnavailableError

T = TypeVar("T")

LENGTH = 8  # bytes
NICE = 10  # who sends little does not wait for a core that reads what somebody else sent


class ParserProcess:
    """Calls functions of modules in a process beside this one, one after the other.

    It is started by the first call, and again by the next one after it has died.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def call(self, function: Callable[..., T], *arguments: Any, body: BinaryIO | None = None) -> T:
        """What `function` returns there. With a `body` it gets all that stands in that file before the `arguments`;
        the file is closed, whatever happens.

        Raises the HoldfastError that it raises, UnavailableError where the process is lost.
        """
        with ExitStack() as kept:
            if body is not None:
                kept.enter_context(body)
            await self._turn.acquire()
            # A caller that leaves from here on must not leave half a message in the socket, or a result to the next.
            calling = asyncio.ensure_future(self._call(function, arguments, body))
            kept.callback(self._turn.release)
            ended = kept.pop_all()
            calling.add_done_callback(lambda _: ended.close())
        return await asyncio.shield(calling)

    async def close(self) -> None:
        process, self._process = self._process, None
        ours, self._socket = self._socket, None
        if ours is not None:
            with suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)  # wakes a call that waits for its result
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if ours is not None:
            ours.close()

    async def _call(self, function: Callable[..., T], arguments: tuple[Any, ...], body: BinaryIO | None) -> T:
        try:
            ours = self._socket = self._socket or await self._start()
            data = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
            # All that came before has been answered, so there is room for this.
            socket.send_fds(ours, [len(data).to_bytes(LENGTH)], [] if body is None else [body.fileno()])
            if body is not None:  # Trap: whoever closes it last frees the memory, 5 ms for 32 MiB
                body.close()
            await asyncio.get_running_loop().sock_sendall(ours, data)
            length = int.from_bytes(await _receive(ours, LENGTH))
            result, error = pickle.loads(await _receive(ours, length))
        except OSError as lost:
            await self.close()
            raise UnavailableError("the process that reads large requests ended") from lost
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    async def _start(self) -> socket.socket:
        command = [sys.executable, "-m", "holdfast.router.parser_process"]
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            self._process = await asyncio.create_subprocess_exec(*command, stdin=theirs.fileno())
        return ours


async def _receive(ours: socket.socket, length: int) -> bytearray:
    """So many bytes. Raises OSError where they do not come."""
    data = bytearray(length)
    left = memoryview(data)
    while left:
        n = await asyncio.get_running_loop().sock_recv_into(ours, left)
        if n == 0:
            raise ConnectionResetError
        left = left[n:]
    return data


def work(router: socket.socket) -> None:
    """Answer calls until there are no more."""
    with router.makefile("rwb") as stream:
        while True:
            head, bodies, _, _ = socket.recv_fds(router, LENGTH, 1)
            if not head:
                return
            function, arguments = pickle.loads(stream.read(int.from_bytes(head)))
            answer: tuple[Any, Exception | None]
            try:
                answer = function(*map(_whole, bodies), *arguments), None
            except HoldfastError as error:
                answer = None, error
            except Exception as error:  # a bug, raised again where the call came from
                answer = None, RuntimeError(repr(error))
            data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
            stream.write(len(data).to_bytes(LENGTH))
            stream.write(data)
            stream.flush()


def _whole(descriptor: int) -> bytes:
    """All that stands in a file, which is closed."""
    with open(descriptor, "rb", buffering=0) as file:
        file.seek(0)
        return file.readall()


if __name__ == "__main__":
    # Out of reach of a Ctrl-C, but no session of its own: Linux shares cores out among sessions first, and who is nice
    # is so within its own. Trap: uvloop, on which Serve runs routers, starts no process with a `process_group`.
    os.setpgid(0, 0)
    os.nice(NICE)
    with socket.socket(fileno=os.dup(0)) as told:
        work(told)
