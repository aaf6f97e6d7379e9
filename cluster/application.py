"""The Serve application: which deployments there are and how they are joined.

    clients -> HAProxy -> Ingress (router's FastAPI app) -> AffinityRouter -> EngineReplica, several

It imports Ray, so the environment must be set before (`serve_private.variables`). `serve` starts it.
"""

import asyncio
import gc
import itertools
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.cluster import doctor, model_files, serve_private
from holdfast.cluster.backend import ServeBackend, expositions
from holdfast.cluster.config import LOOPBACK_HOSTS, Settings, choose_order
from holdfast.cluster.engine_replica import EngineReplica
from holdfast.cluster.tenants import TenantsWatch, tenants_in
from holdfast.replicas import logs
from holdfast.replicas.config import POCKET
from holdfast.replicas.errors import HoldfastError
from holdfast.router import tracing
from holdfast.router.app import create_app
from holdfast.router.dispatch import HEALTH, Listener
from holdfast.router.dispatch.serve_private import proxy_host
from holdfast.router.endpoints import watch_line, watch_redis
from holdfast.router.entry import Audit, Drain, IdentityTokens, Quotas, RouterMetrics, TenantStore, TurnLog, UsageBooks
from holdfast.router.records import ProgramTable, Records, RedisAddress, ResponseCache, ToolLatencies
from holdfast.router.tenants import TenantDirectory

log = logging.getLogger(__name__)

APPLICATION = "holdfast"
REPLICAS = "replicas"
ROUTER = "router"
CONTROL_CALLS = 32  # health, metrics, status and the like, that a full engine still takes at once
DRAIN_LOOK_S = 0.2  # between two looks whether the running requests have ended
ENDING_S = 6.0  # routers and engines outlive the drain by so long, to tell clients and book usage
# The release that introduced the format of the records of programs, responses, prefills and sessions. A release writes
# its own version here if it and the previous release cannot read each other's records.
RECORDS = "0.1.0"
YOUNG = 2  # collections of young garbage between two full ones; Python's own value is 10
FULL_LOOKS = 1000  # full collections between two that look through everything
_collections = itertools.count(1)
INGRESS_REQUESTS = 8192  # requests in one ingress at once; its own limits answer before this does


class Ingress:
    """The router in a Serve replica. Ready when an engine has answered.

    `tenants_file` replaces the tenants of `settings`; a fault in it raises ConfigError.
    """

    async def __init__(  # type: ignore[misc]
        self,
        replicas: DeploymentHandle[Any],
        settings: Settings,
        redis: RedisAddress,
        tenants_file: Path | None = None,
    ) -> None:
        loop, drain = asyncio.get_running_loop(), Drain()
        serve_private.patch_replica(lambda: loop.call_soon_threadsafe(drain.bound, settings.server.drain_s))
        freeze_garbage()
        logs.configure(settings.logging, ROUTER)
        self._spans = tracing.start(settings.tracing, ROUTER)
        backend = ServeBackend(replicas, HEALTH)
        await backend.start(settings.server.ready_timeout_s)
        # Strangers can connect by the address that the proxy really listens on, which may not be that of our settings.
        exposed = await proxy_host() not in LOOPBACK_HOSTS
        config = settings.router
        context = serve.get_replica_context()
        self._metrics = RouterMetrics(CollectorRegistry(), router=context.replica_id.unique_id)
        self._routers = (context.deployment, context.app_name)
        timeout_s, retry_s, observe = config.store_timeout_s, config.store_retry_s, self._metrics.stored
        self._records = Records(redis, timeout_s, retry_s, observe, config.cache_key_file)
        watch_line(self._metrics, lambda: HEALTH.queue_stats)
        watch_redis(self._metrics, self._records)
        self._health = Listener(self._records, HEALTH, settings.placement.silent_s)
        self._latencies = ToolLatencies(self._records)
        self._programs = ProgramTable(self._records, config)
        # A key may have been revoked since the deployment: the file counts as it is now, or this router does not start.
        tenants_now = settings.tenants if tenants_file is None else await asyncio.to_thread(tenants_in, tenants_file)
        self._tokens = IdentityTokens(config.oidc) if config.oidc.issuer else None
        read_token = None if self._tokens is None else self._tokens.read
        tenants = TenantDirectory(tenants_now, exposed, config.hosts, config.cors_origins, read_token)
        # All models and record formats share these: the tenants, their limits and their usage.
        shared = replace(redis, namespace=f"{settings.redis.namespace}/accounts")
        self._books = Records(shared, timeout_s, retry_s, observe)
        info = await self._records.info()
        if info is not None and info.memory_limit and (crowded := config.crowded(info.memory_limit)):
            log.warning("%s", crowded)
        router = self._metrics.router
        self._usage = UsageBooks(config, Quotas(self._books, settings.server.routers))
        self._audit = Audit(self._books, config.audit_records, router)
        self._tenant_store = TenantStore(self._books, tenants, config.audit_records)
        await self._tenant_store.start()
        self._usage.start()
        self._audit.start()
        if self._tokens is not None:
            await self._tokens.start()
        self._tenants = TenantsWatch(tenants_file, tenants) if tenants_file else None
        self._drain = drain
        (card,) = await backend.models()
        # During a rollout an engine of the old configuration may answer first.
        model = f"{model_files.settings_digest(settings.engine, version('holdfast'))}{card.fingerprint}"
        self._cache = ResponseCache(self._records, config, model)
        self._app = create_app(
            backend,
            tenants,
            self._programs,
            self._cache,
            self._metrics,
            self._records,
            config,
            self._latencies,
            TurnLog(self._spans),
            self._peers,
            self._drain,
            self._tenant_store,
            self._usage,
            self._audit,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        self._app.add_middleware(OneRequestId)
        return self._app

    async def metrics(self, only: str | None = None) -> tuple[str, str]:
        """This router's id and its metrics; no metrics if `only` names another process."""
        own = self._metrics.router
        return own, await self._metrics.exposition() if only in (None, own) else ""

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and end those that run after `seconds` with an error that says so."""
        self._drain.begin(seconds)

    async def _peers(self, only: str | None) -> Mapping[str, str]:
        deployment, application = self._routers
        return await expositions(serve.get_deployment_handle(deployment, application), only)

    async def __del__(self) -> None:  # Serve awaits it once requests have drained
        if self._tenants is not None:
            await self._tenants.close()
        if self._tokens is not None:
            await self._tokens.close()
        await self._tenant_store.close()
        await self._cache.drain()
        await self._usage.close()
        await self._audit.close()
        await self._books.close()
        await self._health.close()
        await self._latencies.close()
        await self._records.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)


class OneRequestId:
    """Removes `x-request-id` from answers: Serve adds the same one, and clients would read the two as a list."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            await send(message)

        await self._app(scope, receive, without_id)


def freeze_garbage() -> None:
    """Keep full collections of garbage short in a process with a hundred thousand lasting records.

    Looking through those takes tenths of a second with every request waiting. So objects that survive a full collection
    are frozen, except in one of `FULL_LOOKS`. Frozen garbage stays as long: requests must leave no reference cycles.
    """
    gc.set_threshold(*gc.get_threshold()[:2], YOUNG)
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)


