"""The virtual clock: programs arrive, steps end, tools return, in the order of their times. Deterministic.

Whatever is drawn comes with the programs, so what happens depends on them and on the settings alone. The tools'
statistics are the cluster's: every interval counts at the next turn's arrival, and replicas see a copy that is at most
`STALE_S` old when they decide.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from holdfast.loadgen.simulator.outcome import Counts, Done, Outcome, Served
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.programs import MAX_TOKENS, Program, Turn
from holdfast.loadgen.simulator.replica import Bulk, Replica
from holdfast.loadgen.simulator.routing import Asked, Ours, Routing
from holdfast.loadgen.simulator.runner import CostRunner, Machine
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Finished, Submit, ToolLatencies, TurnEnded
from holdfast.replicas.retention.latency import LatencyBook
from holdfast.replicas.types import TokenIds

STALE_S = 1.0
BEHIND_S = 300.0  # that turns of a window are waited for, behind it
PARTS = 10  # replicas tell how they are by tenths, one after the other


@dataclass(slots=True)
class Run:
    """A program on its way: `at` is its turn, `length` the tokens of its text that are there."""

    program: Program
    text: TokenIds
    home: int | None = None
    at: int = 0
    length: int = 0
    ended: float = 0.0  # of its latest turn
    tool_s: float = 0.0
    bubble_s: float = 0.0
    prompt: int = 0
    cached: int = 0
    drawn: int = 0
    asked: float = 0.0  # when its present turn came
    parent: Run | None = None
    children: int = 0  # sub-agents that it waits for

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
            tokens=self.text[: self.length],
            sampling=sampling,
            scope=program.tenant,
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
    began: float = 0.0  # the step that it is in
    busy_s: float = 0.0  # of steps, in the time that is looked at

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
    """One run of programs on replicas, which are all of one kind; `machine` makes each one's.

    `routing` places turns. In the `window`, from one moment to another, it is counted how long each site is busy.
    `served` is told of every turn. A run is over once every turn that came in the window is, or `BEHIND_S` behind it:
    then `served` is told of those that are not, as if they ended there without a token.
    """

    def __init__(
        self,
        profile: Profile,
        config: EngineConfig,
        replicas: int = 1,
        bulk: Bulk | None = None,
        clients: Clients | None = None,
        machine: Callable[[], Machine] | None = None,
        routing: Callable[[int], Routing] = Ours,
        window: tuple[float, float] = (0.0, float("inf")),
        served: Callable[[Served], None] | None = None,
    ) -> None:
        make = machine or (lambda: CostRunner(profile, config.page_size))
        self._clients = clients or Clients()
        self.sites = [
            Site(Replica(f"replica-{number}", config, profile, make(), bulk or Bulk()), [])
            for number in range(replicas)
        ]
        self._routing = routing(replicas)
        self._window = window
        self._served = served
        self._left = 0  # programs that have come and not ended
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._numbers = count()
        self._runs: dict[str, Run] = {}
        self._open: dict[str, Run] = {}  # whose present turn came in the window
        self._book = LatencyBook()
        self._latencies, self._written = ToolLatencies(self._book.snapshot()), float("-inf")
        self._now = 0.0
        self._done: list[Done] = []
        self._programs: Iterator[Program] = iter(())
        self._coming = float("inf")  # when the next program arrives

    def run(
        self,
        programs: Iterable[Program],
        ended: Callable[[], None] = lambda: None,
        enough: Callable[[int], bool] = lambda number: False,
    ) -> Outcome:
        """Until every program has ended, or it is `enough` with the end of this one; they come in order of arrival.

        `ended` is called for each.
        """
        self._programs = iter(programs)
        self._next_program()
        if self._routing.every < float("inf"):
            for part in range(PARTS):
                self._at(self._routing.every * part / PARTS, self._publish, range(part, len(self.sites), PARTS))
        told, over = 0, False
        while self._heap and not over and not self._over():
            self._now, _, what, about = heapq.heappop(self._heap)
            what(about)
            while told < len(self._done):
                over = over or enough(self._done[told].number)
                told += 1
                ended()
        for run in self._open.values():
            self._tell_served(run, self._now, self._now, prompt=0, cached=0)
        replicas = [site.replica for site in self.sites]
        counts = Counts.of([replica.engine.stats for replica in replicas], sum(replica.steps for replica in replicas))
        return Outcome(sorted(self._done, key=lambda done: done.number), counts)

    # ---- what happens ----

    def _arrive(self, program: Program) -> None:
        self._begin_program(program, None)
        self._next_program()

    def _arrive_child(self, about: tuple[Program, Run]) -> None:
        self._begin_program(*about)

    def _return(self, run: Run) -> None:
        """What the program waited for is there: the next turn."""
        if run.turn.tool:
            self._book.record("", run.turn.tool, self._now - run.ended)
        run.tool_s += self._now - run.ended
        run.at += 1
        self._send(run)

    def _publish(self, numbers: range) -> None:
        """These replicas tell how they are, and will again."""
        for number in numbers:
            self._routing.report(number, self.sites[number].replica, self._now)
        if self._left or self._coming < float("inf"):
            self._at(self._now + self._routing.every, self._publish, numbers)

    def _step_over(self, about: tuple[Site, int]) -> None:
        site, number = about
        if site.end != number:
            return  # it was cut short
        begin, end = self._window
        site.busy_s += max(0.0, min(self._now, end) - max(site.began, begin))
        for finished in site.replica.end():
            self._finished(site, finished)
        self._begin(site)

    # ---- what follows ----

    def _over(self) -> bool:
        behind = self._now - self._window[1]
        return behind > 0 and (not self._open or behind > BEHIND_S)

    def _at(self, when: float, what: Callable[..., None], about: Any) -> int:
        number = next(self._numbers)
        heapq.heappush(self._heap, (max(when, self._now), number, what, about))
        return number

    def _next_program(self) -> None:
        program = next(self._programs, None)
        self._coming = float("inf") if program is None else program.arrived
        if program is not None:
            self._at(program.arrived, self._arrive, program)

    def _begin_program(self, program: Program, parent: Run | None) -> None:
        self._left += 1
        run = self._runs[program.name] = Run(program, program.tokens(self._clients.vocabulary), parent=parent)
        self._send(run)

    def _send(self, run: Run) -> None:
        run.asked = self._now
        if self._window[0] <= self._now <= self._window[1]:
            self._open[run.program.name] = run
        submit = run.submit(self._clients.exact)
        near = None if run.parent is None else (run.parent.program.name, run.parent.home)
        asked = Asked(run.program, run.at, run.length, run.home, near, self._now)
        run.home = self._routing.place(asked)
        site = self.sites[run.home]
        site.replica.give(submit, run.reply(), self._now)
        if site.end < 0:
            self._begin(site)
        elif (end := site.replica.cut(self._now)) is not None:
            self._ends(site, end)

    def _begin(self, site: Site) -> None:
        site.began = self._now
        known, alone = site.known(self._now), len(self.sites) == 1
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
        assert timing.first_token is not None
        assert timing.finished is not None
        assert run.home is not None
        run.ended = timing.finished
        run.bubble_s += timing.scheduled - timing.arrived
        self._open.pop(name, None)
        self._tell_served(run, timing.first_token, timing.finished, usage.prompt, usage.cached)
        run.length += turn.reply
        run.prompt += usage.prompt
        run.cached += usage.cached
        run.drawn += usage.completion
        self._routing.ended(run.home, run.program, run.at)
        self._tell(site)
        tools = (turn.tool,) if turn.tool else ()
        site.replica.notice(TurnEnded(finished.request_id, run.program.tenant, name, tools, last, run.at + 1))
        if last:
            self._ended(run)
        elif turn.children:
            run.children = len(turn.children)
            for child in turn.children:
                when = run.ended + child.arrived
                self._at(when, self._arrive_child, (replace(child, arrived=when), run))
                heapq.heappush(site.returns, when)
        else:
            self._goes_on(site, run, run.ended + turn.tool_s)

    def _ended(self, run: Run) -> None:
        self._left -= 1
        self._done.append(self._runs.pop(run.program.name).done())
        parent = run.parent
        if parent is None:
            return
        parent.children -= 1
        if not parent.children:
            assert parent.home is not None
            self._goes_on(self.sites[parent.home], parent, max(run.ended, parent.ended + parent.turn.tool_s))

    def _goes_on(self, site: Site, run: Run, when: float) -> None:
        self._at(when, self._return, run)
        heapq.heappush(site.returns, when)

    def _tell_served(self, run: Run, first: float, ended: float, prompt: int, cached: int) -> None:
        if self._served is not None:
            assert run.home is not None
            first_s, seconds = first - run.asked, ended - run.asked
            self._served(Served(run.program.tenant, run.asked, first_s, seconds, prompt, cached, run.home))

    def _tell(self, site: Site) -> None:
        """Let a replica know the tools, where what it knows is too old."""
        if self._now - site.told < STALE_S:
            return
        if self._now - self._written >= STALE_S:
            self._latencies, self._written = ToolLatencies(self._book.snapshot()), self._now
        site.replica.notice(self._latencies)
        site.told = self._now
