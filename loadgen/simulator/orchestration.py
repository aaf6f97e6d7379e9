"""`holdfast simulate-orchestrator`: what each part of Sutradhara's co-design is worth, one added after another.

The paper's table at the paper's scale: Qwen3-14B on an A100, chunks of 256, order by the arrival of the agent. Prefill
and decoding apart on two GPUs are left out. Beside its baseline: whole prompts in a step, and cells kept for 6 s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from holdfast.loadgen.lag import uncollected
from holdfast.loadgen.measure import Estimate, mean, ratio
from holdfast.loadgen.policies.fixed import SUTRADHARA_TTL, TTL_S
from holdfast.loadgen.progress import bar
from holdfast.loadgen.simulator import machines
from holdfast.loadgen.simulator.agents import WORKLOADS, draw
from holdfast.loadgen.simulator.orchestrated import Done, Orchestrated, Way
from holdfast.loadgen.simulator.policies import engine_config
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.table import WIDTH
from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.errors import ConfigError

WHOLE = 1 << 20  # tokens of a step, of which no prompt fills a quarter
DEPTHS = 4  # the last one stands for all deeper ones
_HEADS = (
    "FTR p50",
    "p90",
    "E2E p50",
    "p90",
    "FTR gained",
    "E2E gained",
    "found",
    "reused",
    "prompt",
    "decode",
    "tools",
)


NEITHER, SPLIT, BOTH = Way(), Way(split=True), Way(split=True, dispatch=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: what the orchestrator does, and the engine's settings."""

    name: str
    way: Way = NEITHER
    engine: dict[str, Any] = field(default_factory=dict)


_TAGS: dict[str, Any] = {"without": ("grouped_prefill",)}
_OURS = EngineConfig()
ROWS = (
    Row("baseline"),
    Row("+ splitting", SPLIT),
    Row("+ dispatch", BOTH),
    Row("+ tags", BOTH, _TAGS),
    Row(
        "+ all other defaults",
        BOTH,
        {"without": (), "step_tokens": _OURS.step_tokens, "retention": _OURS.retention},
    ),
    Row("baseline, whole prompts", engine={"step_tokens": WHOLE}),
    Row(f"baseline, TTL {TTL_S:g} s", engine={"retention": RetentionConfig(SUTRADHARA_TTL)}),
)
SWEPT = ("baseline", "+ tags")


@dataclass(frozen=True, slots=True)
class Options:
    """What is simulated. `rate` is of the table; `rates` are those of FTR against load. Raises ConfigError."""

    workload: str = "fan-out"
    agents: int = 120
    rate: float = 0.0075
    rates: tuple[float, ...] = ()
    profile: str = "14b-a100"
    cells: int | None = None
    tools: float = 1.0
    seed: int = 0
    seeds: int = 5

    def __post_init__(self) -> None:
        for name in ("agents", "seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", name)
        if self.workload not in WORKLOADS:
            raise ConfigError(f"there is no workload {self.workload!r}; there are {', '.join(WORKLOADS)}", "workload")
        if not all(rate > 0 for rate in (self.rate, *self.rates)):
            raise ConfigError("rates must be more than 0", "rates")
        if not self.tools >= 0:
            raise ConfigError("tools must be at least 0", "tools")

    @property
    def machine(self) -> Profile:
        machine = machines.profile(self.profile)
        return machine if self.cells is None else replace(machine, cells=self.cells)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Times in seconds; shares are of the prompts' tokens, of the `depths` by who computed what was found."""

    row: str
    rate: float
    seed: int
    first: dict[str, float]  # to the first token of the last reply: p50, p90
    whole: dict[str, float]  # to its end
    tools: dict[str, float]  # share of the time to that first token in which nothing but tools ran: p50, p90, p99
    parts: dict[str, float]  # of that time, mean seconds: prompt (with waiting), decode, tools
    found: float  # cached when a turn began
    reused: float  # not computed for it, nor ahead of it
    depths: tuple[dict[str, float], ...]  # across, within, ahead: of the prompts of that depth


def run(options: Options, row: Row, rate: float, seed: int) -> Figures:
    """One run to its end. Raises EngineError where an engine failed a request."""
    profile = options.machine
    config = replace(
        engine_config("program", profile, host=False),
        step_tokens=256,
        without=("grouped_prefill", "kv_tags"),
    )
    with uncollected():
        simulated = Orchestrated(profile, replace(config, **row.engine), row.way)
        done = simulated.run(draw(options.workload, options.agents, rate, seed, options.tools))
    stats = simulated.engine.stats
    prompt = sum(found.prompt for each in done for found in each.found)
    cached = sum(found.across + found.within + found.ahead for each in done for found in each.found)
    first = [each.first_s for each in done]
    tools, decode = fmean(each.tool_s for each in done), fmean(each.decode_s for each in done)
    return Figures(
        row=row.name,
        rate=rate,
        seed=seed,
        first=_percentiles(first, 50, 90),
        whole=_percentiles([each.seconds for each in done], 50, 90),
        tools=_percentiles([each.tool_s / each.first_s for each in done], 50, 90, 99),
        parts={"prompt": fmean(first) - tools - decode, "decode": decode, "tools": tools},
        found=cached / prompt,
        reused=1 - (stats.prompt_computed + stats.ahead_computed) / prompt,
        depths=tuple(_depth(done, depth) for depth in range(DEPTHS)),
    )


