"""Replays the programs of a trace on servers: the whole trace on one, then on the next.

What each request holds and when it is due is `traces.replay`'s; here it is sent and measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from holdfast.loadgen.chat import streamed
from holdfast.loadgen.conversation import Said, WrittenCall, assistant, digest
from holdfast.loadgen.runner import About, Runner, Sent
from holdfast.loadgen.schedule import LEAD_S, sleep_until, start_each
from holdfast.loadgen.traces.formats import Format, named, read
from holdfast.loadgen.traces.lengths import Wording, worded
from holdfast.loadgen.traces.model import Json, Program, from_zero
from holdfast.loadgen.traces.replay import Answers, Ask, Forcing, Lengths, Manner, first, following
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
    max_tokens: int = 128

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
        """Whose answers are in the histories, for the reader of the report."""
        lengths = ", of the recorded lengths" if self.forced_lengths else ""
        whose = "the trace's" if self.recorded_answers else "each server's own"
        return f"of {self.trace.name} at {self.speed:g} times its speed, {whose} answers{lengths}"


def replays(asked: Asked, seed: int, repetitions: int) -> list[Replay]:
    """Every repetition of the trace. Raises ConfigError."""
    programs = from_zero(read(asked.trace, named(asked.format)).programs)
    wording = Wording(seed=seed, scale=asked.scale)
    return [Replay(programs, asked.manner, wording, repetition) for repetition in range(repetitions)]


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace to be sent. Raises ConfigError for a program that cannot be replayed in this manner."""

    programs: tuple[Program, ...]
    manner: Manner
    wording: Wording
    repetition: int = 0

    def __post_init__(self) -> None:
        if not self.programs:
            raise ConfigError("the trace has no program", "trace")
        for program in self.programs:
            first(worded(program, self.wording), self.manner)

    @property
    def about(self) -> str:
        """What is being sent, for the one who waits."""
        return f"{WORKLOAD} {self.repetition + 1}"

    @property
    def requests(self) -> int:
        """What one server is sent."""
        return sum(len(program.turns) for program in self.programs)

    @property
    def told(self) -> dict[str, str]:
        """What is sent, in a line, under the name that the rows have for it."""
        last = max(program.arrival_ms or 0.0 for program in self.programs) / 1e3 / self.manner.speed
        return {WORKLOAD: f"{len(self.programs)} programs, {self.requests} requests, arriving over {last:.0f} s"}

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
        ended_ms = 0.0
        while ask is not None:
            due = began + ask.due_ms(ended_ms) / 1e3
            await sleep_until(due, LEAD_S)
            content = streamed({"model": about.server.model, **ask.request})
            paced = due if ask.index == 0 or ask.due_ms(ended_ms) > ended_ms else None
            sent = Sent(program.id, ask.index, ask.turn.tools, digest(ask.messages, ask.turn.tools), paced)
            await sleep_until(due)
            exchange = await about.server.client.send(content, {"x-session-id": quote(program.id)})
            said = exchange.said
            runner.keep(about, sent, exchange, said is not None and _as_recorded(said, ask.turn.output.answer))
            ended_ms = (exchange.ended - began) * 1e3
            ask = following(ask, None if said is None else assistant(said))
            runner.sent()


def _as_recorded(said: Said, answer: Json | None) -> bool:
    """Whether the calls are the recorded answer's; not where the trace has none."""
    if answer is None:
        return False
    functions = [call["function"] for call in answer.get("tool_calls") or ()]
    recorded = Said("", tuple(WrittenCall("", of["name"], of["arguments"]) for of in functions))
    return bool(said.plain["calls"] == recorded.plain["calls"])
