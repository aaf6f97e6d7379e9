"""Replays the programs of a trace: reads them, gives them moments, and makes parts for the runner of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from pathlib import Path

from holdfast.loadgen.chat import encode
from holdfast.loadgen.conversation import Answers, Forcing, Lengths, Manner, first
from holdfast.loadgen.program import Program, from_zero
from holdfast.loadgen.runner import Part
from holdfast.loadgen.traces.formats import Format, named, read
from holdfast.loadgen.traces.lengths import Wording, worded
from holdfast.loadgen.workloads.drawing import poisson
from holdfast.loadgen.workloads.script import Round
from holdfast.replicas.errors import ConfigError

WORKLOAD = "replay"


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay as the command line asks for it."""

    trace: Path
    format: str = Format.MOONCAKE
    recorded_answers: bool = False
    forced_lengths: bool = False
    forcing: str = Forcing.HOLDFAST
    speed: float = 1.0
    scale: float = 1.0
    max_tokens: int | None = 128  # of answers without a limit in the trace, or without a length where these are forced
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
    def about(self) -> str:
        """How it is sent and whose answers are in the histories, for the reader of the report."""
        limit = "" if self.max_tokens is None else f" and max_tokens {self.max_tokens}"
        lengths = ", answers of the recorded lengths" if self.forced_lengths else ""
        whose = "the trace's" if self.recorded_answers else "each server's own"
        when = f"{self.speed:g} times its speed" if self.rate is None else f"{self.rate:g} programs a second"
        return (
            f"temperature 0{limit} where the trace has none{lengths}; "
            f"histories are of {self.trace.name} at {when}, {whose} answers"
        )

    def parts(self, seed: int, repetitions: int) -> list[Part]:
        """Every repetition of the trace. Raises ConfigError."""
        programs = from_zero(read(self.trace, named(self.format)).programs)
        if not programs:
            raise ConfigError("the trace has no program", "trace")
        if self.rate is not None:
            if not 0 < self.rate < inf:
                raise ConfigError("rate must be a number more than 0", "rate")
            if any(turn.at_ms is not None for program in programs for turn in program.turns):
                raise ConfigError("the trace says when programs arrived; --speed makes that faster", "rate")
        return [self._part(programs, Wording(seed, repetition, scale=self.scale)) for repetition in range(repetitions)]

    def _part(self, programs: tuple[Program, ...], wording: Wording) -> Part:
        for program in programs:
            first(worded(program, wording), self.manner)
            check_sendable(program)
        due = tuple((program.arrival_ms or 0.0) / 1e3 / self.speed for program in programs)
        if self.rate is not None:
            rng = random.Random(f"{wording.seed}/{WORKLOAD}/{wording.repetition}/arrivals")
            due = poisson(rng, len(programs), self.rate)
        lanes = tuple((place,) * len(program.turns) for place, program in enumerate(programs))
        round_ = Round(programs, (lanes,), due=due, session=f"{wording.seed}/{wording.repetition}")
        when = f"arriving over {max(due):.0f} s" if max(due) else "all at once"
        about = f"{len(programs)} programs, {sum(map(len, lanes))} requests, {when}"
        return Part(WORKLOAD, wording.repetition, round_, self.manner, wording=wording, about=about)


def check_sendable(program: Program) -> None:
    """Raises ConfigError for what no request can hold: half a surrogate pair, or an integer beyond 64 bits."""
    for index, turn in enumerate(program.turns):
        try:
            encode({"": [program.id, turn.prompt, turn.output.history, turn.tools, turn.sampling]})
        except TypeError as error:
            raise ConfigError(f"program {program.id!r}, turn {index}: cannot be sent: {error}", "trace") from error