def main(options: Options, json_file: Path | None = None) -> int:
    """Run, print, write; the exit status. Raises ConfigError."""
    table = list(_runs(options, ROWS, (options.rate,)))
    swept = list(_runs(options, [row for row in ROWS if row.name in SWEPT], options.rates)) if options.rates else []
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for part in (_ablation(options, table), _by_depth(table), *([_against_load(swept)] if swept else ())):
        console.print(part)
    base = [each for each in table if each.row == "baseline"]
    shares = ", ".join(f"{name} {fmean(each.tools[name] for each in base):.0%}" for name in ("p50", "p90", "p99"))
    print(f"tools' share of the baseline's FTR: {shares}")
    for line in _equal_latency(swept):
        print(line)
    if json_file is not None:
        told = {"options": asdict(options), "runs": [asdict(each) for each in (*table, *swept)]}
        try:
            json_file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write: {error}", "json") from error
    return 0


def _runs(options: Options, rows: Sequence[Row], rates: Sequence[float]) -> Iterator[Figures]:
    with bar("runs", len(rows) * len(rates) * options.seeds) as shown:
        for rate in rates:
            for row in rows:
                for seed in range(options.seed, options.seed + options.seeds):
                    shown.about(f"{rate:g}/s, {row.name}, seed {seed}")
                    yield run(options, row, rate, seed)
                    shown.advance()


def _ablation(options: Options, table: Sequence[Figures]) -> Table:
    title = (
        f"{options.workload}, {options.agents} agents, {options.rate:g}/s on {options.profile}, {options.seeds} seeds"
    )
    shown = _table(title, "", _HEADS)
    base = [each for each in table if each.row == "baseline"]
    for row in ROWS:
        mine = [each for each in table if each.row == row.name]
        gained = [
            ratio([getattr(each, time)["p50"] for each in mine], [getattr(each, time)["p50"] for each in base], mean, 0)
            for time in ("first", "whole")
        ]
        shown.add_row(
            row.name,
            *(
                f"{fmean(getattr(each, time)[p] for each in mine):.1f}"
                for time in ("first", "whole")
                for p in ("p50", "p90")
            ),
            *("-" if row.name == "baseline" else _gained(each) for each in gained),
            *(f"{fmean(getattr(each, share) for each in mine):.1%}" for share in ("found", "reused")),
            *(f"{fmean(each.parts[part] for each in mine):.1f}" for part in ("prompt", "decode", "tools")),
        )
    return shown


def _by_depth(table: Sequence[Figures]) -> Table:
    kinds = ("across", "within", "ahead")
    heads = [f"{depth if depth < DEPTHS - 1 else f'{depth}+'} {kind}" for depth in range(DEPTHS) for kind in kinds]
    shown = _table("found at each depth: of others, of earlier turns, computed ahead", "", heads)
    for row in ROWS[:5]:
        mine = [each for each in table if each.row == row.name]
        cells = [f"{fmean(each.depths[depth][kind] for each in mine):.0%}" for depth in range(DEPTHS) for kind in kinds]
        shown.add_row(row.name, *cells)
    return shown


def _against_load(swept: Sequence[Figures]) -> Table:
    shown = _table("FTR against load: p50, p90", "agents/s", [f"{name} {p}" for name in SWEPT for p in ("p50", "p90")])
    for rate in dict.fromkeys(each.rate for each in swept):
        cells = [f"{_first(swept, name, rate, p):.1f}" for name in SWEPT for p in ("p50", "p90")]
        shown.add_row(f"{rate:g}", *cells)
    return shown


def _equal_latency(swept: Sequence[Figures]) -> Iterator[str]:
    """For each of the baseline's points: how much load all of it carries at the same median FTR."""
    rates = sorted({each.rate for each in swept})
    ours = [_first(swept, SWEPT[1], rate, "p50") for rate in rates]
    for rate in rates[:-1]:
        wanted = _first(swept, SWEPT[0], rate, "p50")
        reached = [n for n in range(len(rates)) if ours[n] <= wanted]
        if not reached:
            continue
        last = max(reached)
        if last + 1 == len(rates):
            yield f"at the baseline's FTR of {wanted:.1f} s at {rate:g}/s: over {rates[-1] / rate:.1f} times the load"
            continue
        part = (wanted - ours[last]) / (ours[last + 1] - ours[last])
        carried = rates[last] + part * (rates[last + 1] - rates[last])
        yield f"at the baseline's FTR of {wanted:.1f} s at {rate:g}/s: {carried / rate:.2f} times the load"


def _first(swept: Sequence[Figures], name: str, rate: float, percentile: str) -> float:
    return fmean(each.first[percentile] for each in swept if (each.row, each.rate) == (name, rate))


def _depth(done: Sequence[Done], depth: int) -> dict[str, float]:
    turns = [
        found
        for each in done
        for at, found in enumerate(each.found)
        if at == depth or (depth == DEPTHS - 1 and at > depth)
    ]
    prompt = max(sum(found.prompt for found in turns), 1)
    return {kind: sum(getattr(found, kind) for found in turns) / prompt for kind in ("across", "within", "ahead")}


def _percentiles(values: Sequence[float], *percents: int) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in percents}


def _gained(estimate: Estimate | None) -> str:
    """How much less a ratio is than one, with its interval."""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{1 - estimate.value:.1%}"
    return f"{1 - estimate.value:.1%} ({1 - estimate.high:.1%} to {1 - estimate.low:.1%})"


def _table(title: str, first: str, heads: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left", box=SIMPLE)
    shown.add_column(first, no_wrap=True)
    for head in heads:
        shown.add_column(head, justify="right")
    return shown
