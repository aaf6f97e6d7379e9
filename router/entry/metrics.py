"""The router's counters and timers, and their Prometheus text. The definitions are in `metric_list`.

Labels come from configuration only (tenant, served model), never from what a client sends.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from holdfast.replicas.errors import ErrorKind, HoldfastError
from holdfast.replicas.metrics import Metric, MetricKind, process_usage
from holdfast.router.metric_list import METRICS
from holdfast.router.protocol.errors import ClientGoneError, Refusal, api_error

OTHER = "other"  # the label of all tenants without series of their own
# Alerts look at the rise of these: a series that begins with a 1 has not risen. So they are 0 from the start.
REFUSED = (Refusal.RATE_LIMITED.value, ErrorKind.OVERLOADED.value, ErrorKind.DEADLINE.value)  # of a tenant
UNKNOWN = Refusal.UNAUTHENTICATED.value  # of nobody

Refresh: TypeAlias = Callable[[], Awaitable[None]]
Read: TypeAlias = Callable[[], float | Mapping[tuple[str, ...], float]]
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_info")  # of samples, after their family's name


class Outcome(StrEnum):
    """The outcome of a request. Each request has exactly one."""

    COMPLETED = "completed"
    CACHED = "cached"  # answered by the response cache
    REJECTED = "rejected"  # refused: the client, or the load, has to change
    FAILED = "failed"
    ABORTED = "aborted"  # the client went away


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of a request that ended in `error`."""
    if isinstance(error, ClientGoneError):
        return Outcome.ABORTED
    if isinstance(error, HoldfastError):
        return Outcome.REJECTED if api_error(error).status < 500 else Outcome.FAILED
    return Outcome.FAILED if isinstance(error, Exception) else Outcome.ABORTED


class RouterMetrics:
    """The router's metrics in `registry`; `router` is this process's id, and a label of all of them."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic, router: str = "router"
    ) -> None:
        self.registry = registry
        self.clock = clock
        self.router = router
        self._named: frozenset[str] | None = None
        self._refreshed: list[Refresh] = []
        self.requests = self._counter("requests_total")
        self.errors = self._counter("request_errors_total")
        self.errors.labels("", UNKNOWN)
        self.in_flight = self._gauge("requests_in_flight")
        self.first_token = self._histogram("time_to_first_token_seconds")
        self.per_token = self._histogram("time_per_output_token_seconds")
        self.turn = self._histogram("turn_seconds")
        self.queue = self._histogram("queue_seconds")
        self.program = self._histogram("program_seconds")
        self.ftr = self._histogram("first_token_rendered_seconds")
        self.program_turns = self._histogram("program_turns")
        self.tool = self._histogram("tool_seconds")
        self.bubble = self._histogram("bubble_seconds")
        self.tokens = self._counter("tenant_tokens_total")
        self.cache = self._counter("response_cache_lookups_total")
        self.skips = self._counter("request_fields_skipped_total")
        self.session_moves = self._counter("session_moves_total")
        self.store = self._counter("store_operations_total")
        self.store_seconds = self._histogram("store_operation_seconds")
        self.watch("router_cpu_seconds_total", lambda: process_usage().cpu_s)
        self.watch("router_memory_bytes", lambda: process_usage().memory)
        self.watch("router_start_time_seconds", lambda: process_usage().started)

    @classmethod
    def unseen(cls) -> Self:
        """Metrics that nobody reads."""
        return cls(CollectorRegistry())

    def watch(self, name: str, read: Read, refresh: Refresh | None = None) -> None:
        """Show a value that is kept elsewhere; `refresh` is awaited before it is read. `name`: as in `metric_list`."""
        self.registry.register(Watched(METRICS[name], read))
        if refresh is not None:
            self._refreshed.append(refresh)

    def name_tenants(self, names: Sequence[str], most: int) -> None:
        """The first `most` of these tenants have series of their own, the others share one."""
        self._named = frozenset(names[:most])
        for name in {self.tenant(each) for each in names}:
            for code in REFUSED:
                self.errors.labels(name, code)

    def tenant(self, name: str) -> str:
        """The label of a tenant; "" if the caller is unknown."""
        return name if not name or self._named is None or name in self._named else OTHER

    def stored(self, seconds: float, done: bool) -> None:
        """An operation on Redis has ended."""
        self.store.labels("done" if done else "failed").inc()
        self.store_seconds.observe(seconds)

    async def exposition(self) -> str:
        """This process's metrics, in Prometheus' text."""
        for refresh in self._refreshed:
            await refresh()
        return own_exposition(self.registry, {"router": self.router})

    def _counter(self, name: str) -> Counter:
        metric = METRICS[name]
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(METRICS[name].name, METRICS[name].help, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        metric = METRICS[name]
        return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self.registry)


# ---- text ----


@dataclass(frozen=True, slots=True, eq=False)
class Watched(Collector):
    """A counter or gauge that is kept elsewhere. `read` gives its value, or one value for each tuple of labels."""

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
    """The metrics of `registry`, with `labels` on every sample, and without the times at which they were made."""

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
