"""One request that generates, from its arrival to its booked end: its charge, metrics, log line and span.

charge      its tenant's limits have room for what it is expected to need, or it is refused
sent        a replica works for it from now on
answered    a replica has given the whole answer
end         it has its one outcome; what it used is booked
"""

from __future__ import annotations

import logging
import secrets
from asyncio import Task, shield
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import Request

from holdfast.replicas import logs
from holdfast.replicas.errors import ErrorKind, HoldfastError
from holdfast.replicas.logs import About
from holdfast.replicas.requests import NO_WORK, Answer, GenerateRequest, Timing, Usage
from holdfast.replicas.retention.latency import tool_set
from holdfast.router.config import Prices
from holdfast.router.entry.http import answer_headers
from holdfast.router.entry.metrics import Outcome, RouterMetrics, outcome_of
from holdfast.router.entry.quotas import Cost
from holdfast.router.entry.turn_log import TurnFacts, TurnLog
from holdfast.router.entry.usage import CallEnd, UsageBooks, UsageRecord, priced
from holdfast.router.protocol.errors import ClientGoneError, ReplyError, reason
from holdfast.router.records import Run, ToolGap
from holdfast.router.tenants import Principal, Tenant
from holdfast.router.tracing import Carrier, stages

if TYPE_CHECKING:
    from holdfast.router.tracing import Span

log = logging.getLogger(__name__)

NOBODY = Tenant("nobody")  # before authentication
BAD = frozenset({Outcome.FAILED, Outcome.REJECTED, Outcome.ABORTED})
AskDrawn = Callable[[], Awaitable[tuple[Usage, bool]]]


