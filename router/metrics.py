"""What the router counts and times. What there is stands in `metric_list`, its text is made in `exposition`.

Labels come from configuration only (tenant, served model), never from what a client sends.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Self, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from holdfast.replicas.errors import ErrorKind, HoldfastError
from holdfast.replicas.metrics import Metric, process_usage
from holdfast.replicas.requests import NO_WORK, Timing, Usage
from holdfast.router import metric_list as listed
from holdfast.router.exposition import Read, Watched, own_exposition
from holdfast.router.http import ClientGoneError
from holdfast.router.programs import Run
from holdfast.router.protocol.errors import Refusal, ReplyError, api_error, reason

OTHER = "other"  # the tenant whose series are those of all that have none of their own
# Of these the first one counts: alerts look at how many came, and a series that begins with a 1 has risen by nothing.
# So they stand at 0 from the start.
REFUSED = (Refusal.RATE_LIMITED.value, ErrorKind.OVERLOADED.value, ErrorKind.DEADLINE.value)  # of a tenant
UNKNOWN = Refusal.UNAUTHENTICATED.value  # of nobody

Refresh: TypeAlias = Callable[[], Awaitable[None]]


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
    """The router's metrics in `registry`; `router` is this process's id, and a label of all of them."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic, router: str = "router"
    ) -> None:
        self.registry = registry
        self.clock = clock
        self.router = router
        self._named: frozenset[str] | None = None
        self._refreshed: list[Refresh] = []
        self.requests = self._counter(listed.REQUESTS)
        self.errors = self._counter(listed.ERRORS)
        self.errors.labels("", UNKNOWN)
        self.in_flight = Gauge(listed.IN_FLIGHT.name, listed.IN_FLIGHT.help, registry=registry)
        self.first_token = self._histogram(listed.FIRST_TOKEN)
        self.per_token = self._histogram(listed.PER_TOKEN)
        self.turn = self._histogram(listed.TURN)
        self.queue = self._histogram(listed.QUEUE)
        self.program = self._histogram(listed.PROGRAM)
        self.program_turns = self._histogram(listed.PROGRAM_TURNS)
        self.tool = self._histogram(listed.TOOL)
        self.bubble = self._histogram(listed.BUBBLE)
        self.tokens = self._counter(listed.TENANT_TOKENS)
        self.cache = self._counter(listed.CACHE)
        self.skips = self._counter(listed.SKIPPED)
        self.session_moves = self._counter(listed.SESSION_MOVES)
        self.store = self._counter(listed.STORE_OPERATIONS)
        self.store_seconds = self._histogram(listed.STORE_SECONDS_TAKEN)
        self.watch(listed.CPU, lambda: process_usage().cpu_s)
        self.watch(listed.MEMORY, lambda: process_usage().memory)
        self.watch(listed.STARTED, lambda: process_usage().started)

    @classmethod
    def unseen(cls) -> Self:
        """Counts that nobody reads."""
        return cls(CollectorRegistry())

    def watch(self, metric: Metric, read: Read, refresh: Refresh | None = None) -> None:
        """Show a value that stands elsewhere; `refresh` is awaited before it is read."""
        self.registry.register(Watched(metric, read))
        if refresh is not None:
            self._refreshed.append(refresh)

    def name_tenants(self, names: Sequence[str], most: int) -> None:
        """The first `most` of these tenants have series of their own, the others share those of one."""
        self._named = frozenset(names[:most])
        for name in {self.tenant(each) for each in names}:
            for why in REFUSED:
                self.errors.labels(name, why)

    def tenant(self, name: str) -> str:
        """The label of a tenant; "" where it is not known who called."""
        return name if not name or self._named is None or name in self._named else OTHER

    def refused(self, error: HoldfastError) -> None:
        """A call that generates nothing was not let in, whoever it came from."""
        self.errors.labels("", reason(error)).inc()

    def stored(self, seconds: float, done: bool) -> None:
        """An operation on Redis has ended."""
        self.store.labels("done" if done else "failed").inc()
        self.store_seconds.observe(seconds)

    async def exposition(self) -> str:
        """What this process has, in Prometheus' text."""
        for refresh in self._refreshed:
            await refresh()
        return own_exposition(self.registry, {"router": self.router})

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self.registry)


