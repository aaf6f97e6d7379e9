"""The files made of `holdfast bench compare --json`: one self-contained HTML page, and a timeline.

Everything that the page shows is computed again from the file's rows, with the file's seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from holdfast.loadgen import rows as row_files
from holdfast.loadgen.measure import FEW
from holdfast.loadgen.progress import bar
from holdfast.loadgen.report import series
from holdfast.loadgen.report.palette import DARK_PAGE, LIGHT_PAGE
from holdfast.loadgen.rows import Row
from holdfast.loadgen.summary import Summary, summarize
from holdfast.loadgen.table import TOOL_HEADS, Layout, layouts, tool_lines
from holdfast.loadgen.timeline import trace
from holdfast.replicas.errors import ConfigError

MOST_PROGRAMS = 16  # in a chart
_SHOWN_OPTIONS = (
    *("seed", "repetitions", "max_tokens", "timeout_s", "warm_up", "forced", "sizes", "rates", "concurrencies"),
    "trace",
)


RATIO = "p50 off/on"
HEADS = ("scenario", "turns", "ms p50 on", "ms p50 off", "ms p99 on", "ms p99 off", RATIO, "p99", "wall", "equal")
_TIMES = ("on_median_ms", "off_median_ms", "on_p99_ms", "off_p99_ms")
_RATIOS = ("ratio", "p99_ratio", "wall_ratio")
_FIELDS = frozenset(("off", "scenario", "turns", "low", "high", "equal", *_TIMES, *_RATIOS))


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of the page: heads, and rows of a name and cells. A cell's first line is the figure."""

    first: str  # head of the names
    heads: tuple[str, ...]
    rows: list[tuple[str, list[list[str]]]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One workload against its load."""

    name: str
    unit: str
    picture: str


@dataclass(frozen=True, slots=True)
class Section:
    """One workload: what it drew, its tables and its pictures."""

    name: str
    drawn: str
    grids: list[Grid]
    turns: str | None
    distributions: str
    gantt: str
    gantt_note: str


def report(source: Path, target: Path, ablation: Path | None = None) -> int:
    """`holdfast bench report`: write the page of the comparison in ``source``. Raises ConfigError."""
    more = {"ablation": read_ablation(ablation)} if ablation else {}
    write_report({**read_run(source), **more}, target)
    return 0


def timeline(source: Path, target: Path) -> int:
    """`holdfast bench trace`: write Chrome trace events, which ui.perfetto.dev opens. Raises ConfigError."""
    events = trace(read_rows(read_run(source)))
    _write(target, json.dumps(events, separators=(",", ":")) + "\n", "trace")
    return 0


def write_report(content: Mapping[str, Any], path: Path) -> None:
    """Write the page for ``content``, the JSON of a comparison. Raises ConfigError."""
    _write(path, render(content), "html")


def render(content: Mapping[str, Any]) -> str:
    """The page as text. Raises ConfigError where matplotlib is missing or ``content`` is no comparison."""
    check_plotting()
    from holdfast.loadgen.report import plots

    rows, seed, options = read_rows(content), _seed(content), content.get("options") or {}
    summaries = summarize(rows, seed, _planned(content))
    drawn = content.get("workloads") or {}
    names = _names(summaries)
    with bar("page", len(names)) as shown:
        sections = []
        for name in names:
            sections.append(_section(name, drawn.get(name, ""), rows, summaries))
            shown.advance()
    environment = Environment(
        loader=PackageLoader("holdfast.loadgen.report", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.jinja").render(
        complete=bool(content.get("complete")),
        written=content.get("written", ""),
        command=" ".join(content.get("command") or ()),
        options=[(name, options[name]) for name in _SHOWN_OPTIONS if options.get(name) not in (None, [], "")],
        machine=content.get("machine") or {},
        servers=content.get("servers") or [],
        generator=content.get("generator") or {},
        first=rows[0].server,
        few=FEW,
        requests=len(rows),
        failures=[told for told in summaries if told.failures],
        overview=plots.overview(summaries),
        sweeps=_sweeps(rows, summaries),
        sections=sections,
        ablation=ablation_grid(content.get("ablation") or ()),
        light=LIGHT_PAGE,
        dark=DARK_PAGE,
    )


def read_rows(content: Mapping[str, Any]) -> list[Row]:
    """The rows of a comparison's JSON. Raises ConfigError where there are none."""
    told = content.get("rows") if isinstance(content, Mapping) else None
    if not isinstance(told, list) or not told:
        raise ConfigError("the file holds no rows of a comparison", "run")
    return row_files.from_json(told)


def read_run(path: Path) -> Mapping[str, Any]:
    """What `holdfast bench compare --json` wrote. Raises ConfigError."""
    content = _read(path, "run")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no comparison", "run")
    return content


def read_ablation(path: Path) -> list[dict[str, Any]]:
    """What `holdfast bench ablation --json` wrote. Raises ConfigError."""
    entries = _read(path, "ablation")
    if not isinstance(entries, list) or not all(isinstance(one, dict) and set(one) >= _FIELDS for one in entries):
        raise ConfigError(f"{path} is no ablation", "ablation")
    return entries


def check_plotting() -> None:
    """Raises ConfigError where what draws the report is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("a report needs matplotlib: .venv/bin/pip install -e '.[report]' -c constraints.txt", "html")


def _section(name: str, drawn: str, rows: Sequence[Row], summaries: Sequence[Summary]) -> Section:
    from holdfast.loadgen.report import plots

    mine = [row for row in rows if row.workload == name]
    told = [summary for summary in summaries if summary.workload == name]
    grids = [Grid("server", layout.heads, _lines(told, layout)) for layout in layouts(told)]
    if tools := [(line[0], [text.split("\n") for text in line[1:]]) for line in tool_lines(told)]:
        grids.append(Grid(TOOL_HEADS[0], TOOL_HEADS[1:], tools))
    repetition = min(row.repetition for row in mine)
    shown = [row for row in mine if row.repetition == repetition]
    charts = {
        summary.server: series.lanes([row for row in shown if row.server == summary.server], MOST_PROGRAMS)
        for summary in told
    }
    programs = len({row.program for row in shown})
    note = f"Repetition {repetition + 1}" + (
        f", the first {MOST_PROGRAMS} of {programs} programs" if programs > MOST_PROGRAMS else ""
    )
    return Section(
        name=name,
        drawn=drawn,
        grids=grids,
        turns=plots.against_turn(mine),
        distributions=plots.distributions(mine),
        gantt=plots.gantt({server: lanes for server, lanes in charts.items() if lanes}),
        gantt_note=note,
    )


def _sweeps(rows: Sequence[Row], summaries: Sequence[Summary]) -> list[Sweep]:
    from holdfast.loadgen.report import plots

    units = {row.swept: row.load.unit for row in rows if row.load is not None}
    loads = series.loads(rows)
    return [Sweep(name, unit, plots.against_load(summaries, loads[name], unit)) for name, unit in units.items()]


def _lines(told: Sequence[Summary], layout: Layout) -> list[tuple[str, list[list[str]]]]:
    lines = []
    for summary in told:
        lines.append((summary.server, [cell.split("\n") for cell in layout.figures(summary)]))
        if summary is not told[0]:
            lines.append((f"/ {told[0].server}", [cell.split("\n") for cell in layout.ratios(summary)]))
    return lines


def _names(summaries: Sequence[Summary]) -> list[str]:
    return list(dict.fromkeys(told.workload for told in summaries))


def _planned(content: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """How many requests each repetition of a workload was to have. Raises ConfigError."""
    told = content.get("planned") or {}
    lists = told.values() if isinstance(told, Mapping) else [None]
    if not all(isinstance(counts, list) and all(isinstance(count, int) for count in counts) for counts in lists):
        raise ConfigError("what was planned is not lists of counts", "planned")
    return told


def _seed(content: Mapping[str, Any]) -> int:
    options = content.get("options")
    return int(options.get("seed", 0)) if isinstance(options, Mapping) else 0


def ablation_grid(entries: Sequence[Mapping[str, Any]]) -> Grid | None:
    """A row for each mechanism and scenario; None without any."""
    rows = [(str(entry["off"]), [[text] for text in _cells(entry)]) for entry in entries]
    for (_, cells), entry in zip(rows, entries, strict=True):
        cells[HEADS.index(RATIO)].append(f"{entry['low']:.2f}–{entry['high']:.2f}")
    return Grid("off", HEADS, rows) if rows else None


def _cells(entry: Mapping[str, Any]) -> list[str]:
    return [
        str(entry["scenario"]),
        str(entry["turns"]),
        *(f"{entry[name]:.1f}" for name in _TIMES),
        *(f"{entry[name]:.2f}x" for name in _RATIOS),
        f"{entry['equal']:.0%}",
    ]


def _read(path: Path, field: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field) from error


def _write(path: Path, text: str, field: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", field) from error