class Call:
    """One request. Its first end counts; later events are not counted."""

    def __init__(
        self, request: Request, endpoint: str, metrics: RouterMetrics, turns: TurnLog, books: UsageBooks
    ) -> None:
        self.request = request
        self.headers = answer_headers(request)
        self.id = secrets.token_hex(12)
        self.principal = Principal(NOBODY)
        self.facts = TurnFacts(endpoint, self.headers.request_id, turns.clock())
        self.charged = False
        self.free = False  # it has been billed already
        self.outcome: Outcome | None = None
        self.first: float | None = None  # when the first token came, on the clock of the metrics
        self._metrics = metrics
        self._turns = turns
        self._books = books
        self._began = metrics.clock()
        self._follows = False  # its program was paused before
        self._over = False  # its program has ended
        self._ask_drawn: AskDrawn | None = None
        self._repeats: Usage | None = None  # of an answer from the response cache
        self._booked: Task[object] | None = None
        self._span: Span | None = None
        self._replica_span: Span | None = None
        if turns.spans is not None:
            self._span = turns.spans.serve(f"POST {request.url.path}", _carrier(request))
        self._trace_id = self._span.trace_id if self._span else ""
        metrics.in_flight.inc()
        if not self.is_prefill:
            turns.begin(self.facts)
        logs.serving(About(trace_id=self._trace_id))

    @property
    def tenant(self) -> Tenant:
        return self.principal.tenant

    @property
    def is_prefill(self) -> bool:
        """Whether it computes a prompt for a later request. Such a call is no turn of a program."""
        return self.facts.endpoint == "prefill"

    @property
    def _labels(self) -> tuple[str, str]:
        return self._metrics.tenant(self.facts.tenant), self.facts.model

    # ---- facts of the request ----

    def asks(self, model: str, stream: bool = False, program: str = "", retry: str = "") -> None:
        """The request is valid. `program` "": the request names none."""
        facts = self.facts
        facts.request_id, facts.model, facts.stream, facts.program, facts.retry = self.id, model, stream, program, retry
        # From 0: alerts see the first.
        self._metrics.requests.labels(*self._labels, facts.endpoint, Outcome.FAILED.value)
        logs.serving(About(self.id, program, facts.tenant, self._trace_id))

    def skipped(self, fields: str) -> None:
        """These fields, items, blocks or tools of the request were left out."""
        self.headers.skipped = fields
        if fields:
            self._metrics.skips.labels(self._labels[0], self.facts.endpoint).inc(fields.count(",") + 1)

    def looked_up(self, result: str) -> None:
        """The result of the look-up in the response cache."""
        self.headers.cache = self.facts.cache = result
        self._metrics.cache.labels(self._labels[0], result).inc()

    def joined_program(self, program: str, pause: ToolGap | None) -> None:
        """The request became a turn of this program, which had paused for `pause`."""
        facts = self.facts
        facts.program, facts.pause = program, pause
        logs.serving(About(facts.request_id, program, facts.tenant, self._trace_id))
        if pause is not None:
            self._follows = True
            self._metrics.tool.labels(*self._labels).observe(pause.seconds)
        if self._span is not None and (before := self._turns.previous(program, self._span.carrier)):
            self._span.link(before)

    async def charge(self, cost: Cost, program: str = "", *, lease: bool = True) -> None:
        """Count the call against its tenant's limits, and with `lease` reserve what it is expected to need until it
        ends. Without, it generates nothing, or could not be read. Raises QuotaError.
        """
        self.charged = True
        limits = self.tenant.limits
        if limits.any if lease else limits.requests_per_minute is not None:
            quotas = self._books.quotas
            self.headers.rate_limit = await quotas.admit(self.tenant, self.id, cost, program, lease=lease)

    # ---- the answer ----

    def asking(self, command: GenerateRequest) -> GenerateRequest:
        """`command` with the trace context for its replica."""
        self._over = command.program_end
        if self._span is None:
            return command
        self._replica_span = self._span.ask("replica")
        return replace(command, trace=self._replica_span.carrier)

    def sent(self, ask_drawn: AskDrawn) -> None:
        """From now on a replica may work for it. If the call is cut off, `ask_drawn` returns its usage, and whether all
        replicas answered.
        """
        self._ask_drawn = ask_drawn

    def first_token(self) -> None:
        if self.first is None:
            self.first = self._metrics.clock()

    def answered(self, replica_id: str, answer: Answer) -> None:
        """A replica has given its whole answer; the client does not have it yet."""
        facts = self.facts
        facts.replica, facts.usage, facts.reason = replica_id, answer.usage, answer.reason
        facts.tools = "" if answer.called.last else tool_set(answer.called.tools)
        facts.stages_ms = stages(answer.timing)
        self._over = self._over or answer.called.last

    def repeats(self, answer: Answer) -> None:
        """The whole answer came from the response cache."""
        self._repeats, self._over = answer.usage, answer.called.last
        self.end(Outcome.CACHED)

    def program_ended(self, run: Run, *, final: bool) -> None:
        """The program's run ended with this turn; `final`: it calls no tool."""
        metrics, labels = self._metrics, self._labels
        metrics.program.labels(*labels).observe(run.seconds)
        metrics.program_turns.labels(*labels).observe(run.turns)
        if final:  # an answer from the response cache comes all at once
            since_first = 0.0 if self.first is None else max(metrics.clock() - self.first, 0.0)
            metrics.ftr.labels(*labels).observe(max(run.seconds - since_first, 0.0))

    # ---- the end ----

    def completed(self, usage: Usage, timing: Timing) -> None:
        """The client has the answer. `timing` is on the replica's clock."""
        metrics, labels, now = self._metrics, self._labels, self._metrics.clock()
        streamed = self.first is not None
        if not streamed and timing.first_token is not None:
            self.first = self._began + timing.first_token - timing.arrived
        first = self.first
        metrics.turn.labels(*labels).observe(now - self._began)
        if first is not None:
            metrics.first_token.labels(*labels).observe(first - self._began)
            if usage.completion > 1:
                metrics.per_token.labels(*labels).observe((now - first) / (usage.completion - 1))
        self.count_tokens(usage)
        if timing.scheduled is not None:
            metrics.queue.labels(*labels).observe(timing.scheduled - timing.arrived)
            if self._follows:
                # What the engine did not work on it: all but its first token, or its whole answer where it is not
                # streamed. A stream's last tokens may wait for their client, so a stream counts to its first token.
                unserved = now - self._began - ((timing.finished or timing.scheduled) - timing.scheduled)
                if streamed and first is not None and timing.first_token is not None:
                    unserved = first - self._began - (timing.first_token - timing.scheduled)
                metrics.bubble.labels(*labels).observe(max(unserved, 0.0))
        self.end(Outcome.COMPLETED, usage)

    def failed(self, error: BaseException) -> None:
        """The request ended in `error`."""
        if self.outcome is not None:
            return
        if isinstance(error, Exception) and not isinstance(error, ClientGoneError):
            label = reason(error) if isinstance(error, HoldfastError) else ErrorKind.INTERNAL.value
            self._metrics.errors.labels(self._labels[0], label).inc()
        used = error.usage if isinstance(error, ReplyError) else None
        if used is not None and used.work != NO_WORK:
            self.count_tokens(used)
        self.end(outcome_of(error), used)

    def count_tokens(self, usage: Usage) -> None:
        """Count the tokens that were computed, cached and generated."""
        for kind, n in (("prompt", usage.prompt), ("cached", usage.cached), ("completion", usage.completion)):
            self._metrics.tokens.labels(*self._labels, kind).inc(n)

    def end(self, outcome: Outcome, usage: Usage | None = None) -> None:
        """The call has ended. `usage` None: the usage is not known; a replica that worked for the call is asked."""
        if self.outcome is not None:
            return
        self.outcome, facts = outcome, self.facts
        seconds = self._metrics.clock() - self._began
        if usage is not None and usage.work != NO_WORK:
            facts.usage = usage
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(*self._labels, facts.endpoint, outcome.value).inc()
        if not self.is_prefill:
            self._turns.end(facts, outcome)
        unknown = usage is None and facts.usage is None and outcome in (Outcome.ABORTED, Outcome.FAILED)
        if unknown and self._ask_drawn is not None:
            self._books.counting.run(self._count(self._ask_drawn, seconds))
        else:
            self._book(facts.usage or usage or self._repeats or Usage(), seconds)
        if log.isEnabledFor(logging.INFO) and not self.is_prefill:
            log.info("turn ended", extra=logs.fields(**_log_fields(facts, outcome), seconds=round(seconds, 6)))
        if self._span is not None:
            self._end_spans(self._span, outcome)

    async def booked(self) -> None:
        """Wait until its end is booked, or Redis is known to be away."""
        if self._booked is not None:
            with suppress(Exception):  # logged where it ran
                await shield(self._booked)

    async def _count(self, ask_drawn: AskDrawn, seconds: float) -> None:
        """Ask replicas for the usage of a request that was cut off, and book it. Its tenant pays if its client left."""
        usage, whole = Usage(), False
        try:
            usage, whole = await ask_drawn()
        finally:
            if not whole:
                self._books.booked["uncounted"] += 1
            self.count_tokens(usage)
            if not self.is_prefill:
                self._turns.of(self.facts.tenant).add(usage)
            counts = {"prompt_tokens": usage.prompt, "cached_tokens": usage.cached}
            fields = logs.fields(http_id=self.facts.http_id, **counts, completion_tokens=usage.completion)
            log.info("cut off turn counted", extra=fields)
            self._book(usage, seconds)

    def _book(self, usage: Usage, seconds: float) -> None:
        assert self.outcome is not None
        worked = self.outcome is not Outcome.REJECTED or usage.work != NO_WORK
        booked = bool(self.facts.model) and not self.free and worked
        if booked or self.id in self._books.quotas.reserved:
            record = _record(self, self.outcome, usage, seconds, self._books.quotas.clock())
            self._booked = self._books.book(CallEnd(record, booked, self.facts.retry, self._over))

    def _end_spans(self, span: Span, outcome: Outcome) -> None:
        facts = self.facts
        if self._replica_span is not None:
            self._replica_span.tell(replica=facts.replica)
            self._replica_span.end()
        if span.recording:
            names = {"request_id": facts.request_id, "program_id": facts.program, "tenant": facts.tenant}
            span.tell(**names, **_log_fields(facts, outcome))
            if outcome in BAD:
                span.fail(outcome.value)
        span.end()


