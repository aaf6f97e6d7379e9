"""How many drafts a step verifies: a pure function of acceptance and of the cost of rows. Stateful inference, 3.6.

A sequence's acceptance is the share of single drafts that were right. Draft n of a sequence is right with probability
acceptance ** n (Leviathan et al. 2023, equation 1). A step reads the weights once for all of its rows, so the cost of
one more row depends on how many the step has. The drafts of all sequences therefore compete for the rows that pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

StepCost: TypeAlias = tuple[float, ...]
"""Seconds of a decode step by its number of rows, from 0 to `VERIFY_ROWS`."""

VERIFY_ROWS = 256  # rows of a step with drafts: with more, steps wait for arithmetic and drafts no longer pay
_UNLIKELY = 0.01  # a draft less likely to be right never pays for its row
_WORTH = 1.02  # least gain over a step without drafts: the best of many estimates is usually too optimistic

FREE: StepCost = (1.0,) * (VERIFY_ROWS + 1)
"""Used where the cost was not measured: rows cost nothing."""


def step_cost(rows: Sequence[int], seconds: Sequence[float]) -> StepCost:
    """The cost of every width from a few measured ones (at least two, rising), on straight lines between them.

    A wider step never costs less: where it was measured so, something else delayed the narrower one.
    """
    rising = np.minimum.accumulate(np.asarray(seconds)[::-1])[::-1]
    slope = (rising[-1] - rising[-2]) / (rows[-1] - rows[-2])
    width = np.arange(VERIFY_ROWS + 1)
    return tuple((np.interp(width, rows, rising) + slope * np.maximum(width - rows[-1], 0)).tolist())


def draft_lengths(
    acceptances: Sequence[float], offered: Sequence[int], decoding: int, cost: StepCost, extra_s: float = 0.0
) -> list[int]:
    """How many drafts of each sequence to verify, so that the step yields the most tokens a second.

    Sequence i offers `offered[i]` drafts. The step has `decoding` rows without drafts; a step of n rows takes
    `cost[n] + extra_s` seconds. Drafts are taken by how likely they are to be right, whichever sequence they are of.
    """
    offers: list[tuple[float, int]] = []
    for i, acceptance in enumerate(acceptances):
        right, left = acceptance, offered[i]
        while left and right >= _UNLIKELY:
            offers.append((-right, i))
            right *= acceptance
            left -= 1
    lengths = [0] * len(offered)
    room = len(cost) - 1 - decoding
    if room <= 0:
        return lengths
    offers.sort()
    tokens, taken, best = float(decoding), 0, _WORTH * decoding / (cost[decoding] + extra_s)
    for n, (right, _) in enumerate(offers[:room], 1):
        tokens -= right
        rate = tokens / (cost[decoding + n] + extra_s)
        if rate > best:
            taken, best = n, rate
    for _, i in offers[:taken]:
        lengths[i] += 1
    return lengths
