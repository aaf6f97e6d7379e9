"""What the layers of a forward share of its attention on a GPU: the items on the device, and the tiles they run in.

The items are worked out by `attention_work`; `attention_gpu` launches them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.attention_work import NARROW_ROWS, AttentionWork, Ints, attention_work, spread
from holdfast.kernels.paging import PagedBatch
from holdfast.kernels.sending import sent


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program walks its positions: so many at a time, by so many warps, with loads of so many tiles ahead."""

    keys: int
    warps: int
    stages: int


def tile_of(rows: int, dim_tile: int, exact: bool) -> Tile:
    """The tile for items of so many rows; `exact`: float32, whose products are made number by number.

    Chosen by what compiles for Ampere and Hopper without spilling registers to speak of and fits their shared memory.
    Pages are looked up a tile before its keys are loaded, so every two stages have one more tile of keys on its way.
    """
    wide = rows > NARROW_ROWS
    if exact and rows > 16:
        return Tile(16, 8, 2) if dim_tile <= 128 or not wide else Tile(16, 16, 1)
    deep = not exact and rows != NARROW_ROWS and dim_tile <= 128
    return Tile(32 if dim_tile > 128 else 64, 8 if wide else 4, 5 if deep else 3)


@dataclass(slots=True)
class GpuPlan:
    """What every layer of a forward shares, on the device: items, order, merges, positions and room for partials.

    With `counts`, two int32 tensors of one element, so many of the narrow and wide items are real, and two numbers of
    `programs` share them for each KV head: the launch is the same however many there are, as a graph's has to be.
    No wide items are launched where `wide` is empty. Rows of `merges` that are zero merge nothing. `tiles`: other tiles
    of narrow and wide items than those of `tile_of`.
    """

    narrow: Tensor
    wide: Tensor
    narrow_rows: int
    order: Tensor
    merges: Tensor
    positions: Tensor
    partial: Tensor
    partial_lse: Tensor
    counts: tuple[Tensor, Tensor] | None = None
    programs: tuple[int, int] = (0, 0)
    tiles: tuple[Tile, Tile] | None = None


def make_plan(q: Tensor, batch: PagedBatch, kv_heads: int, window: int, cascade: bool = True) -> GpuPlan:
    """Work out the items of a forward over queries like `q` and copy them to its device, in one copy."""
    _, heads, dim = q.shape
    work = attention_work(batch, heads // kv_heads, kv_heads, window, cascade)
    arrays = plan_arrays(work, batch)
    buffer, offsets = spread(arrays)
    device = sent(buffer, q.device)
    views = [device[at : at + array.size].view(array.shape) for array, at in zip(arrays, offsets, strict=True)]
    return plan_over(work, views, heads, dim)


def plan_arrays(work: AttentionWork, batch: PagedBatch) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """What a plan needs on the device: narrow and wide items, order, merges, and the positions of the tokens."""
    spans = [np.arange(s, s + n, dtype=np.int32) for s, n in zip(batch.starts, batch.lengths, strict=True)]
    return work.narrow, work.wide, work.order, work.merges, np.concatenate(spans)


def plan_over(work: AttentionWork, views: Sequence[Tensor], heads: int, dim: int) -> GpuPlan:
    """A plan over `views`, which are `plan_arrays` on the device."""
    narrow, wide, order, merges, positions = views
    partial = torch.empty(max(work.partials, 1), heads, dim, dtype=torch.float32, device=order.device)
    lse = torch.empty(partial.shape[:2], dtype=torch.float32, device=order.device)
    return GpuPlan(narrow, wide, work.narrow_rows, order, merges, positions, partial, lse)


def plan_key(window: int) -> int:
    """Under which key of `PagedBatch.plans` the plan for a window lies; 0: none."""
    return -window - 1
