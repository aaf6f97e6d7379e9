"""Requests that wait for a replica, each line in order, all lines together bounded. Pure: who is next, not when.

A request waits for its program's replica, or for any. A replica with room takes the first of its own line and the line
for any, whichever comes first; so among those that it could serve, nobody is overtaken.
"""

import heapq
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeAlias, TypeVar

from holdfast.replicas.errors import OverloadedError

T = TypeVar("T")
Key: TypeAlias = tuple[float, ...]

_SLACK = 64  # places that were given up may stay in a line of any length


@dataclass(slots=True, eq=False)
class Place(Generic[T]):
    """One request's place; `home` None: any replica will do."""

    key: Key
    waiter: T
    home: str | None
    gone: bool = False


class Lines(Generic[T]):
    """Heaps with lazy deletion: every operation costs O(log n)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tickets = count()  # breaks ties first-in first-out
        self._lines: dict[str | None, list[tuple[Key, int, Place[T]]]] = {}
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def enter(self, key: Key, waiter: T, home: str | None) -> Place[T]:
        """Raises OverloadedError where too many wait already."""
        if self._waiting >= self._most:
            raise OverloadedError(f"{self._most} requests wait for a replica already")
        place = Place(key, waiter, home)
        self._waiting += 1
        self._push(place)
        return place

    def free(self, place: Place[T]) -> None:
        """Any replica will do from now on."""
        if place.home is not None and not place.gone:
            place.home = None
            self._push(place)

    def leave(self, place: Place[T]) -> None:
        """It waits no longer."""
        if not place.gone:
            place.gone = True
            self._waiting -= 1

    def take(self, replica_id: str) -> T | None:
        """The next for a replica, which leaves its line; None: nobody waits for it."""
        heads = [head for line in (replica_id, None) if (head := self._head(line)) is not None]
        if not heads:
            return None
        place = min(heads)[2]
        self.leave(place)
        return place.waiter

    def keep(self, replica_ids: set[str]) -> None:
        """These are the replicas there are: who waited for another one waits for any."""
        for home in [line for line in self._lines if line is not None and line not in replica_ids]:
            for _, _, place in self._lines.pop(home):
                if place.home == home:
                    self.free(place)

    def _push(self, place: Place[T]) -> None:
        line = self._lines.setdefault(place.home, [])
        if len(line) > 2 * self._waiting + _SLACK:
            line[:] = [entry for entry in line if not entry[2].gone and entry[2].home == place.home]
            heapq.heapify(line)
        heapq.heappush(line, (place.key, next(self._tickets), place))

    def _head(self, home: str | None) -> tuple[Key, int, Place[T]] | None:
        line = self._lines.get(home)
        while line and (line[0][2].gone or line[0][2].home != home):
            heapq.heappop(line)
        if not line:
            self._lines.pop(home, None)
            return None
        return line[0]
