"""Agent programs as numbers: when they arrive, how many tokens each turn adds and draws, how long its tools take.

Turns and tool times are drawn to the figures of Sutradhara's traces, as those of `workloads.papers` are. Lengths are
ours: neither paper tells them, but that a program fits a context of 128k and takes over 100 seconds alone. `coding` is
drawn to real coding sessions; in `mixed` and `mixed-shell` one tool of five is slow, and ours entirely. All that is
drawn of a program depends on the seed and its number, so every policy meets the same programs and the same tools.

    tokens   |<- system, same for all ->|<- program ->|<- reply ->|<- result ->|<- reply ->| ...
             0                        shared                                   turn 2
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from holdfast.loadgen.workloads.papers import BFCL, GROUP, SESSION, SUB_AGENT, SWE, Figures, Session
from holdfast.loadgen.workloads.tooltime import QUICK, TIMES, Gaps, log_normal
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.types import TokenIds

CONTEXT = 1 << 17  # no program has more tokens; texts of neighbouring programs are so far apart
MAX_TOKENS = 2048  # of a reply, as the client asks for it; where it ends nobody knows beforehand
PAGES = 64  # cells that a request needs beside its own, at most: pages that are not full
_CHILD_S = 0.02  # from one sub-agent to the next
_BASES, _NAMES, _PREAMBLES = 8191, 1 << 30, 3 << 29


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: how much of the calls go to it, and how long it takes against the others."""

    name: str
    share: float
    times: float


@dataclass(frozen=True, slots=True)
class Times:
    """Of a kind's tools: the mean of their `times`, and the variance of the seconds of one that takes the mean."""

    mean: float
    within: float


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens, log-normal with this mean; `spread` is of the logarithm."""

    mean: float
    spread: float

    def draw(self, rng: random.Random, scale: float = 1.0) -> int:
        return max(1, round(rng.lognormvariate(math.log(self.mean * scale) - self.spread**2 / 2, self.spread)))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of agent."""

    figures: Figures
    tools: tuple[Tool, ...]
    shared: int  # tokens of the system prompt and the tools' schemas
    task: Length  # what the user asks for
    reply: Length
    result: Length
    gaps: Gaps | None = None  # how long its tools take, where `figures` do not tell
    group: Kind | None = None  # its sub-agents, about seven at once, that go on from what it has

    def times(self) -> Times:
        """Mean and variance over all tools are those of `figures`."""
        figures = self.figures
        mean = sum(tool.share * tool.times for tool in self.tools)
        square = sum(tool.share * (tool.times / mean) ** 2 for tool in self.tools)
        return Times(mean, (figures.tool_variance + figures.tool_s**2) / square - figures.tool_s**2)

    def tool(self, rng: random.Random, times: Times) -> tuple[str, float]:
        """A tool and the seconds it takes."""
        if self.gaps is not None:
            return self.tools[0].name, self.gaps.draw(rng)
        tool = rng.choices(self.tools, [tool.share for tool in self.tools])[0]
        return tool.name, tool.times / times.mean * log_normal(rng, self.figures.tool_s, times.within)


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


