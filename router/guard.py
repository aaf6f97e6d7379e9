"""What stands before every call of a tenant: who calls, whether it may call now, and how its body is read.

In this order: key or address, then a place, and what is known of the tenant's limits, then the declared length, and
only then the bytes. So a caller who is refused again costs no body. What a call counts against the limits is charged
once that is known (`accounts`). A place that it takes here is kept until its answer is complete.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from starlette.requests import HTTPConnection, Request

from holdfast.router.accounts import Accounts, Admission
from holdfast.router.audit import Audit
from holdfast.router.config import WARM_UP_HEADER, RouterConfig
from holdfast.router.drain import Drain
from holdfast.router.http import answer_headers, caller, read_body, route_of
from holdfast.router.limits import BodyMemory, Limiter
from holdfast.router.metrics import RouterMetrics
from holdfast.router.parser_process import ParserProcess
from holdfast.router.protocol.body import parse_long
from holdfast.router.protocol.errors import Refusal, RefusedError, reason
from holdfast.router.tenants import Principal, Scope, Tenant, TenantDirectory
from holdfast.router.watching import watch_accounts, watch_tenants

T = TypeVar("T")

TENANT = "holdfast.tenant"  # where a request's scope keeps whose it is
NOBODY = Tenant("nobody")


class Guard:
    """Lets calls in. One for all endpoints of a router, so that they share its limits."""

    def __init__(
        self,
        tenants: TenantDirectory,
        metrics: RouterMetrics,
        config: RouterConfig,
        drain: Drain,
        parser: ParserProcess,
        accounts: Accounts | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._tenants = tenants
        self._config = config
        self._metrics = metrics
        self._limiter = Limiter(config.max_in_flight)
        self._bodies = BodyMemory(config.body_memory)
        for each in (self._limiter, self._bodies):
            tenants.watch(each.share)
        self._drain = drain
        self._parser = parser
        self._accounts = accounts or Accounts(config)
        self._audit = audit or Audit()
        self._proxies = config.networks()
        tenants.watch(self._accounts.keep)
        watch_accounts(metrics, self._accounts)
        watch_tenants(metrics, tenants, self._limiter, config.metrics_tenants)

    def warms_up(self, request: HTTPConnection) -> bool:
        """Whether the server sent this request itself, to warm up. Where there are keys nobody can say so."""
        return WARM_UP_HEADER in request.headers and not self._tenants.has_keys

    def authenticate(self, request: HTTPConnection, scope: Scope = Scope.INFER) -> Principal:
        """Whose call it is. Raises RefusedError (401, 403; also for a key that is not for this) or ClientGoneError."""
        who = caller(request)
        try:
            principal = self._tenants.authenticate(who)
            if not principal.allows(scope):
                raise RefusedError(Refusal.FORBIDDEN, f"This API key does not have the scope '{scope}'")
        except RefusedError as error:
            self._audit.refused(reason(error), who.address(self._proxies), route_of(request))
            raise
        request.scope[TENANT] = principal.tenant
        return principal

    @contextmanager
    def place(self, tenant: Tenant) -> Iterator[None]:
        """A place for one call of `tenant`. Raises OverloadedError (429), or UnavailableError (503) while the server
        stops.
        """
        self._drain.check()
        self._limiter.enter(tenant)
        try:
            yield
        finally:
            self._limiter.leave(tenant)

    @contextmanager
    def admitted(self, principal: Principal) -> Iterator[Admission]:
        """A place for a call, which is yet to be charged. Raises as `place`, and QuotaError (429) where it is known
        already that the tenant has no room.
        """
        with self.place(principal.tenant):
            yield self._accounts.admission(principal)

    @asynccontextmanager
    async def entered(self, request: Request, scope: Scope = Scope.INFER) -> AsyncIterator[Tenant]:
        """All of it, for a call that generates nothing: the tenant that calls, with a place for the call."""
        try:
            principal = self.authenticate(request, scope)
        except RefusedError as error:
            self._metrics.refused(error)
            raise
        with self.admitted(principal) as admission:
            await admission.charge_call()
            answer_headers(request).standing = admission.standing
            yield principal.tenant

    async def read(self, request: Request, parse: Callable[..., T], *arguments: object) -> T:
        """What `parse(body, *arguments)` makes of the request's body; a long one is parsed beside the event loop.

        So `parse` is a function of a module, and all that crosses can be pickled. Raises RefusedError (413, 408),
        OverloadedError where the bodies of this tenant, or of all, are too much at once, what `parse` raises, or
        ClientGoneError.
        """
        config, tenant = self._config, request.scope.get(TENANT, NOBODY)
        with self._bodies.body(tenant.name) as held:
            most = config.max_body_bytes
            body = await read_body(request, most, config.body_timeout_s, config.long_body_bytes, held)
            if isinstance(body, bytes):
                return parse(body, *arguments)
            work, told = held.size / tenant.weight, (config.max_body_values, parse, arguments)
            return await self._parser.call(parse_long, *told, body=body, payer=tenant.name, work=work)
