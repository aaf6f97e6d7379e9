"""The virtual clock: programs arrive, steps end, tools return, in the order of their times. Deterministic.

Whatever is drawn comes with the programs, so what happens depends on them and on the settings alone. The tools'
statistics are the cluster's: every interval counts at the next turn's arrival, and replicas see a copy that is at most
`STALE_S` old when they decide.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from holdfast.loadgen.simulator.outcome import Counts, Done, Outcome
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.programs import MAX_TOKENS, Program, Turn
from holdfast.loadgen.simulator.replica import Bulk, Replica
from holdfast.loadgen.simulator.routing import Routing
from holdfast.loadgen.simulator.runner import CostRunner, Machine
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.events import Finished, Sampling, Submit, ToolLatencies, TurnEnded
from holdfast.replicas.retention.latency import LatencyBook
from holdfast.replicas.types import TokenIds

STALE_S = 1.0


@dataclass(slots=True)
class Run:
    """A program on its way: `at` is its turn, `length` the tokens of its text that are there."""

    program: Program
    text: TokenIds
    home: Replica
    at: int = 0
    length: int = 0
    ended: float = 0.0  # of its latest turn
    tool_s: float = 0.0
    bubble_s: float = 0.0
    prompt: int = 0
    cached: int = 0
    drawn: int = 0

    @property
    def turn(self) -> Turn:
        return self.program.turns[self.at]

    def submit(self, exact: bool) -> Submit:
        """The request of its present turn; `exact`: it asks for as many tokens as it gets."""
        turn, program = self.turn, self.program
        self.length += turn.prompt
        last = int(self.text[self.length + turn.reply - 1])
        sampling = Sampling(max_tokens=MAX_TOKENS, stop_token_ids=frozenset((last,)))
        if exact:
            sampling = Sampling(max_tokens=turn.reply, ignore_eos=True)
        return Submit(
            f"{program.name}/{self.at}",
            self.text[: self.length],
            sampling,
            program_id=program.name,
            program_arrival=program.arrived,
            program_turns=self.at,
        )

    def reply(self) -> TokenIds:
        """Where the reply of its present turn goes."""
        return self.text[self.length : self.length + self.turn.reply]

    def done(self) -> Done:
        program = self.program
        return Done(
            program.number,
            program.arrived,
            self.ended,
            len(program.turns),
            self.tool_s,
            self.bubble_s,
            self.prompt,
            self.cached,
            self.drawn,
        )


@dataclass(slots=True)
class Site:
    """A replica and its events. Of the ends that were foreseen for its step only number `end` counts."""

    replica: Replica
    returns: list[float]  # when tools of its programs return
    end: int = -1
    told: float = float("-inf")  # how old what it knows of the tools is

    def known(self, now: float) -> float:
        """When the next request will come that is known to."""
        while self.returns and self.returns[0] <= now:
            heapq.heappop(self.returns)
        return self.returns[0] if self.returns else float("inf")


@dataclass(frozen=True, slots=True)
class Clients:
    """How requests are sent. `exact`: with the length of their replies; others ask for `MAX_TOKENS` and end before.
    `vocabulary`: of a model that reads the texts.
    """

    exact: bool = False
    vocabulary: int | None = None


class Simulation:
    """One run of programs on replicas, which are all of one kind; `machine` makes each one's."""

    def __init__(
        self,
        profile: Profile,
        config: EngineConfig,
        replicas: int = 1,
        bulk: Bulk | None = None,
        clients: Clients | None = None,
        machine: Callable[[], Machine] | None = None,
    ) -> None:
        make = machine or (lambda: CostRunner(profile, config.page_size))
        self._clients = clients or Clients()
        self._sites = {
            name: Site(Replica(name, config, profile, make(), bulk or Bulk()), [])
            for name in (f"replica-{number}" for number in range(replicas))
        }
        self._routing = Routing([site.replica for site in self._sites.values()])
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._numbers = count()
        self._runs: dict[str, Run] = {}
        self._book = LatencyBook()
        self._latencies, self._written = ToolLatencies(self._book.snapshot()), float("-inf")
        self._now = 0.0
        self._done: list[Done] = []
        self._programs: Iterator[Program] = iter(())
        self._coming = float("inf")  # when the next program arrives

    def run(self, programs: Iterable[Program], ended: Callable[[], None] = lambda: None) -> Outcome:
        """Until every program has ended; they come in order of arrival. `ended` is called for each."""
        self._programs = iter(programs)
        self._next_program()
        told = 0
        while self._heap:
            self._now, _, what, about = heapq.heappop(self._heap)
            what(about)
            while told < len(self._done):
                told += 1
                ended()
        replicas = [site.replica for site in self._sites.values()]
        counts = Counts.of([replica.engine.stats for replica in replicas], sum(replica.steps for replica in replicas))
        return Outcome(sorted(self._done, key=lambda done: done.number), counts)

    # ---- what happens ----

    def _arrive(self, program: Program) -> None:
        replica = self._routing.place(program.name, None)
        run = self._runs[program.name] = Run(program, program.tokens(self._clients.vocabulary), replica)
        self._send(run)
        self._next_program()

    def _return(self, run: Run) -> None:
        """A tool has returned: the next turn."""
        self._book.record("", run.turn.tool, self._now - run.ended)
        run.at += 1
        run.home = self._routing.place(run.program.name, run.home)
        self._send(run)

    def _step_over(self, about: tuple[Site, int]) -> None:
        site, number = about
        if site.end != number:
            return  # it was cut short
        for finished in site.replica.end():
            self._finished(site, finished)
        self._begin(site)

    # ---- what follows ----

    def _at(self, when: float, what: Callable[..., None], about: Any) -> int:
        number = next(self._numbers)
        heapq.heappush(self._heap, (max(when, self._now), number, what, about))
        return number

    def _next_program(self) -> None:
        program = next(self._programs, None)
        self._coming = float("inf") if program is None else program.arrived
        if program is not None:
            self._at(program.arrived, self._arrive, program)

    def _send(self, run: Run) -> None:
        site = self._sites[run.home.name]
        run.home.give(run.submit(self._clients.exact), run.reply(), self._now)
        if site.end < 0:
            self._begin(site)
        elif (end := run.home.cut(self._now)) is not None:
            self._ends(site, end)

    def _begin(self, site: Site) -> None:
        known, alone = site.known(self._now), len(self._sites) == 1
        end = site.replica.begin(self._now, min(known, self._coming) if alone else known, all_known=alone)
        if end is None:
            site.end = -1
        else:
            self._ends(site, end)

    def _ends(self, site: Site, end: float) -> None:
        number = next(self._numbers)
        site.end = number
        heapq.heappush(self._heap, (max(end, self._now), number, self._step_over, (site, number)))

    def _finished(self, site: Site, finished: Finished) -> None:
        name = finished.request_id.rpartition("/")[0]
        run, timing, usage = self._runs[name], finished.timing, finished.usage
        turn, last = run.turn, run.at + 1 == len(run.program.turns)
        assert timing.scheduled is not None
        assert timing.finished is not None
        run.ended = timing.finished
        run.bubble_s += timing.scheduled - timing.arrived
        run.length += turn.reply
        run.prompt += usage.prompt
        run.cached += usage.cached
        run.drawn += usage.completion
        self._tell(site)
        tools = (turn.tool,) if turn.tool else ()
        site.replica.notice(TurnEnded(finished.request_id, "", name, tools, last, run.at + 1))
        if last:
            self._done.append(self._runs.pop(name).done())
            return
        run.tool_s += turn.tool_s
        self._at(run.ended + turn.tool_s, self._return, run)
        heapq.heappush(site.returns, run.ended + turn.tool_s)

    def _tell(self, site: Site) -> None:
        """Let a replica know the tools, where what it knows is too old."""
        if self._now - site.told < STALE_S:
            return
        if self._now - self._written >= STALE_S:
            self._latencies, self._written = ToolLatencies(self._book.snapshot()), self._now
        site.replica.notice(self._latencies)
        site.told = self._now
