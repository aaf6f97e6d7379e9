"""How much a tenant, and all tenants together, may ask of the replicas at once and in a minute.

Counts are this process's own. Every call of a tenant counts, before its body is read: also one that turns out to be
wrong, or to be answered by the response cache.
"""

from collections import Counter
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
        self._buckets: dict[str, Bucket] = {}

    @property
    def in_flight(self) -> int:
        return self._in_flight.total()

    def in_flight_of(self, tenant: str) -> int:
        return self._in_flight[tenant]

    def enter(self, tenant: Tenant, now: float) -> None:
        """Raises OverloadedError or RefusedError (429) where there is no room, and then counts nothing."""
        if self.in_flight >= self._max_in_flight:
            raise OverloadedError(f"The server has {self._max_in_flight} requests in flight already")
        allowed = tenant.limits.max_concurrent
        if allowed is not None and self._in_flight[tenant.name] >= allowed:
            message = f"Tenant '{tenant.name}' has {allowed} requests in flight, its limit"
            raise RefusedError(Refusal.RATE_LIMITED, message, retry_after_s=1.0)
        self._take(tenant, now)
        self._in_flight[tenant.name] += 1

    def leave(self, tenant: Tenant) -> None:
        self._in_flight[tenant.name] -= 1

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
