"""The reports of one replica for its observers: metrics, status, and the present requests and pins.

The only file of this folder that knows prometheus_client and orjson.
"""

import time
from collections.abc import Iterator, Mapping

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from holdfast.replicas.engine import Engine
from holdfast.replicas.metrics import ALL, OWNER, MetricKind, Reading, process_usage
from holdfast.replicas.metrics import Metric as Definition
from holdfast.replicas.programs import Kind, Status
from holdfast.replicas.service import Service
from holdfast.replicas.stats import (
    DECODE,
    OTHERS,
    PREFILL,
    QUEUE,
    Histogram,
    PinRow,
    ReplicaStatus,
    TurnRow,
    replica_status,
)


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


def exposition(service: Service, replica_id: str) -> str:
    """The engine's metrics in Prometheus' text format. Every sample has this replica's label."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(service, replica_id))
    return generate_latest(registry).decode()


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
        result = kind(metric.name.removesuffix("_total"), metric.help, labels=labels)
        for key, number in value.items() if isinstance(value, Mapping) else (("", value),):
            result.add_metric((*self._labels, *((key,) if metric.labels else ())), number)
        return result
