"""Work that would hold up the event loop, done in a process of its own: a large request body is parsed there.

A thread would not do: a JSON parser keeps the interpreter lock until it is through. Calls and results cross a socket,
pickled, each behind its length in eight bytes. A body stands in a file, and what crosses is a descriptor of
that. The process ends with the socket, so with its router, however that ends.
"""

import asyncio
import heapq
import itertools
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


class Turns:
    """Who may go on, one at a time: of those that wait the one whose payer has had least, this turn counted.

    Self-clocked fair queueing (Golestani, 1994): a turn is stamped with the work of its payer at its end, and begins at
    no less than the stamp of who goes on now; the lowest stamp is next. So a payer that comes once waits for the turn
    that goes on and no longer ones, however many another has in line.
    """

    def __init__(self) -> None:
        self._line: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = itertools.count()  # of equal stamps the first to come is next
        self._stamps: dict[str, float] = {}  # the latest of each payer
        self._now: float | None = None  # the stamp of who goes on; None: nobody does

    async def take(self, payer: str, work: float) -> None:
        """Wait for a turn of so much `work`, which is to be given back."""
        stamp = max(self._stamps.get(payer, 0.0), self._now or 0.0) + work
        self._stamps[payer] = stamp
        if self._now is None:
            self._now = stamp
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (stamp, next(self._count), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this one's already
                self.give_back()
            raise

    def give_back(self) -> None:
        while self._line:
            self._now, _, turn = heapq.heappop(self._line)
            if not turn.done():  # who waited for it has left
                turn.set_result(None)
                return
        self._now = None
        self._stamps.clear()


class ParserProcess:
    """Calls functions of modules in a process beside this one, one after the other.

    It is started by the first call, and again by the next one after it has died.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._turns = Turns()

    async def call(
        self,
        function: Callable[..., T],
        *arguments: Any,
        body: BinaryIO | None = None,
        payer: str = "",
        work: float = 0.0,
    ) -> T:
        """What `function` returns there. With a `body` it gets all that stands in that file before the `arguments`;
        the file is closed, whatever happens. `payer` takes its turn, with so much `work`, among all who call.

        Raises the HoldfastError that it raises, UnavailableError where the process is lost.
        """
        with ExitStack() as kept:
            if body is not None:
                kept.enter_context(body)
            await self._turns.take(payer, work)
            # A caller that leaves from here on must not leave half a message in the socket, or a result to the next.
            calling = asyncio.ensure_future(self._call(function, arguments, body))
            kept.callback(self._turns.give_back)
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
