"""What becomes of a program's cells while its tool runs, by InferCept's rule: whatever wastes least memory and time.

Waste is cells times the seconds in which they do nothing useful. All three ways pay for the same bytes a cell, so
bytes do not appear. Pure.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pause:
    """A program that pauses: its `cells`, and what it costs to have them again. Times are in seconds.

    `others` are the cells of the other running sequences: they wait while this one's are computed again. `stalled` are
    the cells that wait while cells are copied: the whole batch where a copy stops it, the program's own where copies
    overlap with steps.
    """

    cells: int
    others: int
    recompute_s: float
    swap_s: float = math.inf  # one way; without a host tier there is none
    stalled: int = 0

    @property
    def discard(self) -> float:
        """Cell-seconds: its own cells fill up again, and the others wait meanwhile."""
        return self.recompute_s * (self.cells + self.others)

    @property
    def swap(self) -> float:
        """Cell-seconds: out and in again."""
        return 2 * self.swap_s * max(self.stalled, self.cells)

    def preserve(self, pause_s: float) -> float:
        """Cell-seconds of a pause of that length."""
        return pause_s * self.cells


def preserve_until(pause: Pause) -> float:
    """For how many seconds preserving wastes least. As a time to live this is the rule for a pause of unknown length:
    InferCept takes the time that a pause has lasted for the time it will last.
    """
    return min(pause.discard, pause.swap) / pause.cells if pause.cells else 0.0
