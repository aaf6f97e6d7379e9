"""Agents and their orchestrator on one simulated replica: the real engine over a cost model, on a virtual clock.

What the orchestrator does is what `loadgen.orchestrator` does: tools begin as their calls close, the next prompt is
sent ahead as far as it is known, result by result in the order of the calls, one request at a time; and the program's
end is told. Each of it can be left out. Prefill and decoding share the replica: nothing here takes them apart.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from holdfast.loadgen.simulator.agents import Agent, Iteration
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.runner import CostRunner
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.tags import labels_of
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Event,
    Finished,
    PartialPrefill,
    ProgramEnded,
    Submit,
    Terminal,
    Tokens,
    ToolLatencies,
    TurnEnded,
)
from holdfast.replicas.retention.latency import LatencyBook
from holdfast.replicas.types import NO_TOKENS, TokenIds, common_prefix

KEEP_S = 300.0  # for which what was sent ahead is kept
HOP_S = 0.002  # from the engine to the client, and back


@dataclass(frozen=True, slots=True)
class Way:
    """What the orchestrator does."""

    split: bool = False
    dispatch: bool = False


@dataclass(slots=True)
class Found:
    """Prompt tokens of a turn, and of these the cached ones by who computed them: other agents, this one in an earlier
    turn, this one ahead of this turn.
    """

    prompt: int
    across: int
    within: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Done:
    """One agent's run, in seconds. To the first token of its last reply `first_s`: of that `tool_s` nothing but tools
    ran, `decode_s` its other replies were drawn, and the rest is for prompts and for waiting.
    """

    first_s: float
    seconds: float
    tool_s: float
    decode_s: float
    found: tuple[Found, ...]


@dataclass(slots=True)
class _Run:
    """An agent on its way. `text`: replies and results so far, without system prompt and query."""

    agent: Agent
    text: TokenIds = field(default_factory=lambda: NO_TOKENS)
    at: int = 0
    begun: TokenIds = field(default_factory=lambda: NO_TOKENS)  # its present prompt
    drawn: list[int] = field(default_factory=list)
    over: bool = False  # the reply is
    ended: float = 0.0
    first: float = 0.0
    tool_s: float = 0.0
    decode_s: float = 0.0
    started: int = 0  # tools
    returned: set[int] = field(default_factory=set)
    told: int = 0  # results that are there with all before them
    sending: bool = False
    wanted: bool = False
    ahead: tuple[int, int] | None = None  # positions of what was computed ahead of the present turn: from, up to
    systems: list[TokenIds] = field(default_factory=list)  # it has asked with
    found: list[Found] = field(default_factory=list)

    @property
    def iteration(self) -> Iteration:
        return self.agent.iterations[self.at]

    @property
    def coming(self) -> Iteration:
        return self.agent.iterations[self.at + 1]

    def prompt(self, system: TokenIds, results: int | None = None) -> TokenIds:
        """With this system prompt, and after the reply so many results; None: the present turn's."""
        parts = [system, self.agent.query, self.text]
        if results is not None:
            parts += [np.array(self.drawn, np.int32), *(call.result for call in self.iteration.calls[:results])]
        return np.concatenate(parts)


