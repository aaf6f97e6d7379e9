"""What is told of each generation request outside of its answer: a log line, a span, and a row for those who watch.

A report is opened when a request arrives and closed by its one outcome; what is learnt in between is noted in it. The
latest ones that were turns of programs are remembered.
What is told are names, counts and times, never texts or keys. Metrics are `metrics`'.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from starlette.requests import Request

from holdfast.replicas import logs
from holdfast.replicas.logs import About
from holdfast.replicas.requests import NO_WORK, Answer, GenerateRequest, Usage
from holdfast.replicas.retention.latency import tool_set
from holdfast.router.accounts import Admission, Served
from holdfast.router.lru import SHARE, Lru
from holdfast.router.metrics import Outcome
from holdfast.router.programs import ToolGap
from holdfast.router.server_timing import stages

if TYPE_CHECKING:
    from holdfast.router.spans import Carrier, Span, Spans

log = logging.getLogger(__name__)

PROGRAMS = 4096  # whose last turn is remembered, so that the next one's span has a link to it
FORGET_S = 3600.0
REMEMBERED = 8192  # turns that have ended; the tenant with most of them loses its oldest ones
BAD = frozenset({Outcome.FAILED, Outcome.REJECTED, Outcome.ABORTED})


@dataclass(slots=True)
class TurnFacts:
    """What is known of a request so far. Times are in seconds since the epoch; "" and None: not known, or not there."""

    endpoint: str
    http_id: str  # `x-request-id`
    arrived: float
    retry: str = ""
    request_id: str = ""  # the engine's, and the last part of the reply's id
    tenant: str = ""
    program: str = ""
    model: str = ""
    stream: bool = False
    cache: str = ""
    replica: str = ""
    pause: ToolGap | None = None  # what its program waited for
    usage: Usage | None = None
    reason: str = ""
    tools: str = ""  # what it called, and its program waits for now
    stages_ms: dict[str, float] = field(default_factory=dict)


# A turn that has ended, as it is remembered: seconds of its stages, then counts of tokens.
ENDED = (
    *("program", "request", "arrived", "ended", "outcome", "replica", "tools", "queue_s", "prefill_s", "decode_s"),
    *("prompt", "cached", "drawn", "drafted", "accepted"),
)
EndedRow: TypeAlias = tuple[
    str, str, float, float, str, str, str, float, float, float, int, int, int, int, int
]  # as `ENDED` says


@dataclass(frozen=True, slots=True)
class Ended:
    """A turn of a program that has ended. `number` is when, in microseconds: no two turns have the same, and it tells a
    tenant nothing of how many turns others had.
    """

    number: int
    tenant: str
    row: EndedRow


@dataclass(slots=True)
class Totals:
    """Of one tenant, since this process began."""

    ended: int = 0  # requests, however they ended
    failed: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these
    cached_answers: int = 0  # requests answered by the response cache: none of their tokens are in the counts above

    def add(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.completion_tokens += usage.completion
        self.drafted_tokens += usage.work.drafted
        self.accepted_tokens += usage.work.accepted


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
        self._number = 0  # of the last one that was remembered
        self._ended: Lru[Ended] = Lru(REMEMBERED, share=SHARE)

    @property
    def live(self) -> list[TurnFacts]:
        return [report.facts for report in self._live.values()]

    @property
    def number(self) -> int:
        """No turn that has ended has a greater one, and each that will end has."""
        return max(self._number, int(self.clock() * 1e6))

    def ended(self, after: int, tenant: str | None, most: int) -> list[Ended]:
        """At most so many turns of a tenant, or of all where that is None, with greater numbers, the latest first."""
        newer = takewhile(lambda each: each.number > after, (ended for _, ended in self._ended.latest(0.0)))
        return list(islice((each for each in newer if tenant is None or each.tenant == tenant), most))

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
        totals.cached_answers += outcome is Outcome.CACHED
        if usage := report.facts.usage:
            totals.add(usage)
        if report.facts.program:
            self._remember(report.facts, outcome)

    def _remember(self, facts: TurnFacts, outcome: Outcome) -> None:
        usage, stages_ms = facts.usage or Usage(), facts.stages_ms
        queue_s, prefill_s, decode_s = (
            round(stages_ms.get(name, 0.0) / 1e3, 4) for name in ("queue", "prefill", "decode")
        )
        row = (
            *(facts.program, facts.request_id, round(facts.arrived, 3), round(self.clock(), 3), outcome.value),
            *(facts.replica, facts.tools, queue_s, prefill_s, decode_s),
            *(usage.prompt, usage.cached, usage.completion, usage.work.drafted, usage.work.accepted),
        )
        self._number = max(self._number, int(self.clock() * 1e6)) + 1
        self._ended.put(str(self._number), Ended(self._number, facts.tenant, row), inf, owner=facts.tenant)


class TurnReport:
    """One request. `ended` counts once; what is noted afterwards is not told."""

    def __init__(self, home: TurnReports, facts: TurnFacts, span: Span | None) -> None:
        self._home = home
        self.facts = facts
        self._span = span
        self._came = time.monotonic()  # `facts.arrived` is the time of day, which may be set back
        self._asked: Span | None = None
        self.admission: Admission | None = None  # where its end is booked
        self._sent = False
        self._over = False
        self._usage: Usage | None = None  # of an answer from the response cache
        self._outcome: Outcome | None = None  # of one that was cut off
        self._counted: Usage | None = None  # what was done for that
        self.trace_id = span.trace_id if span else ""

    def accepted(self, request_id: str, tenant: str, program: str, model: str, stream: bool) -> None:
        """It is valid, and this is whose it is; `program` "": it names none."""
        facts = self.facts
        facts.request_id, facts.tenant, facts.program = request_id, tenant, program
        facts.model, facts.stream = model, stream
        logs.serving(About(request_id, program, tenant, self.trace_id))

    def began(self, program: str, pause: ToolGap | None) -> None:
        """It is a turn of this program, which has waited so long."""
        facts = self.facts
        facts.program, facts.pause = program, pause
        logs.serving(About(facts.request_id, program, facts.tenant, self.trace_id))
        if self._span is not None and (before := self._home.previous(program, self._span.carrier)):
            self._span.link(before)

    def asking(self, request: GenerateRequest) -> GenerateRequest:
        """`request` on its way to a replica, with the context in which that goes on."""
        self._over = request.program_end
        if self._span is None:
            return request
        self._asked = self._span.ask("replica")
        return replace(request, trace=self._asked.carrier)

    def sent(self) -> None:
        """From now on a replica may work for it: if it is cut off, that is asked what it did."""
        self._sent = True

    def answered(self, replica_id: str, answer: Answer) -> None:
        """A replica has given its whole answer."""
        facts = self.facts
        facts.replica, facts.usage, facts.reason = replica_id, answer.usage, answer.reason
        facts.tools = "" if answer.called.last else tool_set(answer.called.tools)
        facts.stages_ms = stages(answer.timing)
        self._over = self._over or answer.called.last

    def repeated(self, answer: Answer) -> None:
        """The response cache has its whole answer."""
        self._usage, self._over = answer.usage, answer.called.last

    def used(self, usage: Usage) -> None:
        """So much was done for it although it was cut off: known only after it has ended."""
        self._home.totals.setdefault(self.facts.tenant, Totals()).add(usage)
        if log.isEnabledFor(logging.INFO):
            told = {"prompt_tokens": usage.prompt, "cached_tokens": usage.cached, "completion_tokens": usage.completion}
            log.info("cut off turn counted", extra=logs.fields(http_id=self.facts.http_id, **told))

    def counted(self, usage: Usage) -> None:
        """All that was done for it although it was cut off."""
        self._counted = usage
        self._book_counted()

    def _book_counted(self) -> None:
        if self._outcome is not None and self._counted is not None:
            self._book(self._outcome, self._counted)

    def ended(self, outcome: Outcome, used: Usage | None = None) -> None:
        """`used`: by a reply that failed; None where nobody has told."""
        if used is not None and used.work != NO_WORK:
            self.facts.usage = used
        self._home.closed(self, outcome)
        known = used is not None or self.facts.usage is not None
        if not known and self._sent and outcome in (Outcome.ABORTED, Outcome.FAILED):
            self._outcome = outcome  # what was done for it is counted later
            self._book_counted()
        else:
            self._book(outcome, self.facts.usage or self._usage or Usage())
        if log.isEnabledFor(logging.INFO):
            log.info("turn ended", extra=logs.fields(**self._told(outcome), seconds=round(self._seconds, 6)))
        if self._span is not None:
            self._end_spans(self._span, outcome)

    @property
    def _seconds(self) -> float:
        """Since it came."""
        return time.monotonic() - self._came

    def _book(self, outcome: Outcome, usage: Usage) -> None:
        if self.admission is None:
            return
        facts = self.facts
        served = Served(
            model=facts.model,
            program=facts.program.partition("/")[2],
            endpoint=facts.endpoint,
            stream=facts.stream,
            replica=facts.replica,
            http_id=facts.http_id,
            retry=facts.retry,
            over=self._over,
        )
        self.admission.end(outcome.value, usage, self._seconds, served)

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
