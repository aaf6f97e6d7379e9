"""What a simulated run tells: of every program, and of the replicas together. Data and sums."""

from __future__ import annotations

from dataclasses import dataclass, fields

from holdfast.replicas.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Done:
    """One program's run. `bubble_s`: its requests' waits to be scheduled, all together."""

    number: int
    arrived: float
    ended: float
    turns: int
    tool_s: float
    bubble_s: float
    prompt: int  # tokens of all its prompts
    cached: int  # of these
    drawn: int

    @property
    def seconds(self) -> float:
        """Job completion time."""
        return self.ended - self.arrived


@dataclass(frozen=True, slots=True)
class Served:
    """One turn: `first_s` to its first token and `seconds` to its end, on replica number `replica`. One that was
    waited for no longer has no `prompt`.
    """

    tenant: str
    asked: float
    first_s: float
    seconds: float
    prompt: int
    cached: int
    replica: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Of all replicas. The names are those of `EngineStats`; `machine_steps` counts those that passed as one."""

    preemptions: int
    prompt_computed: int
    tokens_reloaded: int
    pins: int
    pin_hits: int
    pin_misses: int
    pins_expired: int
    pins_given_way: int
    pins_refused: int
    pages_out: int
    pages_in: int
    steps: int
    machine_steps: int = 0

    @classmethod
    def of(cls, stats: list[EngineStats], machine_steps: int) -> Counts:
        names = [field.name for field in fields(cls) if field.name != "machine_steps"]
        sums = {name: sum(getattr(each, name) for each in stats) for name in names}
        return cls(**sums, machine_steps=machine_steps)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, programs in order of arrival."""

    programs: list[Done]
    counts: Counts

    @property
    def turns(self) -> int:
        return sum(each.turns for each in self.programs)

    @property
    def wall_s(self) -> float:
        """From the first arrival to the last end."""
        return max(each.ended for each in self.programs) - min(each.arrived for each in self.programs)

    @property
    def programs_per_s(self) -> float:
        return len(self.programs) / self.wall_s
