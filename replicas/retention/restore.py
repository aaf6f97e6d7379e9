"""What it costs to have a program's cells again: seconds to compute them, or to copy them back from a slower memory.

The coefficients are fitted to the steps that the engine runs (Continuum fits the same polynomial beforehand). A step
that computes the tokens from `start` to `end` of a prompt takes a (end^2 - start^2) + b (end - start) + c.
"""

from dataclasses import dataclass

import numpy as np

from holdfast.replicas.retention.least_squares import not_negative
from holdfast.replicas.scheduling.plan import StepPlan

_KEPT = 0.98  # weight of what is known already when a step is added
_ENOUGH = 8  # steps with a prefill before the fit says anything
_REFRESH = 64  # steps after which it is drawn anew
_THOUSAND = 1e3  # tokens are counted in thousands, so that the three terms are of one size


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """Seconds to have `n` cells again: a n^2 + b n + c, or `reload` a cell where there is a tier to copy them from."""

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    reload: float | None = None

    def seconds(self, n: int) -> float:
        computed = (self.a * n + self.b) * n + self.c if n > 0 else 0.0
        return computed if self.reload is None else min(computed, self.reload * n)


class PrefillFit:
    """Least squares over the steps with a prefill in them, the older the less; no coefficient is negative."""

    def __init__(self) -> None:
        self._seen = 0
        self._products = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self.cost = RestoreCost()

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """A step of this plan took `seconds`. One that only decoded says nothing here."""
        if seconds <= 0 or plan.times > 1 or not plan.prefills:
            return
        squares = tokens = 0.0
        for chunk in plan.chunks:
            n = len(chunk.tokens)
            end = chunk.start + n
            squares += end * end - chunk.start * chunk.start
            tokens += n
        x = np.array((squares / _THOUSAND**2, tokens / _THOUSAND, 1.0))
        self._products = _KEPT * self._products + x[:, None] * x
        self._sums = _KEPT * self._sums + seconds * x
        self._seen += 1
        if self._seen == _ENOUGH or self._seen % _REFRESH == 0:
            a, b, c = (float(each) for each in not_negative(self._products, self._sums))
            self.cost = RestoreCost(a / _THOUSAND**2, b / _THOUSAND, c)
