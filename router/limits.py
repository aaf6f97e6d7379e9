"""How much a tenant, and all tenants together, may ask of the replicas at once and in a minute.

Counts are this process's own. Every call of a tenant counts, before its body is read: also one that turns out to be
wrong, or to be answered by the response cache. Half of the places are kept for tenants by their weights: whoever has
fewer than its part gets one, however many requests others send. The rest is whoever's comes first.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.replicas.errors import OverloadedError
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import Tenant


@dataclass(slots=True)
class Bucket:
    """Tokens for requests: at most a minute's worth, filled evenly."""

    tokens: float
    filled_at: float


class Limiter:
    """Admits requests; each one admitted must `leave` exactly once."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._in_flight: Counter[str] = Counter()
        self._kept: dict[str, int] = {}  # places that others do not get, by tenant
        self._unused = 0  # of these
        self._buckets: dict[str, Bucket] = {}

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

    def enter(self, tenant: Tenant, now: float) -> None:
        """Raises OverloadedError or RefusedError (429) where there is no room, and then counts nothing."""
        in_flight, left = self.in_flight, self._left(tenant.name)
        if in_flight >= self._max_in_flight:
            raise OverloadedError(f"The server has {self._max_in_flight} requests in flight already")
        if not left and in_flight + self._unused >= self._max_in_flight:
            raise OverloadedError(
                f"The server has {in_flight} requests in flight, the other places are kept for others"
            )
        allowed = tenant.limits.max_concurrent
        if allowed is not None and self._in_flight[tenant.name] >= allowed:
            message = f"Tenant '{tenant.name}' has {allowed} requests in flight, its limit"
            raise RefusedError(Refusal.RATE_LIMITED, message, retry_after_s=1.0)
        self._take(tenant, now)
        self._in_flight[tenant.name] += 1
        self._unused -= bool(left)

    def leave(self, tenant: Tenant) -> None:
        self._in_flight[tenant.name] -= 1
        self._unused += bool(self._left(tenant.name))

    def _left(self, tenant: str) -> int:
        """Of the places that are kept for a tenant those that it has not taken."""
        return max(0, self._kept.get(tenant, 0) - self._in_flight[tenant])

    def _take(self, tenant: Tenant, now: float) -> None:
        rate = tenant.limits.requests_per_minute
        if rate is None:
            return
        bucket = self._buckets.setdefault(tenant.name, Bucket(rate, now))
        bucket.tokens = min(rate, bucket.tokens + (now - bucket.filled_at) * rate / 60.0)
        bucket.filled_at = now
        if bucket.tokens < 1.0:
            message = f"Tenant '{tenant.name}' is limited to {rate} requests per minute"
            wait_s = (1.0 - bucket.tokens) * 60.0 / rate
            raise RefusedError(Refusal.RATE_LIMITED, message, retry_after_s=wait_s)
        bucket.tokens -= 1.0
