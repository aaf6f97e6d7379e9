"""From a StepPlan to the tensors of one forward: token ids, positions, cells, and which outputs are drawn.

One numpy pass over the chunks, then a handful of tensors. What is drawn with which settings is the sampler's matter.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.paging import PagedBatch
from holdfast.replicas.model.page_table import PageTable
from holdfast.replicas.scheduling.plan import Chunk


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


def build_batch(chunks: tuple[Chunk, ...], table: PageTable) -> StepBatch:
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
    device = table.device
    pages = PagedBatch(
        page_size=table.page_size,
        page_table=table.tensor,
        rows=rows,
        starts=starts,
        lengths=lengths,
        cells=torch.from_numpy(cells).to(device),
        runs=[table.runs[row] for row in rows],
    )
    return StepBatch(
        token_ids=torch.from_numpy(tokens).to(device)[None],
        position_ids=torch.from_numpy(positions).to(device)[None],
        drawn=torch.tensor([index for span in drawn for index in span], dtype=torch.int64, device=device),
        pages=pages,
    )
