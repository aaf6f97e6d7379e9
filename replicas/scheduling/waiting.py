"""The queue of requests that wait for admission: ordered by a policy, bounded in time, cheap to cancel in."""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import count

from holdfast.replicas.scheduling.lines import Lines, Ticket
from holdfast.replicas.scheduling.order import Order
from holdfast.replicas.sequences.parking import Owner
from holdfast.replicas.sequences.sequence import Sequence

_HELD = -1  # the ticket of a sequence that is set aside: it is in no heap
_SLACK = 64  # entries that have lost their meaning may stay in a heap of any size


class WaitingQueue:
    """Heaps with lazy deletion: push, pop, cancel and a new place cost O(log n); the length is exact."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._tickets = count()  # breaks ties first-in first-out, so sequences are never compared
        self._first: Sequence | None = None  # the head, once it is known and until who waits changes
        self._lines = Lines(self._waits)
        self._due: list[tuple[float, int, Sequence]] = []  # when those that are passed over too long are promoted
        self._arrivals: deque[tuple[float, Sequence]] = deque()  # since when each waits
        self._unseen: list[Sequence] = []  # sessions' operations that no step has found here yet
        self._entries: dict[str, tuple[Ticket, Sequence]] = {}  # by request id; only this ticket counts
        self._turns: dict[Owner, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, in no particular order."""
        return (sequence for _, sequence in self._entries.values())

    def __contains__(self, sequence: Sequence) -> bool:
        entry = self._entries.get(sequence.request_id)
        return entry is not None and entry[1] is sequence

    def push(self, sequence: Sequence) -> None:
        """Enter a sequence. It waits since it arrived; an operation of a session from the next `promote` on: before it
        may have stood behind others of its session, however much room there was.
        """
        if not sequence.preempted:  # what has been started is neither timed out nor promoted
            self._order.arrive(sequence)
            if sequence.owner is not None and sequence.owner.session:
                self._unseen.append(sequence)
            else:
                self._arrivals.append((sequence.arrived, sequence))
            due = self._order.due(sequence)
            if due is not None:
                heapq.heappush(self._due, (due, sequence.number, sequence))
        if sequence.owner is not None:
            self._turns.setdefault(sequence.owner, []).append(sequence)
        self._place(sequence)

    def head(self) -> Sequence | None:
        """The next to be admitted; it stays in the queue, and stays the next until who waits or in which place changes.

        Then it is looked for among the heads of all lines.
        """
        if self._first is None and self._entries:
            heads = self._lines.heads()
            if not heads or None in heads:
                self._first = heads.get(None)
            else:
                self._first = self._order.first(tuple(heads.values()))
        return self._first

    def hold(self) -> Sequence:
        """Set the head aside: it still waits, can be removed and expires, but is not the head until `unhold`."""
        sequence = self.head()
        if sequence is None:
            raise IndexError("nobody is waiting")
        self._lines.pop(_line(self._order, sequence))
        self._first = None
        self._entries[sequence.request_id] = (_HELD, sequence)
        return sequence

    def unhold(self, sequence: Sequence) -> None:
        """Put a held sequence back in its place; nothing, if it was removed in the meantime."""
        if sequence in self:
            self._place(sequence)

    def reorder(self, sequence: Sequence) -> None:
        """What the order looks at has changed for this sequence: give it its new place. Nothing, if it has gone."""
        if sequence in self and self._entries[sequence.request_id][0] != _HELD:
            self._place(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._entries[sequence.request_id]
        self._first = None
        if sequence.owner is not None:
            turns = self._turns[sequence.owner]
            turns.remove(sequence)
            if not turns:
                del self._turns[sequence.owner]

    def turns_of(self, owner: Owner) -> list[Sequence]:
        """The waiting requests of a program or session."""
        return list(self._turns.get(owner, ()))

    def promote(self, now: float) -> None:
        """Promote those that were passed over too long by `now`, the beginning of a step."""
        self._arrivals.extend((now, sequence) for sequence in self._unseen)
        self._unseen.clear()
        while self._due and self._due[0][0] <= now:
            sequence = heapq.heappop(self._due)[2]
            if sequence in self and not sequence.preempted:
                self._order.promote(sequence)
                self.reorder(sequence)

    def expired(self, before: float) -> list[Sequence]:
        """Remove and return the sequences that wait since before `before` and were never started."""
        late = []
        while self._arrivals:
            since, sequence = self._arrivals[0]
            waits = sequence in self and not sequence.preempted
            if waits and since >= before:
                break
            self._arrivals.popleft()
            if waits:
                self.remove(sequence)
                late.append(sequence)
        return late

    def _place(self, sequence: Sequence) -> None:
        ticket, self._first = next(self._tickets), None
        self._entries[sequence.request_id] = (ticket, sequence)
        most = 2 * len(self._entries) + _SLACK
        self._lines.push(_line(self._order, sequence), self._order.waiting(sequence), ticket, sequence, most)
        if len(self._arrivals) > most:
            self._arrivals = deque(entry for entry in self._arrivals if entry[1] in self and not entry[1].preempted)
        if len(self._unseen) > most:
            self._unseen = [each for each in self._unseen if each in self]
        if len(self._due) > most:
            self._due = [entry for entry in self._due if entry[2] in self]
            heapq.heapify(self._due)

    def _waits(self, ticket: Ticket, sequence: Sequence) -> bool:
        entry = self._entries.get(sequence.request_id)
        return entry is not None and entry[0] == ticket


def _line(order: Order, sequence: Sequence) -> str | None:
    """None for those that were preempted: they have a part of their work behind them and come before all others."""
    return None if sequence.preempted else order.line(sequence)
