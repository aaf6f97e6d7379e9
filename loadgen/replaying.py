"""Replays the programs of a trace on servers: the whole trace on one, then on the next.

What each request holds and when it is due is `traces.replay`'s; here it is sent and measured.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from urllib.parse import quote

from holdfast.loadgen.chat import encode, streamed
from holdfast.loadgen.conversation import Said, WrittenCall, assistant, digest
from holdfast.loadgen.runner import About, Runner, Sent, reported
from holdfast.loadgen.schedule import LEAD_S, sleep_until, start_each
from holdfast.loadgen.traces.formats import Format, named, read
from holdfast.loadgen.traces.lengths import Wording, worded
from holdfast.loadgen.traces.model import Json, Program, from_zero
from holdfast.loadgen.traces.replay import Answers, Ask, Forcing, Lengths, Manner, first, following
from holdfast.loadgen.workloads.drawing import poisson
from holdfast.replicas.errors import ConfigError

WORKLOAD = "replay"


@dataclass(frozen=True, slots=True)
class Asked:
    """A replay as the command line asks for it."""

    trace: Path
    format: str = Format.MOONCAKE
    recorded_answers: bool = False
    forced_lengths: bool = False
    forcing: str = Forcing.HOLDFAST
    speed: float = 1.0
    scale: float = 1.0
    max_tokens: int | None = 128  # of answers of which the trace has no limit, or no length where these are forced
    rate: float | None = None  # programs a second, of a trace without times

    @property
    def manner(self) -> Manner:
        """Raises ConfigError."""
        if self.forcing not in set(Forcing):
            raise ConfigError(f"forcing is one of {', '.join(Forcing)}, not {self.forcing!r}", "forcing")
        answers = Answers.RECORDED if self.recorded_answers else Answers.LIVE
        lengths = Lengths.FORCED if self.forced_lengths else Lengths.FREE
        return Manner(answers, lengths, Forcing(self.forcing), self.max_tokens, self.speed)

    @property
    def told(self) -> str:
        """How it is sent and whose answers are in the histories, for the reader of the report."""
        limit = "" if self.max_tokens is None else f" and max_tokens {self.max_tokens}"
        lengths = ", answers of the recorded lengths" if self.forced_lengths else ""
        whose = "the trace's" if self.recorded_answers else "each server's own"
        when = f"{self.speed:g} times its speed" if self.rate is None else f"{self.rate:g} programs a second"
        return (
            f"temperature 0{limit} where the trace has none{lengths}; "
            f"histories are of {self.trace.name} at {when}, {whose} answers"
        )


def replays(asked: Asked, seed: int, repetitions: int) -> list[Replay]:
    """Every repetition of the trace. Raises ConfigError."""
    programs = from_zero(read(asked.trace, named(asked.format)).programs)
    if asked.rate is not None:
        if not 0 < asked.rate < inf:
            raise ConfigError("rate must be a number more than 0", "rate")
        if any(turn.at_ms is not None for program in programs for turn in program.turns):
            raise ConfigError("the trace says when programs arrived; --speed makes that faster", "rate")
    wordings = [Wording(seed, repetition, scale=asked.scale) for repetition in range(repetitions)]
    return [Replay(_arriving(programs, asked, wording), asked.manner, wording) for wording in wordings]


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace to be sent. Raises ConfigError for a program that cannot be replayed in this manner."""

    programs: tuple[Program, ...]
    manner: Manner
    wording: Wording

    def __post_init__(self) -> None:
        if not self.programs:
            raise ConfigError("the trace has no program", "trace")
        for program in self.programs:
            first(worded(program, self.wording), self.manner)
            _check_sendable(program)

    @property
    def about(self) -> str:
        """What is being sent, for the one who waits."""
        return f"{WORKLOAD} {self.repetition + 1}"

    @property
    def repetition(self) -> int:
        """Which one, from 0."""
        return self.wording.repetition

    @property
    def requests(self) -> int:
        """What one server is sent."""
        return sum(self.measured.values())

    @property
    def measured(self) -> Mapping[str, int]:
        """The same, by the names that the rows have for it."""
        counts: Counter[str] = Counter()
        for program in self.programs:
            counts[reported(WORKLOAD, program.tenant or "")] += len(program.turns)
        return counts

    @property
    def tenants(self) -> Set[str]:
        """Whose requests they are, where the trace tells."""
        return {program.tenant for program in self.programs if program.tenant}

    @property
    def told(self) -> dict[str, str]:
        """What is sent, in a line, under every name that the rows have for it."""
        last = max(program.arrival_ms or 0.0 for program in self.programs) / 1e3 / self.manner.speed
        when = f"arriving over {last:.0f} s" if last else "all at once"
        return dict.fromkeys(self.measured, f"{len(self.programs)} programs, {self.requests} requests, {when}")

    async def send(self, runner: Runner) -> None:
        """Replay the trace on every server of ``runner``, which keeps the rows."""
        servers = runner.servers
        for place in range(len(servers)):
            server = servers[(self.repetition + place) % len(servers)]
            about = About(WORKLOAD, self.repetition, 0, True, server)
            began = time.perf_counter()
            starts = [began + (program.arrival_ms or 0.0) / 1e3 / self.manner.speed for program in self.programs]
            await start_each(starts, [partial(self._program, runner, about, each, began) for each in self.programs])

    async def _program(self, runner: Runner, about: About, program: Program, began: float) -> None:
        ask: Ask | None = first(worded(program, self.wording), self.manner)
        session = quote(f"{self.wording.seed}/{self.repetition}/{program.id}")
        ended_ms = 0.0
        while ask is not None:
            due = began + ask.due_ms(ended_ms) / 1e3
            await sleep_until(due, LEAD_S)
            content = streamed({"model": about.server.model, "temperature": 0, **ask.request})
            paced = due if ask.index == 0 or ask.due_ms(ended_ms) > ended_ms else None
            tools, tenant = ask.turn.tools, program.tenant or ""
            asked = digest(ask.messages, tools)
            sent = Sent(program.id, ask.index, len(program.turns), tools, asked, paced, tenant)
            await sleep_until(due)
            exchange = await about.server.client.send(content, runner.headers(session, tenant))
            said = exchange.said
            runner.keep(about, sent, exchange, said is not None and _as_recorded(said, ask.turn.output.answer))
            ended_ms = (exchange.ended - began) * 1e3
            ask = following(ask, None if said is None else assistant(said))
            runner.sent()


