"""Programs of known lengths: when they arrive, how many tokens each turn adds and draws, how long its tools take.

Turns and tool times follow the figures of the papers' traces (`workloads.papers`). Neither paper publishes lengths:
they are our choice, within a context of 128k and over 100 seconds for a program alone. `coding` follows real coding
sessions; in `mixed` and `mixed-shell`, our own, one tool of five is slow. Everything drawn for a program depends on the
seed and its number, so every policy gets the same programs and the same tools.

    tokens   |<- beginning, shared ->|<- program ->|<- reply ->|<- result ->|<- reply ->| ...
             0                                                  turn 2

`Crowd` draws programs for many replicas:

    agents      append-only coding agents: each has a task of its own, and a system prompt that all share
    preambles   short programs that begin with one of forty long preambles, the k-th of them with a share of 1/k
    fan-out     parents whose sub-agents go on from what the parent has said and heard so far, all at once
    hot-tenant  ten tenants; one of them sends three fifths of the programs, all in bursts

`agents` draws programs that call several tools at once and change their system prompt, after Sutradhara's traces.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from holdfast.loadgen.flags import above_zero
from holdfast.loadgen.program import Beginning, Output, Program, Sized, ToolRun, Turn, sized, sized_turn
from holdfast.loadgen.workloads.drawing import poisson
from holdfast.loadgen.workloads.papers import (
    BFCL,
    FAN_OUT,
    GROUP,
    ITERATIONS,
    KNOWN,
    LONGEST,
    SESSION,
    SUB_AGENT,
    SWE,
    Figures,
    Session,
    long_tailed,
)
from holdfast.loadgen.workloads.tooltime import QUICK, TIMES, Gaps, HeavyTailed, Length, log_normal
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.types import TokenIds

CONTEXT = 1 << 17  # no program has more tokens; texts of neighbouring programs are so far apart
MAX_TOKENS = 2048  # of a reply, as the client asks for it
PAGES = 64  # cells that a request needs beside its own, at most: pages that are not full
_CHILD_S = 0.02  # from one sub-agent to the next
_BASES, _NAMES, _PREAMBLES = 8191, 1 << 30, 3 << 29


def tokens_of(program: Program, vocabulary: int | None = None) -> TokenIds:
    """The whole text, int32: after its first own token each token is the one before it and 1, modulo `vocabulary`."""
    beginning, base = program.beginning, program.number % _BASES * CONTEXT
    text = np.arange(base, base + program.length, dtype=np.int32)
    if beginning.parent is not None:
        text[: beginning.tokens] = tokens_of(beginning.parent)[: beginning.tokens]
    else:
        first = _PREAMBLES + beginning.preamble * CONTEXT if beginning.preamble else 0
        text[: beginning.tokens] = np.arange(first, first + beginning.tokens)
    text[beginning.tokens] = _NAMES + program.number % _NAMES
    return text if vocabulary is None else text % vocabulary


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: its share of the calls, and how long it takes relative to the others."""

    name: str
    share: float
    times: float


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of agent. `gaps`: how long its tools take, where `figures` do not say."""

    figures: Figures
    tools: tuple[Tool, ...]
    shared: int  # tokens of the system prompt and the tools' schemas
    task: Length  # what the user asks for
    reply: Length
    result: Length
    gaps: Gaps | None = None
    group: Kind | None = None  # its sub-agents, about seven at once, that go on from its own text

    def seconds(self) -> Callable[[random.Random], tuple[str, float]]:
        """Draws a tool and its seconds; mean and variance over all tools are those of `figures`."""
        if self.gaps is not None:
            name, draw = self.tools[0].name, self.gaps.draw
            return lambda rng: (name, draw(rng))
        figures, shares = self.figures, [tool.share for tool in self.tools]
        mean = sum(tool.share * tool.times for tool in self.tools)
        square = sum(tool.share * (tool.times / mean) ** 2 for tool in self.tools)
        within = (figures.tool_variance + figures.tool_s**2) / square - figures.tool_s**2

        def drawn(rng: random.Random) -> tuple[str, float]:
            tool = rng.choices(self.tools, shares)[0]
            return tool.name, tool.times / mean * log_normal(rng, figures.tool_s, within)

        return drawn

    def turns(
        self,
        rng: random.Random,
        shared: int,
        context: int,
        times: int = 1,
        scale: float = 1.0,
        tool_times: float = 1.0,
    ) -> tuple[Turn, ...]:
        """The turns of one program in a `context` of so many tokens, whose first `shared` tokens others have too.

        `times` multiplies the turns and divides the lengths of replies and results; `scale` is of all lengths.
        """
        tool, room = self.seconds(), context - MAX_TOKENS
        turns: list[Turn] = []
        for index in range(self.figures.turns(rng) * times):
            if index:
                prompt = self.result.draw(rng, scale / times)
            else:
                prompt = min(
                    shared + self.task.draw(rng, scale), context - 2 * MAX_TOKENS
                )  # so that its reply has room
            reply = min(self.reply.draw(rng, scale / times), MAX_TOKENS - 1)
            name, seconds = tool(rng)
            room -= prompt + reply
            if room < 0 and turns:  # the context is full: the agent ends with what it has
                break
            turns.append(sized_turn(prompt, reply, name, seconds * tool_times))
        turns[-1] = replace(turns[-1], runs=())
        return tuple(turns)


_SHELL = (Tool("cat", 0.3, 0.35), Tool("sed", 0.25, 0.3), Tool("grep", 0.25, 0.4), Tool("python", 0.13, 2.0),
          Tool("pytest", 0.07, 7.0))  # fmt: skip
_MIXED = Figures(SWE.most, SWE.share, 8.0, 285.0)  # 0.6 s and 37.5 s; each tool's deviation is half of its mean
_QUICK_AND_SLOW = (Tool("edit", QUICK, 1.0), Tool("tests", 1.0 - QUICK, TIMES))
_ONE_SHELL = tuple(replace(tool, name="shell") for tool in _QUICK_AND_SLOW)


def _session(session: Session, group: Kind | None = None) -> Kind:
    lengths = Length(session.task, 0.5), Length(session.reply, 0.8), Length(session.result, 1.0)
    return Kind(session.figures, (Tool("shell", 1.0, 1.0),), session.shared, *lengths, Gaps(), group)


KINDS = {
    "swe": Kind(SWE, _SHELL, 1500, Length(1000, 0.5), Length(300, 0.6), Length(900, 1.0)),
    "bfcl": Kind(BFCL, (Tool("web_search", 1.0, 1.0),), 1500, Length(200, 0.4), Length(400, 0.6), Length(8000, 0.7)),
    "mixed": Kind(_MIXED, _QUICK_AND_SLOW, 1500, Length(1000, 0.5), Length(300, 0.6), Length(900, 1.0)),
    "mixed-shell": Kind(_MIXED, _ONE_SHELL, 1500, Length(1000, 0.5), Length(300, 0.6), Length(900, 1.0)),
    "coding": _session(SESSION, _session(SUB_AGENT)),
}


def _with_children(program: Program, at: int, children: list[tuple[int, tuple[Turn, ...]]]) -> Program:
    """The program with sub-agents after its turn `at`, each of a number and turns."""
    shared = sum(turn.added + turn.reply for turn in program.turns[: at + 1])
    beginning = Beginning(shared, parent=program, fork=at)
    subagents = tuple(sized(number, turns, i * _CHILD_S, beginning) for i, (number, turns) in enumerate(children))
    turns = list(program.turns)
    turns[at] = replace(turns[at], runs=(), children=subagents)
    return replace(program, turns=tuple(turns))


@dataclass(frozen=True, slots=True)
class Workload:
    """`programs` programs of a kind, which arrive by a Poisson process, `rate` a second. Raises ConfigError.

    `turns_times` multiplies the turns and divides the lengths of replies and results (Continuum, section 6.3). `scale`
    is of all lengths, `tool_times` of the seconds that tools take.
    """

    kind: str
    programs: int
    rate: float
    turns_times: int = 1
    scale: float = 1.0
    tool_times: float = 1.0
    context: int = CONTEXT

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"there is no workload {self.kind!r}; there are {', '.join(KINDS)}", "workload")
        above_zero("programs turns_times rate scale tool_times", self)
        least = KINDS[self.kind].shared * self.scale + 2 * MAX_TOKENS
        if not least <= self.context <= CONTEXT:
            raise ConfigError(f"context must be from {least:.0f} to {CONTEXT}, not {self.context}", "context")

    def within(self, cells: int) -> Workload:
        """The same with no program too long for a cache of so many cells. Raises ConfigError."""
        return replace(self, context=min(self.context, cells - PAGES))

    def draw(self, seed: int) -> Iterator[Program]:
        """The programs in order of arrival."""
        moments = poisson(random.Random(f"{seed}/{self.kind}/arrivals"), self.programs, self.rate)
        for number, moment in enumerate(moments):
            yield self._program(number, moment, random.Random(f"{seed}/{self.kind}/{number}"))

    def _program(self, number: int, arrived: float, rng: random.Random) -> Program:
        kind = KINDS[self.kind]
        tokens = max(1, round(kind.shared * self.scale))
        draw = partial(Kind.turns, times=self.turns_times, scale=self.scale, tool_times=self.tool_times)
        program = sized(number, draw(kind, rng, tokens, self.context), arrived, Beginning(tokens))
        if kind.group is None or len(program.turns) < 2:
            return program
        at = rng.randrange(len(program.turns) - 1)
        shared = sum(turn.added + turn.reply for turn in program.turns[: at + 1])
        if shared > self.context - 3 * MAX_TOKENS:
            return program
        numbers = [self.programs + number * GROUP[1] + i for i in range(rng.randint(*GROUP))]
        return _with_children(program, at, [(child, draw(kind.group, rng, shared, self.context)) for child in numbers])


# ---- many replicas ----

CROWD_CONTEXT = 1 << 15  # tokens of a program, at most
_PREAMBLE_COUNT = 40
_TENANTS, _HOT = 10, 0.6
_PERIOD_S, _BURST_S = 30.0, 15.0  # the hot tenant sends in the first part of each period


def _crowd_kind(most: int, shared: int, task: Length, reply: int, result: Length) -> Kind:
    figures = Figures(most, 0.5, SWE.tool_s, SWE.tool_variance)
    return Kind(figures, _SHELL, shared, task, Length(reply, 0.6), result)


_AGENT = _crowd_kind(15, 1500, Length(1000, 0.5), 150, Length(900, 1.0))
_PREAMBLE = Length(6000, 0.5)
_SHORT = _crowd_kind(5, 0, Length(300, 0.4), 150, Length(300, 0.6))
_PARENT = _crowd_kind(5, 1500, Length(4000, 0.5), 200, Length(1500, 0.8))
_CHILD = _crowd_kind(3, 0, Length(300, 0.4), 150, Length(500, 0.6))
_TENANT = _crowd_kind(7, 3000, Length(1000, 0.5), 150, Length(900, 0.8))
_LENGTHS = (_TENANT.task, _TENANT.reply, _TENANT.result)


@dataclass(frozen=True, slots=True)
class Crowd:
    """`programs` programs for many replicas, `rate` a second by a Poisson process, sub-agents not counted.

    Raises ConfigError.
    """

    kind: str
    programs: int
    rate: float

    def __post_init__(self) -> None:
        if self.kind not in CROWDS:
            raise ConfigError(f"there is no workload {self.kind!r}; there are {', '.join(CROWDS)}", "workload")
        above_zero("programs rate", self)

    def draw(self, seed: int) -> Iterator[Program]:
        """The programs in order of arrival."""
        moments = poisson(random.Random(f"{seed}/{self.kind}/arrivals"), self.programs, self.rate)
        programs = (CROWDS[self.kind](self, seed, number, moment) for number, moment in enumerate(moments))
        return iter(sorted(programs, key=lambda program: program.arrived))

    def _rng(self, seed: int, label: str) -> random.Random:
        return random.Random(f"{seed}/{self.kind}/{label}")

    def agent(self, seed: int, number: int, moment: float) -> Program:
        return _one(_AGENT, self._rng(seed, f"{number}"), number, moment)

    def short(self, seed: int, number: int, moment: float) -> Program:
        rng, ranks = self._rng(seed, f"{number}"), range(1, _PREAMBLE_COUNT + 1)
        (preamble,) = rng.choices(ranks, [1 / rank for rank in ranks])
        length = min(_PREAMBLE.draw(self._rng(seed, f"preamble/{preamble}")), CROWD_CONTEXT // 2)
        return _one(replace(_SHORT, shared=length), rng, number, moment, preamble)

    def of_tenant(self, seed: int, number: int, moment: float) -> Program:
        rng = self._rng(seed, f"{number}")
        hot = rng.random() < _HOT
        tenant = 0 if hot else rng.randrange(1, _TENANTS)
        if hot:  # the programs of a whole period come in its first part
            moment -= moment % _PERIOD_S * (1 - _BURST_S / _PERIOD_S)
        program = _one(_TENANT, rng, number, moment, tenant + 1)
        return replace(program, tenant="hot" if hot else f"quiet-{tenant}")

    def parent(self, seed: int, number: int, moment: float) -> Program:
        """With sub-agents after one of its turns but the last."""
        rng = self._rng(seed, f"{number}")
        program = _one(_PARENT, rng, number, moment)
        if len(program.turns) < 2:
            return program
        at = rng.randrange(len(program.turns) - 1)
        count = long_tailed(rng, *FAN_OUT)
        shared = sum(turn.added + turn.reply for turn in program.turns[: at + 1])
        if shared >= CROWD_CONTEXT - 2 * MAX_TOKENS:
            return program
        first = self.programs + number * FAN_OUT[1]
        turns = [_CHILD.turns(rng, shared, CROWD_CONTEXT) for _ in range(count)]
        return _with_children(program, at, list(enumerate(turns, first)))


def _one(kind: Kind, rng: random.Random, number: int, moment: float, preamble: int = 0) -> Program:
    turns = kind.turns(rng, kind.shared, CROWD_CONTEXT)
    return sized(number, turns, moment, Beginning(kind.shared, preamble))


CROWDS = {"agents": Crowd.agent, "preambles": Crowd.short, "fan-out": Crowd.parent, "hot-tenant": Crowd.of_tenant}


def of_tenants(seed: int, programs: dict[str, int], within_s: float) -> list[Program]:
    """`programs` of each tenant, which all arrive within `within_s` seconds, in order of arrival.

    Tenants differ: the lengths of the first have half of the usual mean, those of the fourth twice the mean, and so on.
    """
    crowd: list[Program] = []
    moments = random.Random(f"{seed}/tenants/arrivals")
    for index, (tenant, count) in enumerate(programs.items()):
        times = 0.5 * 4.0 ** (index % 4 / 3)
        task, reply, result = (replace(length, mean=length.mean * times) for length in _LENGTHS)
        kind = replace(_TENANT, task=task, reply=reply, result=result)
        for i in range(count):
            rng, moment = random.Random(f"{seed}/tenants/{tenant}/{i}"), within_s * moments.random()
            crowd.append(replace(_one(kind, rng, len(crowd), moment, index + 1), tenant=tenant))
    return sorted(crowd, key=lambda program: program.arrived)


# ---- agents with an orchestrator ----

PROMPT = 20_000  # tokens
SYSTEMS = 15  # system prompts that a prompt after the first may have: instructions for reading a tool's result
CALL, PREAMBLE, LAST = 100, 40, 1_200  # tokens of a call, of the text before the calls, of the last reply
STEP = Length(80, 0.5)  # of an answer in the open traces, whose 20 iterations take 48 s
TOOL_S = 4.5  # median of the tools
AGENTS = ("fan-out", "append-only")


def agents(workload: str, count: int, rate: float, seed: int, tool_times: float = 1.0) -> Iterator[Program]:
    """Agents in the order in which they come, `rate` a second. Raises ConfigError.

    `fan-out` follows the paper: 2 iterations and 2 calls in each (median), 7 and 21 at the 99th percentile; prompts of
    20k tokens, three times that at the tail; 50 to 80 % of a prompt known before the tools return; last replies five
    times as long as others; tools with long tails that take 32 % of the time to the last answer (median). Reply
    lengths and the number of system prompts are our choice. `append-only` follows the open traces: one system prompt,
    one call at a time.
    """
    if workload not in AGENTS:
        raise ConfigError(f"there is no workload {workload!r}; there are {', '.join(AGENTS)}", "workload")
    moments = poisson(random.Random(f"{seed}/{workload}/arrivals"), count, rate)
    kinds = random.Random(f"{seed}/{workload}/tools")
    times = [HeavyTailed.drawn(kinds, TOOL_S * tool_times) for _ in range(SYSTEMS)]
    for number, moment in enumerate(moments):
        rng = random.Random(f"{seed}/{workload}/{number}")
        turns, system = _fanning(rng, times) if workload == "fan-out" else _growing(rng, tool_times)
        yield sized(number, turns, moment, Beginning(system))


def _fanning(rng: random.Random, times: list[HeavyTailed]) -> tuple[list[Turn], int]:
    count = max(2, long_tailed(rng, *ITERATIONS))
    first = PROMPT * 3 // 4
    turns: list[Turn] = []
    length, added, system = float(first), first, "first"  # the first system prompt is of no tool
    for _ in range(count - 1):
        fan = long_tailed(rng, *FAN_OUT)
        least = max(KNOWN[0], (first / (LONGEST * PROMPT)) ** (1 / (count - 1)))
        longer = length / rng.uniform(least, KNOWN[1])
        size = max(1, round((longer - length) / fan))
        picks = rng.choices(range(SYSTEMS), [1 / (1 + tool) for tool in range(SYSTEMS)], k=fan)
        runs = tuple(
            ToolRun(f"tool-{tool}", times[tool].draw(rng), size, PREAMBLE + CALL * (n + 1))
            for n, tool in enumerate(picks)
        )
        turns.append(Turn(Sized(added), output=Output(tokens=PREAMBLE + CALL * fan), system=system, runs=runs))
        system, length, added = f"tool-{picks[0]}", longer, size * fan
    last = max(64, round(rng.lognormvariate(0.0, 0.4) * LAST))
    turns.append(Turn(Sized(added), output=Output(tokens=last), system=system))
    return turns, first // 2


def _growing(rng: random.Random, tool_times: float) -> tuple[list[Turn], int]:
    kind = KINDS["swe"]
    tool = kind.seconds()
    turns: list[Turn] = []
    added = None
    for _ in range(max(2, kind.figures.turns(rng)) - 1):
        name, seconds = tool(rng)
        reply = STEP.draw(rng)
        run = ToolRun(name, seconds * tool_times, kind.result.draw(rng), reply)
        turns.append(Turn(Sized(added or 0), output=Output(tokens=reply), system="first", runs=(run,)))
        added = run.tokens
    turns.append(Turn(Sized(added or 0), output=Output(tokens=max(2, STEP.draw(rng, 5.0))), system="first"))
    turns[0] = replace(turns[0], prompt=Sized(kind.shared + kind.task.draw(rng)))
    return turns, kind.shared
