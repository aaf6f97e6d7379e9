"""What a decode step of so many rows takes: what was measured when the model was loaded, corrected by every step.

A machine that others share measures badly once, and a step costs more as contexts grow; so each step that only
decodes moves the curve a little. Not here: what to do with it (`gate`).
"""

from __future__ import annotations

from bisect import bisect_left

from holdfast.replicas.speculation.gate import VerificationCost

_RATE = 0.1  # how far one step moves the curve towards what it took
_OUTLIER = 1.5  # a step is taken for at most so many times what was expected: something else ran meanwhile
_LEAST = 1e-9  # seconds
_REFRESH = 16  # steps after which the table is drawn anew


class StepCost:
    """Seconds by rows, `table[rows]` for 0 to `most` rows. Learns; deterministic in what it is told."""

    __slots__ = ("_fresh", "_knots", "_most", "_values", "table")

    def __init__(self, measured: VerificationCost, most: int) -> None:
        smooth = VerificationCost(measured.rows, tuple(_rising(list(measured.seconds))))
        self._knots = [*(rows for rows in measured.rows if rows < most), most]
        self._values = [smooth.at(rows) for rows in self._knots]
        self._most, self._fresh = most, 0
        self.table: list[float] = []
        self._draw()

    def learn(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`. What lies outside of the table is ignored."""
        if not 0 < rows <= self._most or seconds <= 0:
            return
        values = self._values
        right = min(max(bisect_left(self._knots, rows), 1), len(self._knots) - 1)
        low, high = self._knots[right - 1], self._knots[right]
        share = max((rows - low) / (high - low), 0.0)
        expected = values[right - 1] * (1 - share) + values[right] * share
        error = min(seconds, expected * _OUTLIER) - expected
        values[right - 1] = max(values[right - 1] + _RATE * (1 - share) * error, _LEAST)
        values[right] = max(values[right] + _RATE * share * error, _LEAST)
        self._fresh += 1
        if self._fresh == _REFRESH:
            self._draw()

    def _draw(self) -> None:
        """Straight lines between the knots."""
        self._fresh = 0
        values = self._values = _rising(self._values)
        table = [values[0]] * (self._knots[0] + 1)
        for i in range(1, len(values)):
            low, high = self._knots[i - 1], self._knots[i]
            step = (values[i] - values[i - 1]) / (high - low)
            table += [values[i - 1] + step * k for k in range(1, high - low + 1)]
        self.table = table


def _rising(values: list[float]) -> list[float]:
    """A wider step never costs less: where it measured so, the narrower one was delayed by something else."""
    values = values[:]
    for i in range(len(values) - 2, -1, -1):
        values[i] = min(values[i], values[i + 1])
    return values
