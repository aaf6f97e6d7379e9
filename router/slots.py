"""How many more requests each replica takes, as far as this process knows. Pure: no waiting, no clock.

A slot is taken when a replica is chosen for a request and given back when the request has ended there. Another ingress
may have requests at the same replica: those show only when the replica says that it is full. Beside its slots a replica
takes control calls, which need none and are counted in what it says, too.
"""

from collections import Counter
from collections.abc import Mapping


class Slots:
    """Replicas by id. One that says it is full is not asked again for `closed_s`, or until something ends there."""

    def __init__(self, closed_s: float, control_calls: int = 0) -> None:
        self._closed_s = closed_s
        self._control_calls = control_calls
        self._capacity: Mapping[str, int] = {}
        self._taken: Counter[tuple[str, str]] = Counter()  # by replica and request: it may try a replica again
        self._in_hand: Counter[str] = Counter()
        self._ongoing: dict[str, int] = {}  # what a replica said last, less what has ended since
        self._closed: dict[str, float] = {}
        self._free: dict[str, None] = {}  # replicas of which this process has not taken every slot

    @property
    def free(self) -> list[str]:
        """Replicas of which this process has not taken every slot; some of them may be closed."""
        return list(self._free)

    def update(self, capacity: Mapping[str, int]) -> None:
        """These are the replicas there are, with how many requests each takes at once."""
        self._capacity = capacity
        for known in (self._ongoing, self._closed):
            for replica_id in [each for each in known if each not in capacity]:
                del known[replica_id]
        self._free = {each: None for each in capacity if self._in_hand[each] < capacity[each]}

    def room(self, replica_id: str, now: float, spared: int = 0) -> bool:
        """Whether it takes one more; `spared`: such a part of its slots, one of so many, is for others."""
        if self._closed.get(replica_id, now) > now:
            return False
        capacity = self._capacity.get(replica_id, 0)
        return self._in_hand[replica_id] < capacity - (capacity // spared if spared else 0)

    def take(self, replica_id: str, request_id: str) -> None:
        self._taken[replica_id, request_id] += 1
        self._in_hand[replica_id] += 1
        if self._in_hand[replica_id] >= self._capacity.get(replica_id, 0):
            self._free.pop(replica_id, None)

    def give_back(self, replica_id: str, request_id: str) -> bool:
        """A request is at a replica no more; False, if it did not come by a slot.

        Opens none that is closed: it may be the very request that was refused.
        """
        key = (replica_id, request_id)
        came = self._taken[key] > 0
        if came:
            self._taken[key] -= 1
            self._in_hand[replica_id] -= 1
            if self._in_hand[replica_id] < self._capacity.get(replica_id, 0):
                self._free[replica_id] = None
        if not self._taken[key]:
            del self._taken[key]
        if not self._in_hand[replica_id]:
            del self._in_hand[replica_id]
        return came

    def told(self, replica_id: str, ongoing: int, now: float) -> float | None:
        """A replica says how many calls it has, of any kind; when to ask it again, where that is all it takes."""
        self._ongoing[replica_id] = ongoing
        capacity = self._capacity.get(replica_id, 0)
        if ongoing < capacity:
            self._closed.pop(replica_id, None)
        return self._close(replica_id, now) if ongoing >= capacity + self._control_calls else None

    def accepted(self, replica_id: str, request_id: str, now: float) -> float | None:
        """What a replica said last came with its yes to this request; when to ask it again, where it has enough.

        Of a request that has ended meanwhile the number is as old as the request is long, and says nothing.
        """
        if not self._taken[replica_id, request_id]:
            self._ongoing.pop(replica_id, None)
            return None
        enough = self._ongoing.get(replica_id, 0) >= self._capacity.get(replica_id, 0)
        return self._close(replica_id, now) if enough else None

    def said(self, replica_id: str) -> int | None:
        """How many calls a replica has by what it said last, less what has ended since; None: that is not known."""
        return self._ongoing.get(replica_id)

    def ended(self, replica_id: str) -> None:
        """One request fewer than the replica said: it takes another."""
        self._closed.pop(replica_id, None)
        if replica_id in self._ongoing:
            self._ongoing[replica_id] = max(0, self._ongoing[replica_id] - 1)

    def _close(self, replica_id: str, now: float) -> float:
        self._closed[replica_id] = now + self._closed_s
        return self._closed[replica_id]
