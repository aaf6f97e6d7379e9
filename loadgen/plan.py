"""What a comparison sends, in order: every repetition of every workload at every load, drawn. No HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.loadgen.options import Options
from holdfast.loadgen.runner import Runner, reported
from holdfast.loadgen.workloads.catalog import LOADED_BY, describe, drawings
from holdfast.loadgen.workloads.drawing import Draw, warm_up
from holdfast.loadgen.workloads.script import Load, Round, Sizes

WARM_UP = "warm-up"


class Part(Protocol):
    """One repetition of something that is sent to every server."""

    @property
    def about(self) -> str:
        """What is being sent, for the one who waits."""

    @property
    def requests(self) -> int:
        """What one server is sent."""

    @property
    def repetition(self) -> int:
        """Which one, from 0."""

    @property
    def measured(self) -> Mapping[str, int]:
        """Of ``requests`` those that are measured, under every name that the rows have for them."""

    @property
    def tenants(self) -> Set[str]:
        """Whose requests they are, where they are told apart."""

    @property
    def told(self) -> dict[str, str]:
        """What was drawn, in a line, under every name that the rows have for it; nothing where none is measured."""

    async def send(self, runner: Runner) -> None:
        """Send it to every server of ``runner``."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One repetition of one workload, drawn."""

    workload: str
    repetition: int
    drawn: Round
    load: Load | None = None  # of a sweep

    @property
    def about(self) -> str:
        return f"{reported(self.workload, load=self.load)} {self.repetition + 1}"

    @property
    def requests(self) -> int:
        return sum(len(lane) for wave in (*self.drawn.fill, *self.drawn.waves) for lane in wave)

    @property
    def measured(self) -> Mapping[str, int]:
        names = [reported(self.workload, script.tenant, self.load) for script in self.drawn.scripts]
        return Counter(names[turn.script] for wave in self.drawn.waves for lane in wave for turn in lane)

    @property
    def tenants(self) -> Set[str]:
        return {script.tenant for script in self.drawn.scripts if script.tenant}

    @property
    def told(self) -> dict[str, str]:
        return dict.fromkeys(self.measured, describe(self.drawn)) if self.drawn.waves else {}

    async def send(self, runner: Runner) -> None:
        await runner.run(self.workload, self.repetition, self.drawn, self.load)


def plan(options: Options) -> list[Planned]:
    """Every repetition, drawn, the warm-up first: the same for the same options."""
    warm = [Planned(WARM_UP, number, warm_up(options.seed, number)) for number in range(options.warm_up)]
    return warm + [
        Planned(name, repetition, drawing(Draw(options.seed, name, repetition, load.told if load else ""), sizes), load)
        for asked in options.workloads
        for load, sizes in _loads(asked, options)
        for name, drawing in drawings((asked,))
        for repetition in range(options.repetitions)
    ]


def measured_of(parts: Sequence[Part]) -> dict[str, list[int]]:
    """How many requests each server is measured by in each repetition, by the name that the rows have for them."""
    found: dict[str, list[int]] = {}
    for part in sorted(parts, key=lambda part: part.repetition):
        for name, count in part.measured.items():
            found.setdefault(name, []).append(count)
    return found


def told_of(parts: Sequence[Part]) -> dict[str, str]:
    """What was drawn, by the name that the rows have for it: of each repetition that differs from those before."""
    found: dict[str, dict[str, None]] = {}
    for part in parts:
        for name, told in part.told.items():
            found.setdefault(name, {})[told] = None
    return {name: "; then ".join(told) for name, told in found.items()}


def _loads(workload: str, options: Options) -> Iterator[tuple[Load | None, Sizes]]:
    """Every load at which a workload is sent, and its sizes then; the usual sizes where no sweep was asked for."""
    size = LOADED_BY.get(workload, "")
    values: tuple[float, ...] = options.rates if size == "rate" else options.concurrencies if size else ()
    unit = "a second" if size == "rate" else "at once"
    for value in values:
        changed: dict[str, Any] = {size: value}
        yield Load(value, unit), replace(options.sizes, **changed)
    if not values:
        yield None, options.sizes
