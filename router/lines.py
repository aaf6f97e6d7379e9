"""Requests that wait for a replica, each line in order, all lines together bounded. Pure: who is next, not when.

A request waits for its program's replica, or for any. A replica with room takes the first of its own line and the line
for any, whichever comes first; so among those that it could serve, nobody is overtaken. Where tenants share the slots
by their weights each has lines of its own, and whose turn it is comes first (`SlotShares`).
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeAlias, TypeVar

from holdfast.replicas.errors import OverloadedError
from holdfast.replicas.scheduling.shares import Shares

T = TypeVar("T")
Key: TypeAlias = tuple[float, ...]

_SLACK = 64  # places that were given up may stay in a line of any length


@dataclass(frozen=True, slots=True)
class Payer:
    """The tenant that a request counts for."""

    tenant: str
    weight: float = 1.0


NOBODY = Payer("")  # whose requests go before those of all tenants, and count for none


@dataclass(slots=True, eq=False)
class Place(Generic[T]):
    """One request's place; `home` None: any replica will do."""

    key: Key
    waiter: T
    home: str | None
    tenant: str = ""
    gone: bool = False


class SlotShares:
    """Who of several tenants gets the next slot: the rule of `engine.order: fair`, over the seconds that they have
    slots. What is nobody's goes first. Times are of one clock that does not go back.
    """

    def __init__(self) -> None:
        self._shares = Shares()
        self._counted: dict[str, float] = {}  # until when, of those that have slots

    def come(self, payer: Payer, now: float) -> None:
        """A request waits from now on."""
        if not payer.tenant:
            return
        self._count(payer.tenant, now)
        self._shares.come(payer.tenant, payer.weight)

    def take(self, payer: Payer, now: float) -> None:
        """A request has got a slot."""
        if not payer.tenant:
            return
        self._count(payer.tenant, now)
        self._shares.begin(payer.tenant).weight = payer.weight
        self._counted[payer.tenant] = now

    def give_back(self, payer: Payer, now: float) -> None:
        if not payer.tenant:
            return
        self._count(payer.tenant, now)
        share = self._shares.of(payer.tenant)
        share.running -= 1
        if not share.running:
            del self._counted[payer.tenant]

    def first(self, tenants: Sequence[str], now: float) -> str:
        """Whose turn it is of these, of whom there is one at least."""
        if NOBODY.tenant in tenants:
            return NOBODY.tenant
        for tenant in tenants:
            self._count(tenant, now)
        chosen = min(tenants, key=self._shares.standing)
        self._shares.chosen(chosen)
        return chosen

    def crowds(self, waiting: Mapping[str, int], payer: Payer) -> str | None:
        """Who has most of a full line for its weight, more than `payer` had with one more; None where nobody has."""
        counts = {tenant: n / self._shares.of(tenant).weight for tenant, n in waiting.items() if tenant}
        most = max(counts, key=counts.__getitem__, default=None)
        if most is None or counts[most] <= (waiting.get(payer.tenant, 0) + 1) / payer.weight:
            return None
        return most

    def _count(self, tenant: str, now: float) -> None:
        """Charge a tenant for the slots it has had since that was done last."""
        since = self._counted.get(tenant)
        if since is None:
            return
        share = self._shares.of(tenant)
        seconds = share.running * (now - since)
        share.served += seconds / share.weight
        self._shares.spend(seconds)
        self._counted[tenant] = now


class Lines(Generic[T]):
    """Heaps with lazy deletion: every operation costs O(log n), those that look at all tenants as many times as there
    are of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tickets = count()  # breaks ties first-in first-out
        self._lines: dict[str | None, dict[str, list[tuple[Key, int, Place[T]]]]] = {}  # by home and tenant
        self._waiting = 0
        self._of: Counter[str] = Counter()  # how many wait, by tenant

    def __len__(self) -> int:
        return self._waiting

    @property
    def full(self) -> bool:
        return self._waiting >= self._most

    def enter(self, key: Key, waiter: T, home: str | None, tenant: str = "") -> Place[T]:
        """Raises OverloadedError where too many wait already."""
        if self.full:
            raise OverloadedError(f"{self._most} requests wait for a replica already")
        place = Place(key, waiter, home, tenant)
        self._waiting += 1
        self._of[tenant] += 1
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
            self._of[place.tenant] -= 1
            if not self._of[place.tenant]:
                del self._of[place.tenant]

    def tenants(self, replica_id: str) -> list[str]:
        """Who has requests that a replica could serve."""
        names = {tenant: None for home in (replica_id, None) for tenant in list(self._lines.get(home, ()))}
        return [tenant for tenant in names if any(self._heads(replica_id, tenant))]

    def take(self, replica_id: str, tenant: str = "") -> T | None:
        """A tenant's next for a replica, which leaves its line; None: nobody waits for it."""
        heads = list(self._heads(replica_id, tenant))
        if not heads:
            return None
        place = min(heads)[2]
        self.leave(place)
        return place.waiter

    def waiting(self) -> Mapping[str, int]:
        """How many requests wait, by tenant."""
        return self._of

    def take_last(self, tenant: str) -> T | None:
        """The one of a tenant's that would be served last leaves its line. Looks at all of them."""
        entries = (entry for lines in self._lines.values() for entry in lines.get(tenant, ()))
        place = max((entry for entry in entries if not entry[2].gone), default=(None, 0, None))[2]
        if place is None:
            return None
        self.leave(place)
        return place.waiter

    def keep(self, replica_ids: set[str]) -> None:
        """These are the replicas there are: who waited for another one waits for any."""
        for home in [line for line in self._lines if line is not None and line not in replica_ids]:
            for line in self._lines.pop(home).values():
                for _, _, place in line:
                    if place.home == home:
                        self.free(place)

    def _push(self, place: Place[T]) -> None:
        line = self._lines.setdefault(place.home, {}).setdefault(place.tenant, [])
        if len(line) > 2 * self._waiting + _SLACK:
            line[:] = [entry for entry in line if not entry[2].gone and entry[2].home == place.home]
            heapq.heapify(line)
        heapq.heappush(line, (place.key, next(self._tickets), place))

    def _heads(self, replica_id: str, tenant: str) -> Iterator[tuple[Key, int, Place[T]]]:
        """The first of a tenant's in the line of a replica, and in the line for any."""
        for home in (replica_id, None):
            lines = self._lines.get(home, {})
            line = lines.get(tenant)
            while line and (line[0][2].gone or line[0][2].home != home):
                heapq.heappop(line)
            if line:
                yield line[0]
            elif tenant in lines:
                del lines[tenant]
                if not lines:
                    del self._lines[home]
