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
from holdfast.loadgen.summary import Summary
from holdfast.replicas.errors import ConfigError

WIDTH = 170  # where the output is no terminal
HEADS = (
    "requests",
    "ms p50",
    "ms p90",
    "ms p99",
    "1st token",
    "1st p99",
    "ms/token",
    "wall s",
    "tokens/s",
    "cached",
    "calls",
    "valid",
    "scripted",
    "same answer",
)


PROGRAM_HEADS = (
    "programs",
    "turns",
    "job s mean",
    "job s p50",
    "job s p90",
    "job s p99",
    "FTR s p50",
    "p90",
    "tools / FTR",
    "tools s",
    "bubble s",
    "programs/s",
    "cached, turn 1, 2, 3, later",
)


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
    for note in notes:
        console.print(note, markup=False, highlight=False)


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a table: of a server's figures, and of their ratios to the first server's."""

    heads: tuple[str, ...]
    figures: Callable[[Summary], list[str]]
    ratios: Callable[[Summary], list[str]]


def layouts(summaries: Sequence[Summary]) -> list[Layout]:
    """The tables of one workload: of its requests, and of its programs where these have several turns."""
    return [REQUESTS, PROGRAMS] if has_programs(summaries) else [REQUESTS]


def table(title: str, layout: Layout, summaries: Sequence[Summary]) -> Table:
    """One workload: each server, and under each but the first its ratios to the first; below a figure its interval."""
    first = summaries[0]
    # What servers are called is text, in which rich would look for markup.
    shown = Table(title=Text(title, "table.title"), title_justify="left", caption_justify="left", box=SIMPLE)
    shown.add_column("server", no_wrap=True)
    for head in layout.heads:
        shown.add_column(head, justify="right", overflow="fold")
    for summary in summaries:
        shown.add_row(Text(summary.server), *layout.figures(summary), end_section=summary is first)
        if summary is not first:
            shown.add_row(Text(f"/ {first.server}"), *layout.ratios(summary), style="bold", end_section=True)
    return shown


def _requests(summary: Summary) -> str:
    failed = sum(summary.failures.values())
    return f"{summary.requests}" + (f"\n{failed} failed" if failed else "")


def figures(summary: Summary) -> list[str]:
    """A server's cells under `HEADS`: the figure, and below it its interval or a remark."""
    agreement = summary.agreement
    return [
        _requests(summary),
        *(cell(summary.latency[name], 1e3) for name in ("p50", "p90", "p99")),
        *(cell(summary.ttft[name], 1e3) for name in ("p50", "p99")),
        cell(summary.per_token, 1e3),
        cell(summary.wall),
        cell(summary.tokens_per_s),
        share(summary.cached_share),
        share(summary.call_share),
        share(summary.fitting_share),
        share(summary.scripted_share),
        "" if agreement is None else f"{agreement.same_answer} of {agreement.same_prompt}\n({agreement.asked} asked)",
    ]


def ratios(summary: Summary) -> list[str]:
    """A server's cells under `HEADS` over the first server's."""
    names = [f"latency {name}" for name in ("p50", "p90", "p99")]
    names += ["ttft p50", "ttft p99", "per token p50", "wall", "tokens per s"]
    return _padded(["", *(cell(summary.ratios[name], unit="x") for name in names)], len(HEADS))


def program_figures(summary: Summary) -> list[str]:
    """A server's cells under `PROGRAM_HEADS`."""
    turns = "-" if summary.turns is None else brief(summary.turns.value)
    times = [summary.job[name] for name in ("mean", "p50", "p90", "p99")]
    first = (summary.last_first_token["p50"], summary.last_first_token["p90"], summary.tool_share)
    rest = (*first, summary.tool, summary.bubble, summary.programs_per_s)
    found = " ".join(share(each) for each in summary.cached_by_turn)
    return [f"{summary.programs}", turns, *(cell(estimate) for estimate in (*times, *rest)), found]


def program_ratios(summary: Summary) -> list[str]:
    """A server's cells under `PROGRAM_HEADS` over the first server's."""
    names = ("job mean", "job p50", "job p90", "job p99", "last first token p50")
    return _padded(["", "", *(cell(summary.ratios[name], unit="x") for name in names)], len(PROGRAM_HEADS))


def has_programs(summaries: Sequence[Summary]) -> bool:
    """Whether there is more to tell of programs than of requests: some have several turns."""
    return any(summary.turns is not None and summary.turns.value > 1 for summary in summaries)


def _padded(cells: list[str], length: int) -> list[str]:
    return cells + [""] * (length - len(cells))


def cell(estimate: Estimate | None, scale: float = 1, unit: str = "") -> str:
    """A figure, and below it its interval."""
    if estimate is None:
        return "-"
    told = brief(estimate.value * scale) + unit
    if estimate.low is None or estimate.high is None:
        return told
    return f"{told}\n{brief(estimate.low * scale)}–{brief(estimate.high * scale)}"


def brief(value: float) -> str:
    """A figure with three digits or more."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{value:.0%}"


REQUESTS = Layout(HEADS, figures, ratios)
PROGRAMS = Layout(PROGRAM_HEADS, program_figures, program_ratios)
