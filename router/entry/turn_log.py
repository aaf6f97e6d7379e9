"""The turns that a router serves now and served lately, for the page and for `/v1/cluster/status`.

Here are names, counts and times, never texts or keys. Metrics are `metrics`'.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf
from typing import TYPE_CHECKING

from holdfast.replicas.requests import Usage
from holdfast.router.entry.metrics import Outcome
from holdfast.router.records import SHARE, Lru, ToolGap

if TYPE_CHECKING:
    from holdfast.router.tracing import Carrier, Spans

PROGRAMS = 4096  # whose last turn is remembered, so that the next one's span is linked to it
FORGET_S = 3600.0
REMEMBERED = 8192  # turns that have ended; the tenant with most of them loses its oldest ones


@dataclass(slots=True)
class TurnFacts:
    """The facts of a request so far. Times are in seconds since the epoch; "" and None: unknown, or absent."""

    endpoint: str
    http_id: str  # `x-request-id`
    arrived: float
    retry: str = ""  # what the tries of one request have in common
    request_id: str = ""  # the engine's, and the last part of the reply's id
    tenant: str = ""
    program: str = ""  # its key
    model: str = ""
    stream: bool = False
    cache: str = ""
    replica: str = ""
    pause: ToolGap | None = None  # its program's, before this turn
    usage: Usage | None = None
    reason: str = ""
    tools: str = ""  # the tools that the answer calls, and that its program waits for
    stages_ms: dict[str, float] = field(default_factory=dict)


# A turn that has ended, as it is remembered: seconds of its stages, then counts of tokens.
ENDED = (
    *("program", "request", "arrived", "ended", "outcome", "replica", "tools", "queue_s", "prefill_s", "decode_s"),
    *("prompt", "cached", "drawn", "drafted", "accepted"),
)


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn of a program that has ended. `number` is the time in microseconds, raised where needed so that no two
    turns have the same: it tells a tenant nothing of how many turns others had.
    """

    number: int
    tenant: str
    row: tuple[str | float, ...]  # the values of `ENDED`


@dataclass(slots=True)
class Totals:
    """Sums of one tenant, since this process began."""

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


class TurnLog:
    """Requests that are served now, turns that have ended, and totals by tenant. `spans` None: no tracing."""

    def __init__(self, spans: Spans | None = None, clock: Callable[[], float] = time.time) -> None:
        self.spans = spans
        self.clock = clock
        self.totals: dict[str, Totals] = {}
        self._live: dict[int, TurnFacts] = {}
        self._carriers: Lru[Carrier] = Lru(PROGRAMS)
        self._number = 0  # of the turn that was remembered last
        self._ended: Lru[EndedTurn] = Lru(REMEMBERED, share=SHARE)

    @property
    def live(self) -> list[TurnFacts]:
        return list(self._live.values())

    @property
    def number(self) -> int:
        """The greatest number of an ended turn. Turns that end later have greater numbers."""
        return max(self._number, int(self.clock() * 1e6))

    def ended(self, after: int, tenant: str | None, most: int) -> list[EndedTurn]:
        """At most so many turns with greater numbers, the latest first. `tenant` None: of all."""
        newer = takewhile(lambda each: each.number > after, (ended for _, ended in self._ended.latest(0.0)))
        return list(islice((each for each in newer if tenant is None or each.tenant == tenant), most))

    def previous(self, program: str, carrier: Carrier) -> Carrier | None:
        """The span of a program's last turn; from now on that is `carrier`."""
        now = self.clock()
        before = self._carriers.get(program, now)
        self._carriers.put(program, carrier, now + FORGET_S)
        return before

    def begin(self, facts: TurnFacts) -> None:
        """A request has arrived."""
        self._live[id(facts)] = facts

    def end(self, facts: TurnFacts, outcome: Outcome) -> None:
        """A request has ended."""
        self._live.pop(id(facts), None)
        if not facts.tenant:
            return
        totals = self.of(facts.tenant)
        totals.ended += 1
        totals.failed += outcome is Outcome.FAILED
        totals.rejected += outcome is Outcome.REJECTED
        totals.cached_answers += outcome is Outcome.CACHED
        if facts.usage:
            totals.add(facts.usage)
        if facts.program:
            self._remember(facts, outcome)

    def of(self, tenant: str) -> Totals:
        return self.totals.setdefault(tenant, Totals())

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
        self._ended.put(str(self._number), EndedTurn(self._number, facts.tenant, row), inf, owner=facts.tenant)
