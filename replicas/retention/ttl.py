"""For how long a program's cells are kept after a turn: six policies behind one pure call (Continuum, section 4.3).

Source of the formulas: Continuum's first version (`bernstein`), its simplified one (`fixed`), its later one
(`continuum`). `infercept` is InferCept's rule, `none` and `restore-cost` are what to measure them against.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Protocol

from holdfast.replicas.retention.config import PolicyName, RetentionConfig
from holdfast.replicas.retention.latency import UNKNOWN, LatencySnapshot, ToolLatency
from holdfast.replicas.retention.restore import RestoreCost
from holdfast.replicas.scheduling.infercept import Pause as Interception
from holdfast.replicas.scheduling.infercept import preserve_until


@dataclass(frozen=True, slots=True)
class Pause:
    """A turn is over and its program is expected back: `tools` is the key of what it called.

    `turn` counts from 1 after the program's last answer.
    """

    tenant: str
    tools: str
    cells: int
    turn: int = 1


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the replica has measured. `wait_s`: mean queue delay of follow-up turns without a pin. `eta`: how much the
    turns a program has behind it say of those before it. `mean_turns` from a question to its answer.
    """

    wait_s: float = 0.0
    eta: float = 1.0
    mean_turns: float = 1.0
    others: int = 0  # cells of the sequences that run
    restore: RestoreCost = field(default_factory=RestoreCost)


class Policy(Protocol):
    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        """Seconds from the turn's end; 0: not at all."""
        ...


class NoRetention:
    """Nothing is kept beyond what the cache keeps anyway."""

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same for all tools whose mean interval is at most as long, and for those that nobody knows (section 4.5)."""

    config: RetentionConfig

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        limit = self.config.fixed_s
        return limit if latency.of(pause.tenant, pause.tools).mean <= limit else 0.0


@dataclass(frozen=True, slots=True)
class Bernstein:
    """An upper bound of the interval, longer for a program that is likely to have many turns before it.

    The paper's scaling by turns is lost; ours is 1 + weight * max(0, 1 - turn / mean turns).
    """

    config: RetentionConfig

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        config, tool = self.config, latency.of(pause.tenant, pause.tools)
        if tool.count >= config.tool_samples:
            bound = upper_bound(tool, config.delta)
        elif latency.overall.count >= config.overall_samples:
            bound = upper_bound(latency.overall, config.delta)
        else:
            bound = config.unknown_s
        left = max(0.0, 1.0 - pause.turn / max(conditions.mean_turns, 1.0))
        return bound * (1.0 + config.turns_weight * left)


def upper_bound(tool: ToolLatency, delta: float) -> float:
    """Empirical Bernstein bound of the mean (Maurer & Pontil 2009, theorem 4), with probability 1 - delta.

    The range of the intervals is unknown beforehand; the longest recent one stands for it.
    """
    if tool.count < 2:
        return tool.mean
    log = math.log(2.0 / delta)
    widest = tool.recent[-1] if tool.recent else tool.mean
    return tool.mean + math.sqrt(2.0 * tool.variance * log / tool.count) + 7.0 * widest * log / (3.0 * (tool.count - 1))


@dataclass(frozen=True, slots=True)
class Continuum:
    """Where keeping pays most: argmax over t of P(back within t) * (wait * eta + cost to restore) - t."""

    config: RetentionConfig

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        benefit = conditions.wait_s * conditions.eta + conditions.restore.seconds(pause.cells)
        enough = self.config.trusted_samples
        if latency.overall.count <= enough:
            # Nobody knows the tools: as if their intervals were exponential with a mean of 1 s.
            return math.log(benefit) if benefit > 1.0 else 0.0
        tool = latency.of(pause.tenant, pause.tools) if pause.tools else UNKNOWN
        return best_time(tool if tool.count > enough else latency.overall, benefit)


def best_time(tool: ToolLatency, benefit: float) -> float:
    """argmax over t in {0} and the recent durations of P(duration <= t) * benefit - t; the smallest of equals."""
    best, most = 0.0, 0.0
    for i in range(bisect_left(tool.recent, benefit) - 1, -1, -1):
        returned = (i + 1) / len(tool.recent) * benefit
        if returned < most:
            break  # no shorter one can gain as much
        gain = returned - tool.recent[i]
        if gain >= most and gain > 0.0:
            best, most = tool.recent[i], gain
    return best


class RestoreTime:
    """As long as having the cells again would take: at most twice the cost of who knew the interval beforehand."""

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return conditions.restore.seconds(pause.cells)


class InferCept:
    """As long as keeping wastes less memory and time than computing again, or copying out and in (InferCept).

    The time that a pause has lasted is taken for the time it will last.
    """

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        cost = conditions.restore
        swap = math.inf if cost.reload is None else cost.reload * pause.cells
        computed = replace(cost, reload=None).seconds(pause.cells)
        return preserve_until(Interception(pause.cells, conditions.others, computed, swap, stalled=pause.cells))


def policy_of(config: RetentionConfig) -> Policy:
    """The policy that `config` names."""
    policies: dict[PolicyName, Policy] = {
        "none": NoRetention(),
        "fixed": Fixed(config),
        "bernstein": Bernstein(config),
        "continuum": Continuum(config),
        "restore-cost": RestoreTime(),
        "infercept": InferCept(),
    }
    return policies[config.policy]
