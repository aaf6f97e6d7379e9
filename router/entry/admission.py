"""The way in: who calls, whether the call is admitted now, and how its body is read. One for every endpoint.

In this order: key or address, then a place and what is known of the tenant's limits, then the declared length, and only
then the bytes. So a caller who is refused again costs no body. What a call counts against its tenant's limits is
charged once that is known (`call`, `quotas`). A call keeps its place until its answer is complete.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Self, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection, Request

from holdfast.replicas.errors import OverloadedError, UnavailableError
from holdfast.router.config import WARM_UP_HEADER, RouterConfig
from holdfast.router.entry.audit import Audit
from holdfast.router.entry.call import NOBODY, Call
from holdfast.router.entry.http import answer_headers, caller, content_digest, route_of
from holdfast.router.entry.long_bodies import LongBodies
from holdfast.router.entry.metrics import RouterMetrics
from holdfast.router.entry.quotas import LIMITS, Cost
from holdfast.router.entry.turn_log import TurnLog
from holdfast.router.entry.usage import UsageBooks
from holdfast.router.protocol.body import check_values
from holdfast.router.protocol.errors import ClientGoneError, Refusal, RefusedError, reason
from holdfast.router.tenants import Principal, Scope, Tenant, TenantDirectory

T = TypeVar("T")
Samples = Mapping[tuple[str, ...], float]

LONG_BODY = 1 << 20  # bytes; a longer body is parsed beside the event loop
TENANT = "holdfast.tenant"  # the key of a request's tenant in its scope


class Entry:
    """Lets calls in. One for all endpoints of a router, so that they share its limits.

    An endpoint that generates nothing needs `entered` and `read`. One that generates has a `Call`: `begin` makes it,
    and it is served inside `admitted`.
    """

    def __init__(
        self,
        tenants: TenantDirectory,
        metrics: RouterMetrics,
        config: RouterConfig,
        books: UsageBooks,
        audit: Audit,
        drain: Drain | None = None,
        turns: TurnLog | None = None,
    ) -> None:
        self.drain = drain or Drain()
        self.books = books
        self.turns = turns or TurnLog()
        self.metrics = metrics
        self._tenants = tenants
        self._config = config
        self._places = Shares(config.max_in_flight)
        self._bodies = Shares(config.body_memory)
        self._audit = audit
        self.long_bodies = LongBodies()
        self._proxies = config.networks()
        for tell in (self._places.share, self._bodies.share, self.books.quotas.keep):
            tenants.watch(tell)
        most = config.metrics_tenants
        tenants.watch(lambda each: metrics.name_tenants([tenant.name for tenant in each], most))
        self._watch()

    # ---- calls that generate nothing ----

    @asynccontextmanager
    async def entered(self, request: Request, scope: Scope = Scope.INFER) -> AsyncIterator[Tenant]:
        """The calling tenant, with a place for its call, which is counted. Raises as `admitted`."""
        try:
            principal = self.authenticate(request, scope)
        except RefusedError as error:
            self.metrics.errors.labels("", reason(error)).inc()
            raise
        tenant, quotas = principal.tenant, self.books.quotas
        with self.place(tenant):
            quotas.check(tenant)
            if tenant.limits.requests_per_minute is not None:
                status = await quotas.admit(tenant, secrets.token_hex(12), Cost(), lease=False)
                answer_headers(request).rate_limit = status
            yield tenant

    # ---- calls that generate ----

    def begin(self, request: Request, endpoint: str) -> Call:
        """The call of a new request. The server's own first request is not counted."""
        own = self.warms_up(request)
        metrics, turns = (RouterMetrics.unseen(), TurnLog()) if own else (self.metrics, self.turns)
        return Call(request, endpoint, metrics, turns, self.books)

    @contextmanager
    def admitted(self, call: Call) -> Iterator[None]:
        """A place for a call, after authentication. Raises as `authenticate` and `place`, and QuotaError (429) if the
        tenant is known to have used up a limit.
        """
        call.principal = self.authenticate(call.request)
        call.facts.tenant = call.tenant.name
        with self.place(call.tenant):
            self.books.quotas.check(call.tenant)
            yield

    # ---- parts ----

    def warms_up(self, request: HTTPConnection) -> bool:
        """Whether the server sent this request itself, to warm up. Where there are keys nobody can claim it."""
        return WARM_UP_HEADER in request.headers and not self._tenants.has_keys

    def authenticate(self, request: HTTPConnection, scope: Scope = Scope.INFER) -> Principal:
        """Authenticate the caller. Raises RefusedError: 401; 403 also for a key without this scope."""
        identity = caller(request)
        try:
            principal = self._tenants.authenticate(identity)
            if not principal.allows(scope):
                raise RefusedError(Refusal.FORBIDDEN, f"This API key does not have the scope '{scope}'")
        except RefusedError as error:
            self._audit.refused(reason(error), identity.address(self._proxies), route_of(request))
            raise
        request.scope[TENANT] = principal.tenant
        return principal

    @contextmanager
    def place(self, tenant: Tenant) -> Iterator[None]:
        """A place for one call of `tenant`. Raises OverloadedError (429), or UnavailableError (503) while the server
        stops.
        """
        self.drain.check()
        places = self._places
        if not places.take(tenant.name, 1):
            reserved = "" if places.total >= places.most else ", the other places are reserved for other tenants"
            raise OverloadedError(f"The server has {places.total} requests in flight already{reserved}")
        try:
            yield
        finally:
            places.give_back(tenant.name, 1)

    async def read(self, request: Request, parse: Callable[..., T], *arguments: object) -> T:
        """The result of `parse(body, *arguments)`.

        Raises RefusedError (413, 408), OverloadedError when there is no room for more bodies, ClientGoneError, or an
        error of `parse`.
        """
        config, tenant = self._config, request.scope.get(TENANT, NOBODY)
        with BodyBytes(self._bodies, tenant.name) as held:
            body = await read_body(request, config.max_body_bytes, config.body_timeout_s, held)
            check_values(body, config.max_body_values)
            if len(body) > LONG_BODY:
                return await self.long_bodies.call(parse, body, *arguments)
            return parse(body, *arguments)

    def _watch(self) -> None:
        """Show tenants' limits, their use and requests in flight, and the usage that waits to be booked."""
        metrics, books, tenants = self.metrics, self.books, self._tenants
        quotas, most = books.quotas, self._config.metrics_tenants

        def in_flight() -> Samples:
            return _summed(((metrics.tenant(each.name),), self._places.of(each.name)) for each in tenants.tenants)

        def allowed() -> Samples:
            limits = ((each, name) for each in tenants.tenants[:most] for name in LIMITS)
            pairs = ((each.name, name, getattr(each.limits, name)) for each, name in limits)
            return {(tenant, name): float(value) for tenant, name, value in pairs if value is not None}

        def used() -> Samples:
            pairs = ((name, status) for name, status in quotas.status.items() if metrics.tenant(name) == name)
            rows = ((name, status, limit, n) for name, status in pairs for limit, n in status.used.items())
            return {(name, limit): n for name, status, limit, n in rows if getattr(status.limits, limit) is not None}

        def refused() -> Samples:
            return _summed(((metrics.tenant(name), limit), n) for (name, limit), n in quotas.refusals.items())

        metrics.watch("tenant_requests_in_flight", in_flight)
        metrics.watch("tenant_limit", allowed)
        metrics.watch("tenant_quota_used", used)
        metrics.watch("tenant_quota_refusals_total", refused)
        metrics.watch("quota_local", lambda: float(quotas.local))
        metrics.watch("quota_routers", lambda: float(quotas.routers))
        metrics.watch("usage_records_total", lambda: {(each,): float(n) for each, n in books.booked.items()})
        metrics.watch("usage_records_waiting", lambda: float(books.waiting))