def _record(call: Call, outcome: Outcome, usage: Usage, seconds: float, at: float) -> UsageRecord:
    facts, work = call.facts, usage.work
    prompt, cached = usage.prompt, usage.cached
    if outcome in (Outcome.ABORTED, Outcome.FAILED):  # perhaps not all of its prompt was computed
        prompt = min(prompt, work.computed + work.cached)
        cached = min(cached, prompt)
    return UsageRecord(
        id=call.id,
        at=round(at, 3),
        tenant=call.tenant.name,
        key=call.principal.key_id,
        model=facts.model,
        program=facts.program.partition("/")[2],
        endpoint=facts.endpoint,
        outcome=outcome.value,
        input=prompt,
        cached=cached,
        output=usage.completion,
        drawn=work.drawn,
        drafted=work.drafted,
        computed=0 if call.is_prefill else work.computed,
        ahead=work.computed if call.is_prefill else 0,
        found=work.cached,
        seconds=round(seconds, 6),
        stream=facts.stream,
        replica=facts.replica,
        http_id=facts.http_id,
    )


def _log_fields(facts: TurnFacts, outcome: Outcome) -> dict[str, object]:
    usage, pause = facts.usage, facts.pause
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


def estimate(prices: Prices, answers: int, input_tokens: int, output_tokens: int) -> Cost:
    """The expected cost of a request: its whole prompt uncached, and the most tokens that it may generate."""
    units = round(priced(prices, input_tokens, 0, output_tokens))
    return Cost(answers, input_tokens, input_tokens, output_tokens, units)


def _carrier(request: Request) -> Carrier:
    """The caller's trace context; the propagator refuses what is malformed."""
    headers = request.headers
    sent = {"traceparent": headers.get("traceparent", ""), "tracestate": ",".join(headers.getlist("tracestate"))}
    return {name: value for name, value in sent.items() if value}
