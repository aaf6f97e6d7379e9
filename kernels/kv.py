"""The paged KV store: where the tokens of a forward lie in it, how cells are written and copied, and how arrays reach
the device that it is on.

The store is `[layers, 2, pages, page_size, kv_heads, head_dim]`; index 1 is key (0) or value (1). Any order in memory
works in which the cells of neighbouring pages are evenly spaced. A cell is numbered
`page * page_size + position % page_size` over the whole store. A page table row holds, for one sequence, the page of
every `page_size` positions, so aliasing a page costs nothing here: it is a number in a page table.

A store in int8 has head_dim + 4 bytes where another store has head_dim numbers. For a head's key or value x,

    s = max_d |x_d| / 127,    q_d = round(x_d / s)              q as bytes, s behind them as a float32;  x is about q s

Each key and value has its own step s, so a cell never depends on other heads or tokens.

A store in FP8 has bytes as well, whose bits are those of float8_e4m3fn: torch moves bytes on every device. Numbers
beyond +-448 are stored as +-448, because the format has no infinity, and there are no scales.

Who owns a page, and which request a token belongs to, is not known here.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Pages = npt.NDArray[np.int32]
Array: TypeAlias = npt.NDArray[Any]

SCALE = 4  # bytes of a scale
FP8 = torch.uint8  # the dtype of a store in FP8
_MOST = 127  # the largest integer; -128 has no counterpart
ALIGNED = 64  # bytes; kernels read from multiples of 16
_DEPTH = 3  # copies in flight at once: the running step's, the next step's, and one in reserve
_LEAST = 1 << 16  # bytes of a buffer


# ---- pages


@dataclass(slots=True)
class PageRuns:
    """A page table row as runs of neighbouring pages.

    Run i covers page slots [slots[i], slots[i + 1]) of the row, the last one up to `extent`, and lies in the store from
    page `pages[i]` on. Updated with every write, so that a step does not scan the row again.
    """

    slots: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    extent: int = 0

    def replace_tail(self, first: int, pages: Pages) -> None:
        """Replace the row from page slot `first` on with `pages`. O(pages) in numpy, O(runs) in Python."""
        if len(pages) == 1 and first == self.extent:  # a sequence that decodes grows by a page
            page = pages.item()
            if not self.slots or self.pages[-1] + first - self.slots[-1] != page:
                self.slots.append(first)
                self.pages.append(page)
            self.extent = first + 1
            return
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
    `runs[c]`: chunk c's row as runs; only the plan for a GPU reads them. `plans` is a cache for the attention kernels:
    work that is planned once per forward and used in every layer. `decodes[c]`: chunk c is a sequence's last token,
    with or without drafts behind it, and not part of a prompt; None: not known.
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


# ---- cells


def head_dim(kv: Tensor) -> int:
    """Numbers of a head's key or value in a store."""
    return kv.shape[5] - SCALE if kv.dtype == torch.int8 else kv.shape[5]


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, columns] -> int8 of its shape and float32 scales [rows, 1]; x is about their product.

    The scale of a row with a NaN is NaN.
    """
    x = x.float()
    most = x.abs().amax(1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, _MOST) / most, 0.0)  # `_MOST / most` rounds twice
    return (x * inverse).round_().nan_to_num_(0.0).to(torch.int8), most / _MOST


def in_bytes(x: Tensor) -> Tensor:
    """Keys or values [..., head_dim] as a store in int8 holds them: [..., head_dim + 4]."""
    numbers, scales = quantise(x.reshape(-1, x.shape[-1]))
    return torch.cat((numbers, scales.view(torch.int8)), 1).view(*x.shape[:-1], -1)


def in_store(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [..., head_dim] as a store of `dtype` holds them."""
    if dtype == torch.int8:
        return in_bytes(x)
    if dtype == FP8:
        most = torch.finfo(torch.float8_e4m3fn).max
        return x.clamp(-most, most).to(torch.float8_e4m3fn).view(FP8)
    return x.to(dtype)


