"""What a step costs on a machine, as numbers: compute, memory and the link to the host. Pure, no state.

    step        constant + sequences + max(weights read once, tokens computed) + attention of every chunk
    attention   of a prompt's chunk: its pairs computed or its cells read, whichever takes longer
                of a decode: its cells read
    beside it   cells copied between the tiers: a step takes at least as long as they do

So a prompt of n tokens takes a n^2 + b n + c, as Continuum fits it, and decoding takes its bytes over the bandwidth and
a constant. Which numbers a machine has is `machines`', or measured (`fitting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.replicas.plan import Chunk, StepPlan


@dataclass(frozen=True, slots=True)
class Profile:
    """One replica's machine and model. Times in seconds, room in cells."""

    name: str
    step_s: float  # of every step, whatever is in it
    weights_s: float  # to read the weights once
    token_s: float  # to compute one token, without attention
    pair_s: float  # of attention, for one token and one cell that it looks at, where computing is what takes time
    cell_s: float  # to read one cell
    reload_s: float  # to copy one cell between the tiers, either way
    cells: int
    host_cells: int  # of the second tier, where there is one
    sequence_s: float = 0.0  # of every sequence in a step

    def decode_s(self, sequences: int, contexts: int, steps: int = 1) -> float:
        """So many decode steps of the same sequences, which look at `contexts` cells in all in the first of them."""
        each = self.step_s + sequences * self.sequence_s + max(self.weights_s, sequences * self.token_s)
        cells = steps * contexts + sequences * steps * (steps - 1) // 2
        return steps * each + cells * self.cell_s

    def decode_steps(self, sequences: int, contexts: int, seconds: float, most: int) -> int:
        """The fewest decode steps that take `seconds` or longer; at least 1, at most `most`."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.decode_s(sequences, contexts, middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low

    def step(self, plan: StepPlan, page_size: int) -> float:
        """One step of this plan; no draft in it counts."""
        tokens = attention = 0.0
        for chunk in plan.chunks:
            n, drafts = len(chunk.tokens), chunk.draw.drafts if chunk.draw else 0
            n -= drafts
            end = chunk.start + n
            tokens += n
            reading = end * self.cell_s
            attention += reading if n == 1 else max(reading, n * (chunk.start + end) / 2 * self.pair_s)
        forward = 0.0
        if plan.chunks:
            forward = self.step_s + len(plan.chunks) * self.sequence_s + max(self.weights_s, tokens * self.token_s)
        return max(forward + attention, self.copies(plan, page_size), self.step_s)

    def copies(self, plan: StepPlan, page_size: int) -> float:
        """The copies of a step: out, then in."""
        return (len(plan.saves) + len(plan.loads)) * page_size * self.reload_s


def contexts(chunks: Sequence[Chunk]) -> int:
    """Cells that decoding chunks look at in all, their own included."""
    return sum([chunk.start for chunk in chunks]) + len(chunks)
