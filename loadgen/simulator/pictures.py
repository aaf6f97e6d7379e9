"""Pictures of a comparison of policies, one file for each group of cases, for light and dark pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from holdfast.loadgen.measure import Estimate
from holdfast.loadgen.report.plots import LINES, MARKS, STYLE, WIDTH, colour, legend, svg
from holdfast.loadgen.simulator.scenarios import Row, summary

INK = "#7d858f"  # a file has no page to take its colour from; this is read on white and on black
_PANELS = (
    ("job completion (s, mean)", "mean_s"),
    ("job completion (s, 99th percentile)", "p99_s"),
    ("waiting to be scheduled (s a program)", "bubble_s"),
    ("programs a second", "programs_per_s"),
)


def write(rows: Sequence[Row], profile: str, folder: Path) -> None:
    """Write a picture for each workload, with and without a second tier: curves over the load, or bars of one load."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        tier = "-host" if "host tier" in row.case else ""
        groups.setdefault(f"{row.case.split()[0]}-{profile}{tier}", []).append(row)
    for name, group in groups.items():
        turns = "-turns" if any(re.search(r" x\d+ ", row.case) for row in group) else ""
        (folder / f"{name}{turns}.svg").write_text(draw(group, "turns, times" if turns else "programs a second"))


def draw(rows: Sequence[Row], about: str) -> str:
    """The four figures of every policy over the loads, with their intervals, as SVG; of one load as bars."""
    loads, ways = sorted({row.load for row in rows}), list(dict.fromkeys(row.way for row in rows))
    with rc_context(STYLE):
        figure = Figure((WIDTH, 5.6), layout="constrained")
        for axes, (title, name) in zip(figure.subplots(2, 2, sharex=True).flat, _PANELS, strict=True):
            for place, way in enumerate(ways):
                points = [_value(rows, way, load, name) for load in loads]
                if len(loads) == 1:
                    axes.bar(place, points[0].value, 0.7, color=colour(place), alpha=0.85)
                    axes.vlines(place, *points[0].ends, color=INK, linewidth=1.1)
                    continue
                # So far aside that the intervals of several policies can be told apart.
                aside = 0.012 * (loads[-1] - loads[0]) * (place - len(ways) / 2)
                at, style = [load + aside for load in loads], LINES[place % len(LINES)] + MARKS[place % len(MARKS)]
                values, ends = [point.value for point in points], [point.ends for point in points]
                axes.plot(at, values, style, color=colour(place), label=way, markersize=4, linewidth=1.3)
                axes.vlines(at, *zip(*ends, strict=True), color=colour(place), linewidth=1.1, alpha=0.7)
            axes.set(title=title, ylim=(0, None))
            axes.grid(True, axis="y" if len(loads) == 1 else "both")
            if len(loads) == 1:
                axes.set_xticks(range(len(ways)), ways, fontsize=7)
            else:
                axes.set_xticks(loads)
        if len(loads) > 1:
            for axes in figure.axes[2:]:
                axes.set_xlabel(about)
            legend(figure, figure.axes[0])
        return svg(figure, INK)


def _value(rows: Sequence[Row], way: str, load: float, name: str) -> Estimate:
    return summary([row.figures[name] for row in rows if (row.way, row.load) == (way, load)])
