"""What is said of a metric: its name, kind, labels and unit, what it tells and what to do about it. Data alone.

Those of a replica are in `listed`, those of the router in its own list; the tables of the docs are made from both.
"""

from dataclasses import dataclass
from enum import StrEnum

OWNER = ("model", "replica")  # labels of every metric of a replica


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` as Prometheus shows it, a counter's with `_total`. `unit`: of the value; "" is a plain number.

    `advice` says what to look at or to change when the value is not as it should be. `buckets` are a histogram's.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    advice: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
