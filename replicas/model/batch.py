"""From a plan's chunks to the tensors of one forward, and what the runner needs of a model.

`lay_out` goes over the chunks once, in numpy: which token lies at which position in which cell of the KV store, and
which outputs are drawn from. The page table, which follows the plan's row writes, says where cells are. A `Model` takes
the tensors (`ForwardBatch`) and gives logits. How tokens are drawn from these is the sampler's matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.attention_plan import AttentionWork, attention_work
from holdfast.kernels.paging import PagedBatch, PageRuns
from holdfast.replicas.plan import Chunk, RowWrite

Int64s = npt.NDArray[np.int64]


class PageTable:
    """Which page holds which part of which sequence: [rows, slots] int32 on the device, one row for each sequence.

    A copy on the host is what forwards are laid out from; on a CPU both are the same memory. `runs[row]` is the row as
    runs of neighbouring pages. Who may use a page is decided elsewhere; entries beyond a sequence's last position may
    be left from an earlier one.
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

    def cells(self, rows: Int64s, positions: Int64s) -> Int64s:
        """The cell of each (row, position)."""
        slots, inside = np.divmod(positions, self.page_size)
        cells: Int64s = self._host[rows, slots].astype(np.int64) * self.page_size + inside
        return cells


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Inputs of one forward over T tokens, all on the device.

    token_ids [1, T] int64, position_ids [1, T] int64, drawn [R] int64 (indices of tokens whose output is drawn from;
    R may be 0).
    """

    token_ids: Tensor
    position_ids: Tensor
    drawn: Tensor
    pages: PagedBatch


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """Where the T tokens of a forward go, on the host. token_ids, positions, cells [T] and drawn [R] are int64.

    `rows`, `starts`, `lengths`: page table row, first position and tokens of each chunk; `decodes`: whether it takes
    its sequence one token further.
    """

    token_ids: Int64s
    positions: Int64s
    cells: Int64s
    drawn: Int64s
    rows: list[int]
    starts: list[int]
    lengths: list[int]
    decodes: list[bool]

    @property
    def arrays(self) -> tuple[Int64s, ...]:
        """What the device needs."""
        return self.token_ids, self.positions, self.cells, self.drawn

    def batch(self, table: PageTable, views: Sequence[Tensor]) -> ForwardBatch:
        """The batch over `views`, which are `arrays` on the table's device."""
        token_ids, positions, cells, drawn = views
        return ForwardBatch(token_ids[None], positions[None], drawn, self.paged(table, cells))

    def paged(self, table: PageTable, cells: Tensor) -> PagedBatch:
        """Where the tokens lie, as attention reads it; `cells` are their own, on the table's device."""
        runs = [table.runs[row] for row in self.rows]
        where = (self.rows, self.starts, self.lengths)
        return PagedBatch(table.page_size, table.tensor, *where, cells, runs, decodes=self.decodes)


def lay_out(chunks: tuple[Chunk, ...], table: PageTable) -> BatchLayout:
    """Lay the chunks out one after the other.

    Raises IndexError when a chunk's row or positions lie outside the page table.
    """
    starts = [chunk.start for chunk in chunks]
    lengths = [len(chunk.tokens) for chunk in chunks]
    rows = [chunk.row for chunk in chunks]
    ends = np.cumsum(lengths)
    # Position of token t: its chunk's start plus its distance from its chunk's first token.
    offsets: Int64s = np.array(starts, dtype=np.int64) - ends + lengths
    positions = np.arange(int(ends[-1])) + np.repeat(offsets, lengths)
    cells = table.cells(np.repeat(rows, lengths), positions)
    decodes = [chunk.decodes for chunk in chunks]
    drawn = np.arange(len(positions))
    if not all(decodes):
        indices = [
            index
            for end, chunk in zip(ends.tolist(), chunks, strict=True)
            if chunk.draw is not None
            for index in range(end - chunk.draw.drafts - 1, end)  # the last token's output, and those before its drafts
        ]
        drawn = np.array(indices, dtype=np.int64)
    tokens = np.concatenate([chunk.tokens for chunk in chunks], dtype=np.int64)
    return BatchLayout(tokens, positions, cells, drawn, rows, starts, lengths, decodes)


def build_batch(chunks: tuple[Chunk, ...], table: PageTable) -> ForwardBatch:
    """The batch of some chunks, copied to the table's device. Raises IndexError like `lay_out`."""
    layout = lay_out(chunks, table)
    return layout.batch(table, [torch.from_numpy(array).to(table.device) for array in layout.arrays])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and their size, and the layers' windows, each once; 0: none. `invariant`: see `attention_work`."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    invariant: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def works(self, pages: PagedBatch) -> list[AttentionWork]:
        """A batch's attention worked out before its forward, for each of `windows`. The batch's cells are not read."""
        alone = self.invariant
        return [attention_work(pages, self.group, self.kv_heads, window, invariant=alone) for window in self.windows]


class Model(Protocol):
    """A batch in; logits [R, vocabulary] of its drawn tokens out, KV stored on the way.

    `attention` lets a batch's attention be worked out beforehand; None: the model asks for it layer by layer.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def attention(self) -> AttentionShape | None: ...

    def forward(self, batch: ForwardBatch) -> Tensor: ...


def _of_triton() -> tuple[type[Exception], ...]:
    """What Triton raises for a kernel that does not compile or fit a device: an exception of its own kind."""
    try:
        from triton.errors import TritonError
    except ImportError:  # a torch for CPUs comes without
        return ()
    return (TritonError,)


STEP_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    IndexError,
    TypeError,
    OverflowError,
    *_of_triton(),
)
"""What torch, numpy and Triton raise for shapes, indices, numbers or memory that a step cannot be run with. It fails
that step and nothing else."""
