"""The queue of requests that wait for admission: ordered by a policy, bounded in time, cheap to cancel in."""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import count

from holdfast.replicas.scheduling.order import Key, Order
from holdfast.replicas.sequences.sequence import Sequence


class WaitingQueue:
    """A heap with lazy deletion: push, pop and cancel cost O(log n); the length is exact."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._ticket = count()  # breaks ties first-in first-out, so sequences are never compared
        self._heap: list[tuple[Key, int, Sequence]] = []
        self._arrivals: deque[tuple[int, Sequence]] = deque()
        self._entries: dict[str, tuple[int, Sequence]] = {}  # by request id; only this ticket counts

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, in no particular order."""
        return (sequence for _, sequence in self._entries.values())

    def __contains__(self, sequence: Sequence) -> bool:
        entry = self._entries.get(sequence.request_id)
        return entry is not None and entry[1] is sequence

    def push(self, sequence: Sequence) -> None:
        ticket = next(self._ticket)
        self._entries[sequence.request_id] = (ticket, sequence)
        heapq.heappush(self._heap, (self._key(sequence), ticket, sequence))
        if not sequence.preempted:  # what has been started is not timed out
            self._arrivals.append((ticket, sequence))

    def head(self) -> Sequence | None:
        """The next to be admitted; it stays in the queue."""
        while self._heap and not self._waits(*self._heap[0][1:]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def hold(self) -> Sequence:
        """Set the head aside: it still waits, can be removed and expires, but is not the head until `unhold`."""
        sequence = self.head()
        if sequence is None:
            raise IndexError("nobody is waiting")
        heapq.heappop(self._heap)
        return sequence

    def unhold(self, sequence: Sequence) -> None:
        """Put a held sequence back in its place; nothing, if it was removed in the meantime."""
        if sequence in self:
            ticket = self._entries[sequence.request_id][0]
            heapq.heappush(self._heap, (self._key(sequence), ticket, sequence))

    def remove(self, sequence: Sequence) -> None:
        del self._entries[sequence.request_id]

    def expired(self, before: float) -> list[Sequence]:
        """Remove and return the sequences that arrived before `before` and were never started."""
        late = []
        while self._arrivals:
            ticket, sequence = self._arrivals[0]
            waits = self._waits(ticket, sequence)
            if waits and sequence.arrived >= before:
                break
            self._arrivals.popleft()
            if waits:
                self.remove(sequence)
                late.append(sequence)
        return late

    def _key(self, sequence: Sequence) -> Key:
        """Preempted ones first: they have a part of their work behind them."""
        return (0.0 if sequence.preempted else 1.0, *self._order.key(sequence))

    def _waits(self, ticket: int, sequence: Sequence) -> bool:
        entry = self._entries.get(sequence.request_id)
        return entry is not None and entry[0] == ticket
