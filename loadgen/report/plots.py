"""The report's pictures as inline SVG, drawn by matplotlib.

Text stays text and takes the page's colour, the ground is left transparent: one picture for a light and a dark page.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from holdfast.loadgen.measure import Estimate
from holdfast.loadgen.rows import Row
from holdfast.loadgen.summary import Summary
from holdfast.loadgen.timeline import Phase, Span, tracks, wave_shifts

# Each colour is read on a white and on a dark page, so a picture needs to be drawn only once.
SERVERS = ("#2f7fd1", "#d0651c", "#23946a", "#9a62d0", "#c74a78", "#84802a", "#0f8f9c")
PHASES = {
    Phase.OUTSIDE: "#878e98",
    Phase.QUEUE: "#d0651c",
    Phase.PREFILL: "#2f7fd1",
    Phase.WAIT: "#94762c",
    Phase.DECODE: "#23946a",
    Phase.TOOL: "#9a62d0",
    Phase.FAILED: "#d64545",
}
INK = "#010203"  # stands for the page's own colour until the picture is text
WIDTH = 9.6  # inches; a picture is scaled to the page
STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names are no formulas
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.16,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "legend.frameon": False,
}
LINES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")

Value = Callable[[Row], float | None]
MEASURES: tuple[tuple[str, Value], ...] = (
    ("latency", lambda row: row.latency),
    ("time to first token", lambda row: row.ttft),
)
AGAINST_LOAD = (
    ("latency (s)", ("latency p50", "latency p99")),
    ("time to first token (s)", ("ttft p50", "ttft p99")),
    ("job completion (s, mean)", ("job mean", "job p99")),
    ("output tokens a second", ("tokens per s",)),
)
MOST_TICKS = 4  # of a panel of the overview, which is as wide as some five of their labels
RATIOS = ("latency p50", "latency p99", "ttft p50", "job mean", "wall")


# ---- figures and their style ----


def colour(place: int) -> str:
    """The colour of the server, or policy, at this place."""
    return SERVERS[place % len(SERVERS)]


def legend(figure: Figure, axes: Axes) -> None:
    """One legend above all panels, from the first of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=6)


def svg(figure: Figure, ink: str = "currentColor") -> str:
    """The picture; `ink` is the colour of its text: the page's own, where the picture is a part of it."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(INK, ink)


def _servers(items: Sequence[Row] | Sequence[Summary]) -> list[str]:
    return list(dict.fromkeys(one.server for one in items))


# ---- the numbers behind them ----


def by_turn(rows: Iterable[Row], value: Value) -> dict[int, tuple[float, float, float]]:
    """The 10th, 50th and 90th percentile of the requests that succeeded, by their turn from 1."""
    values: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        number = value(row)
        if row.ok and number is not None:
            values[row.turn + 1].append(number)
    return {turn: tuple(np.percentile(values[turn], (10, 50, 90)).tolist()) for turn in sorted(values)}


def cumulative(rows: Iterable[Row], value: Value) -> tuple[list[float], list[float]]:
    """The empirical distribution of ``value``: sorted values, and the share of requests at or below each."""
    values = sorted(known for row in rows if row.ok and (known := value(row)) is not None)
    return values, [(number + 1) / len(values) for number in range(len(values))]


def loads(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """The loads of each sweep by its workload's name: one for each of its workloads, in rising order."""
    result: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.load is not None:
            result[row.swept][row.workload] = row.load.value
    return {name: dict(sorted(values.items(), key=lambda item: item[1])) for name, values in result.items()}


def lanes(rows: Sequence[Row], most: int) -> list[tuple[str, list[Span]]]:
    """The first ``most`` programs of one server's repetition with their spans, its waves put one after another."""
    shifts = wave_shifts(rows)
    result = sorted(tracks(rows), key=lambda track: track.rows[0].began)[:most]
    return [
        (track.rows[0].program, [
            replace(span, begin=span.begin - shifts[span.row.wave], end=span.end - shifts[span.row.wave])
            for span in track.spans
        ])
        for track in result
    ]  # fmt: skip


# ---- pictures ----


