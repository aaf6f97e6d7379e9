"""Settings of retention: how long a program's cells are kept while its tools run, and how many of them."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from holdfast.replicas.errors import ConfigError

PolicyName: TypeAlias = Literal["none", "fixed", "bernstein", "continuum", "restore-cost", "infercept"]

_NOT_NEGATIVE = ("fixed_s", "turns_weight", "unknown_s", "settle_s", "most_s")
_POSITIVE = ("tool_samples", "overall_samples", "trusted_samples", "wait_window")
_SHARES = ("share", "tenant_share")


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """`policy` says for how long; the constants after it belong to the policy named. Times in seconds."""

    policy: PolicyName = "infercept"  # none: nothing is kept; infercept: while keeping wastes less than computing again
    most_s: float = 60.0  # no pin lasts longer, whatever the policy says
    settle_s: float = 1.0  # a turn's cells are kept so long until it is known what the turn called
    share: float = 1.0  # of all cells that pins may keep; who began earlier takes what it needs of them
    tenant_share: float = 1.0  # of all cells that the pins of one tenant may keep

    fixed_s: float = 2.0  # fixed: the longest mean interval worth a pin, and how long the pin lasts

    # bernstein (Continuum's first version; the paper leaves the values open)
    delta: float = 0.05  # bernstein: the mean of a tool's times is above its bound with this probability at most
    tool_samples: int = 10  # bernstein: from so many calls on a tool's own bound counts
    overall_samples: int = 10  # bernstein: from so many calls on that of all tools counts
    unknown_s: float = 2.0  # bernstein: the bound until then
    turns_weight: float = 1.0  # bernstein: how much longer a program is kept at the beginning of its turns

    # continuum
    trusted_samples: int = 100  # continuum: a tool with so many calls or fewer is taken for the average tool
    wait_window: int = 128  # continuum: turns without a pin over which the queue delay is averaged

    def __post_init__(self) -> None:
        policies = get_args(PolicyName)
        if self.policy not in policies:
            raise ConfigError(f"policy must be one of {', '.join(policies)}, not {self.policy!r}", "policy")
        # Written as what has to hold: no comparison with NaN does, so NaN fails.
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}", name)
        for name in _POSITIVE:
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", name)
        for name in _SHARES:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be in [0, 1], not {getattr(self, name)}", name)
        if not 0.0 < self.delta < 1.0:
            raise ConfigError(f"delta must be in (0, 1), not {self.delta}", "delta")
