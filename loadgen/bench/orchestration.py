"""Sutradhara's table on the real engine: its parts added one after another, each row on an engine of its own.

``python -m holdfast.loadgen.bench.orchestration [--workload fan-out|append-only] [--rounds N] [--tools 0]``. The same
agent runs on every engine in turn, another one first each time; all have met the same agents before. Requests go to the
service without HTTP, as the router would send them, so what tools and prompts sent ahead cost on the way is not in it
(`holdfast bench orchestrator` is over HTTP). Tools only wait, `--tools` times as long as is drawn for them. Calls are
asked for by `tool_choice`, so how many there are is the model's; answers are greedy, and have to be the same in every
row. What the last answer calls is not run.

    fan-out        a question with several calls, then the answer, asked with a system prompt of the first call's kind
    append-only    a few turns with a call each over one system prompt, then the answer
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.loadgen.measure import estimate, median, ratio
from holdfast.loadgen.simulator.policies import SUTRADHARA_TTL, TTL_S
from holdfast.loadgen.workloads.words import KINDS, filler
from holdfast.replicas.config import POCKET, DraftConfig, EngineConfig, RetentionConfig
from holdfast.replicas.errors import ConfigError, EngineError, HoldfastError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Answer,
    AnswerBuilder,
    ChatPrompt,
    Errored,
    GenerateRequest,
    HandleReleased,
    PartialPrefill,
    ProgramEnded,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)
from holdfast.replicas.service import Service

WORKLOADS = ("fan-out", "append-only")
CITIES, TURNS = 3, 3  # calls that a fan-out's question asks for; calls of an append-only agent
SYSTEMS = 4  # that a prompt after the first may have
SHORTEST_S, LONGEST_S = 0.05, 0.3  # that a tool takes
KEEP_S = 60.0
SPLIT_AFTER_S = 0.01  # the orchestrator's, which needs more than a bare clone has
WHOLE = 2**15  # tokens of a step: a quarter is more than a prompt here has
_WARM = 2 * SYSTEMS  # rounds before the measured ones
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    """What the client does, and the engine's settings."""

    name: str
    split: bool = False
    dispatch: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)


ROWS = (
    Row("baseline"),
    Row("+ splitting", split=True),
    Row("+ dispatch", split=True, dispatch=True),
    Row("+ tags", split=True, dispatch=True, engine={"without": ()}),
    Row("tags alone", engine={"without": ()}),
    Row("baseline, chunks of 256", engine={"step_tokens": 256}),
    Row("baseline, whole prompts", engine={"step_tokens": WHOLE}),
    Row(f"baseline, TTL {TTL_S:g} s", engine={"retention": RetentionConfig(SUTRADHARA_TTL)}),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rounds, words of a system prompt and of what a tool tells, cells and threads of an engine; `tools` is what the
    times of tools are multiplied by. Raises ConfigError.
    """

    workload: str = "fan-out"
    rounds: int = 30
    system: int = 250
    result: int = 60
    cells: int = 4096
    threads: int = 1
    tools: float = 1.0

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ConfigError(f"there is no workload {self.workload!r}; there are {', '.join(WORKLOADS)}", "workload")
        for name in ("rounds", "system", "result", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", name)
        if not self.tools >= 0:
            raise ConfigError("tools must be at least 0", "tools")


def rows_named(names: Sequence[str]) -> tuple[Row, ...]:
    """The first row, which the others are compared to, and those of these names; none: all. Raises ConfigError."""
    known = {row.name: row for row in ROWS}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no row {name!r}; there are {', '.join(known)}", "row")
    return tuple(row for row in ROWS if row is ROWS[0] or not names or row.name in names)


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent: what it is asked, the system prompt of each turn, and how long the tool takes for each city."""

    name: str
    question: str
    systems: tuple[str, ...]
    seconds: Mapping[str, float]
    result: int

    @classmethod
    def drawn(cls, number: int, sizes: Sizes) -> Agent:
        rng = random.Random(number)
        cities = [str(KINDS["city"](rng)) for _ in range(CITIES)]
        kind = rng.choices(range(SYSTEMS), [1 / (1 + n) for n in range(SYSTEMS)])[0]
        first, later = _system(-1, sizes.system), _system(kind, sizes.system)
        systems = (first, later) if sizes.workload == "fan-out" else (first,) * (TURNS + 1)
        asked = " and ".join(f"check the weather in {city}" for city in cities)
        seconds = {city: sizes.tools * rng.uniform(SHORTEST_S, LONGEST_S) for city in cities}
        return cls(f"agent-{number}", f"Run {number}: {asked}.", systems, seconds, sizes.result)

    def tool_s(self, call: ToolCall) -> float:
        """How long a call takes; one of a city that nobody asked for, as long as the longest."""
        known = (seconds for city, seconds in self.seconds.items() if city in call.arguments)
        return next(known, max(self.seconds.values()))

    def told(self, call: ToolCall, number: int) -> dict[str, Any]:
        text = filler(f"{self.name}/{number}/{call.arguments}", self.result)
        return {"role": "tool", "tool_call_id": call.call_id, "content": f'{{"temperature": {number}}}\n{text}'}


@dataclass(slots=True)
class Run:
    """One agent in one row. Seconds; `cached` and `prompt` tokens of its turns."""

    first_s: float = 0.0
    seconds: float = 0.0
    said: list[Any] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)


