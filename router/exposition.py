"""Prometheus' text: a process' own, with its label on every sample, and one made of several."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from holdfast.replicas.metrics import Metric, MetricKind

SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_info")  # of samples, after their family's name

Read: TypeAlias = Callable[[], float | Mapping[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True, eq=False)
class Watched(Collector):
    """A counter or gauge whose value stands somewhere already: `read` gives it, or one for each tuple of labels."""

    metric: Metric
    read: Read

    def collect(self) -> Iterator[Family]:
        kind = CounterMetricFamily if self.metric.kind is MetricKind.COUNTER else GaugeMetricFamily
        family = kind(self.metric.name.removesuffix("_total"), self.metric.help, labels=self.metric.labels)
        value = self.read()
        for labels, number in value.items() if isinstance(value, Mapping) else (((), value),):
            family.add_metric(labels, number)
        yield family


@dataclass(frozen=True, slots=True, eq=False)
class Labelled(Collector):
    """What `registry` has, with `labels` on every sample. Left out is when each was made, which nobody asks for."""

    registry: CollectorRegistry
    labels: Mapping[str, str]

    def collect(self) -> Iterator[Family]:
        for family in self.registry.collect():
            kept = (each for each in family.samples if not each.name.endswith("_created"))
            family.samples = [Sample(each.name, {**self.labels, **each.labels}, *each[2:]) for each in kept]
            yield family


def own_exposition(registry: CollectorRegistry, labels: Mapping[str, str]) -> str:
    around = CollectorRegistry(auto_describe=False)
    around.register(Labelled(registry, labels))
    return generate_latest(around).decode()


class Merged:
    """One exposition of several: samples of a family stand together under one HELP and TYPE, as scrapers demand."""

    def __init__(self) -> None:
        self._headings: dict[str, dict[str, str]] = {}
        self._samples: dict[str, list[str]] = {}

    def add(self, text: str) -> None:
        """Another process's exposition."""
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, word, family, *_ = line.split(" ", 3)
                self._headings.setdefault(family, {}).setdefault(word, line)
                self._samples.setdefault(family, [])
            elif line and not line.startswith("#"):
                name = line.split("{", 1)[0].split(" ", 1)[0]
                if name.removeprefix(family) not in SUFFIXES:
                    family = name
                self._samples.setdefault(family, []).append(line)

    def families(self) -> Iterator[str]:
        """The text, a family at a time."""
        for family, samples in self._samples.items():
            yield "\n".join((*self._headings.get(family, {}).values(), *samples, ""))
