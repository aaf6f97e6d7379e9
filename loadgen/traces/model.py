"""What a trace holds: programs, their turns and what was answered. Data only; the formats are elsewhere.

Times are milliseconds, as in the formats that are read and written, so that nothing is lost on the way. A message, a
tool and an assistant's answer are JSON objects as an OpenAI client sends them, and are never changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.replicas.errors import ConfigError

Json = dict[str, Any]
Messages = tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Sized:
    """A prompt of which only the length is known: in tokens, with an id for each block of it.

    Blocks with one id have one content. None: nothing is known to be shared.
    """

    tokens: int
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What came of a turn: the assistant's message, tokens as the server counted them, and times from the request on.

    ``kept`` is the message that went into the history where that is not ``answer``: a scripted one, say.
    """

    answer: Json | None = None
    kept: Json | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None  # generated
    reason: str | None = None  # why it ended, as the server says
    failure: str | None = None
    first_token_ms: float | None = None
    latency_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None

    @property
    def history(self) -> Json | None:
        """The assistant's message in the prompts that follow; None where the trace has none."""
        return self.answer if self.kept is None else self.kept


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what it adds to the conversation, the fields it was sent with, and when.

    ``prompt`` holds the messages after the answer of the turn before; with ``whole`` it is the whole prompt, and what
    came before is dropped. Raises ConfigError for sampling fields that would replace the conversation.
    """

    prompt: Messages | Sized
    whole: bool = False
    tools: tuple[Json, ...] = ()
    sampling: Json = field(default_factory=dict)  # other fields of the request's body
    max_tokens: int | None = None
    at_ms: float | None = None  # when it was sent, from the start of the trace
    delay_ms: float | None = None  # from the end of the turn before: the time of its tools
    output: Output = Output()

    def __post_init__(self) -> None:
        for name in ("messages", "tools"):
            if name in self.sampling:
                raise ConfigError(f"{name!r} is no sampling field", name)


@dataclass(frozen=True, slots=True)
class Program:
    """One agent run. ``closing``: messages after the last answer, with which nothing was asked.

    Raises ConfigError without id or turns, and for a first turn that is ``whole``: there is nothing before it.
    """

    id: str
    turns: tuple[Turn, ...]
    tenant: str | None = None
    closing: Messages = ()

    def __post_init__(self) -> None:
        if not self.id:
            raise ConfigError("a program needs an id", "id")
        if not self.turns:
            raise ConfigError(f"program {self.id!r} has no turn", "turns")
        if self.turns[0].whole:
            raise ConfigError(f"program {self.id!r}: the first turn drops nothing", "turns")

    @property
    def arrival_ms(self) -> float | None:
        """When its first turn was sent, from the start of the trace."""
        return self.turns[0].at_ms


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read from how many records, and which fields of them, how often, have no place in a trace."""

    programs: tuple[Program, ...]
    records: int
    left_out: Mapping[str, int]

    @property
    def turns(self) -> int:
        return sum(len(program.turns) for program in self.programs)

    @property
    def summary(self) -> str:
        """One line for the one who asked for the reading."""
        answered = sum(turn.output.answer is not None for program in self.programs for turn in program.turns)
        told = f"{self.records} records: {len(self.programs)} programs, {self.turns} turns, {answered} answers"
        fields = ", ".join(f"{name} ({count})" for name, count in sorted(self.left_out.items()))
        return f"{told}; left out: {fields}" if fields else told


def distinct(programs: Iterable[Program]) -> Iterator[Program]:
    """The programs, one by one. Raises ConfigError at a second one of the same id."""
    seen: set[str] = set()
    for program in programs:
        if program.id in seen:
            raise ConfigError(f"there are two programs {program.id!r}", "id")
        seen.add(program.id)
        yield program


def from_zero(programs: Iterable[Program]) -> tuple[Program, ...]:
    """The same programs with the earliest moment of all at zero."""
    programs = tuple(programs)
    start = min((turn.at_ms for program in programs for turn in program.turns if turn.at_ms is not None), default=0.0)
    return tuple(replace(program, turns=tuple(_earlier(turn, start) for turn in program.turns)) for program in programs)


def _earlier(turn: Turn, by_ms: float) -> Turn:
    return turn if turn.at_ms is None else replace(turn, at_ms=turn.at_ms - by_ms)