class Client:
    """An orchestrator without HTTP: one row's way with its service."""

    def __init__(self, row: Row, service: Service) -> None:
        self.row = row
        self.service = service

    async def run(self, agent: Agent) -> Run:
        """From the question to the last answer. Raises EngineError where the engine does not answer."""
        run, asked = Run(), [{"role": "user", "content": agent.question}]
        arrived = time.time()
        start = time.perf_counter()
        for turn, system in enumerate(agent.systems):
            last = turn + 1 == len(agent.systems)
            request = GenerateRequest(
                f"{agent.name}/{turn}",
                _prompt(system, asked, "auto" if last else "required"),
                Sampling(max_tokens=96),
                program_id=agent.name,
                program_arrival=arrived,
                program_turns=turn,
            )
            answer, tools, first = await self._turn(request, agent)
            run.cached.append(answer.usage.cached)
            run.prompt.append(answer.usage.prompt)
            run.said.append((answer.text, [(call.name, call.arguments) for call in answer.tool_calls]))
            if last:
                run.first_s, run.seconds = first - start, time.perf_counter() - start
                break
            asked = [*asked, _message(answer)]
            asked += await self._pause(request, agent, asked, answer.tool_calls, tools, agent.systems[turn + 1])
        self.service.notice(ProgramEnded("", agent.name))
        return run

    async def _turn(
        self, request: GenerateRequest, agent: Agent
    ) -> tuple[Answer, dict[int, asyncio.Task[None]], float]:
        """An answer, the tools that began meanwhile by their call, and when its first token came."""
        built, tools = AnswerBuilder(), dict[int, asyncio.Task[None]]()
        first, written = 0.0, dict[int, str]()
        async for pieces in self.service.stream(request):
            built.add(pieces)
            for piece in pieces:
                if isinstance(piece, TextDelta | ToolCallDelta):
                    first = first or time.perf_counter()
                if isinstance(piece, ToolCallDelta):
                    written[piece.index] = written.get(piece.index, "") + piece.arguments
                    if piece.closed and self.row.dispatch:
                        call = ToolCall("", "", written[piece.index])
                        tools[piece.index] = asyncio.create_task(asyncio.sleep(agent.tool_s(call)))
        answer = built.answer()
        if answer is None:
            raise EngineError(f"{request.request_id} failed: {built.error().error.message}")
        return answer, tools, first or time.perf_counter()

    async def _pause(
        self,
        request: GenerateRequest,
        agent: Agent,
        asked: Sequence[Mapping[str, Any]],
        calls: Sequence[ToolCall],
        tools: Mapping[int, asyncio.Task[None]],
        system: str,
    ) -> list[dict[str, Any]]:
        """Until all tools are done; what is known of the next prompt goes ahead, result by result."""
        running = [tools.get(n) or asyncio.create_task(asyncio.sleep(agent.tool_s(c))) for n, c in enumerate(calls)]
        results: list[dict[str, Any]] = []
        sending: asyncio.Task[Answer | Errored] | None = None
        handle = f"{request.request_id}/ahead"
        for number, (call, tool) in enumerate(zip(calls, running, strict=True)):
            if self.row.split:
                await asyncio.wait([tool], timeout=SPLIT_AFTER_S)
            if self.row.split and not tool.done() and (sending is None or sending.done()):
                ahead = replace(
                    request,
                    request_id=f"{handle}/{number}",
                    prompt=_prompt(system, [*asked, *results], "auto"),
                    sampling=Sampling(max_tokens=0),
                    background=PartialPrefill(handle, KEEP_S),
                )
                sending = asyncio.create_task(self.service.generate(ahead))
            await tool
            results.append(agent.told(call, number))
        if sending is not None:
            sending.add_done_callback(lambda _: self.service.notice(HandleReleased("", handle)))
        return results


