"""A bounded map with deadlines: least recently used first out. One thread, time comes in as `now`."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")

SHARE = 0.5  # of what is full that one owner may keep while others want to put something


class Lru(Generic[V]):
    """At most `max_entries` values of together at most `max_weight`; a value is gone at its deadline.

    Where it is full, values of the owner that has most of it go first as long as that is more than its `share`, so that
    no owner can push out what the others have within theirs.
    """

    def __init__(self, max_entries: int, max_weight: int | None = None, share: float = 1.0) -> None:
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._share = share
        self._entries: OrderedDict[str, tuple[V, float, int, str]] = OrderedDict()
        self._owned: dict[str, OrderedDict[str, None]] = {}  # the keys of each owner, the least recently used first
        self._owners: defaultdict[str, float] = defaultdict(float)  # how much each has, as a part of all there may be
        self._weights: defaultdict[str, int] = defaultdict(int)  # of each owner
        self._weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def weight(self) -> int:
        return self._weight

    def get(self, key: str, now: float) -> V | None:
        """The value under `key`, made the most recently used, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now >= entry[1]:
            self.remove(key)
            return None
        self._entries.move_to_end(key)
        self._owned[entry[3]].move_to_end(key)
        return entry[0]

    def latest(self, now: float) -> Iterator[tuple[str, V]]:
        """Keys and values, the most recently used first; using one while this goes on is not allowed."""
        for key in reversed(self._entries):
            value, deadline, *_ = self._entries[key]
            if now < deadline:
                yield key, value

    def put(
        self, key: str, value: V, deadline: float, weight: int = 1, owner: str = "", most: int | None = None
    ) -> None:
        """Keep `value` until `deadline`. One that is heavier than the whole map is not kept.

        With `most` its owner's values weigh as much together at most: its own least recently used ones go first.
        """
        self.remove(key)
        bound = min(each for each in (self._max_weight, most, weight) if each is not None)
        if weight > bound:
            return
        self._entries[key] = (value, deadline, weight, owner)
        self._owned.setdefault(owner, OrderedDict())[key] = None
        self._owners[owner] += self._part(weight)
        self._weights[owner] += weight
        self._weight += weight
        while most is not None and self._weights[owner] > most:
            self.remove(next(iter(self._owned[owner])))
        while len(self._entries) > self._max_entries or self._over_weight():
            self.remove(self._first_out())

    def remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            _, _, weight, owner = entry
            self._weight -= weight
            self._owners[owner] -= self._part(weight)
            self._weights[owner] -= weight
            del self._owned[owner][key]
            if not self._owned[owner]:
                del self._owned[owner], self._owners[owner], self._weights[owner]

    def _first_out(self) -> str:
        if self._share < 1.0:
            owner, parts = max(self._owners.items(), key=lambda each: each[1])
            if parts > self._share:
                return next(iter(self._owned[owner]))
        return next(iter(self._entries))

    def _part(self, weight: int) -> float:
        """How much of the map a value takes: of its places, or of its weight where that is more."""
        return max(1 / self._max_entries, weight / self._max_weight if self._max_weight else 0.0)

    def _over_weight(self) -> bool:
        return self._max_weight is not None and self._weight > self._max_weight
