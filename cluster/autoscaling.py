"""The number of engines that a model needs, from their requests, waiting tokens, cells and paused programs.

Serve calls `Demand` in its controller with the average of what each engine reports (`record_autoscaling_stats`, every
ten seconds). Delays and bounds are Serve's own, from the same part of the configuration.
"""

import math
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingContext


class Demand:
    """The scaling policy. Each argument is the target for one engine; 0: not counted.

    `ongoing_requests` run or wait. `waiting_tokens` are the prompt tokens in the engine's queue. `cell_pressure` is the
    share of KV cells that running sequences and paused programs hold. `pinned_programs` are the paused programs.
    Background prefill counts neither as requests nor as tokens.
    """

    def __init__(
        self, ongoing_requests: float, waiting_tokens: float, cell_pressure: float, pinned_programs: float
    ) -> None:
        self._targets = {
            "requests": ongoing_requests,
            "waiting_tokens": waiting_tokens,
            "cell_pressure": cell_pressure,
            "pinned_programs": pinned_programs,
        }

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The engines wanted, at least 1, and the state for the next call: none.

        The number does not fall before all engines have reported: a new cluster has no requests while it loads.
        """
        reported: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        requests = reported.get("requests", {})
        totals = {name: sum(reported.get(name, {}).values()) for name in self._targets}
        totals["requests"] += context.total_queued_requests or 0.0  # in the routers' queues
        number = engines_needed(totals, self._targets)
        silent = len(requests) < context.target_num_replicas
        return max(number, context.target_num_replicas) if silent else number, {}


def engines_needed(totals: Mapping[str, float], targets: Mapping[str, float]) -> int:
    """The fewest engines of which each has no more than its target, on average, of any total."""
    needed = (math.ceil(totals[name] / target) for name, target in targets.items() if target > 0)
    return max(needed, default=1) or 1
