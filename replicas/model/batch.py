"""From a StepPlan to the tensors of one forward: token ids, positions, cells, and which outputs are drawn.

One numpy pass over the chunks (`lay_out`), then a handful of tensors. What is drawn with
which settings is the sampler's matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.paging import PagedBatch, PageRuns
from holdfast.replicas.scheduling.plan import Chunk, RowWrite

# ---- The page table: which page holds which part of which sequence, one row for each. It follows the plan's row
# writes.
#
# Who may use a page is decided elsewhere; entries beyond a sequence's last position may be left from an earlier one.


class PageTable:
    """[rows, slots] int32 on the device, with a host copy to plan from. On a CPU both are the same memory.

    `runs[row]` is the row as runs of neighbouring pages.
    """

    def __init__(self, rows: int, slots: int, page_size: int, pages: int, device: str | torch.device = "cpu") -> None:
        self.page_size = page_size
        self.device = torch.device(device)
        self._pages = pages
        self._host = np.zeros((rows, slots), dtype=np.int32)
        self.tensor: Tensor = torch.from_numpy(self._host).to(self.device)
        self.runs = [PageRuns() for _ in range(rows)]

    def write(self, write: RowWrite) -> None:
        """Apply one row write. Raises IndexError when it reaches outside the table or names a page that is not."""
        self.note(write)
        if self.tensor.device.type != "cpu":
            end = write.first + len(write.pages)
            pages = torch.from_numpy(np.ascontiguousarray(write.pages))
            self.tensor[write.row, write.first : end] = pages.to(self.device)

    def note(self, write: RowWrite) -> None:
        """The host's part of a row write; whoever calls it sees to it that the device's follows, in order."""
        rows, slots = self._host.shape
        first, end = write.first, write.first + len(write.pages)
        if not (0 <= write.row < rows and first >= 0 and end <= slots):
            raise IndexError(f"pages {first} to {end} of row {write.row} lie outside a table of {rows} x {slots}")
        if len(write.pages) and not (write.pages.min() >= 0 and write.pages.max() < self._pages):
            raise IndexError(f"row {write.row} names a page outside the {self._pages} there are")
        runs = self.runs[write.row]
        if first > runs.extent:
            raise IndexError(f"row {write.row} is written from page {first} on but ends at {runs.extent}")
        self._host[write.row, first:end] = write.pages
        runs.replace_tail(first, self._host[write.row, first : max(end, runs.extent)])

    def cells(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The cell of each (row, position)."""
        slots, inside = np.divmod(positions, self.page_size)
        cells: npt.NDArray[np.int64] = self._host[rows, slots].astype(np.int64) * self.page_size + inside
        return cells


Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Inputs of one forward over T tokens.

    token_ids [1, T] int64, position_ids [1, T] int64, drawn [R] int64 (indices of tokens whose output is drawn from;
    R may be 0), all on the device.
    """

    token_ids: Tensor
    position_ids: Tensor
    drawn: Tensor
    pages: PagedBatch


def drawn_rows(chunk: Chunk) -> int:
    """How many positions of a chunk are drawn from: its last token's and those before its drafts."""
    return chunk.draw.drafts + 1 if chunk.draw else 0


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Where the tokens of a step go, on the host: ids, positions, cells [T] and drawn [R], all int64."""

    token_ids: Int64s
    positions: Int64s
    cells: Int64s
    drawn: Int64s
    rows: list[int]
    starts: list[int]
    lengths: list[int]

    @property
    def arrays(self) -> tuple[Int64s, ...]:
        """What the device needs."""
        return self.token_ids, self.positions, self.cells, self.drawn


def lay_out(chunks: tuple[Chunk, ...], table: PageTable) -> StepLayout:
    """Lay the chunks out one after the other.

    Raises IndexError when a chunk's row or positions lie outside the page table.
    """
    starts = [chunk.start for chunk in chunks]
    lengths = [len(chunk.tokens) for chunk in chunks]
    rows = [chunk.row for chunk in chunks]
    ends = np.cumsum(lengths)
    # Position of token t: its chunk's start plus its distance from its chunk's first token.
    offsets: npt.NDArray[np.int64] = np.array(starts, dtype=np.int64) - ends + lengths
    positions = np.arange(int(ends[-1])) + np.repeat(offsets, lengths)
    cells = table.cells(np.repeat(rows, lengths), positions)
    drawn = [
        range(end - drawn_rows(chunk), end) for end, chunk in zip(ends.tolist(), chunks, strict=True) if chunk.draw
    ]
    tokens = np.concatenate([chunk.tokens for chunk in chunks], dtype=np.int64)
    indices = np.array([index for span in drawn for index in span], dtype=np.int64)
    return StepLayout(tokens, positions, cells, indices, rows, starts, lengths)


def batch_over(layout: StepLayout, views: Sequence[Tensor], table: PageTable) -> StepBatch:
    """The batch of a layout over `views`, which are its `arrays` on the table's device."""
    token_ids, positions, cells, drawn = views
    return StepBatch(token_ids[None], positions[None], drawn, pages_of(layout, table, cells))


def pages_of(layout: StepLayout, table: PageTable, cells: Tensor) -> PagedBatch:
    """Where a layout's tokens lie; `cells` are its own, on the table's device."""
    runs = [table.runs[row] for row in layout.rows]
    return PagedBatch(table.page_size, table.tensor, layout.rows, layout.starts, layout.lengths, cells, runs)


def build_batch(chunks: tuple[Chunk, ...], table: PageTable) -> StepBatch:
    """The batch of some chunks. Raises IndexError like `lay_out`."""
    layout = lay_out(chunks, table)
    return batch_over(layout, [torch.from_numpy(array).to(table.device) for array in layout.arrays], table)


# ---- What the runner needs of a model, whichever computes it.


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and their size, and the layers' windows, each once; 0: none."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class Model(Protocol):
    """A batch in; logits [R, vocabulary] of its drawn tokens out, KV stored on the way.

    `attention` lets a step's attention be worked out beforehand; None: the model asks for it layer by layer.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def attention(self) -> AttentionShape | None: ...

    def forward(self, batch: StepBatch) -> Tensor: ...
