"""All numbers of a replica at one moment, and how a metric finds its own among them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.replicas.histogram import Histogram
from holdfast.replicas.metrics.definition import Kind, Metric
from holdfast.replicas.metrics.process_usage import ProcessUsage
from holdfast.replicas.stats import EngineStats, Occupancy, TextStats


@dataclass(frozen=True, slots=True)
class Reading:
    stats: EngineStats
    now: Occupancy
    text: TextStats
    process: ProcessUsage


Value: TypeAlias = float | Mapping[str, float] | Histogram
Read: TypeAlias = Callable[[Reading], Value]


@dataclass(frozen=True, slots=True)
class ReplicaMetric:
    """`read` gives a number; where the metric has a label of its own, a number for each value of it."""

    metric: Metric
    read: Read


def counter(name: str, unit: str, help_text: str, advice: str, read: Read, *labels: str) -> ReplicaMetric:
    return ReplicaMetric(Metric(f"holdfast_{name}_total", Kind.COUNTER, unit, help_text, advice, labels), read)


def gauge(name: str, unit: str, help_text: str, advice: str, read: Read, *labels: str) -> ReplicaMetric:
    return ReplicaMetric(Metric(f"holdfast_{name}", Kind.GAUGE, unit, help_text, advice, labels), read)
