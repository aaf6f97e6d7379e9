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
    """`send` makes one round trip: the answers to its calls in their order, or None where nobody answers."""

    def __init__(self, send: Callable[[Sequence[Call]], Awaitable[Sequence[Answer] | None]]) -> None:
        self._send = send
        self._waiting: deque[tuple[Call, asyncio.Future[Answer | None]]] = deque()
        self._runs: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return self._runs is None

    async def ask(self, call: Call) -> Answer | None:
        """The answer to `call`; None where nobody answers."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer | None] = loop.create_future()
        self._waiting.append((call, future))
        if self._runs is None:
            self._runs = loop.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), AT_ONCE))]
                answers: Sequence[Answer] | None = None
                try:
                    answers = await self._send([call for call, _ in batch])
                except Exception:  # a bug: its callers go on without an answer
                    log.exception("a round trip failed")
                finally:
                    _resolve(batch, answers)
        finally:
            self._runs = None
            _resolve(self._waiting, None)  # the loop ends: nobody else would answer them
            self._waiting.clear()


def _resolve(batch: Iterable[tuple[Call, asyncio.Future[Answer | None]]], answers: Sequence[Answer] | None) -> None:
    """Answer those who still wait."""
    for i, (_, future) in enumerate(batch):
        if not future.done():
            future.set_result(None if answers is None else answers[i])
