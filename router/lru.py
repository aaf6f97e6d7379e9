"""A bounded map with deadlines: least recently used first out. One thread, time comes in as `now`."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class Lru(Generic[V]):
    """At most `max_entries` values of together at most `max_weight`; a value is gone at its deadline."""

    def __init__(self, max_entries: int, max_weight: int | None = None) -> None:
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._entries: OrderedDict[str, tuple[V, float, int]] = OrderedDict()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._entries)

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
        return entry[0]

    def latest(self, now: float) -> Iterator[tuple[str, V]]:
        """Keys and values, the most recently used first; using one while this goes on is not allowed."""
        for key in reversed(self._entries):
            value, deadline, _ = self._entries[key]
            if now < deadline:
                yield key, value

    def put(self, key: str, value: V, deadline: float, weight: int = 1) -> None:
        """Keep `value` until `deadline`. One that is heavier than the whole map is not kept."""
        self.remove(key)
        if self._max_weight is not None and weight > self._max_weight:
            return
        self._entries[key] = (value, deadline, weight)
        self._weight += weight
        while len(self._entries) > self._max_entries or self._over_weight():
            self.remove(next(iter(self._entries)))

    def remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._weight -= entry[2]

    def _over_weight(self) -> bool:
        return self._max_weight is not None and self._weight > self._max_weight
