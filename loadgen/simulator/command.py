"""`holdfast simulate`: runs what its options ask for, prints a table, writes files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from holdfast.loadgen.measure import Estimate
from holdfast.loadgen.progress import bar
from holdfast.loadgen.report.page import check_plotting
from holdfast.loadgen.simulator import machines
from holdfast.loadgen.simulator.comparison import Case, Row, Summary, cases, run, summarize, to_json
from holdfast.loadgen.simulator.policies import USUAL, engine_config
from holdfast.loadgen.simulator.programs import Workload
from holdfast.loadgen.simulator.replica import ONE_BY_ONE
from holdfast.loadgen.table import WIDTH, brief
from holdfast.replicas.errors import ConfigError

HEADS = ("job s mean", "p50", "p90", "p99", "programs/s", "bubble s", "cached", "faster", "throughput")


@dataclass(frozen=True, slots=True)
class Options:
    """What is simulated. No `policies`: the usual ones. No `cells`: what the profile has."""

    workload: str = "swe"
    programs: int = 100
    rates: tuple[float, ...] = (0.1,)
    turns_times: tuple[int, ...] = (1,)
    scale: float = 1.0
    tool_times: float = 1.0
    profile: str = "8b-a100"
    replicas: int = 1
    cells: int | None = None
    policies: tuple[str, ...] = ()
    hosts: tuple[bool, ...] = (False,)
    seed: int = 0
    seeds: int = 3
    one_by_one: bool = False

    def cases(self) -> list[Case]:
        """Every combination. Raises ConfigError."""
        for name in ("replicas", "seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", name)
        profile = machines.profile(self.profile)
        if self.cells is not None:
            profile = replace(profile, cells=self.cells)
        rate, tools = self.rates[0], self.tool_times
        workload = Workload(self.workload, self.programs, rate, scale=self.scale, tool_times=tools)
        base = Case(workload.within(profile.cells), profile, self.replicas)
        return list(cases(base, self.rates, self.hosts, self.turns_times))

    @property
    def compared(self) -> tuple[str, ...]:
        return self.policies or USUAL


def main(options: Options, json_file: Path | None = None, pictures: Path | None = None) -> int:
    """Run, print, write; the exit status. Raises ConfigError."""
    if pictures is not None:
        check_plotting()
    rows = list(simulate(options))
    summaries = summarize(rows)
    for case in dict.fromkeys(summary.case for summary in summaries):
        _print(case, [summary for summary in summaries if summary.case == case])
    try:
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(told(rows, options), encoding="utf-8")
        if pictures is not None:
            _draw(options, rows, pictures)
    except OSError as error:
        raise ConfigError(f"cannot write: {error}") from error
    return 0


def simulate(options: Options) -> Iterator[Row]:
    """Every run, seed by seed. Raises ConfigError before the first one where it can be told."""
    wanted, policies = options.cases(), options.compared
    for policy in policies:
        engine_config(policy, wanted[0].profile, host=any(options.hosts))
    bulk = ONE_BY_ONE if options.one_by_one else None
    total = sum(case.workload.programs for case in wanted) * len(policies) * options.seeds
    with bar("programs", total) as shown:
        for case in wanted:
            for seed in range(options.seed, options.seed + options.seeds):
                for policy in policies:
                    shown.about(f"{case.name}, {policy}")
                    yield run(case, policy, seed, bulk, shown.advance)


def told(rows: Sequence[Row], options: Options) -> str:
    """The JSON of a simulation: the same text for the same options."""
    about: dict[str, Any] = asdict(options) | {"policies": options.compared}
    about["machine"] = asdict(options.cases()[0].profile)
    return json.dumps(to_json(rows, about), indent=1) + "\n"


def _print(case: str, summaries: Sequence[Summary]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    shown = Table(title=case, title_justify="left", box=SIMPLE)
    shown.add_column("policy", no_wrap=True)
    for head in HEADS:
        shown.add_column(head, justify="right")
    for summary in summaries:
        figures = summary.figures
        names = ("mean_s", "p50_s", "p90_s", "p99_s", "programs_per_s", "bubble_s")
        ratios = (_cell(summary.faster, "x"), _cell(summary.more, "x"))
        cells = [*(_cell(figures[name]) for name in names), f"{figures['cached'].value:.0%}", *ratios]
        shown.add_row(summary.policy, *cells)
    console.print(shown)


def _cell(estimate: Estimate | None, unit: str = "") -> str:
    if estimate is None:
        return "-"
    low = "" if estimate.low is None or estimate.high is None else f"\n{_told(estimate.low)}–{_told(estimate.high)}"
    return f"{_told(estimate.value)}{unit}{low}"


def _told(value: float) -> str:
    return brief(value) if value >= 1 else f"{value:.3f}"


def _draw(options: Options, rows: Sequence[Row], folder: Path) -> None:
    from holdfast.loadgen.simulator import pictures

    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.of(options.cases(), summarize(rows)).items():
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
