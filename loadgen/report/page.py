"""The files made of `holdfast bench compare --json`: one self-contained HTML page, and a timeline.

Everything that the page shows is computed again from the file's rows, with the file's seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from holdfast.loadgen import options as of
from holdfast.loadgen import rows as row_files
from holdfast.loadgen.measure import FEW
from holdfast.loadgen.progress import bar
from holdfast.loadgen.rows import Row
from holdfast.loadgen.summary import Summary, summarize
from holdfast.loadgen.table import TOOL_HEADS, layouts, lines, tool_lines
from holdfast.loadgen.timeline import trace
from holdfast.replicas.errors import ConfigError

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#15181c"
MOST_PROGRAMS = 16  # in a chart
SHOWN_OPTIONS = (
    *("seed", "repetitions", "max_tokens", "timeout_s", "warm_up", "forced", "sizes", "rates", "concurrencies"),
    "trace",
)


def report(options: of.View) -> int:
    """`holdfast bench report`: write the page of a comparison. Raises ConfigError."""
    write_report(read_run(options.source), options.target)
    return 0


def timeline(options: of.View) -> int:
    """`holdfast bench trace`: write Chrome trace events, which ui.perfetto.dev opens. Raises ConfigError."""
    events = trace(read_rows(read_run(options.source)))
    _write(options.target, json.dumps(events, separators=(",", ":")) + "\n", "trace")
    return 0


def write_report(content: Mapping[str, Any], path: Path) -> None:
    """Write the page for ``content``, the JSON of a comparison. Raises ConfigError."""
    _write(path, render(content), "html")


def render(content: Mapping[str, Any]) -> str:
    """The page as text. Raises ConfigError where matplotlib is missing or ``content`` is no comparison."""
    check_plotting()
    from holdfast.loadgen.report import plots

    rows, options = read_rows(content), content.get("options") or {}
    summaries = summarize(rows, int(options.get("seed", 0)), _planned(content))
    descriptions = content.get("workloads") or {}
    names = list(dict.fromkeys(summary.workload for summary in summaries))
    with bar("page", len(names)) as progress:
        sections = []
        for name in names:
            sections.append(_section(name, descriptions.get(name, ""), rows, summaries))
            progress.advance()
    units, loads = {row.swept: row.load.unit for row in rows if row.load is not None}, plots.loads(rows)
    environment = Environment(
        loader=PackageLoader("holdfast.loadgen.report", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.jinja").render(
        complete=bool(content.get("complete")),
        written=content.get("written", ""),
        command=" ".join(content.get("command") or ()),
        options=[(name, options[name]) for name in SHOWN_OPTIONS if options.get(name) not in (None, [], "")],
        machine=content.get("machine") or {},
        servers=content.get("servers") or [],
        generator=content.get("generator") or {},
        first=rows[0].server,
        few=FEW,
        requests=len(rows),
        failures=[summary for summary in summaries if summary.failures],
        overview=plots.overview(summaries),
        sweeps=[
            {"name": name, "unit": unit, "picture": plots.against_load(summaries, loads[name], unit)}
            for name, unit in units.items()
        ],
        sections=sections,
        light=LIGHT_PAGE,
        dark=DARK_PAGE,
    )


def read_rows(content: Mapping[str, Any]) -> list[Row]:
    """The rows of a comparison's JSON. Raises ConfigError where there are none."""
    rows = content.get("rows") if isinstance(content, Mapping) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError("the file holds no rows of a comparison", "run")
    return row_files.from_json(rows)


def read_run(path: Path) -> Mapping[str, Any]:
    """The content of a file of `holdfast bench compare --json`. Raises ConfigError."""
    content = _read(path, "run")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no comparison", "run")
    return content


def check_plotting() -> None:
    """Raises ConfigError if the plotting library is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("a report needs matplotlib: .venv/bin/pip install -e '.[report]' -c constraints.txt", "html")


def _section(name: str, description: str, rows: Sequence[Row], summaries: Sequence[Summary]) -> dict[str, Any]:
    """One workload: its tables and its pictures."""
    from holdfast.loadgen.report import plots

    rows = [row for row in rows if row.workload == name]
    mine = [summary for summary in summaries if summary.workload == name]
    repetition = min(row.repetition for row in rows)
    visible = [row for row in rows if row.repetition == repetition]
    lanes = {
        each.server: plots.lanes([row for row in visible if row.server == each.server], MOST_PROGRAMS) for each in mine
    }
    programs = len({row.program for row in visible})
    some = f", the first {MOST_PROGRAMS} of {programs} programs" if programs > MOST_PROGRAMS else ""
    grids: list[dict[str, Any]] = [
        {
            "heads": ["server", *(column.head for column in columns)],
            "rows": [(head, [cell.split("\n") for cell in cells]) for head, cells in lines(mine, columns)],
        }
        for columns in layouts(mine)
    ]
    if tools := [(line[0], [cell.split("\n") for cell in line[1:]]) for line in tool_lines(mine)]:
        grids.append({"heads": list(TOOL_HEADS), "rows": tools})
    return {
        "name": name,
        "drawn": description,
        "grids": grids,
        "turns": plots.against_turn(rows),
        "distributions": plots.distributions(rows),
        "gantt": plots.gantt(lanes),
        "gantt_note": f"Repetition {repetition + 1}{some}",
    }


def _planned(content: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """The planned number of requests in each repetition of a workload. Raises ConfigError."""
    planned = content.get("planned") or {}
    lists = planned.values() if isinstance(planned, Mapping) else [None]
    if not all(isinstance(counts, list) and all(isinstance(count, int) for count in counts) for counts in lists):
        raise ConfigError("what was planned is not lists of counts", "planned")
    return planned


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