def in_numbers(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """A store's keys or values [..., head_dim, or in int8 head_dim + 4] as numbers in `dtype` [..., head_dim]."""
    if stored.dtype == FP8:
        return stored.view(torch.float8_e4m3fn).to(dtype)
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    numbers, scales = torch.split(stored, [stored.shape[-1] - SCALE, SCALE], dim=-1)
    return (numbers.float() * scales.contiguous().view(torch.float32)).to(dtype)


def store_kv(kv: Tensor, layer: int, k: Tensor, v: Tensor, cells: Tensor) -> None:
    """Write `k`, `v` [T, kv_heads, head_dim] of one layer into `cells` [T] int64 of the store, in place, in its dtype.

    Cells must differ from each other. Raises IndexError for a cell outside the store, ValueError for other shapes.
    """
    heads = kv.shape[4], head_dim(kv)
    if k.shape != v.shape or k.shape[1:] != heads or k.shape[0] != cells.shape[0]:
        raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit cells of {heads}")
    keys, values = kv[layer].flatten(1, 2).unbind(0)
    keys.index_copy_(0, cells, in_store(k, kv.dtype))
    values.index_copy_(0, cells, in_store(v, kv.dtype))


def copy_cells(kv: Tensor, source: int, target: int, cells: int) -> None:
    """Copy the first `cells` cells of page `source` to page `target` in every layer, in place.

    Raises ValueError for a page outside the store, for more cells than a page has, or for a page onto itself.
    """
    pages, page_size = kv.shape[2], kv.shape[3]
    if not (0 <= source < pages and 0 <= target < pages) or source == target:
        raise ValueError(f"cannot copy page {source} to page {target} of {pages}")
    if not 0 < cells <= page_size:
        raise ValueError(f"cannot copy {cells} cells of a page of {page_size}")
    with torch.no_grad():
        kv[:, :, target, :cells].copy_(kv[:, :, source, :cells])


def store_kv_reference(kv: Tensor, layer: int, k: Tensor, v: Tensor, cells: Tensor) -> None:
    """`store_kv`, token by token."""
    page_size = kv.shape[3]
    for token, cell in enumerate(cells.tolist()):
        kv[layer, 0, cell // page_size, cell % page_size] = k[token]
        kv[layer, 1, cell // page_size, cell % page_size] = v[token]


# ---- arrays from the host to the device
#
# A copy to a GPU from ordinary memory waits for everything that the GPU was given before. So arrays go through pinned
# memory, several in one copy: packed one behind the other into a buffer of bytes (`packed`), and seen on the device
# with their own dtypes and shapes (`view`). On a CPU the same code runs without pinning.


def sent(array: Array, device: torch.device) -> Tensor:
    """`array` on a device, by a copy that does not block. On a CPU it is the array's own memory."""
    tensor = torch.from_numpy(array)
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def sent_together(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays on a device, each with its dtype and shape, by one such copy."""
    offsets, size = packed(arrays)
    buffer = np.empty(max(size, 1), np.uint8)
    _fill(buffer, arrays, offsets)
    return views(sent(buffer, device), arrays, offsets)


def packed(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """The offset of each array in bytes, and the bytes of all."""
    offsets, at = [], 0
    for array in arrays:
        offsets.append(at)
        at += -(-array.nbytes // ALIGNED) * ALIGNED
    return offsets, at


def view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A part of a buffer of bytes as a tensor."""
    part = buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype)
    return part if len(shape) == 1 else part.view(*shape)


@cache
def _dtype(dtype: "np.dtype[Any]") -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def views(buffer: Tensor, arrays: Sequence[Array], offsets: Sequence[int]) -> list[Tensor]:
    """The parts of a buffer of bytes at `offsets`, as tensors like `arrays`."""
    return [
        view(buffer, offset, _dtype(array.dtype), array.shape) for offset, array in zip(offsets, arrays, strict=True)
    ]


def _fill(buffer: npt.NDArray[np.uint8], arrays: Sequence[Array], offsets: Sequence[int]) -> None:
    memory = buffer.data
    for array, offset in zip(arrays, offsets, strict=True):
        memory[offset : offset + array.nbytes] = array.tobytes()  # copied twice, which for so little is faster


class Sender:
    """Sends arrays to one device, from a few pinned buffers in turn.

    There are several because a copy may still read one when the next arrays are packed. On a CPU it copies as well, so
    that the caller may reuse its arrays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        """The stream of all copies, kept because looking it up takes longer than using it."""
        self._buffers = [_Buffer(self.stream) for _ in range(_DEPTH)]
        self._sent = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays on the device, each with its dtype and shape, by one copy."""
        offsets, size = packed(arrays)
        target = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
        self.send_into(target, arrays, offsets, size)
        return views(target, arrays, offsets)

    def send_into(self, target: Tensor, arrays: Sequence[Array], offsets: Sequence[int], size: int) -> None:
        """Fill the first `size` bytes of `target` with the arrays at `offsets`. Bytes between them are undefined."""
        buffer = self._buffers[self._sent % _DEPTH]
        self._sent += 1
        host = buffer.reserve(size)
        _fill(buffer.bytes, arrays, offsets)
        target[:size].copy_(host[:size], non_blocking=True)
        buffer.mark_read()


class _Buffer:
    """Host memory, and the copy that reads it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._host = torch.empty(0, dtype=torch.uint8)
        self._read: torch.cuda.Event | None = None
        self.bytes: npt.NDArray[np.uint8] = self._host.numpy()

    def reserve(self, size: int) -> Tensor:
        """At least `size` bytes, once no copy reads them any more."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None
        if len(self._host) < size:
            room = max(_LEAST, 1 << (size - 1).bit_length())
            self._host = torch.empty(room, dtype=torch.uint8, pin_memory=self._stream is not None)
            self.bytes = self._host.numpy()
        return self._host

    def mark_read(self) -> None:
        """A copy that reads the memory has begun."""
        if self._stream is not None:
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record(self._stream)
