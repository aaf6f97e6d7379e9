"""The parts of a dashboard, and the few shapes of its queries. Not here: Grafana's JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

WINDOW = "$__rate_interval"
WIDTH = 24  # columns of Grafana's grid


class Kind(StrEnum):
    LINES = "lines"
    STACKED = "stacked"
    NUMBER = "number"


class Unit(StrEnum):
    """Grafana's names of units."""

    PLAIN = "short"
    SECONDS = "s"
    PER_SECOND = "reqps"
    RATE = "cps"  # of anything else that is counted
    SHARE = "percentunit"
    PERCENT = "percent"
    BYTES = "bytes"
    MOMENT = "dateTimeFromNow"  # in milliseconds
    YES_NO = "bool_yes_no"


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` names labels in double braces."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`description` says what to look for. `width` and `height` are in cells of the grid.

    `gpu`: the panel is empty without a GPU. A number from `bad` on is red.
    """

    title: str
    description: str
    unit: Unit
    queries: Sequence[Query]
    kind: Kind = Kind.LINES
    width: int = 8
    height: int = 8
    gpu: bool = False
    bad: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of the dashboard: the values of `label` on `metric`."""

    name: str
    title: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Board:
    name: str  # of its file, and a part of its address
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]


JOB = Variable("job", "Installation", "holdfast_requests_in_flight", "job")
MODEL = Variable("model", "Model", "holdfast_cell_capacity", "model")
REPLICA = Variable("replica", "Replica", "holdfast_cell_capacity", "replica")
TENANT = Variable("tenant", "Tenant", "holdfast_tenant_requests_in_flight", "tenant")


def graph(
    title: str,
    description: str,
    unit: Unit,
    *queries: Query,
    kind: Kind = Kind.LINES,
    width: int = 8,
    gpu: bool = False,
) -> Panel:
    return Panel(title, description, unit, queries, kind, width, gpu=gpu)


def number(title: str, description: str, unit: Unit, expression: str, bad: float | None = None) -> Panel:
    return Panel(title, description, unit, (Query(expression, ""),), Kind.NUMBER, width=4, height=4, bad=bad)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Queries over the series that the given variables select."""

    variables: Sequence[Variable]

    def of(self, name: str, **labels: str) -> str:
        """The series of a metric; a label's value is a regular expression."""
        matchers = {**{each.label: f"${each.name}" for each in self.variables}, **labels}
        return name + "{" + ", ".join(f'{label}=~"{value}"' for label, value in matchers.items()) + "}"

    def rate(self, name: str, *by: str, **labels: str) -> str:
        """How fast a counter grows, per second."""
        return f"sum{_by(by)} (rate({self.of(name, **labels)}[{WINDOW}]))"

    def total(self, name: str, *by: str, **labels: str) -> str:
        return f"sum{_by(by)} ({self.of(name, **labels)})"

    def share(self, part: str, whole: str, *by: str, **labels: str) -> str:
        """The share of one gauge in another; `labels` select series of the part."""
        return f"{self.total(part, *by, **labels)} / {self.total(whole, *by)}"

    def most(self, name: str, *by: str, **labels: str) -> str:
        return f"max{_by(by)} ({self.of(name, **labels)})"

    def quantile(self, q: float, name: str, *by: str) -> str:
        """A quantile of a histogram."""
        return f"histogram_quantile({q:g}, {self.rate(f'{name}_bucket', 'le', *by)})"

    def mean(self, name: str, *by: str) -> str:
        """The mean of a histogram's observations."""
        return f"{self.rate(f'{name}_sum', *by)} / {self.rate(f'{name}_count', *by)}"

    def quantiles(self, name: str, *by: str) -> tuple[Query, ...]:
        """The median, p95 and p99 for each value of the labels."""
        of_each = "".join(f" {{{{{label}}}}}" for label in by)
        return tuple(Query(self.quantile(q, name, *by), f"p{q * 100:g}{of_each}") for q in (0.5, 0.95, 0.99))


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
