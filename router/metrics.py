"""What the router counts and times, and one exposition made of its own and the replicas'.

Labels come from configuration only (tenant, served model), never from what a client sends.
"""

import time
from collections.abc import Callable, Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from holdfast.replicas.errors import HoldfastError
from holdfast.router.event_stream import ClientGoneError
from holdfast.router.protocol.errors import api_error

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_info")  # of samples, after their family's name
TURN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Outcome(StrEnum):
    """How a request ended; every one ends in exactly one of these."""

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
    """The router's metrics in `registry`."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry
        self.clock = clock
        who = ("tenant", "model")
        self.requests = Counter(
            "holdfast_requests_total",
            "Generation requests by how they ended: completed, cached, rejected, failed or aborted.",
            (*who, "endpoint", "outcome"),
            registry=registry,
        )
        self.in_flight = Gauge("holdfast_requests_in_flight", "Generation requests being served.", registry=registry)
        self.first_token = Histogram(
            "holdfast_time_to_first_token_seconds",
            "From a request's arrival at the router to its first token.",
            who,
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "holdfast_time_per_output_token_seconds",
            "Mean time between the output tokens of a request after its first.",
            who,
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self.turn = Histogram(
            "holdfast_turn_seconds",
            "From a completed request's arrival at the router to its last token; without response-cache hits.",
            who,
            buckets=TURN_SECONDS,
            registry=registry,
        )
        self.cache = Counter(
            "holdfast_response_cache_lookups_total",
            "Response cache look-ups by result: hit, miss or bypass.",
            ("tenant", "result"),
            registry=registry,
        )
        self.degraded = Gauge(
            "holdfast_store_degraded",
            "1 while Redis is away and values are kept in this process's memory.",
            registry=registry,
        )


class Meter:
    """Times one request and counts how it ended, once."""

    def __init__(self, metrics: RouterMetrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._started = metrics.clock()
        self._first: float | None = None
        self._ended = False
        self.tenant = ""  # empty until they are known
        self.model = ""
        metrics.in_flight.inc()

    def first_token(self) -> None:
        """The first token has come."""
        if self._first is None:
            self._first = self._metrics.clock()

    def answered(self, tokens: int, first_token_s: float | None = None) -> None:
        """The request completed with `tokens` output tokens.

        `first_token_s` is how long its first token took, for a request that was not streamed.
        """
        now = self._metrics.clock()
        first = self._started + first_token_s if first_token_s is not None else self._first
        self._metrics.turn.labels(self.tenant, self.model).observe(now - self._started)
        if first is not None:
            self._metrics.first_token.labels(self.tenant, self.model).observe(first - self._started)
            if tokens > 1:
                self._metrics.per_token.labels(self.tenant, self.model).observe((now - first) / (tokens - 1))
        self.end(Outcome.COMPLETED)

    def end(self, outcome: Outcome) -> None:
        """The request has ended. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(self.tenant, self.model, self._endpoint, outcome.value).inc()


def exposition(metrics: RouterMetrics, others: Iterable[str]) -> str:
    """The text exposition of the router's own metrics and of `others`, each family once."""
    return merge_expositions([generate_latest(metrics.registry).decode(), *others])


def merge_expositions(texts: Iterable[str]) -> str:
    """One exposition of several: samples of a family stand together under one HELP and TYPE, as scrapers demand."""
    headings: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, word, family, *_ = line.split(" ", 3)
                headings.setdefault(family, {}).setdefault(word, line)
                samples.setdefault(family, [])
            elif line and not line.startswith("#"):
                name = line.split("{", 1)[0].split(" ", 1)[0]
                if name.removeprefix(family) not in SUFFIXES:
                    family = name
                samples.setdefault(family, []).append(line)
    lines: list[str] = []
    for family, found in samples.items():
        lines.extend(headings.get(family, {}).values())
        lines.extend(found)
    return "\n".join(lines) + "\n"