class Orchestrated:
    """One run of agents on one replica."""

    def __init__(self, profile: Profile, config: EngineConfig, way: Way) -> None:
        self._profile = profile
        self._way = way
        self._machine = CostRunner(profile, config.page_size)
        self.engine = Engine(config, self._machine, stopwatch=lambda: 0.0)
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._numbers = count()
        self._runs: dict[str, _Run] = {}
        self._left: dict[str, int] = {}  # tokens that running replies still draw
        self._contexts: dict[str, int] = {}  # cells that decoding ones look at
        self._book = LatencyBook()
        self.done: list[Done] = []

    def run(self, agents: Iterable[Agent], ended: Callable[[], None] = lambda: None) -> list[Done]:
        """Until every agent has its answer. Raises EngineError where a request did not get one."""
        for agent in agents:
            self._at(agent.arrived, self._arrive, agent)
        told = 0
        while self._heap or self.engine.busy:
            if not self.engine.busy or (self._heap and self._heap[0][0] <= self._now):
                when, _, what, about = heapq.heappop(self._heap)
                self._now = max(self._now, when)
                what(about)
            else:
                self._step()
            for _ in range(told, len(self.done)):
                ended()
            told = len(self.done)
        return self.done

    def _at(self, when: float, what: Callable[..., None], about: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), what, about))

    # ---- the engine ----

    def _step(self) -> None:
        machine, begun = self._machine, self._now
        decoding = machine.decoded and machine.drew == len(self._left) == len(self._contexts)
        steps = self._steps() if decoding and not self.engine.occupancy().waiting else 1
        machine.start(self.engine, steps)
        machine.decoded = False
        events = self.engine.step(begun, lambda: begun + machine.seconds)
        seconds = machine.end()
        if not seconds and not events:
            if not self._heap:
                raise EngineError("requests wait that nothing will let in")
            seconds = self._heap[0][0] - begun
        self._now = begun + seconds
        self._deal(events)

    def _steps(self) -> int:
        """Decode steps until something may change: a reply ends, a call closes, somebody comes."""
        if not self._left:
            return 1
        most = min(self._left.values())
        for name in self._left:
            run = self._runs[name]
            closes = [call.closes - len(run.drawn) for call in run.iteration.calls]
            most = min([most, *(n for n in closes if n > 0)])
        room = self.engine.cache.cells.available // len(self._left) - 2 * self.engine.config.page_size
        until = self._heap[0][0] - self._now if self._heap else float("inf")
        steps = max(min(most, room), 1)
        return self._profile.decode_steps(len(self._contexts), sum(self._contexts.values()), until, steps)

    def _deal(self, events: Sequence[Event]) -> None:
        for event in events:
            name, _, ahead = event.request_id.partition("/")
            run = self._runs.get(name)
            if ahead.startswith("ahead"):
                if run is not None and isinstance(event, Finished):
                    self._ahead_over(run, event, ahead)
            elif isinstance(event, Tokens):
                assert run is not None
                self._heard(run, name, event.tokens)
            elif isinstance(event, Finished):
                assert run is not None
                self._answered(run, name, event)
            elif isinstance(event, Terminal):
                raise EngineError(f"{event.request_id} did not get its answer: {event}")

    def _give(self, submit: Submit) -> None:
        self._deal(self.engine.handle(submit, self._now))

    # ---- the orchestrator ----

    def _arrive(self, agent: Agent) -> None:
        run = self._runs[agent.name] = _Run(agent, ended=agent.arrived)
        self._send(run)

    def _send(self, run: _Run) -> None:
        """The next turn: the whole conversation."""
        agent, iteration = run.agent, run.iteration
        run.begun = run.prompt(iteration.system)
        run.drawn, run.started, run.told = [], 0, 0
        run.returned = set()
        self._left[agent.name] = iteration.reply
        system, query = len(iteration.system), len(agent.query)
        starts = (0, system, system + query) if len(run.text) else (0, system)
        self._give(
            Submit(
                f"{agent.name}/{run.at}",
                tokens=run.begun,
                sampling=Sampling(iteration.reply, ignore_eos=True),
                program_id=agent.name,
                program_arrival=agent.arrived + 1.0,
                program_turns=run.at,
                labels=labels_of(("system", "user", "tool")[: len(starts)], starts, len(run.begun)),
            )
        )

    def _heard(self, run: _Run, name: str, tokens: Sequence[int]) -> None:
        if not run.drawn:
            run.first = self._now
            self._contexts[name] = len(run.begun)
        run.drawn += tokens
        self._left[name] -= len(tokens)
        self._contexts[name] += len(tokens)
        if self._way.dispatch:
            while run.started < len(run.iteration.calls) and run.iteration.calls[run.started].closes <= len(run.drawn):
                self._begin_tool(run)

    def _begin_tool(self, run: _Run) -> None:
        number, run.started = run.started, run.started + 1
        self._at(self._now + HOP_S + run.iteration.calls[number].tool_s, self._return, (run, run.at, number))

    def _answered(self, run: _Run, name: str, event: Finished) -> None:
        del self._left[name]
        self._contexts.pop(name, None)
        run.over, run.ended = True, self._now
        run.found.append(_found(run, event.usage.cached))
        run.ahead = None
        run.systems.append(run.iteration.system)
        tools = tuple(call.tool for call in run.iteration.calls)
        notice = TurnEnded(event.request_id, "", name, tools, not tools, run.at + 1)
        self._deal(self.engine.handle(notice, self._now))
        if not tools:
            self._end(run, name)
            return
        while run.started < len(tools):
            self._begin_tool(run)
        if self._way.split and run.told < len(tools):
            self._want(run)
        self._go_on(run)

    def _return(self, about: tuple[_Run, int, int]) -> None:
        run, _, number = about
        run.returned.add(number)
        while run.told in run.returned:
            run.told += 1
        if self._way.split and run.over and run.told < len(run.iteration.calls) and number < run.told:
            self._want(run)
        self._go_on(run)

    def _go_on(self, run: _Run) -> None:
        """The next turn, once all results are there."""
        if not run.over or run.told < len(run.iteration.calls):
            return
        run.tool_s += self._now - run.ended
        run.decode_s += run.ended - run.first
        for tool in sorted({call.tool for call in run.iteration.calls}):
            self._book.record("", tool, self._now - run.ended)
        self._deal(self.engine.handle(ToolLatencies(self._book.snapshot()), self._now))
        run.text = run.prompt(NO_TOKENS, len(run.iteration.calls))[len(run.agent.query) :]
        run.at += 1
        run.over = run.sending = run.wanted = False
        self._at(self._now + HOP_S, self._send, run)

    def _end(self, run: _Run, name: str) -> None:
        agent = run.agent
        first_s, seconds = run.first - agent.arrived, self._now - agent.arrived
        self.done.append(Done(first_s, seconds, run.tool_s, run.decode_s, tuple(run.found)))
        del self._runs[name]
        self._deal(self.engine.handle(ProgramEnded("", name), self._now))

    # ---- ahead of the next turn ----

    def _want(self, run: _Run) -> None:
        """What is known by now goes ahead, or after the request that is under way."""
        run.wanted = True
        if not run.sending:
            self._at(self._now + HOP_S, self._prefill, (run, run.at))

    def _prefill(self, about: tuple[_Run, int]) -> None:
        run, at = about
        if run.at != at or run.sending or not run.wanted:
            return
        run.sending, run.wanted = True, False
        tokens = run.prompt(run.coming.system, run.told)
        self._compute(run, "ahead", tokens, PartialPrefill(f"{run.agent.name}-{run.at}", KEEP_S))

    def _compute(self, run: _Run, name: str, tokens: TokenIds, background: PartialPrefill) -> None:
        agent, system = run.agent, len(run.coming.system)
        labels = labels_of(("system", "user"), (0, system), len(tokens))
        request = f"{agent.name}/{name}-{run.at}-{next(self._numbers)}"
        self._give(
            Submit(
                request,
                tokens=tokens,
                sampling=Sampling(0),
                program_id=agent.name,
                program_arrival=agent.arrived + 1.0,
                background=background,
                labels=labels,
            )
        )

    def _ahead_over(self, run: _Run, event: Finished, name: str) -> None:
        if event.timing.scheduled is not None:
            begun = event.usage.cached if run.ahead is None else min(run.ahead[0], event.usage.cached)
            run.ahead = begun, event.usage.prompt
        run.sending = False
        if run.wanted and run.over:
            self._prefill((run, run.at))


def _found(run: _Run, cached: int) -> Found:
    """Whose the cached tokens of a turn are that is over."""
    begun, end = run.ahead or (cached, cached)
    ahead = max(min(cached, end) - begun, 0)
    before = min(cached, begun) if ahead else cached
    own = max((common_prefix(run.begun, each) for each in run.systems), default=0)
    across = max(min(before, len(run.iteration.system)) - own, 0)
    return Found(len(run.begun), across, cached - ahead - across, ahead)
