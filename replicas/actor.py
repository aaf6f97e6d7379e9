"""One replica as an actor: the service, its identity, its health, its metrics and what those who watch are told.

The only file of this folder that knows prometheus_client. `cluster/engine_replica.py` makes a Serve deployment of it.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from holdfast.replicas.activity import activity
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.events import HandleReleased, ProgramEnded, ProgramExpected, ServedElsewhere, ToolLatencies
from holdfast.replicas.metrics import ALL, OWNER, Kind, Reading, Value, process_usage
from holdfast.replicas.metrics import Metric as Definition
from holdfast.replicas.requests import (
    Answer,
    ChatPrompt,
    Errored,
    GenerateRequest,
    ModelCard,
    PartialReply,
    Piece,
    RawPrompt,
    SessionCall,
    SessionState,
    Usage,
)
from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.service import Service
from holdfast.replicas.stats import OTHERS, Histogram, LoadReport, ReplicaStatus, replica_status


class Replica:
    """One engine per GPU, or per share of the cores. Create it on the event loop that uses it; loads for seconds."""

    def __init__(self, config: EngineConfig, replica_id: str) -> None:
        self._id = replica_id
        self.service = Service.load(config)
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(self.service, self._id))

    async def generate(self, request: GenerateRequest) -> Answer | Errored:
        return await self.service.generate(request)

    def stream(
        self, request: GenerateRequest, drawing: PartialReply | None = None
    ) -> AsyncGenerator[tuple[Piece, ...], None]:
        return self.service.stream(request, drawing)

    async def session(self, call: SessionCall) -> SessionState:
        """What is asked of a session besides generating. Raises a HoldfastError."""
        return replace(await self.service.sessions.call(call), replica_id=self._id)

    async def sessions(self, scope: str) -> list[SessionState]:
        """A tenant's open sessions."""
        return [replace(state, replica_id=self._id) for state in self.service.sessions.of(scope)]

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str = "") -> list[int]:
        return await self.service.tokenize(prompt, scope)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self.service.detokenize(tokens)

    async def card(self) -> ModelCard:
        return replace(self.service.card, replica_id=self._id)

    async def metrics(self) -> str:
        """Prometheus text exposition of the engine, every sample labelled with this replica."""
        return generate_latest(self._registry).decode()

    async def status(self) -> ReplicaStatus:
        """What is in use, and what was done since the start."""
        return status_of(self.service, self._id)

    async def learn(self, latency: LatencySnapshot) -> None:
        """How long tools take, as the cluster knows it now."""
        self.service.notice(ToolLatencies(latency))

    @property
    def contended(self) -> Mapping[str, float]:
        """Seconds that were served while others waited, by `<class>/<tenant>`, where tenants share it."""
        return self.service.engine.contended

    def learn_served(self, elsewhere: Mapping[str, float]) -> None:
        """So many more were served by other replicas."""
        self.service.notice(ServedElsewhere(elsewhere))

    async def end_program(self, scope: str, program_id: str) -> None:
        """A program is over: nothing is kept for it any more. Nothing, where this replica does not know it."""
        self.service.notice(ProgramEnded(scope, program_id))

    async def release(self, scope: str, handle: str) -> None:
        """Nobody comes back for what was computed ahead under this handle."""
        self.service.notice(HandleReleased(scope, handle))

    def load(self) -> LoadReport:
        """What routers are to know of it when they place programs."""
        return self.service.engine.load()

    @property
    def hung(self) -> bool:
        """Whether a step of the engine does not end."""
        return self.service.hung

    def expect(self, scope: str, program_id: str, seconds: float) -> None:
        """A program's next turn waits in a router for this replica: its pin lives so much longer."""
        self.service.notice(ProgramExpected(scope, program_id, seconds))

    async def drawn(self, request_id: str) -> Usage | None:
        """What was done for a request whose client has left, once it has ended; None where it never came here."""
        return await self.service.used(request_id)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What this replica has to do and what would be lost with it, polled by Serve for `cluster.autoscaling`."""
        now = self.service.engine.occupancy()
        return {
            "requests": sum(now.turns),
            "waiting_tokens": now.turns_tokens,
            "cell_pressure": (now.cells_held + now.cells_pinned) / now.cells_total,
            "pinned_programs": now.pins,
            "pinned_cells": now.cells_pinned,
        }

    async def check_health(self) -> None:
        if not self.service.alive:
            raise UnavailableError("the engine thread has died")
        if self.hung:
            raise UnavailableError("a step of the engine does not end")

    async def shutdown(self) -> None:
        await self.service.close()


def status_of(service: Service, replica_id: str) -> ReplicaStatus:
    engine = service.engine
    return replica_status(replica_id, service.card.name, engine.config.device, engine.stats, engine.occupancy())


def told_activity(service: Service, replica_id: str, scope: str | None) -> bytes:
    """`activity` in JSON; the status is in it for those who may see all tenants, else null.

    Made here, so that a router passes it on as it is: a thousand rows cost it a copy.
    """
    status = status_of(service, replica_id).row if scope is None else None
    found = activity(service.engine, scope, time.monotonic())
    return orjson.dumps({"replica": replica_id, "status": status, "turns": found.turns, "pins": found.pins})


class EngineCollector(Collector):
    """Everything in `metrics.ALL` as Prometheus families, read when scraped."""

    def __init__(self, service: Service, replica: str) -> None:
        self._service = service
        self._labels = (service.card.name, replica)

    def collect(self) -> Iterator[Metric]:
        engine = self._service.engine
        service = self._service
        asked = service.questions.stats
        pages = engine.cache.tree.tenants.counted(engine.stats.served_s, OTHERS)
        cells = {tenant: n * engine.config.page_size for tenant, n in pages.items()}
        reading = Reading(engine.stats, engine.occupancy(), service.text_stats, process_usage(), asked, cells)
        for each in ALL:
            yield self._family(each.metric, each.read(reading))

    def _family(self, metric: Definition, value: Value) -> Metric:
        labels = (*OWNER, *metric.labels)
        if isinstance(value, Histogram):
            family = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            family.add_metric(self._labels, value.cumulative(), value.total)
            return family
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        found = kind(metric.name.removesuffix("_total"), metric.help, labels=labels)
        for key, number in value.items() if isinstance(value, Mapping) else (("", value),):
            found.add_metric((*self._labels, *((key,) if metric.labels else ())), number)
        return found
