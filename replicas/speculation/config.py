"""Settings of the drafter. Frozen; every source of drafts has a switch."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.speculation.ngrams import WINDOW


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Counts are in tokens, weights and thresholds in [0, 1], memory in bytes."""

    enabled: bool = True  # tokens are drafted and verified together; off: one by one
    prompt_lookup: bool = True  # drafts from the sequence itself
    memory: bool = True  # drafts from earlier turns of the tenant
    skeleton: bool = True  # drafts from the declared tools: names, keys and signs of a call

    max_draft: int = 16  # drafts a sequence may have in one step
    min_n: int = 1  # shortest match in the sequence itself that is drafted from
    memory_min_n: int = 2  # shortest match in the memory

    # Inside a tool call.
    raw_length: int = 24  # a match this long is trusted over the skeleton
    own_value_length: int = (
        3  # a match this long in the sequence itself fills a value before a longer one in the memory
    )

    # The gate: stateful inference, section 3.6, which leaves the values open.
    ema_weight: float = 0.1  # of the newest step in the acceptance averages
    confidence: float = 0.35  # acceptance of single drafts below which only `floor` are drafted
    floor: int = 4  # drafts of a sequence whose acceptance is below `confidence`
    verify_rows: int = 256  # rows one step may verify, over all decoding sequences
    cost_gate: bool = True  # draft only what verifying pays for, by the cost of steps; off: by acceptance alone
    shared_budget: bool = True  # the drafts of all sequences compete for a step's rows; off: all draft alike
    explore_every: int = 64  # steps after which one verifies some drafts though they may not pay, to know the cost

    memory_bytes: int = 64 << 20  # of all tenants together
    scope_bytes: int = 4 << 20  # of one tenant
    memory_context: int = 16  # tokens before a turn that are remembered with it, so that its start can be found

    def __post_init__(self) -> None:
        # Written as what has to hold: no comparison with NaN does, so NaN fails.
        for name in (
            "max_draft",
            "min_n",
            "memory_min_n",
            "explore_every",
            "memory_bytes",
            "scope_bytes",
        ):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", name)
        if not self.verify_rows >= 2:  # a sequence's own row and a draft's
            raise ConfigError(f"verify_rows must be at least 2, not {self.verify_rows}", "verify_rows")
        for name in ("floor", "memory_context", "own_value_length", "raw_length"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}", name)
        for name in ("ema_weight", "confidence"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be in [0, 1], not {getattr(self, name)}", name)
        for name in ("min_n", "memory_min_n"):
            if getattr(self, name) > WINDOW:
                raise ConfigError(f"{name} must be at most {WINDOW}, not {getattr(self, name)}", name)