class Meter:
    """Times one request and counts how it ended, once."""

    def __init__(self, metrics: RouterMetrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._started = metrics.clock()
        self._first: float | None = None
        self._ended = False
        self._follows = False
        self.tenant = ""  # empty until they are known
        self.model = ""
        self.on_end: Callable[[Outcome, Usage | None], None] = lambda outcome, used: None  # as `end`
        metrics.in_flight.inc()

    def asks(self, model: str) -> None:
        """The request is for `model`."""
        self.model = model
        self._metrics.requests.labels(*self._who, self._endpoint, Outcome.FAILED.value)  # from 0, as `REFUSED`

    def first_token(self) -> None:
        """The first token has come."""
        if self._first is None:
            self._first = self._metrics.clock()

    def resumed(self, pause_s: float) -> None:
        """The request is the next turn of a program whose tools took so long."""
        self._follows = True
        self._metrics.tool.labels(*self._who).observe(pause_s)

    def looked_up(self, result: str) -> None:
        """What the response cache said."""
        self._metrics.cache.labels(self._who[0], result).inc()

    def skipped(self, n: int) -> None:
        """So many fields, items, blocks or tools of the request were left out."""
        self._metrics.skips.labels(self._who[0], self._endpoint).inc(n)

    def answered(self, usage: Usage, timing: Timing) -> None:
        """The request completed; `timing` is on its replica's clock."""
        metrics, who, now = self._metrics, self._who, self._metrics.clock()
        first = self._first
        if first is None and timing.first_token is not None:  # not streamed
            first = self._started + timing.first_token - timing.arrived
        metrics.turn.labels(*who).observe(now - self._started)
        if first is not None:
            metrics.first_token.labels(*who).observe(first - self._started)
            if usage.completion > 1:
                metrics.per_token.labels(*who).observe((now - first) / (usage.completion - 1))
        self.used(usage)
        if timing.scheduled is not None:
            metrics.queue.labels(*who).observe(timing.scheduled - timing.arrived)
            if self._follows:
                metrics.bubble.labels(*who).observe(max(self._unserved(timing, timing.scheduled, now), 0.0))
        self.end(Outcome.COMPLETED)

    def used(self, usage: Usage) -> None:
        """So many tokens were computed, cached and drawn for the request, however it ended."""
        for kind, n in (("prompt", usage.prompt), ("cached", usage.cached), ("completion", usage.completion)):
            self._metrics.tokens.labels(*self._who, kind).inc(n)

    def program_ended(self, run: Run) -> None:
        """The request was the last of its program's turns, for now."""
        self._metrics.program.labels(*self._who).observe(run.seconds)
        self._metrics.program_turns.labels(*self._who).observe(run.turns)

    def failed(self, error: BaseException) -> None:
        """The request ended in `error`."""
        if not self._ended and isinstance(error, Exception) and not isinstance(error, ClientGoneError):
            why = reason(error) if isinstance(error, HoldfastError) else ErrorKind.INTERNAL.value
            self._metrics.errors.labels(self._who[0], why).inc()
        used = error.usage if isinstance(error, ReplyError) else None
        if not self._ended and used is not None and used.work != NO_WORK:
            self.used(used)
        self.end(outcome_of(error), used)

    def end(self, outcome: Outcome, used: Usage | None = None) -> None:
        """The request has ended; `used` by a reply that failed, None where nobody tells. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(*self._who, self._endpoint, outcome.value).inc()
        self.on_end(outcome, used)

    @property
    def _who(self) -> tuple[str, str]:
        return self._metrics.tenant(self.tenant), self.model

    def _unserved(self, timing: Timing, scheduled: float, now: float) -> float:
        """Seconds in which the engine did not work on the request: all but those of its first token, or of its all.

        A stream's last tokens may wait for their client, so there it counts to the first one.
        """
        if self._first is not None and timing.first_token is not None:
            return self._first - self._started - (timing.first_token - scheduled)
        return now - self._started - ((timing.finished or scheduled) - scheduled)
