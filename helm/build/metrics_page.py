"""The tables of `docs/metrics.md`, made from the metrics' definitions. The text around them is written by hand."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from holdfast.replicas import metrics as replica
from holdfast.replicas.metrics import Metric
from holdfast.router import metric_list as router

FILE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
HEAD = "| metric | type, unit | labels | what, and what to do about it |\n|---|---|---|---|"


def tables() -> str:
    """Markdown of all groups, the router's first."""
    parts = (
        *_section("Router", "All with `router`, the id of the process.", router.GROUPS),
        *_section("Replica", "All with `model` and `replica`.", replica.GROUPS),
    )
    return "\n\n".join(parts)


def rewritten(page: str) -> str:
    """`page` with the tables between its two marks made again. Raises ValueError where a mark is missing."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if BEGIN not in page or END not in rest:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _section(title: str, intro: str, groups: Mapping[str, Sequence[Metric]]) -> Iterable[str]:
    yield f"## {title}\n\n{intro}"
    for name, metrics in groups.items():
        yield f"### {title}: {name.lower()}\n\n{HEAD}\n" + "\n".join(map(_row, metrics))


def _row(metric: Metric) -> str:
    unit = f", {metric.unit}" if metric.unit else ""
    return f"| `{metric.name}` | {metric.kind}{unit} | {', '.join(metric.labels)} | {metric.help}. {metric.advice} |"
