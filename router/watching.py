"""Metrics whose values stand elsewhere in the router, joined to where they stand. Those it counts are in `metrics`."""

from collections.abc import Callable, Mapping
from typing import Protocol

from holdfast.router import metric_list as listed
from holdfast.router.accounts import Accounts
from holdfast.router.line_stats import LineStats
from holdfast.router.metrics import RouterMetrics
from holdfast.router.placement import Reason
from holdfast.router.quotas import LIMITS
from holdfast.router.records import RedisInfo
from holdfast.router.response_cache import ResponseCache
from holdfast.router.tenants import TenantDirectory


def watch_tenants(metrics: RouterMetrics, directory: TenantDirectory, places: Callable[[str], int], most: int) -> None:
    """What each of the first `most` tenants may ask for, and has in flight; the others' requests are summed up."""
    directory.watch(lambda tenants: metrics.name_tenants([tenant.name for tenant in tenants], most))

    def in_flight() -> Mapping[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for tenant in directory.tenants:
            label = (metrics.tenant(tenant.name),)
            found[label] = found.get(label, 0.0) + places(tenant.name)
        return found

    def allowed() -> Mapping[tuple[str, ...], float]:
        return {
            (tenant.name, limit): float(value)
            for tenant in directory.tenants[:most]
            for limit in LIMITS
            if (value := getattr(tenant.limits, limit)) is not None
        }

    metrics.watch(listed.TENANT_IN_FLIGHT, in_flight)
    metrics.watch(listed.TENANT_LIMIT, allowed)


def watch_accounts(metrics: RouterMetrics, accounts: Accounts) -> None:
    """Who was refused by which limit, how tenants stand, and what the books have not got yet."""

    def used() -> Mapping[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for tenant, standing in accounts.standings.items():
            for name, n in standing.used.items():
                if getattr(standing.limits, name) is not None and metrics.tenant(tenant) == tenant:
                    found[tenant, name] = n
        return found

    def refused() -> Mapping[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for (tenant, name), n in accounts.refusals.items():
            label = (metrics.tenant(tenant), name)
            found[label] = found.get(label, 0.0) + n
        return found

    metrics.watch(listed.QUOTA_USED, used)
    metrics.watch(listed.QUOTA_REFUSED, refused)
    metrics.watch(listed.QUOTA_LOCAL, lambda: float(accounts.local))
    metrics.watch(listed.QUOTA_ROUTERS, lambda: float(accounts.routers))
    metrics.watch(listed.USAGE_RECORDS, lambda: {(each,): float(n) for each, n in accounts.booked.items()})
    metrics.watch(listed.USAGE_WAITING, lambda: float(accounts.unbooked))


def watch_cache(metrics: RouterMetrics, cache: ResponseCache) -> None:
    """What this process keeps of answers, and who waits for one that is being computed."""
    flights = cache.flights
    metrics.watch(listed.CACHE_BYTES, lambda: float(cache.weight))
    metrics.watch(listed.FLIGHTS_WAITING, lambda: float(flights.waiting))
    metrics.watch(
        listed.FLIGHTS_BROKEN, lambda: {("left",): float(flights.handed_over), ("failed",): float(flights.failed)}
    )


def watch_line(metrics: RouterMetrics, read: Callable[[], LineStats]) -> None:
    metrics.watch(listed.LINE, lambda: read().waiting)
    metrics.watch(listed.LINE_TOKENS, lambda: read().tokens)
    metrics.watch(listed.LINE_WAITS, lambda: _by_aim(read().home_waits, read().waits))
    metrics.watch(listed.LINE_SECONDS, lambda: _by_aim(read().home_wait_s, read().wait_s))
    metrics.watch(listed.FORETOLD, lambda: read().foretold)
    metrics.watch(listed.PLACED, lambda: {(each.value,): float(read().placed.get(each, 0)) for each in Reason})
    metrics.watch(listed.BALANCE, lambda: read().balance)
    metrics.watch(listed.REPLICAS, lambda: read().replicas)
    metrics.watch(listed.REPLICAS_JOINED, lambda: read().joined)
    metrics.watch(listed.REPLICAS_LOST, lambda: read().lost)


def _by_aim(home: float, both: float) -> Mapping[tuple[str, ...], float]:
    return {("home",): float(home), ("any",): float(both - home)}


class Informed(Protocol):
    """`RedisStore`, as far as it is needed here."""

    async def info(self) -> RedisInfo | None: ...


def watch_redis(metrics: RouterMetrics, store: Informed) -> None:
    """What the server says of itself, asked once a scrape; no samples but `up` while it does not answer."""
    last: list[RedisInfo | None] = [None]

    async def ask() -> None:
        last[0] = await store.info()

    def told(field: str) -> Callable[[], Mapping[tuple[str, ...], float]]:
        return lambda: {} if last[0] is None else {(): float(getattr(last[0], field))}

    metrics.watch(listed.REDIS_UP, lambda: float(last[0] is not None), ask)
    metrics.watch(listed.REDIS_MEMORY, told("memory"))
    metrics.watch(listed.REDIS_LIMIT, told("memory_limit"))
    metrics.watch(listed.REDIS_CLIENTS, told("clients"))
    metrics.watch(listed.REDIS_KEYS, told("keys"))
    metrics.watch(listed.REDIS_EVICTED, told("evicted"))
