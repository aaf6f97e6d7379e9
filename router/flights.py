"""Single flight: of those who want the same thing at once, one makes it and the others wait for that.

    join -> Lead      nobody makes it: the caller does, and says how that ended
         -> Future    somebody does: what it made, a Lead where that one has left, None where it failed

A leader that leaves hands over to who has waited longest, and the others go on waiting: what was begun is given up with
its client, so nobody pays for another's. One that fails lets all go, each to try for itself: they would fail alike, and
one after the other they would wait long for it. Of one process and one event loop; nothing here knows what is made.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeAlias, TypeVar

from holdfast.router.http import ClientGoneError

T = TypeVar("T")


class Flights(Generic[T]):
    """What is being made, by key. `ended` is told of each key that nobody makes any more, and whether it was made."""

    def __init__(self, ended: Callable[[str, bool], None] = lambda key, made: None) -> None:
        self._followers: dict[str, deque[Future[T]]] = {}
        self._ended = ended
        self.waiting = 0
        self.handed_over = 0  # so often another one had to go on where a leader left
        self.failed = 0  # so many followers were let go because their leader failed

    def __len__(self) -> int:
        return len(self._followers)

    def join(self, key: str) -> "Lead[T] | Future[T]":
        followers = self._followers.get(key)
        if followers is None:
            self._followers[key] = deque()
            return Lead(self, key)
        future: Future[T] = asyncio.get_running_loop().create_future()
        followers.append(future)
        return future

    async def follow(self, future: "Future[T]", adopt: "Callable[[Lead[T]], None]") -> "T | Lead[T] | None":
        """What the leader made. `adopt` is told of a Lead in the same moment in which that is the caller's."""
        self.waiting += 1
        try:
            told = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and isinstance(lead := future.result(), Lead):
                lead.leave()
            raise
        finally:
            self.waiting -= 1
        if isinstance(told, Lead):
            adopt(told)
        return told

    def end(self, key: str, made: T | None) -> None:
        """All who wait have this."""
        for future in self._followers.pop(key):
            if not future.done():
                future.set_result(made)
                self.failed += made is None
        self._ended(key, made is not None)

    def hand_over(self, key: str) -> None:
        """Who has waited longest leads; nobody where none waits."""
        followers = self._followers[key]
        while followers:
            future = followers.popleft()
            if not future.done():
                self.handed_over += 1
                future.set_result(Lead(self, key))
                return
        self.end(key, None)


class Lead(Generic[T]):
    """The making of one thing: `land`, `fail` or `leave`, and the first of them counts.

    As a context: who gets out of it by an error has failed, by a client that is gone has left; and without a word, too,
    it has failed.
    """

    def __init__(self, flights: Flights[T], key: str) -> None:
        self._flights = flights
        self._key = key
        self._over = False

    def land(self, made: T) -> None:
        """Here it is."""
        if self._first():
            self._flights.end(self._key, made)

    def fail(self) -> None:
        """It cannot be made, now at least."""
        if self._first():
            self._flights.end(self._key, None)

    def leave(self) -> None:
        """Who made it has gone."""
        if self._first():
            self._flights.hand_over(self._key)

    def __enter__(self) -> "Lead[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if isinstance(error, ClientGoneError | asyncio.CancelledError):
            self.leave()
        else:
            self.fail()

    def _first(self) -> bool:
        first, self._over = not self._over, True
        return first


Future: TypeAlias = "asyncio.Future[T | Lead[T] | None]"
