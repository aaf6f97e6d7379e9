"""Agents of Sutradhara's traces as numbers: iterations, the calls of each, what tools tell and how long they take.

    first prompt    |-- head, all alike --|-- system, by kind --|-- query --|
    next prompt     |-- head, all alike --|-- another system ---|-- query --|-- reply --|-- results --|

What the paper tells is drawn to it: 2 iterations and 2 calls in each (median), 7 and 21 at the 99th percentile; prompts
of 20k tokens, three times that at the tail; 50 to 80 % of a prompt known before the tools return; last replies five
times as long as others; tools that take 32 % of the time to the last answer (median), with long tails. The rest is
ours: how long replies are, how many system prompts there are and how often each is asked with. The open traces'
programs only grow: one system prompt, a call at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.loadgen.simulator.programs import KINDS, Length
from holdfast.loadgen.workloads.papers import FAN_OUT, ITERATIONS, KNOWN, LONGEST, long_tailed
from holdfast.loadgen.workloads.tooltime import HeavyTailed
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.types import TokenIds

WORKLOADS = ("fan-out", "append-only")
PROMPT = 20_000  # tokens
SYSTEMS = 15  # that a prompt after the first may have: instructions for what the called tool tells
HEAD = 2_000  # tokens with which all of them begin
CALL, PREAMBLE, LAST = 100, 40, 1_200  # tokens of a call, of what is said before, of the last reply
STEP = Length(80, 0.5)  # of an answer in the open traces, whose 20 iterations take 48 s
TOOL_S = 4.5  # median of the tools


@dataclass(frozen=True, slots=True)
class Call:
    """`closes`: so many tokens of the reply are out when it is whole. Its tool takes `tool_s` and tells `result`."""

    closes: int
    tool: str
    tool_s: float
    result: TokenIds


@dataclass(frozen=True, slots=True)
class Iteration:
    """One request: its system prompt, the tokens that are drawn, the calls among them; none in the last."""

    system: TokenIds
    reply: int
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Agent:
    """One request of a user, all iterations of it."""

    name: str
    arrived: float
    query: TokenIds
    iterations: tuple[Iteration, ...]


class Texts:
    """Token ids of which no two pieces have any in common, as far as they are not the same piece."""

    def __init__(self) -> None:
        self._next = 1 << 20
        self._systems: dict[tuple[int, int], TokenIds] = {}

    def new(self, n: int) -> TokenIds:
        first = self._next
        self._next += n + 4096  # what is drawn behind a piece counts on from its last token
        return np.arange(first, first + n, dtype=np.int32)

    def system(self, kind: int, length: int) -> TokenIds:
        """The system prompt of a kind: `HEAD` tokens as in all of them, then its own."""
        if (kind, length) not in self._systems:
            head = self._systems.setdefault((-1, HEAD), self.new(HEAD)) if length > HEAD else self.new(0)
            self._systems[kind, length] = np.concatenate((head, self.new(length - len(head))))
        return self._systems[kind, length]


def draw(workload: str, agents: int, rate: float, seed: int, tools: float = 1.0) -> Iterator[Agent]:
    """So many agents in the order in which they come, `rate` a second; `tools`: times their tools' seconds."""
    if workload not in WORKLOADS:
        raise ConfigError(f"there is no workload {workload!r}; there are {', '.join(WORKLOADS)}", "workload")
    texts, now = Texts(), 0.0
    arrivals = random.Random(f"{seed}/{workload}/arrivals")
    kinds = random.Random(f"{seed}/{workload}/tools")
    times = [HeavyTailed.drawn(kinds, TOOL_S * tools) for _ in range(SYSTEMS)]
    for number in range(agents):
        now += arrivals.expovariate(rate)
        rng = random.Random(f"{seed}/{workload}/{number}")
        name = f"agent-{number}"
        if workload == "fan-out":
            yield _fanning(name, now, rng, texts, times)
        else:
            yield _growing(name, now, rng, texts, tools)


def _fanning(name: str, arrived: float, rng: random.Random, texts: Texts, times: list[HeavyTailed]) -> Agent:
    turns = max(2, long_tailed(rng, *ITERATIONS))
    first = PROMPT * 3 // 4
    system, length = first // 2, float(first)
    iterations, kind = [], -2  # the first prompt is of no tool's kind
    for _ in range(turns - 1):
        fan = long_tailed(rng, *FAN_OUT)
        least = max(KNOWN[0], (first / (LONGEST * PROMPT)) ** (1 / (turns - 1)))
        longer = length / rng.uniform(least, KNOWN[1])
        each = max(1, round((longer - length) / fan))
        chosen = rng.choices(range(SYSTEMS), [1 / (1 + tool) for tool in range(SYSTEMS)], k=fan)
        calls = tuple(
            Call(PREAMBLE + CALL * (n + 1), f"tool-{tool}", times[tool].draw(rng), texts.new(each))
            for n, tool in enumerate(chosen)
        )
        iterations.append(Iteration(texts.system(kind, system), PREAMBLE + CALL * fan, calls))
        kind, length = chosen[0], longer
    last = max(64, round(rng.lognormvariate(0.0, 0.4) * LAST))
    iterations.append(Iteration(texts.system(kind, system), last, ()))
    return Agent(name, arrived, texts.new(first - system), tuple(iterations))


def _growing(name: str, arrived: float, rng: random.Random, texts: Texts, tools: float) -> Agent:
    kind = KINDS["swe"]
    times = kind.times()
    iterations = []
    for _ in range(max(2, kind.figures.turns(rng)) - 1):
        tool, seconds = kind.tool(rng, times)
        reply = STEP.draw(rng)
        call = Call(reply, tool, seconds * tools, texts.new(kind.result.draw(rng)))
        iterations.append(Iteration(texts.system(0, kind.shared), reply, (call,)))
    iterations.append(Iteration(texts.system(0, kind.shared), max(2, STEP.draw(rng, 5.0)), ()))
    return Agent(name, arrived, texts.new(kind.task.draw(rng)), tuple(iterations))
