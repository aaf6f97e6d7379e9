"""Lines of waiting sequences: heaps with lazy deletion, one for each name. Who of all of them is next: `waiting`."""

import heapq
from collections.abc import Callable
from typing import TypeAlias

from holdfast.replicas.scheduling.order import Key
from holdfast.replicas.sequences.sequence import Sequence

Name: TypeAlias = str | None
Ticket: TypeAlias = int


class Lines:
    """Entries that do not count any more, as `counts` says, are passed over and let go in time."""

    def __init__(self, counts: Callable[[Ticket, Sequence], bool]) -> None:
        self._counts = counts
        self._heaps: dict[Name, list[tuple[Key, Ticket, Sequence]]] = {}

    def __len__(self) -> int:
        """Entries, those that do not count among them."""
        return sum(map(len, self._heaps.values()))

    def push(self, line: Name, key: Key, ticket: Ticket, sequence: Sequence, most: int) -> None:
        """Enter a sequence; a line of more than `most` entries lets those go that do not count."""
        heap = self._heaps.setdefault(line, [])
        heapq.heappush(heap, (key, ticket, sequence))
        if len(heap) > most:
            heap[:] = [entry for entry in heap if self._counts(*entry[1:])]
            heapq.heapify(heap)

    def heads(self) -> dict[Name, Sequence]:
        """The first of each line that has any."""
        found = {}
        for line in list(self._heaps):
            heap = self._heaps[line]
            while heap and not self._counts(*heap[0][1:]):
                heapq.heappop(heap)
            if heap:
                found[line] = heap[0][2]
            else:
                del self._heaps[line]
        return found

    def pop(self, line: Name) -> None:
        """Take the first of a line out."""
        heapq.heappop(self._heaps[line])
