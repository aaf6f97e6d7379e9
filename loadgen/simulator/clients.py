"""Agents with an orchestrator, whose clients are more than a sequence of turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from holdfast.loadgen.program import Program, Turn
from holdfast.loadgen.simulator.machines import Profile
from holdfast.loadgen.simulator.replica import Reply
from holdfast.loadgen.simulator.simulation import Loop, Site
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.tags import labels_of
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Event,
    Finished,
    PartialPrefill,
    ProgramEnded,
    Submit,
    Tokens,
    ToolLatencies,
    TurnEnded,
)
from holdfast.replicas.retention.latency import LatencyBook
from holdfast.replicas.types import NO_TOKENS, TokenIds, common_prefix

KEEP_S = 300.0  # how long a replica keeps what was sent ahead
HOP_S = 0.002  # from the engine to the client, and back
HEAD = 2_000  # tokens with which all system prompts of agents begin


@dataclass(frozen=True, slots=True)
class Way:
    """The orchestrator's mode: `split` sends the known part of the next prompt ahead while tools run, `dispatch`
    starts a tool as soon as its call is complete. `first`: what is sent ahead is a prompt like any other, which does
    not give way.
    """

    split: bool = False
    dispatch: bool = False
    first: bool = False


@dataclass(slots=True)
class Cached:
    """Prompt tokens of a turn, and of these the cached ones by who computed them: other agents, this one in an earlier
    turn, this one ahead of this turn.
    """

    prompt: int
    across: int
    within: int
    ahead: int


@dataclass(frozen=True, slots=True)
class AgentDone:
    """One agent's run, in seconds.

    Of the `first_s` until the first token of its last reply only tools ran for `tool_s`, and earlier replies were drawn
    for `decode_s`; the rest is for prompts and for waiting.
    """

    first_s: float
    seconds: float
    tool_s: float
    decode_s: float
    turns: tuple[Cached, ...]


class Texts:
    """Token ids of agents: two pieces have tokens in common only where they are the same piece."""

    def __init__(self) -> None:
        self._next = 1 << 20
        self._systems: dict[tuple[str, int], TokenIds] = {}

    def new(self, n: int) -> TokenIds:
        first = self._next
        self._next += n + 4096  # the reply after a piece counts on from its last token
        return np.arange(first, first + n, dtype=np.int32)

    def system(self, name: str, length: int) -> TokenIds:
        """The system prompt of that name: `HEAD` tokens as in all of them, then its own."""
        if (name, length) not in self._systems:
            head = self._systems.setdefault(("", HEAD), self.new(HEAD)) if length > HEAD else self.new(0)
            self._systems[name, length] = np.concatenate((head, self.new(length - len(head))))
        return self._systems[name, length]


@dataclass(slots=True)
class _Agent:
    """An agent in progress. `text`: replies and results so far, without system prompt and query."""

    program: Program
    query: TokenIds
    text: TokenIds = field(default_factory=lambda: NO_TOKENS)
    at: int = 0
    prompt: TokenIds = field(default_factory=lambda: NO_TOKENS)  # of the present turn
    results: list[TokenIds] = field(default_factory=list)  # of the present turn's tools
    drawn: list[int] = field(default_factory=list)
    answered: bool = False  # the reply is complete
    ended: float = 0.0
    first: float = 0.0
    tool_s: float = 0.0
    decode_s: float = 0.0
    started: int = 0  # tools
    returned: set[int] = field(default_factory=set)
    ready: int = 0  # results that are there with all before them
    sending: bool = False
    wanted: bool = False
    ahead: tuple[int, int] | None = None  # positions that were computed ahead of the present turn: from, up to
    systems: list[TokenIds] = field(default_factory=list)  # of its earlier turns
    turns: list[Cached] = field(default_factory=list)

    @property
    def turn(self) -> Turn:
        return self.program.turns[self.at]

    def next_prompt(self, system: TokenIds, results: int) -> TokenIds:
        """The next prompt with so many results of the tools."""
        reply = np.array(self.drawn, np.int32)
        return np.concatenate([system, self.query, self.text, reply, *self.results[:results]])


class Orchestrated(Loop):
    """Agents on one replica with what `loadgen.orchestrator` does: tools begin as their calls close, and the next
    prompt is sent ahead as far as it is known, result by result in the order of the calls, one request at a time.
    """

    def __init__(self, profile: Profile, config: EngineConfig, way: Way) -> None:
        super().__init__(profile, config)
        (self._site,) = self.sites
        self.engine = self._site.replica.engine
        self._way = way
        self._ids = count()
        self._agents: dict[str, _Agent] = {}
        self._book = LatencyBook()
        self._texts = Texts()
        self.done: list[AgentDone] = []

    def run(self, programs: Iterable[Program]) -> list[AgentDone]:
        """Until every agent has its answer. Raises EngineError where a request did not get one."""
        for program in programs:
            self.at(program.arrived, self._arrive, program, self._site)
        self.play()
        return self.done

    def event(self, site: Site, event: Event) -> None:
        name, _, request = event.request_id.partition("/")
        agent = self._agents.get(name)
        if request.startswith("ahead"):
            if agent is not None and isinstance(event, Finished):
                self._ahead_over(agent, event)
        elif isinstance(event, Tokens):
            assert agent is not None
            self._on_tokens(agent, event.tokens)
        elif isinstance(event, Finished):
            assert agent is not None
            self._on_answer(agent, event)
        else:
            raise EngineError(f"{event.request_id} did not get its answer: {event}")

    # ---- a turn ----

    def _arrive(self, program: Program) -> None:
        query = self._texts.new(program.turns[0].added - program.beginning.tokens)
        agent = self._agents[program.id] = _Agent(program, query, ended=program.arrived)
        self._send_turn(agent)

    def _system(self, agent: _Agent, at: int) -> TokenIds:
        return self._texts.system(agent.program.turns[at].system, agent.program.beginning.tokens)

    def _send_turn(self, agent: _Agent) -> None:
        """The next turn: the whole conversation."""
        system = self._system(agent, agent.at)
        agent.prompt = np.concatenate([system, agent.query, agent.text])
        agent.drawn, agent.started, agent.ready, agent.returned = [], 0, 0, set()
        agent.results = [self._texts.new(run.tokens) for run in agent.turn.runs]
        starts = (0, len(system), len(system) + len(agent.query)) if len(agent.text) else (0, len(system))
        labels = labels_of(("system", "user", "tool")[: len(starts)], starts, len(agent.prompt))
        reply = agent.turn.reply
        submit = Submit(
            f"{agent.program.id}/{agent.at}",
            tokens=agent.prompt,
            sampling=Sampling(reply, ignore_eos=True),
            program_id=agent.program.id,
            program_arrival=agent.program.arrived + 1.0,
            program_turns=agent.at,
            labels=labels,
        )
        stops = (reply - 1, *(reply - run.closes for run in agent.turn.runs))
        self.send(self._site, submit, Reply(reply, stops=stops))

    def _on_tokens(self, agent: _Agent, tokens: Sequence[int]) -> None:
        if not agent.drawn:
            agent.first = self.now
        agent.drawn += tokens
        runs = agent.turn.runs
        while self._way.dispatch and agent.started < len(runs) and runs[agent.started].closes <= len(agent.drawn):
            self._begin_tool(agent)

    def _begin_tool(self, agent: _Agent) -> None:
        number, agent.started = agent.started, agent.started + 1
        self.at(self.now + HOP_S + agent.turn.runs[number].seconds, self._return, (agent, number), self._site)

    def _on_answer(self, agent: _Agent, event: Finished) -> None:
        name = agent.program.id
        agent.answered, agent.ended = True, self.now
        agent.turns.append(_cached(agent, self._system(agent, agent.at), event.usage.cached))
        agent.ahead = None
        agent.systems.append(self._system(agent, agent.at))
        tools = tuple(run.tool for run in agent.turn.runs)
        self._site.replica.notice(TurnEnded(event.request_id, "", name, tools, not tools, agent.at + 1))
        if not tools:
            arrived, times = agent.program.arrived, (agent.tool_s, agent.decode_s, tuple(agent.turns))
            self.done.append(AgentDone(agent.first - arrived, self.now - arrived, *times))
            del self._agents[name]
            self._site.replica.notice(ProgramEnded("", name))
            return
        while agent.started < len(tools):
            self._begin_tool(agent)
        if self._way.split and agent.ready < len(tools):
            self._want(agent)
        self._go_on(agent)

    def _return(self, agent_call: tuple[_Agent, int]) -> None:
        agent, number = agent_call
        agent.returned.add(number)
        while agent.ready in agent.returned:
            agent.ready += 1
        if self._way.split and agent.answered and agent.ready < len(agent.turn.runs) and number < agent.ready:
            self._want(agent)
        self._go_on(agent)

    def _go_on(self, agent: _Agent) -> None:
        """The next turn, once all results are there."""
        if not agent.answered or agent.ready < len(agent.turn.runs):
            return
        agent.tool_s += self.now - agent.ended
        agent.decode_s += agent.ended - agent.first
        for tool in sorted({run.tool for run in agent.turn.runs}):
            self._book.record("", tool, self.now - agent.ended)
        self._site.replica.notice(ToolLatencies(self._book.snapshot()))
        agent.text = agent.next_prompt(NO_TOKENS, len(agent.results))[len(agent.query) :]
        agent.at += 1
        agent.answered = agent.sending = agent.wanted = False
        self.at(self.now + HOP_S, self._send_turn, agent, self._site)

    # ---- ahead of the next turn ----

    def _want(self, agent: _Agent) -> None:
        """Send ahead what is known by now, after the request that is under way."""
        agent.wanted = True
        if not agent.sending:
            self.at(self.now + HOP_S, self._prefill, (agent, agent.at), self._site)

    def _prefill(self, agent_length: tuple[_Agent, int]) -> None:
        agent, at = agent_length
        if agent.at != at or agent.sending or not agent.wanted:
            return
        agent.sending, agent.wanted = True, False
        system, name = self._system(agent, agent.at + 1), agent.program.id
        tokens = agent.next_prompt(system, agent.ready)
        submit = Submit(
            f"{name}/ahead-{agent.at}-{next(self._ids)}",
            tokens=tokens,
            sampling=Sampling(0),
            program_id=name,
            program_arrival=agent.program.arrived + 1.0,
            background=None if self._way.first else PartialPrefill(f"{name}-{agent.at}", KEEP_S),
            labels=labels_of(("system", "user"), (0, len(system)), len(tokens)),
        )
        self.send(self._site, submit, Reply(0))

    def _ahead_over(self, agent: _Agent, event: Finished) -> None:
        if event.timing.scheduled is not None:
            begun = event.usage.cached if agent.ahead is None else min(agent.ahead[0], event.usage.cached)
            agent.ahead = begun, event.usage.prompt
        agent.sending = False
        if agent.wanted and agent.answered:
            self._prefill((agent, agent.at))


def _cached(agent: _Agent, system: TokenIds, cached: int) -> Cached:
    """The cached tokens of a turn that has ended, by who computed them."""
    begun, end = agent.ahead or (cached, cached)
    ahead = max(min(cached, end) - begun, 0)
    before = min(cached, begun) if ahead else cached
    own = max((common_prefix(agent.prompt, each) for each in agent.systems), default=0)
    across = max(min(before, len(system)) - own, 0)
    return Cached(len(agent.prompt), across, cached - ahead - across, ahead)
