"""What is told of each generation request outside of its answer: a log line, a span, and a row while it is served.

A report is opened when a request arrives and closed by its one outcome; what is learnt in between is noted in it.
What is told are names, counts and times, never texts or keys. Metrics are `metrics`'.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from starlette.requests import Request

from holdfast.replicas import logs
from holdfast.replicas.events import Usage
from holdfast.replicas.logs import About
from holdfast.replicas.requests import Answer, GenerateRequest
from holdfast.router.lru import Lru
from holdfast.router.metrics import Outcome
from holdfast.router.programs import Pause
from holdfast.router.server_timing import stages

if TYPE_CHECKING:
    from holdfast.router.spans import Carrier, Span, Spans

log = logging.getLogger(__name__)

PROGRAMS = 4096  # whose last turn is remembered, so that the next one's span has a link to it
FORGET_S = 3600.0
BAD = frozenset({Outcome.FAILED, Outcome.REJECTED, Outcome.ABORTED})


@dataclass(slots=True)
class TurnFacts:
    """What is known of a request so far. Times are in seconds since the epoch; "" and None: not known, or not there."""

    endpoint: str
    http_id: str  # `x-request-id`
    arrived: float
    request_id: str = ""  # the engine's, and the last part of the reply's id
    tenant: str = ""
    program: str = ""
    model: str = ""
    stream: bool = False
    cache: str = ""
    replica: str = ""
    pause: Pause | None = None  # what its program waited for
    usage: Usage | None = None
    reason: str = ""
    stages_ms: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Totals:
    """Of one tenant, since this process began."""

    ended: int = 0  # requests, however they ended
    failed: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.completion_tokens += usage.completion


class TurnReports:
    """Opens reports; `live` are those of the requests being served, `totals` count those that ended, by tenant.

    `spans` None: no tracing.
    """

    def __init__(self, spans: Spans | None = None, clock: Callable[[], float] = time.time) -> None:
        self._spans = spans
        self.clock = clock
        self.totals: dict[str, Totals] = {}
        self._live: dict[int, TurnReport] = {}
        self._turns: Lru[Carrier] = Lru(PROGRAMS)

    @property
    def live(self) -> list[TurnFacts]:
        return [report.facts for report in self._live.values()]

    def begin(self, request: Request, endpoint: str, http_id: str) -> TurnReport:
        """The report of a request that has just come."""
        facts = TurnFacts(endpoint, http_id, self.clock())
        span = self._spans.serve(f"POST {request.url.path}", _carrier(request)) if self._spans else None
        report = TurnReport(self, facts, span)
        self._live[id(report)] = report
        logs.serving(About(trace_id=report.trace_id))
        return report

    def previous(self, program: str, carrier: Carrier) -> Carrier | None:
        """Where the span of a program's turn before is, and from now on this one's."""
        now = self.clock()
        before = self._turns.get(program, now)
        self._turns.put(program, carrier, now + FORGET_S)
        return before

    def closed(self, report: TurnReport, outcome: Outcome) -> None:
        """A report's request has ended."""
        self._live.pop(id(report), None)
        if not report.facts.tenant:
            return
        totals = self.totals.setdefault(report.facts.tenant, Totals())
        totals.ended += 1
        totals.failed += outcome is Outcome.FAILED
        totals.rejected += outcome is Outcome.REJECTED
        if usage := report.facts.usage:
            totals.add(usage)


class TurnReport:
    """One request. `ended` counts once; what is noted afterwards is not told."""

    def __init__(self, home: TurnReports, facts: TurnFacts, span: Span | None) -> None:
        self._home = home
        self.facts = facts
        self._span = span
        self._asked: Span | None = None
        self.trace_id = span.trace_id if span else ""

    def accepted(self, request_id: str, tenant: str, program: str, model: str, stream: bool) -> None:
        """It is valid, and this is whose it is; `program` "": it names none."""
        facts = self.facts
        facts.request_id, facts.tenant, facts.program = request_id, tenant, program
        facts.model, facts.stream = model, stream
        logs.serving(About(request_id, program, tenant, self.trace_id))

    def began(self, program: str, pause: Pause | None) -> None:
        """It is a turn of this program, which has waited so long."""
        facts = self.facts
        facts.program, facts.pause = program, pause
        logs.serving(About(facts.request_id, program, facts.tenant, self.trace_id))
        if self._span is not None and (before := self._home.previous(program, self._span.carrier)):
            self._span.link(before)

    def asking(self, request: GenerateRequest) -> GenerateRequest:
        """`request` on its way to a replica, with the context in which that goes on."""
        if self._span is None:
            return request
        self._asked = self._span.ask("replica")
        return replace(request, trace=self._asked.carrier)

    def answered(self, replica_id: str, answer: Answer) -> None:
        """A replica has given its whole answer."""
        facts = self.facts
        facts.replica, facts.usage, facts.reason = replica_id, answer.usage, answer.reason
        facts.stages_ms = stages(answer.timing)

    def used(self, usage: Usage) -> None:
        """So much was done for it although its client had left: known only after it has ended."""
        self._home.totals.setdefault(self.facts.tenant, Totals()).add(usage)
        if log.isEnabledFor(logging.INFO):
            told = {"prompt_tokens": usage.prompt, "cached_tokens": usage.cached, "completion_tokens": usage.completion}
            log.info("aborted turn counted", extra=logs.fields(http_id=self.facts.http_id, **told))

    def ended(self, outcome: Outcome) -> None:
        self._home.closed(self, outcome)
        seconds = self._home.clock() - self.facts.arrived
        if log.isEnabledFor(logging.INFO):
            log.info("turn ended", extra=logs.fields(**self._told(outcome), seconds=round(seconds, 6)))
        if self._span is not None:
            self._end_spans(self._span, outcome)

    def _told(self, outcome: Outcome) -> dict[str, object]:
        facts, usage, pause = self.facts, self.facts.usage, self.facts.pause
        return {
            "outcome": outcome.value,
            "endpoint": facts.endpoint,
            "http_id": facts.http_id,
            "model": facts.model,
            "stream": facts.stream,
            "cache": facts.cache,
            "replica": facts.replica,
            "finish_reason": facts.reason,
            "prompt_tokens": usage and usage.prompt,
            "cached_tokens": usage and usage.cached,
            "completion_tokens": usage and usage.completion,
            "tool_wait_s": pause and round(pause.seconds, 6),
            "tools": pause and pause.tools,
            **{f"{name}_ms": value for name, value in facts.stages_ms.items()},
        }

    def _end_spans(self, span: Span, outcome: Outcome) -> None:
        if self._asked is not None:
            self._asked.tell(replica=self.facts.replica)
            self._asked.end()
        facts = self.facts
        if not span.recording:
            span.end()
            return
        span.tell(request_id=facts.request_id, program_id=facts.program, tenant=facts.tenant, **self._told(outcome))
        if outcome in BAD:
            span.fail(outcome.value)
        span.end()


def _carrier(request: Request) -> Carrier:
    """The caller's trace context; the propagator refuses what is malformed."""
    headers = request.headers
    given = {"traceparent": headers.get("traceparent", ""), "tracestate": ",".join(headers.getlist("tracestate"))}
    return {name: value for name, value in given.items() if value}
