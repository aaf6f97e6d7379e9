"""Lengths and tool times, drawn from a generator that is passed in."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

_Z75, _Z90, _Z99 = 0.674490, 1.281552, 2.326348  # of the standard normal distribution


def log_normal(rng: random.Random, mean: float, variance: float) -> float:
    """A draw from the log-normal distribution with this mean and variance."""
    spread = math.log1p(variance / mean**2)
    return rng.lognormvariate(math.log(mean) - spread / 2, math.sqrt(spread))


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens, log-normal with this mean; `spread` is of the logarithm."""

    mean: float
    spread: float

    def draw(self, rng: random.Random, scale: float = 1.0) -> int:
        """A length, 1 at least; `scale` multiplies the mean."""
        return max(1, round(rng.lognormvariate(math.log(self.mean * scale) - self.spread**2 / 2, self.spread)))


@dataclass(frozen=True, slots=True)
class Gaps:
    """Between the requests of real coding sessions, by three percentiles in seconds.

    The logarithm goes straight, over the normal distribution's, from the median through the 90th percentile and from
    there through the 99th, where it ends: nothing is known of what lies above. Below the median it goes on as above.
    """

    median: float = 2.0
    p90: float = 24.0
    p99: float = 660.0

    def draw(self, rng: random.Random) -> float:
        """Seconds of one gap."""
        z, upper = min(rng.gauss(0, 1), _Z99), math.log(self.p90 / self.median)
        if z <= _Z90:
            return self.median * math.exp(z * upper / _Z90)
        return self.p90 * math.exp((z - _Z90) * math.log(self.p99 / self.p90) / (_Z99 - _Z90))


QUICK, TIMES = 0.8, 60.0
"""Two kinds of tools: the share of calls to quick ones, and the ratio of slow to quick times."""


def two_kinds(rng: random.Random, quick_s: float) -> float:
    """Seconds of a call where most are quick, `quick_s` in the mean, and the others take 60 times as long."""
    mean = quick_s if rng.random() < QUICK else quick_s * TIMES
    return log_normal(rng, mean, (mean / 2) ** 2)


@dataclass(frozen=True, slots=True)
class HeavyTailed:
    """A distribution with this median, and these quotients of its 75th and 90th percentile to it.

    The logarithm is normal up to the 75th percentile; from there on it goes straight through the 90th, so that the
    tail may be heavier than a log-normal one. It ends at the 99th: nothing is known of what lies above.
    """

    median: float
    p75: float
    p90: float

    @classmethod
    def drawn(cls, rng: random.Random, median: float) -> HeavyTailed:
        """One tool's, within the ranges that Sutradhara's production traces show."""
        return cls(median, rng.uniform(1.23, 1.52), rng.uniform(1.6, 3.28))

    def draw(self, rng: random.Random) -> float:
        """Seconds of one call."""
        z, upper = min(rng.gauss(0, 1), _Z99), math.log(self.p75)
        if z <= _Z75:
            return self.median * math.exp(z * upper / _Z75)
        return self.median * math.exp(upper + (z - _Z75) * (math.log(self.p90) - upper) / (_Z90 - _Z75))
