"""Ways to place programs on many replicas, side by side: one row a run, and a table of ratios to the router's own.

What is looked at is the time from the first third of the arrivals to the last of them: before that caches are empty,
behind it replicas have nothing to do. A run is over when the turns that came in this time are; some that take
very long are cut short, and what is told of their seconds is too little.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.loadgen.lag import uncollected
from holdfast.loadgen.progress import bar
from holdfast.loadgen.simulator.crowds import CROWDS, LONGEST, Crowd
from holdfast.loadgen.simulator.machines import profile
from holdfast.loadgen.simulator.outcome import Served
from holdfast.loadgen.simulator.policies import engine_config
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.routing import ROUTINGS, routing
from holdfast.loadgen.simulator.simulation import Simulation
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError

ROWS = 32  # of a replica: so many turns at once
CELLS = 1 << 16
RATES = {"agents": 0.22, "preambles": 0.45, "fan-out": 0.17, "hot-tenant": 0.4}  # programs a second and replica
WARM = 1 / 3  # of the arrivals, before anything is looked at


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in seconds; `others_p99_s` is of the tenants that are not the hot one, where there is one."""

    hit: float  # share of prompt tokens that were found cached
    p50_s: float
    p99_s: float
    first_p50_s: float
    first_p99_s: float
    others_p99_s: float | None
    in_hand: float  # turns in hand in the mean, of a replica
    most_in_hand: float  # of the replica with the most


@dataclass(frozen=True, slots=True)
class Row(Figures):
    """One run."""

    workload: str
    replicas: int
    placement: str
    seed: int
    turns: int  # that are looked at
    cut: int  # of them, those that were not waited for to their end
    busy: float  # share of the time that replicas compute
    most_busy: float  # the busiest replica's time over the mean
    busy_cv: float  # standard deviation of the busy times over their mean
    took_s: float  # processor time of the run


TOLD = ("hit", "p50_s", "p99_s", "first_p50_s", "first_p99_s", "most_in_hand", "most_busy", "busy_cv")


def engine(machine: Profile) -> EngineConfig:
    """One replica of the fleet: the default order and retention, a cache of `machine.cells`, few rows."""
    usual = engine_config("default", machine, host=False)
    return replace(usual, context_length=LONGEST, max_sequences=ROWS, session_rows=ROWS // 2)


def run(crowd: Crowd, machine: Profile, replicas: int, placement: str, seed: int) -> Row:
    """One run to its end. Raises ConfigError, and EngineError where an engine failed a request."""
    programs = list(crowd.draw(seed))
    window = programs[int(WARM * len(programs))].arrived, programs[-1].arrived
    turns: list[Served] = []
    began = time.process_time()
    with uncollected():
        simulation = Simulation(
            machine, engine(machine), replicas, routing=routing(placement), window=window, served=turns.append
        )
        simulation.run(programs)
    took = time.process_time() - began
    looked = [turn for turn in turns if window[0] <= turn.asked <= window[1]]
    found = figures(looked, window[1] - window[0], replicas)
    busy = np.array([site.busy_s for site in simulation.sites])
    return Row(
        workload=crowd.kind,
        replicas=replicas,
        placement=placement,
        seed=seed,
        turns=len(looked),
        cut=sum(not turn.prompt for turn in looked),
        busy=float(busy.mean()) / (window[1] - window[0]),
        most_busy=float(busy.max() / busy.mean()),
        busy_cv=float(busy.std() / busy.mean()),
        took_s=took,
        **asdict(found),
    )


def figures(turns: Sequence[Served], seconds: float, replicas: int) -> Figures:
    """Of turns that were sent within so many seconds."""
    whole, first = (np.array([getattr(turn, name) for turn in turns]) for name in ("seconds", "first_s"))
    others = np.array([turn.seconds for turn in turns if turn.tenant != "hot"])
    hand = np.zeros(replicas)
    np.add.at(hand, [turn.replica for turn in turns], whole / seconds)
    return Figures(
        hit=sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns),
        p50_s=_percentile(whole, 50),
        p99_s=_percentile(whole, 99),
        first_p50_s=_percentile(first, 50),
        first_p99_s=_percentile(first, 99),
        others_p99_s=_percentile(others, 99) if 0 < len(others) < len(turns) else None,
        in_hand=float(hand.mean()),
        most_in_hand=float(hand.max()),
    )


@dataclass(frozen=True, slots=True)
class Options:
    """What is run. No `placements`: all of them. `programs`: of one run, for each replica."""

    workloads: tuple[str, ...] = ()
    placements: tuple[str, ...] = ()
    replicas: tuple[int, ...] = (4,)
    programs: int = 60
    load: float = 1.0
    profile: str = "8b-a100"
    cells: int = CELLS
    seed: int = 100
    seeds: int = 1

    def runs(self) -> Iterator[tuple[Crowd, int, str, int]]:
        """Every run: programs, replicas, placement and seed."""
        for replicas in self.replicas:
            for workload in self.workloads or tuple(CROWDS):
                rate = RATES.get(workload, 1.0) * self.load * replicas
                crowd = Crowd(workload, self.programs * replicas, rate)
                for seed in range(self.seed, self.seed + self.seeds):
                    for name in self.placements or tuple(ROUTINGS):
                        yield crowd, replicas, name, seed


def main(options: Options, json_file: Path | None = None, told: Sequence[Path] = ()) -> int:
    """Run, print, write; the exit status. Rows of earlier runs, `told`, are printed with them. Raises ConfigError."""
    rows = [Row(**row) for file in told for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    machine = replace(profile(options.profile), cells=options.cells)
    wanted = list(options.runs())
    for _, replicas, name, _ in wanted:
        if replicas < 1:
            raise ConfigError("replicas must be at least 1", "replicas")
        routing(name)
    with bar("runs", len(wanted)) as shown:
        for crowd, replicas, name, seed in wanted:
            shown.about(f"{crowd.kind}, {replicas} replicas, {name}")
            rows.append(run(crowd, machine, replicas, name, seed))
            shown.advance()
            if json_file is not None:
                content = {
                    "options": asdict(options),
                    "machine": asdict(machine),
                    "rows": [asdict(row) for row in rows],
                }
                json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    return 0


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of means over seeds, in brackets what they are over ours."""
    lines = [
        "| workload, replicas | placement | hit rate | p50 s | p99 s | first token p50 s | p99 s | most in hand | "
        "busiest over mean | cv |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for replicas, workload in dict.fromkeys((row.replicas, row.workload) for row in rows):
        mine = [row for row in rows if (row.replicas, row.workload) == (replicas, workload)]
        names = dict.fromkeys(row.placement for row in mine)
        means = {name: _means([row for row in mine if row.placement == name]) for name in names}
        ours = means.get("ours")
        for name, figures in means.items():
            cells = [_cell(figures, ours, figure) for figure in TOLD]
            lines.append(f"| {workload}, {replicas} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _means(rows: Sequence[Row]) -> dict[str, float]:
    return {name: sum(getattr(row, name) for row in rows) / len(rows) for name in TOLD}


def _cell(figures: dict[str, float], ours: dict[str, float] | None, name: str) -> str:
    value = f"{figures[name]:.1%}" if name == "hit" else f"{figures[name]:.3g}"
    if ours is None or ours is figures or name in ("busy_cv", "most_busy"):
        return value
    return f"{value} ({figures[name] / ours[name]:.2f})"


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent))
