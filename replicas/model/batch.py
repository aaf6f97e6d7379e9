"""From a StepPlan to the tensors of one forward: token ids, positions, cells, and which outputs are drawn.

One numpy pass over the chunks (`lay_out`), then a handful of tensors. What is drawn with
which settings is the sampler's matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.paging import PagedBatch
from holdfast.replicas.model.page_table import PageTable
from holdfast.replicas.scheduling.plan import Chunk

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
