"""How many calls a router serves at once, and whose they may be. What a tenant may use in all is `quotas`'.

Counts are this process's own. Half of the places are kept for tenants by their weights: whoever has fewer than its part
gets one, however many requests others send. The rest is whoever's comes first.
"""

from collections import Counter
from collections.abc import Sequence

from holdfast.replicas.errors import OverloadedError
from holdfast.router.tenants import Tenant


class Limiter:
    """Admits requests; each one admitted must `leave` exactly once."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._in_flight: Counter[str] = Counter()
        self._kept: dict[str, int] = {}  # places that others do not get, by tenant
        self._unused = 0  # of these

    @property
    def in_flight(self) -> int:
        return self._in_flight.total()

    def in_flight_of(self, tenant: str) -> int:
        return self._in_flight[tenant]

    def share(self, tenants: Sequence[Tenant]) -> None:
        """From now on these are the tenants."""
        total = sum(tenant.weight for tenant in tenants)
        self._kept = {each.name: int(self._max_in_flight * each.weight / total / 2) for each in tenants}
        self._unused = sum(map(self._left, self._kept))

    def enter(self, tenant: Tenant) -> None:
        """Raises OverloadedError (429) where there is no room, and then counts nothing."""
        in_flight, left = self.in_flight, self._left(tenant.name)
        if in_flight >= self._max_in_flight:
            raise OverloadedError(f"The server has {self._max_in_flight} requests in flight already")
        if not left and in_flight + self._unused >= self._max_in_flight:
            raise OverloadedError(
                f"The server has {in_flight} requests in flight, the other places are kept for others"
            )
        self._in_flight[tenant.name] += 1
        self._unused -= bool(left)

    def leave(self, tenant: Tenant) -> None:
        self._in_flight[tenant.name] -= 1
        self._unused += bool(self._left(tenant.name))

    def _left(self, tenant: str) -> int:
        """Of the places that are kept for a tenant those that it has not taken."""
        return max(0, self._kept.get(tenant, 0) - self._in_flight[tenant])
