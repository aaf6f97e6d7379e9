"""Programs for many replicas, where it matters which one serves whom: four kinds, drawn to their seed.

    agents      append-only coding agents: each has a task of its own, and a system prompt that all share
    preambles   short programs that begin with one of forty long preambles, the k-th of them with a share of 1/k
    fan-out     parents whose sub-agents go on from what the parent has said and heard so far, all at once
    hot-tenant  ten tenants; one of them sends three fifths of the programs, all in bursts

Tools take what they take in the traces of SWE-Bench agents that the Continuum paper tells of, sub-agents are as many as
the calls of one iteration in Sutradhara's traces (2 in the median, 21 at the 99th percentile). Lengths, preambles and
bursts are ours: no paper tells them. Programs have fewer turns than those of the traces, so that a thousand replicas
serve several each.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from holdfast.loadgen.simulator.programs import KINDS, MAX_TOKENS, Kind, Length, Program, Turn
from holdfast.loadgen.workloads.drawing import poisson
from holdfast.loadgen.workloads.papers import SWE, Figures
from holdfast.replicas.errors import ConfigError

LONGEST = 1 << 15  # tokens of a program, at most
_FIRST = LONGEST - 2 * MAX_TOKENS  # of its first prompt, so that the reply to it has room
_PREAMBLES = 40
_TENANTS, _HOT = 10, 0.6
_PERIOD_S, _BURST_S = 30.0, 15.0  # the hot tenant sends in the first part of each period
_CHILDREN, _MOST_CHILDREN = 2, 21  # median and 99th percentile, none above
_CHILD_S = 0.02  # from one sub-agent to the next
_SHELL = KINDS["swe"].tools


def _kind(most: int, shared: int, task: Length, reply: int, result: Length) -> Kind:
    figures = Figures(most, 0.5, SWE.tool_s, SWE.tool_variance)
    return Kind(figures, _SHELL, shared, task, Length(reply, 0.6), result)


_AGENT = _kind(15, 1500, Length(1000, 0.5), 150, Length(900, 1.0))
_PREAMBLE = Length(6000, 0.5)
_SHORT = _kind(5, 0, Length(300, 0.4), 150, Length(300, 0.6))
_PARENT = _kind(5, 1500, Length(4000, 0.5), 200, Length(1500, 0.8))
_CHILD = _kind(3, 0, Length(300, 0.4), 150, Length(500, 0.6))
_TENANT = _kind(7, 3000, Length(1000, 0.5), 150, Length(900, 0.8))


@dataclass(frozen=True, slots=True)
class Crowd:
    """So many programs of a kind, `rate` of them a second by a Poisson process; sub-agents are not counted."""

    kind: str
    programs: int
    rate: float

    def __post_init__(self) -> None:
        if self.kind not in CROWDS:
            raise ConfigError(f"there is no workload {self.kind!r}; there are {', '.join(CROWDS)}", "workload")
        for name in ("programs", "rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0", name)

    @property
    def seconds(self) -> float:
        """How long programs come, in the mean."""
        return self.programs / self.rate

    def draw(self, seed: int) -> Iterator[Program]:
        """The programs in order of arrival."""
        moments = poisson(random.Random(f"{seed}/{self.kind}/arrivals"), self.programs, self.rate)
        drawn = (
            _Drawing(seed, self.kind, number, len(moments)).program(moment) for number, moment in enumerate(moments)
        )
        return iter(sorted(drawn, key=lambda program: program.arrived))


class _Drawing:
    """One program: all that is drawn depends on the seed and its number."""

    def __init__(self, seed: int, kind: str, number: int, programs: int) -> None:
        self._seed = seed
        self._kind = kind
        self._number = number
        self._children = programs + number * _MOST_CHILDREN  # the number of its first sub-agent
        self._rng = random.Random(f"{seed}/{kind}/{number}")

    def program(self, moment: float) -> Program:
        return CROWDS[self._kind](self, moment)

    def agent(self, moment: float) -> Program:
        return self.one(_AGENT, moment)

    def short(self, moment: float) -> Program:
        (preamble,) = self._rng.choices(range(1, _PREAMBLES + 1), [1 / k for k in range(1, _PREAMBLES + 1)])
        length = _PREAMBLE.draw(random.Random(f"{self._seed}/{self._kind}/preamble/{preamble}"))
        return self.one(replace(_SHORT, shared=min(length, LONGEST // 2)), moment, preamble)

    def of_tenant(self, moment: float) -> Program:
        hot = self._rng.random() < _HOT
        tenant = 0 if hot else self._rng.randrange(1, _TENANTS)
        if hot:  # what would come in the whole period comes in its first part
            moment -= moment % _PERIOD_S * (1 - _BURST_S / _PERIOD_S)
        return replace(self.one(_TENANT, moment, tenant + 1), tenant="hot" if hot else f"quiet-{tenant}")

    def parent(self, moment: float) -> Program:
        """With sub-agents after one of its turns but the last."""
        alone = self.one(_PARENT, moment)
        turns = list(alone.turns)
        if len(turns) < 2:
            return alone
        at = self._rng.randrange(len(turns) - 1)
        spread = math.log(_MOST_CHILDREN / _CHILDREN) / 2.326
        count = min(_MOST_CHILDREN, max(1, round(self._rng.lognormvariate(math.log(_CHILDREN), spread))))
        length = sum(turn.prompt + turn.reply for turn in turns[: at + 1])
        if length >= _FIRST:
            return alone
        kind = replace(_CHILD, shared=length)
        children = tuple(
            replace(self.one(kind, i * _CHILD_S), number=self._children + i, parent=alone, fork=at)
            for i in range(count)
        )
        turns[at] = replace(turns[at], tool="", tool_s=0.0, children=children)
        return replace(alone, turns=tuple(turns))

    def one(self, kind: Kind, moment: float, preamble: int = 0) -> Program:
        rng, times, room = self._rng, kind.times(), LONGEST - MAX_TOKENS
        turns: list[Turn] = []
        for index in range(kind.figures.turns(rng)):
            prompt = kind.result.draw(rng) if index else min(kind.shared + kind.task.draw(rng), _FIRST)
            reply = min(kind.reply.draw(rng), MAX_TOKENS - 1)
            name, tool_s = kind.tool(rng, times)
            room -= prompt + reply
            if room < 0 and turns:
                break
            turns.append(Turn(prompt, reply, name, tool_s))
        turns[-1] = replace(turns[-1], tool="", tool_s=0.0)
        return Program(self._number, moment, kind.shared, tuple(turns), preamble=preamble)


CROWDS: dict[str, Callable[[_Drawing, float], Program]] = {
    "agents": _Drawing.agent,
    "preambles": _Drawing.short,
    "fan-out": _Drawing.parent,
    "hot-tenant": _Drawing.of_tenant,
}


def of_tenants(seed: int, programs: dict[str, int], within_s: float) -> list[Program]:
    """So many programs of each tenant, which all come within so many seconds, in order of arrival. Tenants are not
    alike: the lengths of the first have half of what the usual ones have, those of the fourth twice as much, and so on.
    """
    drawn: list[Program] = []
    moments = random.Random(f"{seed}/tenants/arrivals")
    for index, (tenant, count) in enumerate(programs.items()):
        times = 0.5 * math.pow(4.0, index % 4 / 3)
        kind = replace(
            _TENANT,
            task=replace(_TENANT.task, mean=_TENANT.task.mean * times),
            reply=replace(_TENANT.reply, mean=_TENANT.reply.mean * times),
            result=replace(_TENANT.result, mean=_TENANT.result.mean * times),
        )
        for i in range(count):
            drawing = _Drawing(seed, f"tenants/{tenant}", i, count)
            program = drawing.one(kind, within_s * moments.random(), index + 1)
            drawn.append(replace(program, number=len(drawn), tenant=tenant))
    return sorted(drawn, key=lambda program: program.arrived)
