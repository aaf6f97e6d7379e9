"""One engine as Serve deploys it: `replicas.service` with its identity, health and reports.

The process that builds the application and the one with the router import this file; torch and transformers, which
take seconds to import, come in with the constructor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from logging import getLogger
from typing import TYPE_CHECKING

import ray
from ray import serve

from holdfast.cluster import checks, environment, loading, replica_spans, serve_replica
from holdfast.cluster.early import HELD_S, EarlySender
from holdfast.cluster.tool_watch import ToolWatch
from holdfast.replicas import logs
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import HoldfastError, UnavailableError
from holdfast.replicas.logs import About, LoggingConfig
from holdfast.replicas.requests import (
    ChatPrompt,
    Errored,
    GenerateRequest,
    HandleReleased,
    ModelCard,
    PartialReply,
    ProgramEnded,
    ProgramExpected,
    RawPrompt,
    ServedElsewhere,
    SessionCall,
    SessionState,
    ToolLatencies,
    Usage,
)
from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.stats import LoadReport, ReplicaStatus
from holdfast.router import tracing
from holdfast.router.backend import Batch, Routed
from holdfast.router.config import RouterConfig
from holdfast.router.elsewhere import Served
from holdfast.router.fleet import Reporter
from holdfast.router.records import Records, RedisAddress
from holdfast.router.tracing import TracingConfig

if TYPE_CHECKING:
    from holdfast.replicas.service import Service

log = getLogger(__name__)


class EngineReplica:
    """A replica that names itself in each answer. Serve awaits the constructor on the loop it uses."""

    async def __init__(  # type: ignore[misc]
        self,
        config: EngineConfig,
        redis: RedisAddress,
        router: RouterConfig,
        logging: LoggingConfig | None = None,
        tracing_config: TracingConfig | None = None,
        report_s: float = 1.0,
    ) -> None:
        from holdfast.replicas.service import Service

        serve_replica.install()
        self._id = serve.get_replica_context().replica_id.unique_id
        logs.configure(logging or LoggingConfig(), f"replica {self._id}")
        self._spans = tracing.start(tracing_config or TracingConfig(), f"replica {self._id}")
        self._early = EarlySender(ray.util.get_node_ip_address())
        told = environment.loading_folder()
        self._service = Service.load(config, partial(loading.write, told, self._id) if told else None)
        # Said by who has the files: a router runs where they are not.
        folder = checks.model_folder(config.model)
        fingerprint = await asyncio.to_thread(checks.fingerprint, folder, config, version("holdfast"))
        self._card = card = replace(self._service.card, replica_id=self._id, fingerprint=fingerprint)
        cells = self._service.engine.load().cells_total
        log.info("the engine is ready", extra=logs.fields(model=card.name, device=config.device, cells=cells))
        self._records = Records(redis, router.store_timeout_s, router.store_retry_s)
        self._tools = ToolWatch(self._records, router.tool_latency_s, self._learn)
        self._served = Served(self._records, "steps", Steps(self._service), report_s)
        self._reporter = Reporter(self._records, self._id, report_s, self._how, self._expect)

    def _how(self) -> LoadReport | None:
        """How it is; None where a step hangs: routers pass it by then, long before Serve has replaced it."""
        return None if self._service.bridge.thread.hung else self._service.engine.load()

    async def _learn(self, latency: LatencySnapshot) -> None:
        self._service.notice(ToolLatencies(latency))

    def _expect(self, scope: str, program_id: str, seconds: float) -> None:
        self._service.notice(ProgramExpected(scope, program_id, seconds))

    async def generate(self, request: GenerateRequest) -> Routed:
        _serving(request)
        span = replica_spans.begin(self._spans, request)
        if span is None:
            return Routed(self._id, await self._service.generate(request))
        try:
            reply = await self._service.generate(request)
            span.reply(reply)
            return Routed(self._id, reply)
        finally:
            span.end()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Batch]:
        _serving(request)
        span = replica_spans.begin(self._spans, request)
        drawing, early = PartialReply(request.drawn), request.early
        try:
            async with aclosing(self._service.stream(request, drawing)) as batches:
                async for pieces in batches:
                    batch = Batch(self._id, pieces, drawn=drawing.take())
                    if self._early.tell(early, batch):
                        await asyncio.sleep(HELD_S)
                    early = None  # the first one only
                    if span is not None:
                        span.pieces(pieces)
                    yield batch
        finally:
            if span is not None:
                span.end()

    async def session(self, call: SessionCall) -> SessionState | Errored:
        """Errors as data: an exception would come out of Ray as another one."""
        try:
            return replace(await self._service.sessions.call(call), replica_id=self._id)
        except HoldfastError as error:
            return Errored(error.info)

    async def sessions(self, scope: str) -> list[SessionState]:
        return [replace(state, replica_id=self._id) for state in self._service.sessions.of(scope)]

    async def end_program(self, scope: str, program_id: str) -> None:
        self._service.notice(ProgramEnded(scope, program_id))

    async def release(self, scope: str, handle: str) -> None:
        self._service.notice(HandleReleased(scope, handle))

    async def drawn(self, request_ids: Sequence[str]) -> list[Usage]:
        """Nothing for what never came here."""
        return [await self._service.used(each) or Usage() for each in request_ids]

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str = "") -> Sequence[int]:
        return await self._service.tokenize(prompt, scope)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return self._service.text.detokenize(tokens)

    async def card(self) -> ModelCard:
        return self._card

    async def metrics(self, only: str | None = None) -> tuple[str, str]:
        """Its id and what it counts; nothing of that where `only` another one is asked."""
        from holdfast.replicas.reports import exposition

        return self._id, exposition(self._service, self._id) if only in (None, self._id) else ""

    async def status(self) -> ReplicaStatus:
        from holdfast.replicas.reports import status_of

        return status_of(self._service, self._id)

    async def activity(self, scope: str | None) -> bytes:
        from holdfast.replicas.reports import told_activity

        return told_activity(self._service, self._id, scope)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve polls it for `cluster.autoscaling`."""
        return self._service.engine.occupancy().demand

    async def check_health(self) -> None:
        thread = self._service.bridge.thread
        if not thread.is_alive():
            raise UnavailableError("the engine thread has died")
        if thread.hung:
            raise UnavailableError("a step of the engine does not end")

    async def __del__(self) -> None:  # Serve awaits it once requests have drained
        await self._reporter.close()
        await self._tools.close()
        await self._served.close()
        await self._records.close()
        self._early.close()
        await self._service.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)


class Steps:
    """The steps of a replica's engine, as what its tenants share."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def contended(self) -> Mapping[str, float]:
        return self._service.engine.contended

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        self._service.notice(ServedElsewhere(elsewhere))


def _serving(request: GenerateRequest) -> None:
    trace_id = request.trace.get("traceparent", "--").split("-")[1]
    logs.serving(About(request.request_id, request.program_id, request.scope, trace_id))
