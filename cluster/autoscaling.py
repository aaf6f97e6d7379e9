"""How many engines a model needs: from what they have in hand, what waits, and what they keep for paused programs.

Serve calls `Demand` in its controller with what each engine last said (`Replica.record_autoscaling_stats`, every ten
seconds, averaged over Serve's look-back period); delays and bounds are Serve's own, from the same part of the
configuration. Which engine goes when there are too many is `scale_down`'s.

Trap: Serve copies this module into the controller by value, so what has to be there once stands in `scale_down`.
"""

import math
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext


class Demand:
    """The policy. Each argument is what one engine is meant to have; 0: that is not looked at.

    `ongoing_requests` run or wait, `waiting_tokens` stand in prompts that wait in the engine's queue, `cell_pressure`
    is the share of KV cells that running sequences and paused programs hold, `pinned_programs` are the paused ones.
    Work ahead, for which nobody waits, counts neither as requests nor as tokens.
    """

    def __init__(
        self, ongoing_requests: float, waiting_tokens: float, cell_pressure: float, pinned_programs: float
    ) -> None:
        from holdfast.cluster import scale_down

        self._targets = {
            "requests": ongoing_requests,
            "waiting_tokens": waiting_tokens,
            "cell_pressure": cell_pressure,
            "pinned_programs": pinned_programs,
        }
        self._losses = scale_down.LOSSES
        scale_down.install()

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Engines wanted, at least 1, and the state that Serve keeps for the next call: none.

        Not fewer than there are to be while one of them is not up or has not said what it has: a new cluster has no
        requests until all of its engines have loaded.
        """
        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        cells, requests = told.get("pinned_cells", {}), told.get("requests", {})
        self._losses[context.deployment_id] = {each: (cells[each], requests.get(each, 0.0)) for each in cells}
        totals = {name: sum(told.get(name, {}).values()) for name in self._targets}
        totals["requests"] += context.total_queued_requests or 0.0  # in the routers' lines
        number = wanted(totals, self._targets)
        silent = len(requests) < context.target_num_replicas
        return max(number, context.target_num_replicas) if silent else number, {}


def wanted(totals: Mapping[str, float], targets: Mapping[str, float]) -> int:
    """The fewest engines of which each has no more than its target, on average, of any total."""
    needed = (math.ceil(totals[name] / target) for name, target in targets.items() if target > 0)
    return max(needed, default=1) or 1
