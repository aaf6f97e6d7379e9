"""Pictures of a comparison of policies, one file each, for light and dark pages. What they show is `comparison`'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from holdfast.loadgen.measure import Estimate
from holdfast.loadgen.report.style import LINES, MARKS, STYLE, WIDTH, colour, legend, svg
from holdfast.loadgen.simulator.comparison import Case, Summary

INK = "#7d858f"  # a file has no page to take its colour from; this is read on white and on black

Load = Callable[[Case], float]
_PANELS = (
    ("job completion (s, mean)", "mean_s"),
    ("job completion (s, 99th percentile)", "p99_s"),
    ("waiting to be scheduled (s a program)", "bubble_s"),
    ("programs a second", "programs_per_s"),
)


def of(cases: Sequence[Case], summaries: Sequence[Summary]) -> dict[str, str]:
    """Pictures by the names of their files: against the rate, and against the turns where they are multiplied."""
    found: dict[str, str] = {}
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(_group(case), []).append(case)
    for name, group in groups.items():
        told = [each for each in summaries if each.case in {case.name for case in group}]
        if len(group) == 1:
            found[name] = bars(told)
        elif len({case.workload.turns_times for case in group}) > 1:
            found[f"{name}-turns"] = draw(group, told, lambda case: case.workload.turns_times, "turns, times")
        else:
            found[name] = draw(group, told, lambda case: case.workload.rate, "programs that arrive a second")
    return found


def bars(summaries: Sequence[Summary]) -> str:
    """The same figures of one load, a bar for each policy, as SVG."""
    with rc_context(STYLE):
        figure = Figure((WIDTH, 5.6), layout="constrained")
        for axes, (title, figure_name) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
            for place, summary in enumerate(summaries):
                found = summary.figures[figure_name]
                axes.bar(place, found.value, 0.7, color=colour(place), alpha=0.85)
                axes.vlines(place, *found.ends, color=INK, linewidth=1.1)
            axes.set(title=title, ylim=(0, None))
            axes.set_xticks(range(len(summaries)), [summary.policy for summary in summaries], fontsize=7)
            axes.grid(True, axis="y")
        return svg(figure, INK)


def draw(cases: Sequence[Case], summaries: Sequence[Summary], load: Load, about: str) -> str:
    """Completion times, waits and throughput of every policy over the cases' loads, with their intervals, as SVG."""
    loads = {case.name: load(case) for case in cases}
    policies = list(dict.fromkeys(summary.policy for summary in summaries))
    apart = 0.012 * (max(loads.values()) - min(loads.values()))
    with rc_context(STYLE):
        figure = Figure((WIDTH, 5.6), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True).flat
        for axes, (title, figure_name) in zip(panels, _PANELS, strict=True):
            for place, policy in enumerate(policies):
                mine = {loads[each.case]: each.figures[figure_name] for each in summaries if each.policy == policy}
                _curve(axes, dict(sorted(mine.items())), apart * (place - len(policies) / 2), place, policy)
            axes.set(title=title, ylim=(0, None))
            axes.grid(True)
        for axes in figure.axes[2:]:
            axes.set_xlabel(about)
        figure.axes[0].set_xticks(sorted(set(loads.values())))
        legend(figure, figure.axes[0])
        return svg(figure, INK)


def _curve(axes: Axes, points: Mapping[float, Estimate], aside: float, place: int, policy: str) -> None:
    """One policy's line with its intervals, so far aside that those of several can be told apart."""
    loads, values = [load + aside for load in points], [found.value for found in points.values()]
    low, high = zip(*(found.ends for found in points.values()), strict=True)
    style = LINES[place % len(LINES)] + MARKS[place % len(MARKS)]
    axes.plot(loads, values, style, color=colour(place), label=policy, markersize=4, linewidth=1.3)
    axes.vlines(loads, low, high, color=colour(place), linewidth=1.1, alpha=0.7)


def _group(case: Case) -> str:
    """The name of the file that a case belongs to: it differs from the others there by its load alone."""
    tier = "-host" if case.host else ""
    return f"{case.workload.kind}-{case.profile.name}{tier}"
