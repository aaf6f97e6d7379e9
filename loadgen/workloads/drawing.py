"""Workloads, drawn: each a function of seed, repetition and sizes.

After the stateful-inference paper's evaluation (sections 4.1 and 5.3): three agents of five tools and five turns, a bug
fix of six turns, a web application of thirty-five, a burst of eight, and exact repeats.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from holdfast.loadgen.workloads import tools
from holdfast.loadgen.workloads.script import Lane, Pause, Round, Script, Sizes, Wave, at_once, one_by_one
from holdfast.loadgen.workloads.tools import Tool

AGENTS = (("travel", "a travel agent"), ("review", "a code reviewer"), ("data", "a data analyst"))
AGENT_TOOLS = {"travel": tools.TRAVEL, "review": tools.REVIEW, "data": tools.DATA}
AGENT_TURNS = 5
BUGFIX_TURNS = 6


@dataclass(frozen=True, slots=True)
class Draw:
    """The identity of one repetition: seed, workload, repetition.

    ``apart`` changes the session only: each load of a sweep sends the same programs, and finds nothing cached.
    """

    seed: int
    workload: str
    repetition: int
    apart: str = ""

    def rng(self, label: str) -> random.Random:
        """A generator for one thing that is drawn."""
        return random.Random(f"{self.seed}/{self.workload}/{self.repetition}/{label}")

    @property
    def session(self) -> str:
        """Opens every system prompt, so that nothing cached in another repetition or workload fits."""
        name = f"{self.seed}/{self.workload}/{self.repetition}" + (f"/{self.apart}" if self.apart else "")
        return hashlib.sha256(name.encode()).hexdigest()[:12]

    def round(self, scripts: Iterable[Script], waves: tuple[Wave, ...], due: tuple[float, ...] = ()) -> Round:
        """Programs of these scripts."""
        programs = tuple(script.program(self.session, tools.result) for script in scripts)
        return Round(programs, waves, due=due, session=self.session)


def poisson(rng: random.Random, count: int, rate: float) -> tuple[float, ...]:
    """The first moments of a Poisson process with ``rate`` a second, in seconds from its beginning."""
    return tuple(accumulate(rng.expovariate(rate) for _ in range(count)))


def sequential(draw: Draw, sizes: Sizes) -> Round:
    """Three agents of five turns: A1 to A5, B1 to B5, C1 to C5."""
    return _agents(draw, sizes, tuple(a for a in range(3) for _ in range(AGENT_TURNS)))


def interleaved(draw: Draw, sizes: Sizes) -> Round:
    """Three agents of five turns: A1 B1 C1 A2 B2 C2 and so on."""
    return _agents(draw, sizes, (0, 1, 2) * AGENT_TURNS)


def round_robin(draw: Draw, sizes: Sizes) -> Round:
    """Three agents of five turns, another one first in each round: A1 B1 C1 B2 C2 A2 C3 A3 B3 and so on."""
    return _agents(draw, sizes, tuple((a + i) % 3 for i in range(AGENT_TURNS) for a in range(3)))


def bugfix(draw: Draw, sizes: Sizes) -> Round:
    """One agent fixes a bug in six turns with file names of its own: reads, searches, writes, runs, checks."""
    script = agent_script(draw, "bugfix", "a coding agent", tools.CODING, BUGFIX_TURNS, sizes.chain)
    return draw.round((script,), one_by_one((0,) * BUGFIX_TURNS))


def webapp(draw: Draw, sizes: Sizes) -> Round:
    """One agent builds a web application; in 35 turns its prompt grows from 300 to 3,000 tokens.

    What `webapp_words` adds comes in equal parts, one after every turn but the last.
    """
    turns, words = sizes.webapp_turns, sizes.webapp_words
    rng = draw.rng("order")
    order: list[Tool] = []
    while len(order) < turns * sizes.chain:
        order += rng.sample(tools.CODING, len(tools.CODING))
    script = agent_script(draw, "webapp", "a software engineer", tools.CODING, turns, sizes.chain, order)
    gaps = turns - 1 if words else 0
    ends = [words * i // gaps for i in range(gaps + 1)] if gaps else []  # words until each turn
    script = replace(script, pauses=tuple(Pause(words=later - earlier) for earlier, later in pairwise(ends)))
    return draw.round((script,), one_by_one((0,) * turns))


def burst(draw: Draw, sizes: Sizes) -> Round:
    """Bursts of requests at once over one preamble of all fifteen tools: 5 times 8 unless sized otherwise."""
    fifteen = tools.TRAVEL + tools.REVIEW + tools.DATA
    count, rng = sizes.burst * sizes.bursts, draw.rng("order")
    scripts = tuple(
        agent_script(draw, f"burst{i}", "an orchestrator of agents", fifteen, 1, 1, rng.sample(fifteen, 1))
        for i in range(count)
    )
    waves = tuple(tuple((first + i,) for i in range(sizes.burst)) for first in range(0, count, sizes.burst))
    return draw.round(scripts, waves)


def concurrency(draw: Draw, sizes: Sizes) -> Round:
    """Bug-fixing programs at once, each sending its next turn when the last is answered: 8 of 6 turns."""
    scripts = tuple(
        agent_script(draw, f"program{i}", "a coding agent", tools.CODING, BUGFIX_TURNS, sizes.chain)
        for i in range(sizes.programs)
    )
    return draw.round(scripts, at_once(sizes.programs, BUGFIX_TURNS))


def arrivals(draw: Draw, sizes: Sizes) -> Round:
    """Bug-fixing programs that arrive by a Poisson process, whether or not the server keeps up."""
    scripts = tuple(
        agent_script(draw, f"job{i}", "a coding agent", tools.CODING, BUGFIX_TURNS, sizes.chain)
        for i in range(sizes.jobs)
    )
    due = poisson(draw.rng("arrivals"), sizes.jobs, sizes.rate)
    return draw.round(scripts, at_once(sizes.jobs, BUGFIX_TURNS), due)


def repeats(draw: Draw, sizes: Sizes) -> Round:
    """The interleaved agents' requests a second time, byte for byte: what a response cache answers."""
    first = interleaved(draw, sizes)
    return replace(first, fill=first.waves, forced=True)


def warm_up(seed: int, number: int) -> Round:
    """A bug fix of which nothing is measured."""
    round_ = bugfix(Draw(seed, "warm-up", number), Sizes())
    return replace(round_, waves=(), fill=round_.waves)


def _agents(draw: Draw, sizes: Sizes, order: Lane) -> Round:
    scripts = []
    for name, role in AGENTS:
        offered = AGENT_TOOLS[name]
        names = draw.rng(f"{name}/order").sample(offered, len(offered))
        scripts.append(agent_script(draw, name, role, offered, AGENT_TURNS, sizes.chain, names))
    return draw.round(scripts, one_by_one(order))


def agent_script(
    draw: Draw, name: str, role: str, offered: Sequence[Tool], turns: int, chain: int, order: Sequence[Tool] = ()
) -> Script:
    """A script that goes through the tools in ``order`` (their own unless given), ``chain`` of them at a time.

    It has a step for every turn: a model that never calls a tool ends a step with each answer.
    """
    rng, order = draw.rng(name), order or offered
    tools_of_turns = ([order[(i + k) % len(order)] for k in range(chain)] for i in range(0, turns * chain, chain))
    steps = tuple(tools.step(group, rng) for group in tools_of_turns)
    system = f"Session {draw.session}. You are {role}. Use the tools when they help. Answer briefly."
    return Script(name, system, tuple(tool.schema for tool in offered), steps)
