"""One engine as Serve deploys it: `replicas.service` with its identity, health and reports.

The router's process imports this file as well; torch and transformers, which take seconds to import, come in with the
constructor.
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

from ray import serve

from holdfast.cluster import environment, model_files, replica_spans, serve_private
from holdfast.replicas import logs
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ErrorInfo, ErrorKind, HoldfastError, UnavailableError
from holdfast.replicas.logs import About, LoggingConfig
from holdfast.replicas.requests import (
    ChatPrompt,
    Errored,
    GenerateRequest,
    HandleReleased,
    ModelCard,
    PartialReply,
    ProgramEnded,
    RawPrompt,
    ServedElsewhere,
    SessionCall,
    SessionState,
    ToolLatencies,
    Usage,
)
from holdfast.replicas.stats import LoadReport, ReplicaStatus
from holdfast.router import tracing
from holdfast.router.backend import Batch, Routed
from holdfast.router.background import forever
from holdfast.router.config import RouterConfig
from holdfast.router.dispatch import REPORT_S, FairShareSync, Reporter
from holdfast.router.records import Reader, Records, RedisAddress
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
        every_s: float = REPORT_S,
    ) -> None:
        from holdfast.replicas.service import Service

        serve_private.patch_replica()
        self._id = serve.get_replica_context().replica_id.unique_id
        logs.configure(logging or LoggingConfig(), f"replica {self._id}")
        self._spans = tracing.start(tracing_config or TracingConfig(), f"replica {self._id}")
        progress = environment.loading_folder()
        self._service = Service.load(
            config, partial(model_files.write_progress, progress, self._id) if progress else None
        )
        # Made here, where the model's files are; a router may run elsewhere.
        folder = model_files.model_folder(config.model)
        fingerprint = await asyncio.to_thread(model_files.fingerprint, folder, config, version("holdfast"))
        self._card = card = replace(self._service.card, replica_id=self._id, fingerprint=fingerprint)
        cells = self._service.engine.load().cells_total
        log.info("the engine is ready", extra=logs.fields(model=card.name, device=config.device, cells=cells))
        self._records = Records(redis, router.store_timeout_s, router.store_retry_s)
        self._latencies = Reader(self._records)
        looking = forever(self._read_latencies, router.tool_latency_s, "reading the cluster's tool latencies")
        self._looking = asyncio.get_running_loop().create_task(looking)
        self._sync = FairShareSync(self._records, StepSharing(self._service))
        self._sync.start(every_s)
        self._reporter = Reporter(self._records, self._id, self._load, every_s)

    def _load(self) -> LoadReport | None:
        """None while a step hangs: routers eject the replica long before Serve has replaced it."""
        return None if self._service.bridge.thread.hung else self._service.engine.load()

    async def _read_latencies(self) -> None:
        if await self._latencies.refresh():
            self._service.notice(ToolLatencies(self._latencies.snapshot))

    async def generate(self, request: GenerateRequest) -> Routed:
        if (refused := self._misdirected(request.replica)) is not None:
            return Routed(self._id, refused)
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
        if (refused := self._misdirected(request.replica)) is not None:
            yield Batch(self._id, (refused,))
            return
        _serving(request)
        span = replica_spans.begin(self._spans, request)
        drawing = PartialReply(request.drawn)
        try:
            async with aclosing(self._service.stream(request, drawing)) as batches:
                async for pieces in batches:
                    if span is not None:
                        span.pieces(pieces)
                    yield Batch(self._id, pieces, drawn=drawing.take())
        finally:
            if span is not None:
                span.end()

    def _misdirected(self, replica_id: str) -> Errored | None:
        """The answer to a call for a dead replica whose port this replica now has."""
        if replica_id in ("", self._id):
            return None
        return Errored(ErrorInfo(ErrorKind.UNAVAILABLE, f"this is not replica {replica_id}"))

    async def session(self, call: SessionCall, replica_id: str = "") -> SessionState | Errored:
        """Returns errors as data, because Ray changes the type of an exception."""
        if (refused := self._misdirected(replica_id)) is not None:
            return refused
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

    async def drawn(self, request_ids: Sequence[str], replica_id: str = "") -> list[Usage] | None:
        """The usage of requests that were cut off; None: the call was for another replica."""
        if self._misdirected(replica_id) is not None:
            return None
        return [await self._service.used(each) or Usage() for each in request_ids]

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str = "") -> Sequence[int]:
        return await self._service.tokenize(prompt, scope)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return self._service.text.detokenize(tokens)

    async def card(self) -> ModelCard:
        return self._card

    async def metrics(self, only: str | None = None) -> tuple[str, str]:
        """The replica's id and its metrics; no metrics if `only` names another replica."""
        from holdfast.replicas.reports import exposition

        return self._id, exposition(self._service, self._id) if only in (None, self._id) else ""

    async def status(self) -> ReplicaStatus:
        from holdfast.replicas.reports import status_of

        return status_of(self._service, self._id)

    async def activity(self, scope: str | None) -> bytes:
        from holdfast.replicas.reports import told_activity

        return told_activity(self._service, self._id, scope)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve polls this for `cluster.autoscaling`."""
        return self._service.engine.occupancy().demand

    async def check_health(self) -> None:
        thread = self._service.bridge.thread
        if not thread.is_alive():
            raise UnavailableError("the engine thread has died")
        if thread.hung:
            raise UnavailableError("a step of the engine does not end")

    async def __del__(self) -> None:  # Serve awaits it once requests have drained
        self._looking.cancel()
        await asyncio.wait({self._looking})
        await self._reporter.close()
        await self._sync.close()
        await self._records.close()
        await self._service.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)


class StepSharing:
    """A replica's steps, as `FairShareSync` takes them."""

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