def _summed(samples: Iterable[tuple[tuple[str, ...], float]]) -> Samples:
    """Samples with the same labels, added up."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in samples:
        sums[labels] = sums.get(labels, 0.0) + value
    return sums


# ---- limits of requests and bytes in flight ----


class Shares:
    """An amount that tenants share. Half of it is reserved for tenants by their weights, the rest is first come, first
    served. Counts are this process's own.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0  # taken by all
        self._taken: Counter[str] = Counter()
        self._reserved: dict[str, int] = {}  # by tenant
        self._unused = 0  # of what is reserved

    def of(self, tenant: str) -> int:
        return self._taken[tenant]

    def share(self, tenants: Sequence[Tenant]) -> None:
        """Set the tenants."""
        total = sum(tenant.weight for tenant in tenants)
        self._reserved = {each.name: int(self.most * each.weight / total / 2) for each in tenants}
        self._unused = sum(map(self._left, self._reserved))

    def room(self, tenant: str, amount: int) -> bool:
        """Whether `take` would succeed."""
        left, after = self._left(tenant), self.total + amount
        return after <= self.most and (amount <= left or after + self._unused - left <= self.most)

    def take(self, tenant: str, amount: int) -> bool:
        """Take an amount. Returns False, and takes nothing, if there is no room."""
        room = self.room(tenant, amount)
        if room:
            self._move(tenant, amount)
        return room

    def give_back(self, tenant: str, amount: int) -> None:
        self._move(tenant, -amount)

    def _move(self, tenant: str, amount: int) -> None:
        before = self._left(tenant)
        self.total += amount
        self._taken[tenant] += amount
        self._unused += self._left(tenant) - before
        if not self._taken[tenant]:
            del self._taken[tenant]

    def _left(self, tenant: str) -> int:
        """The unused rest of a tenant's reserved part."""
        return max(0, self._reserved.get(tenant, 0) - self._taken[tenant])


