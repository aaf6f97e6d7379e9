"""How many tokens to draft: pure functions of acceptance, load and what verifying costs. Stateful inference, 3.6.

Acceptance here is that of single drafts: of those compared, the share that was right. A draft of n tokens is then
expected to yield a + a^2 + ... + a^n tokens (Leviathan et al. 2023, equation 1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.speculation.config import DraftConfig

_LEVELS = 64  # acceptance is rounded to so many levels, to remember what was worked out


@dataclass(frozen=True, eq=False)
class VerificationCost:
    """Seconds of a decode step by how many rows it verifies, as the runner measured them. Compared by identity."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rows) < 2 or len(self.rows) != len(self.seconds):
            raise ConfigError("the cost of verifying needs at least two widths, each with its seconds", "rows")
        if any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)) or self.rows[0] < 1:
            raise ConfigError(f"widths must rise from 1 on: {self.rows}", "rows")
        if min(self.seconds) <= 0:
            raise ConfigError(f"seconds must be positive: {self.seconds}", "seconds")

    def at(self, rows: int) -> float:
        """Seconds for `rows`, between and beyond the measured widths on straight lines."""
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        slope = max(y1 - y0, 0.0) / (x1 - x0)  # a wider step is never cheaper; where it measured so, that was noise
        return y0 + slope * (rows - x0)


@dataclass(slots=True)
class Acceptance:
    """Moving average of single drafts' acceptance."""

    value: float

    def learn(self, compared: int, right: int, weight: float) -> None:
        """Of `compared` drafts the first `right` were; `weight` is that of one draft."""
        if compared:
            self.value += (1.0 - (1.0 - weight) ** compared) * (right / compared - self.value)


def agreement(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many drafts were right before the first wrong one."""
    for i, (a, b) in enumerate(zip(draft, drawn, strict=False)):
        if a != b:
            return i
    return min(len(draft), len(drawn))


def cap(config: DraftConfig, limit: int, decoding: int) -> int:
    """Drafts for each of `decoding` sequences: at most `limit`, and all windows within the rows of a step."""
    return max(min(limit, config.max_draft, config.verify_rows // max(decoding, 1) - 1), 0)


def draft_length(
    config: DraftConfig, most: int, decoding: int, acceptance: float, cost: VerificationCost | None = None
) -> int:
    """How many of `most` drafts to verify; with a cost as many as yield the most tokens a second, or none."""
    if acceptance < config.confidence:
        most = min(most, config.floor)
    if cost is None:
        return most
    return _best_length(round(acceptance * _LEVELS), most, max(decoding, 1), cost)


@lru_cache(maxsize=16384)
def _best_length(level: int, most: int, decoding: int, cost: VerificationCost) -> int:
    """All sequences are taken to draft alike: n drafts make a step of decoding * (1 + n) rows."""
    acceptance, expected, best, best_rate = level / _LEVELS, 1.0, 0, 1.0 / cost.at(decoding)
    right = 1.0
    for n in range(1, most + 1):
        right *= acceptance
        expected += right
        rate = expected / cost.at(decoding * (1 + n))
        if rate > best_rate:
            best, best_rate = n, rate
    return best
