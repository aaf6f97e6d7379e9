"""Many tenants on several replicas behind several routers, simulated: how equally they are served, and what one with
very many programs does to the others.

    equal    all tenants have as many programs, more than the replicas can serve at once: Jain's index of the seconds of
             steps that each had, until the first of them has ended half of its programs
    noise    one tenant has as many programs as all others together: their turns over what they take where that one has
             as many programs as each of them, and one's turns over what they take alone on replicas that are as much
             slower as its share is smaller
    pair     two tenants of equal weight, one with very many programs: the other's turns over what they take alone, on
             replicas that are half as fast, and on half of the replicas

The engines, the router's placement and what replicas tell each other of the time that tenants had are the real ones,
over a cost model. Replicas take whatever comes, so requests wait in the engines and none in the routers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from holdfast.loadgen.lag import uncollected
from holdfast.loadgen.policies import ORDERS
from holdfast.loadgen.progress import bar
from holdfast.loadgen.simulator.crowds import of_tenants
from holdfast.loadgen.simulator.machines import profile
from holdfast.loadgen.simulator.outcome import Served
from holdfast.loadgen.simulator.placement import CELLS, engine
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.programs import Program
from holdfast.loadgen.simulator.replica import Replica
from holdfast.loadgen.simulator.routing import Ours
from holdfast.loadgen.simulator.simulation import Simulation
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.requests import ServedElsewhere
from holdfast.router.elsewhere import Ledger

WITHIN_S = 10.0  # all programs come in this time
STEP_MS = 100.0  # `engine.step_ms`, with which the tables of docs/scheduling.md were made
QUIET = "tenant-1"  # of a pair, the one that is looked at; of many, all but the noisy one are
NOISY = "tenant-0"


@dataclass(frozen=True, slots=True)
class Options:
    """What is run. `programs` are those of all tenants together."""

    tenants: int = 50
    programs: int = 2000
    quiet: int = 20
    replicas: int = 4
    routers: int = 4
    orders: tuple[str, ...] = ("program", "fair")
    profile: str = "8b-a100"
    cells: int = CELLS
    seed: int = 0
    seeds: int = 1

    def __post_init__(self) -> None:
        if self.tenants < 2 or self.programs < 2 * self.tenants:
            raise ConfigError("there must be two tenants, and two programs of each", "tenants")
        if self.replicas < 2 or self.replicas % 2:
            raise ConfigError("replicas must be an even number", "replicas")
        for name in ("quiet", "routers", "seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", name)


@dataclass(frozen=True, slots=True)
class Row:
    """One run. p50 and p99 of the turns that are looked at, in seconds; `raised`: p50 over that of the run `base`.
    `jain` and `most_over_least` are of the seconds that tenants were served.
    """

    run: str
    order: str
    seed: int
    turns: int
    p50_s: float
    p99_s: float
    base: str = ""
    raised: float | None = None
    jain: float | None = None
    most_over_least: float | None = None
    took_s: float = 0.0

    def over(self, base: Row) -> Row:
        return replace(self, base=base.run, raised=self.p50_s / base.p50_s)


class Told(Ours):
    """The router's placement; when a replica tells how it is, it also adds to the sums of what tenants had."""

    def __init__(self, replicas: int, routers: int, *, share: bool) -> None:
        super().__init__(replicas, routers=routers)
        self._share = share
        self._sums: dict[str, float] = {}
        self._ledgers = [Ledger() for _ in range(replicas)]

    def report(self, number: int, replica: Replica, now: float) -> None:
        super().report(number, replica, now)
        if not self._share:
            return
        ledger = self._ledgers[number]
        news = ledger.news(replica.engine.contended)
        for name, seconds in news.seconds.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds
        if elsewhere := ledger.answered(news, [self._sums[name] for name in news.seconds]):
            replica.notice(ServedElsewhere(elsewhere))


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a run: its turns, and the seconds that each tenant had had at moments on the way."""

    turns: Sequence[Served]
    had: Sequence[tuple[float, Mapping[str, float]]]
    ended: Mapping[str, Sequence[float]]  # when programs ended, by tenant


def run(
    programs: Sequence[Program],
    machine: Profile,
    replicas: int,
    order: str,
    routers: int,
    besides: str = "",
) -> Ran:
    """One run to the end of all programs, but for those of the tenant `besides`."""
    turns: list[Served] = []
    had: list[tuple[float, Mapping[str, float]]] = []

    def served(turn: Served) -> None:
        turns.append(turn)
        now = turn.asked + turn.seconds
        if not had or now >= had[-1][0] + 1.0:
            total: dict[str, float] = {}
            for site in simulation.sites:
                for tenant, seconds in site.replica.engine.stats.served_s.items():
                    total[tenant] = total.get(tenant, 0.0) + seconds
            had.append((now, total))

    config = replace(engine(machine), order=ORDERS.get(order, order), step_ms=STEP_MS)
    told = partial(Told, routers=routers, share=order == "fair")
    simulation = Simulation(machine, config, replicas, routing=told, served=served)
    left = {program.number for program in programs if program.tenant != besides}

    def enough(number: int) -> bool:
        left.discard(number)
        return not left

    with uncollected():
        outcome = simulation.run(programs, enough=enough)
    tenants = {program.number: program.tenant for program in programs}
    ended: dict[str, list[float]] = {program.tenant: [] for program in programs}
    for done in outcome.programs:
        ended[tenants[done.number]].append(done.ended)
    return Ran(turns, had, {tenant: sorted(moments) for tenant, moments in ended.items()})


def shares(ran: Ran) -> dict[str, float]:
    """Seconds that each tenant had, from when all programs have come until the first tenant has ended half of its
    own.
    """
    end = min(moments[len(moments) // 2] for moments in ran.ended.values())
    inside = [total for moment, total in ran.had if WITHIN_S <= moment <= end]
    return {tenant: inside[-1][tenant] - inside[0].get(tenant, 0.0) for tenant in inside[-1]}


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all have the same, 1/n where one has all."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one order and seed."""

    options: Options
    machine: Profile
    order: str
    seed: int

    def equal(self) -> Row:
        """All tenants have as many programs."""
        each = self.options.programs // self.options.tenants
        row, ran = self._run("equal", {f"tenant-{i}": each for i in range(self.options.tenants)})
        had = list(shares(ran).values())
        return replace(row, jain=jain(had), most_over_least=max(had) / min(had))

    def noise(self) -> Iterator[Row]:
        """One tenant has half of all programs."""
        count = self.options.tenants
        each = self.options.programs // 2 // (count - 1)
        others = {f"tenant-{i}": each for i in range(1, count)}
        calm, _ = self._run("noise: as many as each other", {NOISY: each, **others})
        yield calm
        loud, ran = self._run("noise: half of all", {NOISY: self.options.programs // 2, **others})
        yield loud.over(calm)
        alone, _ = self._run(f"noise: one alone, 1/{count} as fast", {NOISY: 0, QUIET: each}, slower=count)
        yield alone
        one = self._row("noise: half of all, one of the others", [t for t in ran.turns if t.tenant == QUIET], 0.0)
        yield one.over(alone)

    def pair(self) -> Iterator[Row]:
        """A tenant beside one with very many programs, and alone."""
        alone = {NOISY: 0, QUIET: self.options.quiet}
        slow, _ = self._run("pair: alone, half as fast", alone, slower=2)
        few, _ = self._run("pair: alone, half of the replicas", alone, self.options.replicas // 2)
        beside, _ = self._run("pair: beside", {**alone, NOISY: self.options.programs // 2})
        yield from (slow, few, beside.over(slow), beside.over(few))

    def _run(self, name: str, programs: dict[str, int], replicas: int = 0, slower: float = 1.0) -> tuple[Row, Ran]:
        began = time.process_time()
        drawn = of_tenants(self.seed, programs, WITHIN_S)
        machine, options = slowed(self.machine, slower), self.options
        besides = "" if name == "equal" else NOISY
        ran = run(drawn, machine, replicas or options.replicas, self.order, options.routers, besides)
        looked_at = [turn for turn in ran.turns if turn.tenant != besides]
        return self._row(name, looked_at, time.process_time() - began), ran

    def _row(self, name: str, turns: Sequence[Served], took_s: float) -> Row:
        p50, p99 = np.percentile([turn.seconds for turn in turns], [50, 99])
        return Row(name, self.order, self.seed, len(turns), float(p50), float(p99), took_s=took_s)


def slowed(machine: Profile, times: float) -> Profile:
    """The same with every step taking so many times as long."""
    names = ("step_s", "weights_s", "token_s", "pair_s", "cell_s", "reload_s", "sequence_s")
    return replace(machine, **{name: getattr(machine, name) * times for name in names})


def main(options: Options, json_file: Path | None = None) -> int:
    """Run, print, write; the exit status. Raises ConfigError."""
    machine = replace(profile(options.profile), cells=options.cells)
    rows: list[Row] = []
    with bar("runs", len(options.orders) * options.seeds) as shown:
        for seed in range(options.seed, options.seed + options.seeds):
            for order in options.orders:
                shown.about(f"{order}, seed {seed}")
                runs = Runs(options, machine, order, seed)
                rows += [runs.equal(), *runs.noise(), *runs.pair()]
                shown.advance()
    if json_file is not None:
        content = {"options": asdict(options), "machine": asdict(machine), "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    return 0


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of means over seeds."""
    lines = [
        "| run | order | turn p50 s | p99 s | p50 over | Jain's index | most over least |",
        "|---|---|---|---|---|---|---|",
    ]
    for about in dict.fromkeys((row.run, row.order, row.base) for row in rows):
        mine = [row for row in rows if (row.run, row.order, row.base) == about]
        p50, p99, raised, index, most = (
            _mean([getattr(row, name) for row in mine])
            for name in ("p50_s", "p99_s", "raised", "jain", "most_over_least")
        )
        over = f"{raised} times {about[2].partition(': ')[2]}" if raised else ""
        lines.append(f"| {about[0]} | `{about[1]}` | {p50} | {p99} | {over} | {index} | {most} |")
    return "\n".join(lines)


def _mean(values: Sequence[float | None]) -> str:
    told = [value for value in values if value is not None]
    return f"{sum(told) / len(told):.3g}" if told else ""
