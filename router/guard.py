"""What stands before every call of a tenant: who calls, whether it may call now, and how its body is read.

In this order, so that a caller who is refused costs no body: key or address, then the tenant's limits, then the
declared length, and only then the bytes. A place that a call takes here is kept until its answer is complete.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request

from holdfast.router.config import RouterConfig
from holdfast.router.drain import Drain
from holdfast.router.http import caller, read_body
from holdfast.router.limits import Limiter
from holdfast.router.metrics import RouterMetrics
from holdfast.router.parser_process import ParserProcess
from holdfast.router.protocol.body import parse_long
from holdfast.router.protocol.errors import RefusedError
from holdfast.router.tenants import Tenant, TenantDirectory
from holdfast.router.watching import watch_tenants

T = TypeVar("T")


class Guard:
    """Lets calls in. One for all endpoints of a router, so that they share its limits."""

    def __init__(
        self,
        tenants: TenantDirectory,
        metrics: RouterMetrics,
        config: RouterConfig,
        drain: Drain,
        parser: ParserProcess,
    ) -> None:
        self._tenants = tenants
        self._config = config
        self._metrics = metrics
        self._limiter = Limiter(config.max_in_flight)
        tenants.watch(self._limiter.share)
        self._drain = drain
        self._parser = parser
        watch_tenants(metrics, tenants, self._limiter, config.metrics_tenants)

    def authenticate(self, request: Request) -> Tenant:
        """Whose call it is. Raises RefusedError (401, 403) or ClientGoneError."""
        return self._tenants.authenticate(caller(request))

    @contextmanager
    def admitted(self, tenant: Tenant) -> Iterator[None]:
        """A place for one call of `tenant`. Raises RefusedError or OverloadedError (429), or UnavailableError (503)
        while the server stops.
        """
        self._drain.check()
        self._limiter.enter(tenant, self._metrics.clock())
        try:
            yield
        finally:
            self._limiter.leave(tenant)

    @contextmanager
    def entered(self, request: Request) -> Iterator[Tenant]:
        """Both: the tenant that calls, with a place for the call."""
        try:
            tenant = self.authenticate(request)
        except RefusedError as error:
            self._metrics.refused(error)
            raise
        with self.admitted(tenant):
            yield tenant

    async def read(self, request: Request, parse: Callable[..., T], *arguments: object) -> T:
        """What `parse(body, *arguments)` makes of the request's body; a long one is parsed beside the event loop.

        So `parse` is a function of a module, and all that crosses can be pickled. Raises RefusedError (413, 408), what
        `parse` raises, or ClientGoneError.
        """
        config = self._config
        body = await read_body(request, config.max_body_bytes, config.body_timeout_s, config.long_body_bytes)
        if isinstance(body, bytes):
            return parse(body, *arguments)
        return await self._parser.call(parse_long, config.max_body_values, parse, arguments, body=body)
