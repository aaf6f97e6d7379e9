"""Counts of observations by size, for whoever has no time to spare: one bisection and two additions each. Pure."""

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True)
class Histogram:
    """Observations up to each of `bounds`, and a last count of those beyond. One thread observes, any may read."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """The upper bound of each bucket as Prometheus writes it, and how many observations are not above it."""
        told, so_far = [], 0
        for bound, n in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += n
            told.append((bound, so_far))
        return told
