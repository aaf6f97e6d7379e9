"""Scripts of agent programs and the order in which their turns are sent: data only, no drawing and no HTTP.

A turn is one request. The user asks for one or more calls; each of the model's calls is answered with the tool's
result, and the user speaks again when the model has answered in text. A script holds what the user says and what a
good model would answer, which is used where the history is forced and in place of an answer that failed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import Any

from holdfast.replicas.errors import ConfigError

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: the tool's name and its arguments as an object."""

    tool: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class Step:
    """One message of the user: what is said, the calls it asks for, the text that ends it."""

    user: str
    calls: tuple[Call, ...]
    text: str
    together: tuple[int, ...] = ()  # how many of the calls each answer holds; empty: one

    def due(self, done: int) -> tuple[Call, ...]:
        """The calls of the next answer after ``done`` calls; none: a text is next."""
        end = 0
        for count in self.together or (1,) * len(self.calls):
            end += count
            if end > done:
                return self.calls[done:end]
        return ()


@dataclass(frozen=True, slots=True)
class Pause:
    """What lies between a turn and the next, whatever the answer: the time of its tools, and how much they tell.

    ``words`` come on top of what the results say themselves; after a text they open the user's next message.
    """

    seconds: float = 0.0
    words: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """One program: system prompt, tools as an OpenAI client declares them, and as many steps as it may have turns."""

    name: str
    session: str  # unlike that of any other repetition or workload; opens the system prompt, too
    system: str
    tools: tuple[Json, ...]
    steps: tuple[Step, ...]
    pauses: tuple[Pause, ...] = ()  # after each turn but the last; empty: none
    tenant: str = ""  # whose key it is sent with; up to a dash, under what name it is reported
    systems: tuple[str, ...] = ()  # of each request, where it changes; empty: `system`

    def system_of(self, turn: int) -> str:
        """The system prompt of request ``turn``."""
        return self.systems[turn] if turn < len(self.systems) else self.system

    def pause(self, turn: int) -> Pause:
        """What follows request ``turn``."""
        return self.pauses[turn] if turn < len(self.pauses) else Pause()


@dataclass(frozen=True, slots=True)
class Turn:
    """Request ``index`` (from 0) of script ``script`` (its place in the round)."""

    script: int
    index: int


Lane = tuple[Turn, ...]
"""Turns sent one after another, each as soon as the one before is answered."""

Wave = tuple[Lane, ...]
"""Lanes that run at once. The next wave starts when all of them are through."""


@dataclass(frozen=True, slots=True)
class Round:
    """One repetition of a workload. ``fill`` waves come first and are not measured: they are what a cache may know."""

    scripts: tuple[Script, ...]
    waves: tuple[Wave, ...]
    fill: tuple[Wave, ...] = ()
    due: tuple[float, ...] = ()  # when each lane of a wave begins, in seconds; empty: at once
    forced: bool = False  # the scripted answers go into the history whatever the model says


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the workloads are. Raises ConfigError for sizes below 1 (words: 0), and for a rate, a scale or times of
    tools that are not above 0.
    """

    webapp_turns: int = 35
    webapp_words: int = 0  # that its tools tell beside their results, in all
    programs: int = 8  # at once, in `concurrency`
    burst: int = 8  # requests at once, in `burst`
    bursts: int = 5  # one after another
    chain: int = 3  # calls that one message of the user asks for at most
    jobs: int = 20  # programs that arrive by a schedule; in `tenants`, of each quiet tenant
    rate: float = 0.2  # of those, a second
    turns_times: int = 1  # how often the turns of `swe`, `mixed` and `bfcl` are multiplied
    tool_times: float = 1.0  # the same of the seconds that their tools take
    prompt_tokens: int = 1000  # words that tools add to a program of these; a prompt of `sutradhara`
    scale: float = 0.01  # of the lengths of `coding`: prompts of 195,000 tokens become 1,950
    quiet: int = 3  # tenants beside the noisy one
    noise: int = 8  # how many times the programs of a quiet one that one sends, at as many times the rate

    def __post_init__(self) -> None:
        above = "rate", "scale", "tool_times"
        for name in (field.name for field in fields(self) if field.name not in above):
            least = 0 if name == "webapp_words" else 1
            if getattr(self, name) < least:
                raise ConfigError(f"{name.replace('_', '-')} must be at least {least}", name)
        for name in above:
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name.replace('_', '-')} must be a number more than 0", name)


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a sweep: so many programs or requests."""

    value: float
    unit: str  # "a second" or "at once"

    @property
    def told(self) -> str:
        return f"{self.value:g} {self.unit}"


def one_by_one(turns: tuple[Turn, ...]) -> tuple[Wave, ...]:
    """Waves that send one turn at a time, in this order."""
    return tuple(((turn,),) for turn in turns)


def at_once(scripts: int, turns: int) -> tuple[Wave, ...]:
    """One wave in which every script runs through its turns at its own pace."""
    return (tuple(tuple(Turn(script, index) for index in range(turns)) for script in range(scripts)),)