def _freeze(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        if next(_collections) % FULL_LOOKS:
            gc.freeze()
        else:
            gc.unfreeze()


def engine_memory(settings: Settings) -> int:
    """Bytes that an engine asks Ray for; 0 if the shape of its model is unknown."""
    try:
        return int(doctor.engine_bytes(settings, on_gpu=settings.engine.device.startswith("cuda")))
    except HoldfastError:
        return 0


def router_memory(settings: Settings) -> int:
    """Bytes that a router asks Ray for."""
    return int(doctor.router_bytes(settings))


def build(
    settings: Settings, redis: RedisAddress, gpus: float, starts: int = 1, tenants_file: Path | None = None
) -> serve.Application:
    """The application for `settings`.

    `gpus`: GPUs of each engine, also a fraction; 0 on a CPU. `starts`: failed starts of an engine after which Serve
    gives up; on one machine a model that cannot be loaded will not load on the second try. `tenants_file`: routers
    read it at their start and after a change, and ignore the tenants in `settings`.
    """
    settings = choose_order(settings, live=tenants_file is not None)
    if tenants_file is not None:  # Serve keeps these for later routers, with keys that are revoked by then
        settings = replace(settings, tenants=())
    redis = replace(redis, namespace=namespace(settings))
    replicas = serve.deployment(EngineReplica).options(
        name=REPLICAS,
        num_replicas=settings.replicas.count,
        max_ongoing_requests=settings.replicas.max_ongoing_requests + CONTROL_CALLS,
        # Cores are shared by thread counts, not reserved: Ray's own processes need some, too. The memory keeps an
        # engine from starting where there is no room; `MemoryGuard` ends one where none is left.
        ray_actor_options={"num_cpus": 0, "num_gpus": gpus, "memory": engine_memory(settings)},
        request_router_config=RequestRouterConfig(
            request_router_class="holdfast.router.dispatch.affinity:AffinityRouter",
            request_router_kwargs={
                **asdict(settings.placement),
                "control_calls": CONTROL_CALLS,
                "fair": settings.engine.order == "fair",
            },
        ),
        max_constructor_retry_count=starts,
        health_check_period_s=5.0,
        # Trap: a stream longer than this dies with its replica when that is stopped. Routers ask afterwards what was
        # done for the requests that they cut off.
        graceful_shutdown_timeout_s=settings.server.drain_s + ENDING_S,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name=ROUTER,
        num_replicas=settings.server.routers,
        max_ongoing_requests=INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": 0, "memory": router_memory(settings)},
        graceful_shutdown_timeout_s=settings.server.drain_s + ENDING_S,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
    )
    engines = replicas.bind(
        settings.engine,
        redis,
        settings.router,
        settings.logging,
        settings.tracing,
    )
    return ingress.bind(engines, settings, redis, tenants_file)


def namespace(settings: Settings) -> str:
    """The prefix of keys in Redis. Each model, and each format of the records, has keys of its own."""
    engine = settings.engine
    return f"{settings.redis.namespace}/{engine.served_name or _identity(engine.model)}/{RECORDS}"


def _identity(model: str) -> str:
    """A model's last name, with a digest of the whole name if that is longer: `/a/m` is not `/b/m`."""
    folder = Path(model).expanduser()
    whole = str(folder.absolute()) if model != POCKET and folder.is_dir() else model
    last = Path(whole).name
    return last if last == whole else f"{last}-{blake2b(whole.encode(), digest_size=6).hexdigest()}"
