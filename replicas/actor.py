"""One replica as an actor: the service, its identity, health, metrics and status.

The only file of this folder that knows prometheus_client. `cluster/engine_replica.py` makes a Serve deployment of it.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.metrics import ALL, OWNER, MetricKind, Reading, process_usage
from holdfast.replicas.metrics import Metric as Definition
from holdfast.replicas.programs import Kind, Status
from holdfast.replicas.requests import ModelCard, SessionCall, SessionState
from holdfast.replicas.service import Service
from holdfast.replicas.stats import (
    DECODE,
    OTHERS,
    PREFILL,
    QUEUE,
    Histogram,
    LoadReport,
    PinRow,
    ReplicaStatus,
    TurnRow,
    replica_status,
)


class Replica:
    """A service and its reports: identity, health, load, metrics. Create it on the event loop that uses it."""

    def __init__(self, config: EngineConfig, replica_id: str) -> None:
        self._id = replica_id
        self.service = Service.load(config)
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(self.service, self._id))

    async def session(self, call: SessionCall) -> SessionState:
        """Execute a session call. Raises a HoldfastError."""
        return replace(await self.service.sessions.call(call), replica_id=self._id)

    def sessions(self, scope: str) -> list[SessionState]:
        """A tenant's open sessions."""
        return [replace(state, replica_id=self._id) for state in self.service.sessions.of(scope)]

    @property
    def card(self) -> ModelCard:
        return replace(self.service.card, replica_id=self._id)

    def metrics(self) -> str:
        """The engine's metrics in Prometheus' text format. Every sample has this replica's label."""
        return generate_latest(self._registry).decode()

    def status(self) -> ReplicaStatus:
        return status_of(self.service, self._id)

    def load(self) -> LoadReport:
        return self.service.engine.load()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The replica's work, and what would be lost with it. Serve polls it for `cluster.autoscaling`."""
        now = self.service.engine.occupancy()
        return {
            "requests": sum(now.turns),
            "waiting_tokens": now.turns_tokens,
            "cell_pressure": (now.cells_held + now.cells_pinned) / now.cells_total,
            "pinned_programs": now.pins,
            "pinned_cells": now.cells_pinned,
        }

    def check_health(self) -> None:
        """Raises UnavailableError."""
        if not self.service.bridge.thread.is_alive():
            raise UnavailableError("the engine thread has died")
        if self.service.bridge.thread.hung:
            raise UnavailableError("a step of the engine does not end")


def status_of(service: Service, replica_id: str) -> ReplicaStatus:
    engine = service.engine
    return replica_status(replica_id, service.card.name, engine.config.device, engine.stats, engine.occupancy())


def told_activity(service: Service, replica_id: str, scope: str | None) -> bytes:
    """`activity` in JSON, with the status if all tenants are requested (`scope` None), else null.

    A router passes the bytes on unchanged, because parsing a thousand rows would cost too much there.
    """
    status = status_of(service, replica_id) if scope is None else None
    turns, pins = activity(service.engine, scope, time.monotonic())
    return orjson.dumps({"replica": replica_id, "status": status, "turns": turns, "pins": pins})


def activity(engine: Engine, scope: str | None, now: float) -> tuple[list[TurnRow], list[PinRow]]:
    """The live requests and the pins of one tenant, or of all if `scope` is None. Any thread may call it.

    The engine runs meanwhile, so each row is consistent in itself, but rows may be of different moments.
    """
    turns, pins = list[TurnRow](), list[PinRow]()
    for each in list(engine.live.values()):
        if scope in (None, each.submit.scope) and not each.background:
            drawn, computed = each.length - each.n_prompt, min(each.n_computed, each.n_prompt)
            phase = QUEUE if each.status is Status.WAITING else DECODE if drawn else PREFILL
            turns.append((each.request_id, phase, each.n_prompt, each.n_cached, computed, drawn))
    for pin in engine.scheduler.retention.pins:
        if scope in (None, pin.scope) and pin.program.key.kind is not Kind.HANDLE:
            since, worth, until = pin.since, min(pin.lapse, pin.deadline), pin.deadline
            seconds = round(now - since, 3), round(worth - now, 3), round(until - now, 3)
            pins.append((pin.program.key.name, pin.pin.length, *seconds))
    return turns, pins


class EngineCollector(Collector):
    """Exposes `metrics.ALL` as Prometheus families, read on every scrape."""

    def __init__(self, service: Service, replica: str) -> None:
        self._service = service
        self._labels = (service.card.name, replica)

    def collect(self) -> Iterator[Metric]:
        service, engine = self._service, self._service.engine
        pages = engine.cache.tree.tenants.counted(engine.stats.served_s, OTHERS)
        cells = {tenant: n * engine.config.page_size for tenant, n in pages.items()}
        reading = Reading(
            engine.stats, engine.occupancy(), service.text.stats, process_usage(), service.questions.stats, cells
        )
        for metric in ALL:
            yield self._family(metric, reading.value(metric))

    def _family(self, metric: Definition, value: float | Mapping[str, float] | Histogram) -> Metric:
        labels = (*OWNER, *metric.labels)
        if isinstance(value, Histogram):
            family = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            family.add_metric(self._labels, value.cumulative(), value.total)
            return family
        kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
        found = kind(metric.name.removesuffix("_total"), metric.help, labels=labels)
        for key, number in value.items() if isinstance(value, Mapping) else (("", value),):
            found.add_metric((*self._labels, *((key,) if metric.labels else ())), number)
        return found