def _system(kind: int, words: int) -> str:
    head = filler("system", words // 4)
    return f"You are a travel agent. Call tools when they help. {head} {filler(f'system/{kind}', words - words // 4)}"


def _prompt(system: str, asked: Sequence[Mapping[str, Any]], choice: Any) -> ChatPrompt:
    return ChatPrompt([{"role": "system", "content": system}, *asked], (_TOOL,), tool_choice=choice)


def _message(answer: Answer) -> dict[str, Any]:
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]
    return {"role": "assistant", "content": answer.text, "tool_calls": calls}


async def measured(model: str, sizes: Sizes, warm: int = _WARM, rows: Sequence[Row] = ROWS) -> dict[str, list[Run]]:
    """Every row's runs, round by round, after `warm` rounds that do not count."""
    config = EngineConfig(
        model=model,
        dtype="float32",
        threads=sizes.threads,
        cells=sizes.cells,
        without=("kv_tags",),
        speculation=DraftConfig(enabled=False),
    )
    clients = [Client(row, Service.load(replace(config, **row.engine))) for row in rows]
    found: dict[str, list[Run]] = {row.name: [] for row in rows}
    try:
        for number in range(warm + sizes.rounds):
            agent, place = Agent.drawn(number, sizes), number % len(clients)
            for client in (*clients[place:], *clients[:place]):
                run = await client.run(agent)
                if number >= warm:
                    found[client.row.name].append(run)
            print(f"round {number + 1} of {warm + sizes.rounds}", file=sys.stderr)
    finally:
        for client in clients:
            await client.service.close()
    return found


def report(found: Mapping[str, Sequence[Run]], sizes: Sizes) -> list[str]:
    """A line for each row: medians, and what is gained over the first row, with intervals."""
    base = next(iter(found.values()))
    same = sum(len({repr(runs[n].said) for runs in found.values()}) == 1 for n in range(len(base)))
    lines = [
        f"{sizes.workload}: {len(base)} agents a row, {same} of them with the same answers in every row",
        f"{'':<24}{'FTR ms':>8}{'gained':>26}{'E2E ms':>9}{'gained':>26}  found, turn by turn",
    ]
    for name, runs in found.items():
        cells = f"{name:<24}"
        for figure, width in (("first_s", 8), ("seconds", 9)):
            mine, first = ([getattr(run, figure) for run in these] for these in (runs, base))
            value, over = estimate(mine, median, 0), ratio(mine, first, median, 0)
            assert value is not None
            assert over is not None
            low, high = over.ends
            told = "-" if runs is base else f"{1 - over.value:.1%} ({1 - high:.1%} to {1 - low:.1%})"
            cells += f"{value.value * 1e3:>{width}.0f}{told:>26}"
        turns = range(len(runs[0].prompt))
        shares = (sum(run.cached[n] for run in runs) / sum(run.prompt[n] for run in runs) for n in turns)
        lines.append(f"{cells}  {' '.join(f'{share:.0%}' for share in shares)}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; an error of ours is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="orchestration", description="Sutradhara's table on the real engine.")
    add = parser.add_argument
    add("--model", default=POCKET, help="'pocket', a folder, or a hub name in the local cache")
    add("--workload", default="fan-out", help="fan-out or append-only (default: fan-out)")
    add("--rounds", type=int, default=30, help="agents, each once in every row (default: 30)")
    add("--system", type=int, default=250, help="words of a system prompt (default: 250)")
    add("--result", type=int, default=60, help="words that a tool tells (default: 60)")
    add("--cells", type=int, default=4096, help="of each engine (default: 4096)")
    add("--threads", type=int, default=1, help="of each engine (default: 1)")
    add("--tools", type=float, default=1.0, metavar="X", help="what the times of tools are multiplied by; 0: at once")
    add("--row", action="append", default=[], help="only this one beside the baseline; may come several times")
    try:
        options = parser.parse_args(argv)
        given = {name: getattr(options, name) for name in ("system", "result", "cells", "threads", "tools")}
        sizes, rows = Sizes(options.workload, options.rounds, **given), rows_named(options.row)
        found = asyncio.run(measured(options.model, sizes, rows=rows))
    except HoldfastError as error:
        print(f"orchestration: {error.message}", file=sys.stderr)
        return 2
    print("\n".join(report(found, sizes)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
