"""Where the tokens of one forward lie in the paged KV store: the batch that attention and the store kernel read.

A page table row holds, for one sequence, the page of every `page_size` positions. A cell is numbered
`page * page_size + position % page_size` over the whole store. Neighbouring pages form a run, which a CPU can
read in place as one strided tensor. Nothing here knows requests, models or who owns a page.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Pages = npt.NDArray[np.int32]


@dataclass(slots=True)
class PageRuns:
    """A page table row as runs of neighbouring pages.

    Run i covers page slots [slots[i], slots[i + 1]) of the row, the last one up to `extent`, and lies in the store from
    page `pages[i]` on. Kept up to date write by write, so that a step does not scan the row again.
    """

    slots: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    extent: int = 0

    def replace_tail(self, first: int, pages: Pages) -> None:
        """Forget the row from page slot `first` on and put `pages` there. O(pages) in numpy, O(runs) in Python."""
        keep = bisect_right(self.slots, first - 1)
        del self.slots[keep:], self.pages[keep:]
        if len(pages):
            breaks = np.flatnonzero(np.diff(pages) != 1) + 1
            heads = [0, *breaks.tolist()]
            if keep and self.pages[-1] + first - self.slots[-1] == int(pages[0]):
                heads = heads[1:]
            self.slots += [first + head for head in heads]
            self.pages += [int(pages[head]) for head in heads]
        self.extent = first + len(pages)

    def between(self, low: int, high: int, page_size: int) -> list[tuple[int, int]]:
        """`(first cell, cells)` of each run piece that holds positions [low, high), in order."""
        pieces: list[tuple[int, int]] = []
        slots, pages, last = self.slots, self.pages, len(self.slots)
        index = bisect_right(slots, low // page_size) - 1
        while low < high:
            end = high if index + 1 == last else min(high, slots[index + 1] * page_size)
            pieces.append((pages[index] * page_size + low - slots[index] * page_size, end - low))
            low, index = end, index + 1
        return pieces


def page_runs(pages: Pages) -> PageRuns:
    """The runs of a whole row."""
    runs = PageRuns()
    runs.replace_tail(0, pages)
    return runs


@dataclass(slots=True, eq=False)
class PagedBatch:
    """The T tokens of one forward, as C chunks one after the other.

    Chunk c has `lengths[c]` tokens at positions `starts[c]`, ... of the sequence in page table row `rows[c]`;
    each of them attends to every earlier position of that sequence and to itself.

    `cells` [T] int64, on the device: where each token's KV is stored. `page_table` [rows, slots] int32, on the device.
    `runs[c]`: chunk c's row as runs; only a CPU reads them. `plans` belongs to the attention kernel: what it works out
    once a forward and uses in every layer. `decodes[c]`: chunk c is a last token, or that with drafts behind it, and no
    part of a prompt; None: not known.
    """

    page_size: int
    page_table: Tensor
    rows: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    cells: Tensor
    runs: Sequence[PageRuns]
    plans: dict[Hashable, Any] = field(default_factory=dict)
    decodes: Sequence[bool] | None = None

    def cells_of(self, chunk: int, low: int, high: int) -> Tensor:
        """Cells of positions [low, high) of chunk's sequence, [high - low] int64 on the device."""
        positions = torch.arange(low, high, device=self.page_table.device)
        pages = self.page_table[self.rows[chunk]].index_select(0, positions // self.page_size).long()
        return pages * self.page_size + positions % self.page_size
