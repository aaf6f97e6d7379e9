"""How much a router takes on at once, and whose it may be. What a tenant may use in all is `quotas`'.

Counts are this process's own. Half of what there is is kept for tenants by their weights: whoever has less than its
part gets it, however much others send. The rest is whoever's comes first.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast.replicas.errors import OverloadedError
from holdfast.router.tenants import Tenant


class Shares:
    """So much of something, half of it kept for tenants by their weights."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._total = 0
        self._taken: Counter[str] = Counter()
        self._kept: dict[str, int] = {}  # what others do not get, by tenant
        self._unused = 0  # of this

    @property
    def total(self) -> int:
        """Taken by all."""
        return self._total

    def of(self, tenant: str) -> int:
        return self._taken[tenant]

    def share(self, tenants: Sequence[Tenant]) -> None:
        """From now on these are the tenants."""
        total = sum(tenant.weight for tenant in tenants)
        self._kept = {each.name: int(self.most * each.weight / total / 2) for each in tenants}
        self._unused = sum(map(self._left, self._kept))

    def room(self, tenant: str, amount: int) -> bool:
        """Whether `take` would give a tenant so much."""
        left, after = self._left(tenant), self._total + amount
        return after <= self.most and (amount <= left or after + self._unused - left <= self.most)

    def take(self, tenant: str, amount: int) -> bool:
        """False where there is no room; then nothing is taken."""
        room = self.room(tenant, amount)
        if room:
            self._move(tenant, amount)
        return room

    def give_back(self, tenant: str, amount: int) -> None:
        self._move(tenant, -amount)

    def _move(self, tenant: str, amount: int) -> None:
        before = self._left(tenant)
        self._total += amount
        self._taken[tenant] += amount
        self._unused += self._left(tenant) - before
        if not self._taken[tenant]:
            del self._taken[tenant]

    def _left(self, tenant: str) -> int:
        """Of what is kept for a tenant that which it has not taken."""
        return max(0, self._kept.get(tenant, 0) - self._taken[tenant])


class Limiter(Shares):
    """Admits requests; each one admitted must `leave` exactly once."""

    def enter(self, tenant: Tenant) -> None:
        """Raises OverloadedError (429) where there is no room, and then counts nothing."""
        if not self.take(tenant.name, 1):
            kept = "" if self.total >= self.most else ", the other places are kept for others"
            raise OverloadedError(f"The server has {self.total} requests in flight already{kept}")

    def leave(self, tenant: Tenant) -> None:
        self.give_back(tenant.name, 1)


class BodyMemory(Shares):
    """Bytes of the request bodies that a router has: of those that are coming, and that wait to be parsed."""

    @contextmanager
    def body(self, tenant: str) -> Iterator["BodyBytes"]:
        """One body, all of which is given back at the end."""
        held = BodyBytes(self, tenant)
        try:
            yield held
        finally:
            self.give_back(tenant, held.size)


class BodyBytes:
    """Of one body so many bytes have come: `size`."""

    def __init__(self, memory: BodyMemory, tenant: str) -> None:
        self._memory, self._tenant = memory, tenant
        self.size = 0

    def expect(self, size: int) -> None:
        """So many bytes are said to come. Raises OverloadedError (429) where there is no room for them now.

        They are not taken: who sends slowly keeps nobody else's.
        """
        if not self._memory.room(self._tenant, size):
            raise _too_much()

    def come(self, size: int) -> None:
        """So many bytes have come. Raises OverloadedError (429) where there is no room for them; then they do not
        count.
        """
        if not self._memory.take(self._tenant, size):
            raise _too_much()
        self.size += size


def _too_much() -> OverloadedError:
    return OverloadedError("The server has as many bytes of request bodies as it takes at once")