@dataclass(frozen=True, slots=True)
class Turn:
    """`prompt` tokens are added before it, `reply` are drawn, then `tool` runs for `tool_s`; "" after the last.

    `children`: sub-agents that begin when it has ended, each `arrived` seconds after; the program goes on when all of
    them have ended too.
    """

    prompt: int
    reply: int
    tool: str = ""
    tool_s: float = 0.0
    children: tuple[Program, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """One agent's run. `arrived` in seconds; the first `shared` tokens are those of every program with its `preamble`,
    or its parent's up to the end of turn `fork` where it is a sub-agent of `parent`.
    """

    number: int
    arrived: float
    shared: int
    turns: tuple[Turn, ...]
    tenant: str = ""
    preamble: int = 0
    parent: Program | None = None
    fork: int = 0

    @property
    def name(self) -> str:
        return f"program-{self.number}"

    @property
    def length(self) -> int:
        return sum(turn.prompt + turn.reply for turn in self.turns)

    def known(self, at: int) -> tuple[str, ...]:
        """What the prompt of its turn `at` begins with, longest first: a name for each beginning that another prompt
        may have too. These are all that was there when the turn before had ended, and the `shared` tokens.
        """
        return (self.standing(at - 1), self.begins) if at else (self.begins,)

    def standing(self, at: int) -> str:
        """The name of all that is there when turn `at` has ended."""
        return f"{self.name}/{at}"

    @property
    def begins(self) -> str:
        """The name of its `shared` tokens."""
        if self.parent is None:
            return f"preamble/{self.tenant}/{self.preamble}"
        return f"{self.parent.name}/{self.fork}"

    def tokens(self, vocabulary: int | None = None) -> TokenIds:
        """The whole text, int32: behind its second part each token is the one before it and 1, up to a `vocabulary`."""
        base = self.number % _BASES * CONTEXT
        text = np.arange(base, base + self.length, dtype=np.int32)
        if self.parent is not None:
            text[: self.shared] = self.parent.tokens()[: self.shared]
        else:
            first = _PREAMBLES + self.preamble * CONTEXT if self.preamble else 0
            text[: self.shared] = np.arange(first, first + self.shared)
        text[self.shared] = _NAMES + self.number % _NAMES
        return text if vocabulary is None else text % vocabulary


@dataclass(frozen=True, slots=True)
class Workload:
    """Which programs, how many of them and how fast they come: `rate` a second, by a Poisson process.

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
        for name in ("programs", "turns_times", "rate", "scale", "tool_times"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name.replace('_', '-')} must be more than 0", name)
        least = KINDS[self.kind].shared * self.scale + 2 * MAX_TOKENS
        if not least <= self.context <= CONTEXT:
            raise ConfigError(f"context must be from {least:.0f} to {CONTEXT}, not {self.context}", "context")

    def within(self, cells: int) -> Workload:
        """The same where no program is longer than a cache of so many cells has room for. Raises ConfigError."""
        return replace(self, context=min(self.context, cells - PAGES))

    def draw(self, seed: int) -> Iterator[Program]:
        """The programs in order of arrival."""
        arrivals, now = random.Random(f"{seed}/{self.kind}/arrivals"), 0.0
        for number in range(self.programs):
            now += arrivals.expovariate(self.rate)
            yield self._program(number, now, random.Random(f"{seed}/{self.kind}/{number}"))

    def _program(self, number: int, arrived: float, rng: random.Random) -> Program:
        kind = KINDS[self.kind]
        alone = self._alone(kind, number, arrived, rng, max(1, round(kind.shared * self.scale)))
        return alone if kind.group is None else self._with_group(alone, kind.group, rng)

    def _alone(self, kind: Kind, number: int, arrived: float, rng: random.Random, shared: int) -> Program:
        """A program that begins with `shared` tokens which others have as well."""
        times = self.turns_times
        drawn = kind.times() if kind.gaps is None else Times(1.0, 0.0)
        count = kind.figures.turns(rng) * times
        turns: list[Turn] = []
        room = self.context - MAX_TOKENS
        for index in range(count):
            if index:
                prompt = kind.result.draw(rng, self.scale / times)
            else:
                prompt = min(shared + kind.task.draw(rng, self.scale), room - MAX_TOKENS)
            reply = min(kind.reply.draw(rng, self.scale / times), MAX_TOKENS - 1)
            name, tool_s = kind.tool(rng, drawn)
            room -= prompt + reply
            if room < 0:  # the context is full: the agent ends with what it has
                break
            turns.append(Turn(prompt, reply, name, tool_s * self.tool_times))
        turns[-1] = replace(turns[-1], tool="", tool_s=0.0)
        return Program(number, arrived, shared, tuple(turns))

    def _with_group(self, alone: Program, kind: Kind, rng: random.Random) -> Program:
        """The program with sub-agents after one of its turns but the last, where these have room."""
        if len(alone.turns) < 2:
            return alone
        at = rng.randrange(len(alone.turns) - 1)
        shared = sum(turn.prompt + turn.reply for turn in alone.turns[: at + 1])
        if shared > self.context - 3 * MAX_TOKENS:
            return alone
        children = []
        for i in range(rng.randint(*GROUP)):
            number = self.programs + alone.number * GROUP[1] + i
            child = self._alone(kind, number, i * _CHILD_S, rng, shared)
            children.append(replace(child, parent=alone, fork=at))
        turns = list(alone.turns)
        turns[at] = replace(turns[at], tool="", tool_s=0.0, children=tuple(children))
        return replace(alone, turns=tuple(turns))