def overview(summaries: Sequence[Summary]) -> str | None:
    """Ratios over the first server, of every workload, with their intervals; None where one server is alone."""
    others = list(dict.fromkeys(summary.server for summary in summaries if summary.agreement is not None))
    workloads = list(dict.fromkeys(summary.workload for summary in summaries))
    if not others:
        return None
    with rc_context(STYLE):
        figure = Figure((WIDTH, 1.0 + 0.24 * len(workloads) * len(others)), layout="constrained")
        panels = figure.subplots(1, len(RATIOS), sharex=True, sharey=True)
        for axes, name in zip(panels, RATIOS, strict=True):
            for place, server in enumerate(others):
                _ratio_points(axes, name, server, workloads, summaries, (place + 1) / (len(others) + 1) - 0.5)
            axes.axvline(1, color=INK, linewidth=0.8)
            axes.set_title(name)
            axes.grid(True)
        ratio_axis(panels[0])
        panels[0].set_yticks(range(len(workloads)), workloads)
        panels[0].set_ylim(len(workloads) - 0.5, -0.5)
        legend(figure, panels[0])
        return svg(figure)


def against_turn(rows: Sequence[Row]) -> str | None:
    """Latency and time to the first token by turn, median and 10th to 90th percentile; None where turns are single."""
    if all(row.turn == 0 for row in rows):
        return None
    with rc_context(STYLE):
        figure = Figure((WIDTH, 3.0), layout="constrained")
        panels = figure.subplots(1, len(MEASURES))
        for axes, (name, value) in zip(panels, MEASURES, strict=True):
            for place, server in enumerate(_servers(rows)):
                values = by_turn((row for row in rows if row.server == server), value)
                low, middle, high = zip(*values.values(), strict=True) if values else ((), (), ())
                axes.fill_between(list(values), low, high, color=colour(place), alpha=0.18, linewidth=0)
                style = LINES[place % len(LINES)] + MARKS[place % len(MARKS)]
                axes.plot(list(values), middle, style, color=colour(place), label=server, markersize=3.5)
            axes.set(title=f"{name} (s)", xlabel="turn", ylim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(True)
        legend(figure, panels[0])
        return svg(figure)


def against_load(summaries: Sequence[Summary], loads: Mapping[str, float], unit: str) -> str:
    """Figures of the workloads of one sweep over ``loads``, with intervals; dashed: the 99th percentile."""
    servers = _servers(summaries)
    with rc_context(STYLE):
        figure = Figure((WIDTH, 5.2), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True).flat
        for axes, (name, curves) in zip(panels, AGAINST_LOAD, strict=True):
            for server in servers:
                mine = {summary.workload: summary for summary in summaries if summary.server == server}
                mine_at = [(load, mine[workload]) for workload, load in loads.items() if workload in mine]
                for tail, of in enumerate(curves):
                    points = [(load, value) for load, summary in mine_at if (value := summary.figures[of]) is not None]
                    _load_curve(axes, points, servers.index(server), server, tail=tail > 0)
            axes.set(title=name, ylim=(0, 1.08 * axes.get_ylim()[1]))
            axes.grid(True)
        for axes in figure.axes[2:]:
            axes.set_xlabel(f"programs {unit}")
        ticks = sorted(loads.values())
        if len(ticks) > 2 and ticks[-1] >= 4 * ticks[0]:  # they are doubled rather than added to
            figure.axes[0].set_xscale("log", base=2)
        figure.axes[0].set_xticks(ticks, [f"{load:g}" for load in ticks])
        figure.axes[0].xaxis.set_minor_locator(NullLocator())
        handles, labels = figure.axes[0].get_legend_handles_labels()
        handles += [Line2D([], [], color=INK), Line2D([], [], color=INK, linestyle="--")]
        figure.legend(handles, [*labels, "median or mean", "p99"], loc="outside upper left", ncols=8)
        return svg(figure)


def distributions(rows: Sequence[Row]) -> str:
    """The share of requests that took no longer than so many seconds, for latency and time to the first token."""
    with rc_context(STYLE):
        figure = Figure((WIDTH, 2.9), layout="constrained")
        panels = figure.subplots(1, len(MEASURES), sharey=True)
        for axes, (name, value) in zip(panels, MEASURES, strict=True):
            all_values: list[float] = []
            for place, server in enumerate(_servers(rows)):
                seconds, share = cumulative((row for row in rows if row.server == server), value)
                all_values += seconds
                line = LINES[place % len(LINES)]
                axes.step(seconds, share, line, where="post", color=colour(place), label=server)
            if all_values and max(all_values) > 30 * min(all_values) > 0:
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
                axes.xaxis.set_minor_locator(NullLocator())
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            else:
                axes.set_xlim(0, None)
            axes.set(title=f"{name} (s)", ylim=(0, 1.02))
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            axes.grid(True)
        panels[0].set_ylabel("share of requests")
        legend(figure, panels[0])
        return svg(figure)


def gantt(servers: Mapping[str, Sequence[tuple[str, Sequence[Span]]]]) -> str:
    """The phase of each program over time, a panel for each server, over the seconds of the server's own repetition."""
    lengths = [max(len(programs), 1) for programs in servers.values()]
    with rc_context(STYLE):
        figure = Figure((WIDTH, 0.9 + sum(0.26 * length + 0.45 for length in lengths)), layout="constrained")
        panels = figure.subplots(len(servers), 1, sharex=True, squeeze=False, height_ratios=lengths)[:, 0]
        phases: set[Phase] = set()
        for axes, (server, programs) in zip(panels, servers.items(), strict=True):
            for place, (_, spans) in enumerate(programs):
                phases |= {span.phase for span in spans}
                for phase in PHASES:
                    bars = [(span.begin, span.end - span.begin) for span in spans if span.phase is phase]
                    axes.broken_barh(bars, (place - 0.36, 0.72), facecolor=PHASES[phase], linewidth=0)
            axes.set_title(server)
            axes.set_yticks(range(len(programs)), [program for program, _ in programs])
            axes.set_ylim(len(programs) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.grid(True, axis="x")
        panels[-1].set_xlabel("seconds")
        panels[-1].set_xlim(0, None)
        keys = [Patch(facecolor=shade, label=phase) for phase, shade in PHASES.items() if phase in phases]
        figure.legend(handles=keys, loc="outside upper left", ncols=len(PHASES), handlelength=1.2, columnspacing=1.4)
        return svg(figure)


def _load_curve(axes: Axes, points: Sequence[tuple[float, Estimate]], place: int, label: str, tail: bool) -> None:
    if not points:  # of a server that failed at every load, or counts no tokens
        return
    loads, values = [load for load, _ in points], [estimate.value for _, estimate in points]
    shade, style = colour(place), ("--" if tail else "-") + MARKS[place % len(MARKS)]
    axes.plot(loads, values, style, color=shade, label=None if tail else label, markersize=4, linewidth=1.2)
    if not tail:
        low, high = zip(*(estimate.ends for _, estimate in points), strict=True)
        axes.fill_between(loads, low, high, color=shade, alpha=0.18, linewidth=0)


def _ratio_points(
    axes: Axes, name: str, server: str, workloads: Sequence[str], summaries: Sequence[Summary], offset: float
) -> None:
    place, points = _servers(summaries).index(server), []
    for summary in summaries:
        estimate = summary.ratios.get(name)
        if summary.server == server and estimate is not None:
            points.append((workloads.index(summary.workload) + offset, estimate.value, *estimate.ends))
    if points:
        heights, values, lows, highs = zip(*points, strict=True)
        axes.hlines(heights, lows, highs, color=colour(place), linewidth=1.6)
        axes.plot(values, heights, MARKS[place % len(MARKS)], color=colour(place), label=server, markersize=5)


def ratio_axis(axes: Axes) -> None:
    """Ticks at powers of two, 1 among them: few enough that their labels stand side by side.

    Small ratios are labelled as fractions, which are shorter than their decimals.
    """
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    low, high = min(low, 0.45), max(high, 2.2)
    axes.set_xlim(low, high)
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / (MOST_TICKS - 1)))
    ticks = [2.0**power for power in range(first + -first % step, last + 1, step)]
    axes.set_xticks(ticks, [f"{tick:g}×" if tick >= 0.5 else f"1/{1 / tick:g}×" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