def _arriving(programs: tuple[Program, ...], asked: Asked, wording: Wording) -> tuple[Program, ...]:
    """The programs at moments drawn for this repetition, where a rate is asked for."""
    if asked.rate is None:
        return programs
    rng = random.Random(f"{wording.seed}/{WORKLOAD}/{wording.repetition}/arrivals")
    moments = poisson(rng, len(programs), asked.rate)
    return tuple(
        replace(program, turns=(replace(program.turns[0], at_ms=moment * 1e3 * asked.speed), *program.turns[1:]))
        for program, moment in zip(programs, moments, strict=True)
    )


def _check_sendable(program: Program) -> None:
    """Raises ConfigError for what no request can hold: half a surrogate pair, or an integer beyond 64 bits."""
    for index, turn in enumerate(program.turns):
        try:
            encode({"": [program.id, turn.prompt, turn.output.history, turn.tools, turn.sampling]})
        except TypeError as error:
            raise ConfigError(f"program {program.id!r}, turn {index}: cannot be sent: {error}", "trace") from error


def _as_recorded(said: Said, answer: Json | None) -> bool:
    """Whether the calls are the recorded answer's; not where the trace has none."""
    if answer is None:
        return False
    functions = [call["function"] for call in answer.get("tool_calls") or ()]
    recorded = Said("", tuple(WrittenCall("", of["name"], of["arguments"]) for of in functions))
    return bool(said.plain["calls"] == recorded.plain["calls"])
