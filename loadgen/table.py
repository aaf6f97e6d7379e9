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
    shown = Table(title=Text(title, "table.title") if title else None, title_justify="left", box=SIMPLE)
    for number, head in enumerate(heads):
        shown.add_column(head, justify="left" if number < left else "right", no_wrap=number < left)
    for row in rows:
        shown.add_row(*(Text(each) for each in row))
    console = Console()
    (console if console.is_terminal else Console(width=2 * WIDTH)).print(shown)


def check_writable(path: Path, field_name: str) -> None:
    """Make the folder of ``path``. Raises ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", field_name) from error


def print_report(summaries: Sequence[Summary], drawn: Mapping[str, str], notes: Sequence[str]) -> None:
    """The tables of each workload, then the notes."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for workload in dict.fromkeys(summary.workload for summary in summaries):
        mine = [summary for summary in summaries if summary.workload == workload]
        titles = (f"{workload}: {drawn.get(workload, '')}", f"{workload}: whole programs")
        for title, layout in zip(titles, layouts(mine), strict=False):
            shown = table(title, layout, mine)
            if workload == "repeats":
                shown.caption = "exact repeats: an answer may come from a response cache, which is no inference"
            console.print(shown)
        if lines := tool_lines(mine):
            print_table(f"{workload}: tools", TOOL_HEADS, lines, left=2)
    for note in notes:
        console.print(note, markup=False, highlight=False)


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a server; `ratio` is the name of its ratio to the first server's in `Summary.ratios`."""

    head: str
    figure: Callable[[Summary], str]
    ratio: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a table."""

    columns: tuple[Column, ...]

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(column.head for column in self.columns)

    def figures(self, summary: Summary) -> list[str]:
        """A server's cells: the figure, and below it its interval or a remark."""
        return [column.figure(summary) for column in self.columns]

    def ratios(self, summary: Summary) -> list[str]:
        """A server's cells over the first server's."""
        return [cell(summary.ratios[column.ratio], unit="x") if column.ratio else "" for column in self.columns]


def layouts(summaries: Sequence[Summary]) -> list[Layout]:
    """The tables of one workload: of its requests, and of its programs where these have several turns."""
    return [REQUESTS, PROGRAMS] if has_programs(summaries) else [REQUESTS]


def table(title: str, layout: Layout, summaries: Sequence[Summary]) -> Table:
    """One workload: each server, and under each but the first its ratios to the first."""
    first = summaries[0]
    # Names of servers are text, in which rich would look for markup.
    shown = Table(title=Text(title, "table.title"), title_justify="left", caption_justify="left", box=SIMPLE)
    shown.add_column("server", no_wrap=True)
    for head in layout.heads:
        shown.add_column(head, justify="right", overflow="fold")
    for summary in summaries:
        shown.add_row(Text(summary.server), *layout.figures(summary), end_section=summary is first)
        if summary is not first:
            shown.add_row(Text(f"/ {first.server}"), *layout.ratios(summary), style="bold", end_section=True)
    return shown


def tool_lines(summaries: Sequence[Summary]) -> list[list[str]]:
    """A line of `TOOL_HEADS` for each set of tools that ran."""
    return [
        [summary.server, each.tools, f"{each.runs}", *map(cell, (each.mean, each.p50, each.p99, *each.after))]
        for summary in summaries
        for each in summary.tools
    ]


TOOL_HEADS = ("server", "tools", "runs", "mean s", "p50", "p99", *(f"mean of the first {n}" for n in SAMPLES))


def _requests(summary: Summary) -> str:
    failed = sum(summary.failures.values())
    return f"{summary.requests}" + (f"\n{failed} failed" if failed else "")


def _agreement(summary: Summary) -> str:
    agreement = summary.agreement
    if agreement is None:
        return ""
    return f"{agreement.same_answer} of {agreement.same_prompt}\n({agreement.asked} asked)"


def has_programs(summaries: Sequence[Summary]) -> bool:
    """Whether some programs have several turns."""
    return any(summary.turns is not None and summary.turns.value > 1 for summary in summaries)


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


REQUESTS = Layout((
    Column("requests", _requests),
    Column("ms p50", lambda s: cell(s.latency["p50"], 1e3), "latency p50"),
    Column("ms p90", lambda s: cell(s.latency["p90"], 1e3), "latency p90"),
    Column("ms p99", lambda s: cell(s.latency["p99"], 1e3), "latency p99"),
    Column("1st token", lambda s: cell(s.ttft["p50"], 1e3), "ttft p50"),
    Column("1st p99", lambda s: cell(s.ttft["p99"], 1e3), "ttft p99"),
    Column("ms/token", lambda s: cell(s.per_token, 1e3), "per token p50"),
    Column("wall s", lambda s: cell(s.wall), "wall"),
    Column("tokens/s", lambda s: cell(s.tokens_per_s), "tokens per s"),
    Column("cached", lambda s: share(s.cached_share)),
    Column("calls", lambda s: share(s.call_share)),
    Column("valid", lambda s: share(s.fitting_share)),
    Column("scripted", lambda s: share(s.scripted_share)),
    Column("same answer", _agreement),
))  # fmt: skip
PROGRAMS = Layout((
    Column("programs", lambda s: f"{s.programs}"),
    Column("turns", lambda s: "-" if s.turns is None else brief(s.turns.value)),
    Column("job s mean", lambda s: cell(s.job["mean"]), "job mean"),
    Column("job s p50", lambda s: cell(s.job["p50"]), "job p50"),
    Column("job s p90", lambda s: cell(s.job["p90"]), "job p90"),
    Column("job s p99", lambda s: cell(s.job["p99"]), "job p99"),
    Column("FTR s p50", lambda s: cell(s.last_first_token["p50"]), "last first token p50"),
    Column("p90", lambda s: cell(s.last_first_token["p90"])),
    Column("tools / FTR", lambda s: cell(s.tool_share)),
    Column("tools s", lambda s: cell(s.tool)),
    Column("bubble s", lambda s: cell(s.bubble)),
    Column("prefill s", lambda s: cell(s.prefill)),
    Column("decode s", lambda s: cell(s.decode)),
    Column("programs/s", lambda s: cell(s.programs_per_s)),
    Column("cached, turn 1, 2, 3, later", lambda s: " ".join(map(share, s.cached_by_turn))),
))  # fmt: skip
