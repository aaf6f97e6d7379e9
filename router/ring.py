"""Which replica a name points to, found without a look at all of them (Karger et al., 1997). Pure.

Equal in every process and release: routers that cannot ask each other agree, and when a replica comes or goes only the
names move that point to it.
"""

import struct
from bisect import bisect_left
from collections.abc import Set
from hashlib import blake2b

POINTS = 64  # of each replica: eight digests of eight each


class Ring:
    """Replicas by their ids, each with `POINTS` places; a name points to the first one from its own place on."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._owners: dict[int, str] = {}
        self._there: frozenset[str] = frozenset()

    def keep(self, replicas: Set[str]) -> None:
        """These are there from now on. Costs a sort of what is nearly in order, where something changed."""
        joined, gone = replicas - self._there, self._there - replicas
        for each in gone:
            for place in _places(each):
                del self._owners[place]
        if gone:
            self._places = [place for place in self._places if place in self._owners]
        for each in joined:
            new = _places(each)
            self._owners.update(dict.fromkeys(new, each))
            self._places += new
        if joined:
            self._places.sort()
        self._there = frozenset(replicas)

    def owner(self, name: str) -> str:
        """The replica that `name` points to; there has to be one."""
        at = bisect_left(self._places, *struct.unpack(">Q", _digest(name, 8)))
        return self._owners[self._places[at % len(self._places)]]


def _places(replica: str) -> tuple[int, ...]:
    """64 bits each: that two are equal is not to be expected."""
    return tuple(n for i in range(POINTS // 8) for n in struct.unpack(">8Q", _digest(f"{i}\0{replica}", 64)))


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(), digest_size=size).digest()
