"""Summaries as text for a terminal. Every figure is one of `summary`; nothing is computed here but units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.loadgen.measure import Estimate
from holdfast.loadgen.summary import SAMPLES, Summary
from holdfast.replicas.errors import ConfigError

WIDTH = 170  # where the output is no terminal


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table on the terminal, or as wide as it needs to be elsewhere; the first ``left`` columns are names."""
    table = Table(title=Text(title, "table.title") if title else None, title_justify="left", box=SIMPLE)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right", no_wrap=number < left)
    for row in rows:
        table.add_row(*(Text(cell_text) for cell_text in row))
    console = Console()
    (console if console.is_terminal else Console(width=2 * WIDTH)).print(table)


def check_writable(path: Path, field_name: str) -> None:
    """Make the folder of ``path``. Raises ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", field_name) from error


# ---- cells ----


def cell(estimate: Estimate | None, scale: float = 1, unit: str = "") -> str:
    """A figure, and below it its interval."""
    if estimate is None:
        return "-"
    figure = brief(estimate.value * scale) + unit
    if estimate.low is None or estimate.high is None:
        return figure
    return f"{figure}\n{brief(estimate.low * scale)}–{brief(estimate.high * scale)}"


def brief(value: float) -> str:
    """A figure with three digits or more."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{value:.0%}"


def _requests(summary: Summary) -> str:
    failed = sum(summary.failures.values())
    return f"{summary.requests}" + (f"\n{failed} failed" if failed else "")


def _agreement(summary: Summary) -> str:
    agreement = summary.agreement
    if agreement is None:
        return ""
    return f"{agreement.same_answer} of {agreement.same_prompt}\n({agreement.asked} asked)"


def _turns(summary: Summary) -> str:
    turns = summary.figures["turns mean"]
    return "-" if turns is None else brief(turns.value)


# ---- tables of a comparison ----


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a server: its name in `Summary.figures`, or a text; whether its ratio to the first is shown."""

    head: str
    figure: str | Callable[[Summary], str]
    scale: float = 1.0
    ratio: bool = True

    def of(self, summary: Summary) -> str:
        """The figure, and below it its interval or a remark."""
        name = self.figure
        return cell(summary.figures[name], self.scale) if isinstance(name, str) else name(summary)

    def over(self, summary: Summary) -> str:
        """The ratio to the first server's figure."""
        return cell(summary.ratios[self.figure], unit="x") if self.ratio and isinstance(self.figure, str) else ""


REQUESTS = (
    Column("requests", _requests),
    Column("ms p50", "latency p50", 1e3),
    Column("ms p90", "latency p90", 1e3),
    Column("ms p99", "latency p99", 1e3),
    Column("1st token", "ttft p50", 1e3),
    Column("1st p99", "ttft p99", 1e3),
    Column("ms/token", "per token p50", 1e3),
    Column("wall s", "wall"),
    Column("tokens/s", "tokens per s"),
    Column("cached", lambda summary: share(summary.cached_share)),
    Column("calls", lambda summary: share(summary.call_share)),
    Column("valid", lambda summary: share(summary.fitting_share)),
    Column("scripted", lambda summary: share(summary.scripted_share)),
    Column("same answer", _agreement),
)
PROGRAMS = (
    Column("programs", lambda summary: f"{summary.programs}"),
    Column("turns", _turns),
    Column("job s mean", "job mean"),
    Column("job s p50", "job p50"),
    Column("job s p90", "job p90"),
    Column("job s p99", "job p99"),
    Column("FTR s p50", "last first token p50"),
    Column("p90", "last first token p90", ratio=False),
    Column("tools / FTR", "tool share p50", ratio=False),
    Column("tools s", "tool mean", ratio=False),
    Column("bubble s", "bubble mean", ratio=False),
    Column("prefill s", "prefill mean", ratio=False),
    Column("decode s", "decode mean", ratio=False),
    Column("programs/s", "programs per s", ratio=False),
    Column("cached, turn 1, 2, 3, later", lambda summary: " ".join(map(share, summary.cached_by_turn))),
)
TOOL_HEADS = ("server", "tools", "runs", "mean s", "p50", "p99", *(f"mean of the first {n}" for n in SAMPLES))


def layouts(summaries: Sequence[Summary]) -> list[tuple[Column, ...]]:
    """The tables of one workload: of its requests, and of its programs where some have several turns."""
    turns = [summary.figures["turns mean"] for summary in summaries]
    return [REQUESTS, PROGRAMS] if any(n_turns is not None and n_turns.value > 1 for n_turns in turns) else [REQUESTS]


def lines(summaries: Sequence[Summary], columns: Sequence[Column]) -> list[tuple[str, list[str]]]:
    """Name and cells of each server, and under each but the first those of its ratios to the first."""
    result, base = [], summaries[0]
    for summary in summaries:
        result.append((summary.server, [column.of(summary) for column in columns]))
        if summary is not base:
            result.append((f"/ {base.server}", [column.over(summary) for column in columns]))
    return result


def tool_lines(summaries: Sequence[Summary]) -> list[list[str]]:
    """A line of `TOOL_HEADS` for each set of tools that ran."""
    return [
        [summary.server, tool.tools, f"{tool.runs}", *map(cell, (tool.mean, tool.p50, tool.p99, *tool.after))]
        for summary in summaries
        for tool in summary.tools
    ]


def print_report(summaries: Sequence[Summary], descriptions: Mapping[str, str], notes: Sequence[str]) -> None:
    """The tables of each workload, then the notes."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for workload in dict.fromkeys(summary.workload for summary in summaries):
        mine = [summary for summary in summaries if summary.workload == workload]
        titles = (f"{workload}: {descriptions.get(workload, '')}", f"{workload}: whole programs")
        for title, columns in zip(titles, layouts(mine), strict=False):
            # Names of servers are text, in which rich would look for markup.
            table = Table(title=Text(title, "table.title"), title_justify="left", caption_justify="left", box=SIMPLE)
            table.add_column("server", no_wrap=True)
            for column in columns:
                table.add_column(column.head, justify="right", overflow="fold")
            for number, (name, cells) in enumerate(lines(mine, columns)):
                ratio = number > 0 and number % 2 == 0
                table.add_row(Text(name), *cells, style="bold" if ratio else None, end_section=ratio or not number)
            if workload == "repeats":
                table.caption = "exact repeats: an answer may come from a response cache, which is no inference"
            console.print(table)
        if tools := tool_lines(mine):
            print_table(f"{workload}: tools", TOOL_HEADS, tools, left=2)
    for note in notes:
        console.print(note, markup=False, highlight=False)
