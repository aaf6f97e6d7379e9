"""Metrics over HTTP: of all processes in one answer, of one of them, and where each is found.

Each router joins all of them, its own among them, so it does not matter which one a scraper reaches.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from holdfast.router.backend import Backend
from holdfast.router.exposition import Merged
from holdfast.router.http import caller, json_response
from holdfast.router.metrics import RouterMetrics
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import TenantDirectory

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NOBODY = ""  # as `only`: who is there, without what they have

Peers: TypeAlias = Callable[[str | None], Awaitable[Mapping[str, str]]]
"""The expositions of all routers by id; with an id, those of others are empty."""


class MetricsEndpoints:
    """For operators and callers on this machine. `peers` None: this router is the only one."""

    def __init__(
        self, backend: Backend, tenants: TenantDirectory, metrics: RouterMetrics, peers: Peers | None = None
    ) -> None:
        self._backend = backend
        self._tenants = tenants
        self._metrics = metrics
        self._peers = peers

    async def all(self, request: Request) -> Response:
        self._tenants.authorize_metrics(caller(request))
        routers, replicas = await self._found(None)
        merged = Merged()
        for text in (*routers.values(), *replicas.values()):
            merged.add(text)
            await asyncio.sleep(0)  # requests go on between two of many replicas
        return StreamingResponse(_in_turns(merged.families()), headers={"content-type": METRICS_TYPE})

    async def process(self, request: Request) -> Response:
        """One router's or replica's. Raises RefusedError where there is none of that id."""
        self._tenants.authorize_metrics(caller(request))
        process = request.path_params["process"]
        routers, replicas = await self._found(process)
        text = {**routers, **replicas}.get(process)
        if not text:
            raise RefusedError(Refusal.NO_PATH, f"There is no process '{process}'")
        return _text(text)

    async def targets(self, request: Request) -> Response:
        """The processes as Prometheus' HTTP service discovery asks for them, at the address that it asked."""
        self._tenants.authorize_metrics(caller(request))
        root = str(request.scope.get("root_path", "")).rstrip("/")
        address = request.headers.get("host", "")
        found = zip(("router", "replica"), await self._found(NOBODY), strict=True)
        targets: list[dict[str, Any]] = [
            {
                "targets": [address],
                "labels": {
                    "__metrics_path__": f"{root}/metrics/processes/{quote(process)}",
                    "instance": process,  # all have one address
                    "process": kind,
                },
            }
            for kind, processes in found
            for process in sorted(processes)
        ]
        return json_response(orjson.dumps(targets))

    async def _found(self, only: str | None) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The expositions of routers and of replicas by id. Our own is there, whatever becomes of the others."""
        routers = dict(await self._peers(only)) if self._peers else {}
        own = self._metrics.router
        if own not in routers:
            routers[own] = await self._metrics.exposition() if only in (None, own) else ""
        return routers, await self._backend.metrics(only)


async def _in_turns(texts: Iterable[str]) -> AsyncIterator[str]:
    for text in texts:
        yield text
        await asyncio.sleep(0)


def _text(text: str) -> Response:
    return Response(text, headers={"content-type": METRICS_TYPE})
