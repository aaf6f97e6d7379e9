"""Every metric of a replica, in the order of the docs. One that is not listed here does not exist."""

from collections.abc import Mapping

from holdfast.replicas.metrics.cells import CELLS
from holdfast.replicas.metrics.reading import ReplicaMetric
from holdfast.replicas.metrics.requests import REQUESTS, TEXT, TOKENS
from holdfast.replicas.metrics.scheduling import SCHEDULING, SPECULATION
from holdfast.replicas.metrics.steps import PROCESS, STEPS

GROUPS: Mapping[str, tuple[ReplicaMetric, ...]] = {
    "Requests": REQUESTS,
    "Tokens": TOKENS,
    "Cells": CELLS,
    "Order and retention": SCHEDULING,
    "Speculation": SPECULATION,
    "Steps": STEPS,
    "Text": TEXT,
    "Process": PROCESS,
}
ALL = tuple(each for group in GROUPS.values() for each in group)
