"""Metrics over HTTP: of all processes in one answer, of one process, and where each is found.

Each router joins the metrics of all processes, so a scraper may reach any of them.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from holdfast.router.backend import Backend
from holdfast.router.dispatch import QueueStats
from holdfast.router.entry import Merged, RouterMetrics, caller, json_response
from holdfast.router.placement import Reason
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.records import Records, RedisInfo
from holdfast.router.tenants import TenantDirectory

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NOBODY = ""  # as `only`: the ids alone

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
        """The metrics of all processes in Prometheus' text format."""
        self._tenants.authorize_metrics(caller(request))
        routers, replicas = await self._expositions(None)
        merged = Merged()
        for text in (*routers.values(), *replicas.values()):
            merged.add(text)
            await asyncio.sleep(0)  # requests go on between two of many replicas
        return StreamingResponse(_in_turns(merged.families()), headers={"content-type": METRICS_TYPE})

    async def process(self, request: Request) -> Response:
        """The metrics of one router or replica. Raises RefusedError for an unknown id."""
        self._tenants.authorize_metrics(caller(request))
        process = request.path_params["process"]
        routers, replicas = await self._expositions(process)
        text = {**routers, **replicas}.get(process)
        if not text:
            raise RefusedError(Refusal.NO_PATH, f"There is no process '{process}'")
        return Response(text, headers={"content-type": METRICS_TYPE})

    async def targets(self, request: Request) -> Response:
        """The processes in the form of Prometheus' HTTP service discovery, at the address that was called."""
        self._tenants.authorize_metrics(caller(request))
        root = str(request.scope.get("root_path", "")).rstrip("/")
        address = request.headers.get("host", "")
        expositions = zip(("router", "replica"), await self._expositions(NOBODY), strict=True)
        targets: list[dict[str, Any]] = [
            {
                "targets": [address],
                "labels": {
                    "__metrics_path__": f"{root}/metrics/processes/{quote(process)}",
                    "instance": process,  # all have one address
                    "process": kind,
                },
            }
            for kind, processes in expositions
            for process in sorted(processes)
        ]
        return json_response(orjson.dumps(targets))

    async def _expositions(self, only: str | None) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The expositions of routers and of replicas by id. Our own is always there."""
        routers = dict(await self._peers(only)) if self._peers else {}
        own = self._metrics.router
        if own not in routers:
            routers[own] = await self._metrics.exposition() if only in (None, own) else ""
        return routers, await self._backend.metrics(only)


async def _in_turns(texts: Iterable[str]) -> AsyncIterator[str]:
    for text in texts:
        yield text
        await asyncio.sleep(0)


# ---- metrics that are kept elsewhere in the router ----


def watch_line(metrics: RouterMetrics, read: Callable[[], QueueStats]) -> None:
    metrics.watch("requests_in_line", lambda: read().waiting)
    metrics.watch("tokens_in_line", lambda: read().tokens)
    metrics.watch("line_waits_total", lambda: _by_aim(read().home_waits, read().waits))
    metrics.watch("line_wait_seconds_total", lambda: _by_aim(read().home_wait_s, read().wait_s))
    metrics.watch("placements_total", lambda: {(each.value,): float(read().placed.get(each, 0)) for each in Reason})
    metrics.watch("replica_balance", lambda: read().balance)
    metrics.watch("replicas", lambda: read().replicas)
    metrics.watch("replicas_joined_total", lambda: read().joined)
    metrics.watch("replicas_lost_total", lambda: read().lost)


def _by_aim(home: float, both: float) -> Mapping[tuple[str, ...], float]:
    return {("home",): float(home), ("any",): float(both - home)}


def watch_redis(metrics: RouterMetrics, store: Records) -> None:
    """Show what Redis reports of itself, asked once a scrape; only `up` while it does not answer."""
    last: list[RedisInfo | None] = [None]

    async def ask() -> None:
        last[0] = await store.info()

    def reader(field: str) -> Callable[[], Mapping[tuple[str, ...], float]]:
        return lambda: {} if last[0] is None else {(): float(getattr(last[0], field))}

    metrics.watch("redis_up", lambda: float(last[0] is not None), ask)
    metrics.watch("redis_memory_bytes", reader("memory"))
    metrics.watch("redis_memory_limit_bytes", reader("memory_limit"))
    metrics.watch("redis_clients", reader("clients"))
    metrics.watch("redis_keys", reader("keys"))
    metrics.watch("redis_evicted_keys_total", reader("evicted"))
