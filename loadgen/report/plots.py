"""The report's pictures as inline SVG, drawn by matplotlib. What they show is of `series` and `summary`.

Text stays text and takes the page's colour, the ground is left transparent: one picture for a light and a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from holdfast.loadgen.measure import Estimate
from holdfast.loadgen.report.palette import PHASES
from holdfast.loadgen.report.series import Lane, Value, by_turn, cumulative
from holdfast.loadgen.report.style import INK, LINES, MARKS, STYLE, WIDTH, colour, legend, svg
from holdfast.loadgen.rows import Row
from holdfast.loadgen.summary import Summary
from holdfast.loadgen.timeline import Phase

Figured = Callable[[Summary], Estimate | None]
MEASURES: tuple[tuple[str, Value], ...] = (
    ("latency", lambda row: row.latency),
    ("time to first token", lambda row: row.ttft),
)
AGAINST_LOAD: tuple[tuple[str, tuple[Figured, ...]], ...] = (
    ("latency (s)", (lambda told: told.latency["p50"], lambda told: told.latency["p99"])),
    ("time to first token (s)", (lambda told: told.ttft["p50"], lambda told: told.ttft["p99"])),
    ("job completion (s, mean)", (lambda told: told.job["mean"], lambda told: told.job["p99"])),
    ("output tokens a second", (lambda told: told.tokens_per_s,)),
)
MOST_TICKS = 4  # of a panel of the overview, which is as wide as some five of their labels
RATIOS = ("latency p50", "latency p99", "ttft p50", "job mean", "wall")


def overview(summaries: Sequence[Summary]) -> str | None:
    """Ratios over the first server, of every workload, with their intervals; None where one server is alone."""
    others = list(dict.fromkeys(told.server for told in summaries if told.agreement is not None))
    workloads = list(dict.fromkeys(told.workload for told in summaries))
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
        _ratio_axis(panels[0])
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
                found = by_turn((row for row in rows if row.server == server), value)
                axes.fill_between(found.turns, found.low, found.high, color=colour(place), alpha=0.18, linewidth=0)
                mark, line = MARKS[place % len(MARKS)], LINES[place % len(LINES)]
                axes.plot(found.turns, found.middle, line + mark, color=colour(place), label=server, markersize=3.5)
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
                told = {summary.workload: summary for summary in summaries if summary.server == server}
                mine = [(load, told[workload]) for workload, load in loads.items() if workload in told]
                for tail, of in enumerate(curves):
                    points = [(load, found) for load, summary in mine if (found := of(summary)) is not None]
                    _load_curve(axes, points, servers.index(server), server, tail=tail > 0)
            axes.set(title=name, ylim=(0, 1.08 * axes.get_ylim()[1]))
            axes.grid(True)
        for axes in figure.axes[2:]:
            axes.set_xlabel(f"programs {unit}")
        _load_axis(figure.axes[0], sorted(loads.values()))
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
            seen: list[float] = []
            for place, server in enumerate(_servers(rows)):
                seconds, share = cumulative((row for row in rows if row.server == server), value)
                seen += seconds
                line = LINES[place % len(LINES)]
                axes.step(seconds, share, line, where="post", color=colour(place), label=server)
            if seen and max(seen) > 30 * min(seen) > 0:
                axes.set_xscale("log")
                _log_ticks(axes, LogLocator(10, subs=(1, 2, 5)), "")
            else:
                axes.set_xlim(0, None)
            axes.set(title=f"{name} (s)", ylim=(0, 1.02))
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            axes.grid(True)
        panels[0].set_ylabel("share of requests")
        legend(figure, panels[0])
        return svg(figure)


def gantt(servers: Mapping[str, Sequence[Lane]]) -> str:
    """What each program was doing, a panel for each server, over the seconds of the server's own repetition."""
    lengths = [max(len(lanes), 1) for lanes in servers.values()]
    with rc_context(STYLE):
        figure = Figure((WIDTH, 0.9 + sum(0.26 * length + 0.45 for length in lengths)), layout="constrained")
        panels = figure.subplots(len(servers), 1, sharex=True, squeeze=False, height_ratios=lengths)[:, 0]
        seen: set[Phase] = set()
        for axes, (server, lanes) in zip(panels, servers.items(), strict=True):
            for place, lane in enumerate(lanes):
                seen |= {bar.phase for bar in lane.bars}
                for phase in PHASES:
                    spans = [(bar.begin, bar.length) for bar in lane.bars if bar.phase is phase]
                    axes.broken_barh(spans, (place - 0.36, 0.72), facecolor=PHASES[phase], linewidth=0)
            axes.set_title(server)
            axes.set_yticks(range(len(lanes)), [lane.program for lane in lanes])
            axes.set_ylim(len(lanes) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.grid(True, axis="x")
        panels[-1].set_xlabel("seconds")
        panels[-1].set_xlim(0, None)
        keys = [Patch(facecolor=shade, label=phase) for phase, shade in PHASES.items() if phase in seen]
        figure.legend(handles=keys, loc="outside upper left", ncols=len(PHASES), handlelength=1.2, columnspacing=1.4)
        return svg(figure)


def _load_curve(axes: Axes, points: Sequence[tuple[float, Estimate]], place: int, label: str, tail: bool) -> None:
    if not points:  # of a server that failed at every load, or counts no tokens
        return
    loads, values = [load for load, _ in points], [found.value for _, found in points]
    shade, style = colour(place), ("--" if tail else "-") + MARKS[place % len(MARKS)]
    axes.plot(loads, values, style, color=shade, label=None if tail else label, markersize=4, linewidth=1.2)
    if not tail:
        low, high = zip(*(found.ends for _, found in points), strict=True)
        axes.fill_between(loads, low, high, color=shade, alpha=0.18, linewidth=0)


def _load_axis(axes: Axes, loads: Sequence[float]) -> None:
    """Ticks at the loads themselves; logarithmic where they are doubled rather than added to."""
    if len(loads) > 2 and loads[-1] >= 4 * loads[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.xaxis.set_minor_locator(NullLocator())


def _ratio_points(
    axes: Axes, name: str, server: str, workloads: Sequence[str], summaries: Sequence[Summary], offset: float
) -> None:
    place = _servers(summaries).index(server)
    points = []
    for told in summaries:
        estimate = told.ratios.get(name)
        if told.server == server and estimate is not None:
            points.append((workloads.index(told.workload) + offset, estimate.value, *estimate.ends))
    if points:
        heights, values, lows, highs = zip(*points, strict=True)
        axes.hlines(heights, lows, highs, color=colour(place), linewidth=1.6)
        axes.plot(values, heights, MARKS[place % len(MARKS)], color=colour(place), label=server, markersize=5)


def _ratio_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    low, high = min(low, 0.45), max(high, 2.2)
    axes.set_xlim(low, high)
    ticks = ratio_ticks(low, high)
    axes.set_xticks(ticks, [_ratio(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def ratio_ticks(low: float, high: float) -> list[float]:
    """Powers of two from ``low`` to ``high``, 1 among them: few enough that their labels stand side by side."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / (MOST_TICKS - 1)))
    return [2.0**power for power in range(first + -first % step, last + 1, step)]


def _ratio(value: float) -> str:
    """`4×`, `0.5×`, `1/16×`: small ones as fractions, which are shorter than their decimals."""
    return f"{value:g}×" if value >= 0.5 else f"1/{1 / value:g}×"


def _log_ticks(axes: Axes, locator: LogLocator, unit: str) -> None:
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))


def _servers(told: Sequence[Row] | Sequence[Summary]) -> list[str]:
    return list(dict.fromkeys(each.server for each in told))
