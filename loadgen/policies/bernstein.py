"""Continuum's first retention: an upper bound of the mean interval, longer at the beginning of a program."""

import math

from holdfast.replicas.retention.latency import LatencySnapshot, ToolLatency
from holdfast.replicas.retention.policy import Conditions, Pause, RetentionPolicy


class Bernstein(RetentionPolicy):
    """Keeps cells for the bound, times 1 + turns_weight * max(0, 1 - turn / mean turns).

    The bound is of the tools from `tool_samples` calls on, else of all tools from `overall_samples` calls on, else
    `unknown_s`. The paper leaves the values open and its scaling by turns is lost; both are ours.
    """

    def __init__(
        self,
        delta: float = 0.05,
        tool_samples: int = 10,
        overall_samples: int = 10,
        unknown_s: float = 2.0,
        turns_weight: float = 1.0,
    ) -> None:
        self._delta = delta
        self._tool_samples = tool_samples
        self._overall_samples = overall_samples
        self._unknown_s = unknown_s
        self._turns_weight = turns_weight

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        tool = latency.of(pause.tenant, pause.tools)
        if tool.count >= self._tool_samples:
            bound = upper_bound(tool, self._delta)
        elif latency.overall.count >= self._overall_samples:
            bound = upper_bound(latency.overall, self._delta)
        else:
            bound = self._unknown_s
        left = max(0.0, 1.0 - pause.turn / max(conditions.mean_turns, 1.0))
        return bound * (1.0 + self._turns_weight * left)


def upper_bound(tool: ToolLatency, delta: float) -> float:
    """Empirical Bernstein bound of the mean (Maurer & Pontil 2009, theorem 4), with probability 1 - delta.

    The range of the intervals is unknown beforehand; the longest recent one stands for it.
    """
    if tool.count < 2:
        return tool.mean
    log = math.log(2.0 / delta)
    widest = tool.recent[-1] if tool.recent else tool.mean
    return tool.mean + math.sqrt(2.0 * tool.variance * log / tool.count) + 7.0 * widest * log / (3.0 * (tool.count - 1))