class BodyBytes:
    """The bytes that are held of one body: `size`."""

    def __init__(self, memory: Shares, tenant: str) -> None:
        self._memory, self._tenant = memory, tenant
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.give_back(self._tenant, self.size)

    def expect(self, size: int) -> None:
        """Raises OverloadedError (429) if there is no room for so many bytes now. It reserves none: a slow client must
        not block others.
        """
        if not self._memory.room(self._tenant, size):
            raise _no_room()

    def add(self, size: int) -> None:
        """Count bytes that have arrived. Raises OverloadedError (429), and counts nothing, if there is no room."""
        if not self._memory.take(self._tenant, size):
            raise _no_room()
        self.size += size


async def read_body(request: Request, limit: int, patience_s: float, held: BodyBytes) -> bytes:
    """The body of `request`.

    Raises RefusedError: 413 as soon as it is longer than `limit` bytes, 408 if it has not arrived after `patience_s`
    seconds; OverloadedError when there is no room for it.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit():
        if int(declared) > limit:
            raise too_large(limit)
        held.expect(int(declared))
    parts: list[bytes] = []
    digest = content_digest(request)
    try:
        async with asyncio.timeout(patience_s):
            async for part in request.stream():
                if held.size + len(part) > limit:
                    raise too_large(limit)
                if digest is not None:
                    digest.update(part)
                held.add(len(part))
                parts.append(part)
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        raise RefusedError(Refusal.SLOW_BODY, f"The request body did not arrive within {patience_s:g} s") from None
    return b"".join(parts)


def too_large(limit: int) -> RefusedError:
    """The refusal of a body that is longer than `limit` bytes."""
    return RefusedError(Refusal.TOO_LARGE, f"The request body is longer than {limit} bytes")


def _no_room() -> OverloadedError:
    return OverloadedError("The server has no memory left for request bodies; retry")


# ---- the end of a router ----


class Drain:
    """Stops a router: new requests are refused, and requests that run past the drain time end with an error.

    Otherwise a stopping server would cut its streams, and clients could not tell a whole answer from half of one. Used
    on one event loop. Until `begin` or `bound` it does nothing.
    """

    def __init__(self) -> None:
        self._closed = False
        self._until: float | None = None
        self._open: set[asyncio.Timeout] = set()

    def begin(self, seconds: float) -> None:
        """Admit no new requests from now on; end running ones after `seconds`."""
        self._closed = True
        self.bound(seconds)

    def bound(self, seconds: float) -> None:
        """End running requests after `seconds`. Until then requests are admitted: the proxy sends some before it knows
        that this router stops.
        """
        now = asyncio.get_running_loop().time()
        self._until = now + seconds if self._until is None else min(now + seconds, self._until)
        for each in self._open:
            each.reschedule(self._until)

    def check(self) -> None:
        """Raises UnavailableError if no new requests are admitted."""
        if self._closed:
            raise UnavailableError("The server is shutting down; retry")

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Cancel the work inside when the time is over, and raise UnavailableError."""
        timeout = asyncio.timeout_at(self._until)
        try:
            async with timeout:
                self._open.add(timeout)
                try:
                    yield
                finally:
                    self._open.discard(timeout)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise UnavailableError("The server stopped before the answer was complete") from None
