"""Joins the calls that come while a round trip is under way into the next one."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
Call = TypeVar("Call")
Answer = TypeVar("Answer")

AT_ONCE = 256  # calls of one round trip


class RoundTrips(Generic[Call, Answer]):
    """`send` makes one round trip: the answers to its calls in their order, or None where nobody answers.

    Every call may be sent twice: a round trip that raises is repeated call by call.
    """

    def __init__(self, send: Callable[[Sequence[Call]], Awaitable[Sequence[Answer] | None]]) -> None:
        self._send = send
        self._waiting: deque[tuple[Call, asyncio.Future[Answer | None]]] = deque()
        self._runs: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return self._runs is None

    async def ask(self, call: Call) -> Answer | None:
        """The answer to `call`; None where nobody answers. Raises what `send` raises for this call alone."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer | None] = loop.create_future()
        self._waiting.append((call, future))
        if self._runs is None:
            self._runs = loop.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._trip([self._waiting.popleft() for _ in range(min(len(self._waiting), AT_ONCE))])
        finally:
            self._runs = None
            _tell(self._waiting, None)  # the loop ends: nobody else would answer them
            self._waiting.clear()

    async def _trip(self, batch: Sequence[tuple[Call, asyncio.Future[Answer | None]]]) -> None:
        answers: Sequence[Answer] | Exception | None = None
        try:
            answers = await self._send([call for call, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                answers = error
            else:
                log.error("a round trip failed; its calls are sent one by one", exc_info=error)
                for each in batch:
                    await self._trip([each])
        finally:
            _tell(batch, answers)


def _tell(
    batch: Iterable[tuple[Call, asyncio.Future[Answer | None]]], answers: Sequence[Answer] | Exception | None
) -> None:
    """Answer those who still wait."""
    for i, (_, future) in enumerate(batch):
        if future.done():
            continue
        if isinstance(answers, Exception):
            future.set_exception(answers)
        else:
            future.set_result(None if answers is None else answers[i])
