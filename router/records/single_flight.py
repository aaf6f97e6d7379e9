"""Single flight: of several requests for one answer in this router, one computes it and the others wait for it.

A request whose leader left tries again: the first that does leads, and the others follow it. So work for a client ends
with its client, and no tenant pays for another one. When a leader fails, each follower computes for
itself: they would fail alike, and one after the other they would wait long for it. Of one event loop.
"""

import asyncio
from enum import Enum
from types import TracebackType
from typing import Generic, TypeVar

from holdfast.router.protocol.errors import ClientGoneError

T = TypeVar("T")


class Unresolved(Enum):
    """How a leader ended without a result."""

    FAILED = "failed"
    LEFT = "left"


class SingleFlight(Generic[T]):
    """What is being computed, by key."""

    def __init__(self) -> None:
        self._leaders: dict[str, Leader[T]] = {}
        self.waiting = 0
        self.left = 0  # leaders that left while others waited
        self.failed = 0  # followers whose leader failed

    def __len__(self) -> int:
        return len(self._leaders)

    def lead(self, key: str) -> "Leader[T] | None":
        """The caller computes it; None: another request does, and `follow` waits for that."""
        if key in self._leaders:
            return None
        leader = self._leaders[key] = Leader(self, key)
        return leader

    async def follow(self, key: str) -> T | Unresolved:
        """The result of the request that leads now."""
        leader = self._leaders[key]
        self.waiting += 1
        leader.followers += 1
        try:
            return await asyncio.shield(leader.result)
        finally:
            self.waiting -= 1
            leader.followers -= 1

    def end(self, key: str, result: T | Unresolved) -> None:
        """The leader of `key` has ended."""
        leader = self._leaders.pop(key)
        self.left += result is Unresolved.LEFT and leader.followers > 0
        self.failed += leader.followers if result is Unresolved.FAILED else 0
        leader.result.set_result(result)


class Leader(Generic[T]):
    """A request that computes for others. Call `resolve`, `fail` or `leave`; the first call counts.

    As a context it leaves with a client that is gone, and fails with any other end that had no call.
    """

    def __init__(self, flights: SingleFlight[T], key: str) -> None:
        self._flights = flights
        self._key = key
        self.result: asyncio.Future[T | Unresolved] = asyncio.get_running_loop().create_future()
        self.followers = 0

    def resolve(self, result: T) -> None:
        self._end(result)

    def fail(self) -> None:
        self._end(Unresolved.FAILED)

    def leave(self) -> None:
        self._end(Unresolved.LEFT)

    def __enter__(self) -> "Leader[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if isinstance(error, ClientGoneError | asyncio.CancelledError):
            self.leave()
        else:
            self.fail()

    def _end(self, result: T | Unresolved) -> None:
        if not self.result.done():
            self._flights.end(self._key, result)
