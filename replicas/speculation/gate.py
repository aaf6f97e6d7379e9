"""How many tokens to draft: pure functions of acceptance, load and what verifying costs. Stateful inference, 3.6.

Acceptance here is that of single drafts: of those compared, the share that was right. A draft of n tokens is then
expected to yield a + a^2 + ... + a^n tokens (Leviathan et al. 2023, equation 1).

The paper caps each sequence's draft by load (`cap`) and acceptance (`draft_length`). `competing_lengths` goes further:
a step reads the weights once for all its rows, so what a row costs depends on how many there are already, and the
drafts of all sequences compete for the rows that pay. What rows cost is measured when the model is loaded
(`VerificationCost`) and corrected by the steps that run (`LearnedCost`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import ConfigError

_UNLIKELY = 0.03  # a draft less likely to be right never pays for its row
_WORTH = 1.02  # what drafts must promise over none: of many estimates the highest are rather too high

_RATE = 0.1  # how far one step moves the curve towards what it took
_OUTLIER = 1.5  # a step is taken for at most so many times what was expected: something else ran meanwhile
_LEAST = 1e-9  # seconds
_REFRESH = 16  # steps after which the table is made anew


@dataclass(slots=True)
class Acceptance:
    """Moving average of single drafts' acceptance."""

    value: float

    def learn(self, compared: int, right: int, weight: float) -> None:
        """Of `compared` drafts the first `right` were; `weight` is that of one draft."""
        if compared:
            self.value += (1.0 - (1.0 - weight) ** compared) * (right / compared - self.value)


def cap(config: DraftConfig, decoding: int) -> int:
    """Drafts for each of `decoding` sequences, so that all windows are within the rows of a step."""
    return max(min(config.max_draft, config.verify_rows // max(decoding, 1) - 1), 0)


def draft_length(config: DraftConfig, most: int, acceptance: float) -> int:
    """How many of `most` drafts to verify, as acceptance alone says: below `confidence` only the floor."""
    return min(most, config.floor) if acceptance < config.confidence else most


def uniform_length(acceptance: float, most: int, decoding: int, seconds: Sequence[float]) -> int:
    """How many of `most` drafts yield the most tokens a second if all `decoding` sequences draft alike, or none.

    `seconds[rows]` is what a step of so many rows takes.
    """
    expected, best, best_rate = 1.0, 0, _WORTH / seconds[decoding]
    right = 1.0
    for n, step_seconds in enumerate(seconds[2 * decoding : (most + 1) * decoding + 1 : decoding], 1):
        right *= acceptance
        if right < _UNLIKELY:
            break
        expected += right
        rate = expected / step_seconds
        if rate > best_rate:
            best, best_rate = n, rate
    return best


def competing_lengths(
    acceptances: Sequence[float], most: Sequence[int], seconds: Sequence[float], decoding: int, least: int = 0
) -> list[int]:
    """How many drafts each sequence verifies, so that the step yields the most tokens a second.

    Sequence i offers `most[i]` drafts, the n-th of which is right with probability `acceptances[i]` ** n. The step has
    `decoding` rows without drafts and takes `seconds[rows]`. The most likely drafts come first, whose ever they are;
    since a sequence's own become less likely, they are taken in order. `least` drafts are taken in any case.
    """
    if decoding == 1:
        return [max(uniform_length(acceptances[0], most[0], 1, seconds), min(least, most[0]))]
    offers: list[tuple[float, int]] = []
    for i, (acceptance, length) in enumerate(zip(acceptances, most, strict=True)):
        right = 1.0
        while length and (right := right * acceptance) >= _UNLIKELY:
            offers.append((-right, i))
            length -= 1
    offers.sort()
    expected, taken, best_rate = float(decoding), 0, _WORTH * decoding / seconds[decoding]
    for n, (right, _) in enumerate(offers[: max(len(seconds) - 1 - decoding, 0)], 1):
        expected -= right
        rate = expected / seconds[decoding + n]
        if rate > best_rate or n <= least:
            taken, best_rate = n, max(rate, best_rate)
    lengths = [0] * len(most)
    for _, i in offers[:taken]:
        lengths[i] += 1
    return lengths


@dataclass(frozen=True, slots=True)
class VerificationCost:
    """Seconds of a decode step by how many rows it verifies, as the runner measured them."""

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


class LearnedCost:
    """Seconds of a decode step by its rows, `table[rows]` for 0 to `most`: as measured, corrected by every step.

    A machine that others share measures badly once, and a step costs more as contexts grow; so each step that only
    decodes moves the curve a little. Deterministic in what it is told.
    """

    __slots__ = ("_fresh", "_knots", "_most", "_values", "table")

    def __init__(self, measured: VerificationCost, most: int) -> None:
        smooth = VerificationCost(measured.rows, tuple(_rising(list(measured.seconds))))
        self._knots = [*(rows for rows in measured.rows if rows < most), most]
        self._values = [smooth.at(rows) for rows in self._knots]
        self._most, self._fresh = most, 0
        self.table: list[float] = []
        self._make_table()

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
            self._make_table()

    def _make_table(self) -> None:
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
