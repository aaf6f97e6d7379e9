"""A bounded map with deadlines; the least recently used value goes first. One thread, time comes in as `now`."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")

SHARE = 0.5  # of a full map that one owner may keep while others want to put something


class Lru(Generic[V]):
    """At most `max_entries` values of together at most `max_weight`; a value is gone at its deadline.

    In a full map the owner that has the largest part loses values as long as that is more than its `share`. So
    no owner can push out what the others have within theirs.
    """

    def __init__(self, max_entries: int, max_weight: int | None = None, share: float = 1.0) -> None:
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._share = share
        self._entries: OrderedDict[str, tuple[V, float, int, str]] = OrderedDict()
        self._owned: dict[str, OrderedDict[str, None]] = {}  # the keys of each owner, the least recently used first
        self._weights: Counter[str] = Counter()  # of each owner
        self.weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

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
        """Keys and values, the most recently used first. Do not use the map while this goes on."""
        for key in reversed(self._entries):
            value, deadline, *_ = self._entries[key]
            if now < deadline:
                yield key, value

    def put(
        self, key: str, value: V, deadline: float, weight: int = 1, owner: str = "", most: int | None = None
    ) -> None:
        """Keep `value` until `deadline`, unless it is heavier than the whole map.

        With `most` the values of its owner weigh as much together at most; its own least recently used ones go first.
        """
        self.remove(key)
        if any(bound is not None and weight > bound for bound in (self._max_weight, most)):
            return
        self._entries[key] = (value, deadline, weight, owner)
        self._owned.setdefault(owner, OrderedDict())[key] = None
        self._weights[owner] += weight
        self.weight += weight
        while most is not None and self._weights[owner] > most:
            self.remove(next(iter(self._owned[owner])))
        while len(self._entries) > self._max_entries or (
            self._max_weight is not None and self.weight > self._max_weight
        ):
            self.remove(self._first_out())

    def remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        _, _, weight, owner = entry
        self.weight -= weight
        self._weights[owner] -= weight
        del self._owned[owner][key]
        if not self._owned[owner]:
            del self._owned[owner], self._weights[owner]

    def _first_out(self) -> str:
        if self._share < 1.0:
            owner = max(self._owned, key=self._part)
            if self._part(owner) > self._share:
                return next(iter(self._owned[owner]))
        return next(iter(self._entries))

    def _part(self, owner: str) -> float:
        """An owner's share of the map: of its entries, or of its weight if that is more."""
        weight = self._weights[owner] / self._max_weight if self._max_weight else 0.0
        return max(len(self._owned[owner]) / self._max_entries, weight)
