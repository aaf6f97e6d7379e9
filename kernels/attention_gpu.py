"""Paged attention on a GPU: one Triton kernel for every kind of item, and one that merges partial results.

Maths and shapes are those of `attention`; what the programs do is worked out by `attention_work`. Each program walks
its positions in tiles with the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022): running maximum m, sum l
and output o of what was seen, all in float32 and, as exp2 is what the hardware has, in base 2:

    m' = max(m, max_j s_j)     l' = l 2^(m - m') + sum_j 2^(s_j - m')     o' = o 2^(m - m') + sum_j 2^(s_j - m') v_j

Keys are found through the page table cell by cell, so any page size will do. Cells at or behind an item's end are never
read: what unused pages hold does not matter. The order of every sum is fixed: the same step gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.attention_work import NARROW_ROWS, WIDE_ROWS, AttentionWork, Ints, attention_work, spread
from holdfast.kernels.paging import PagedBatch

_LOG2E = 1.4426950408889634
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on a CPU."""


@triton.jit
def _bent(scores, softcap, LOG2E: tl.constexpr):  # type: ignore[no-untyped-def]
    """softcap tanh(scores / softcap) in base 2; tanh by exp2 of what is at most zero, which does not overflow."""
    shrunk = tl.exp2(-2.0 * LOG2E * tl.abs(scores) / softcap)
    size = softcap * (1.0 - shrunk) / (1.0 + shrunk) * LOG2E
    return tl.where(scores < 0, -size, size)


@triton.jit
def _folded(  # type: ignore[no-untyped-def]
    query,
    position,
    keys,
    values,
    pages,
    low,
    high,
    scale,
    softcap,
    window,
    cell_stride,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
    LOG2E: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Maximum, sum and output, not yet divided, of a tile's rows over the positions [low, high) of one sequence."""
    dims = tl.arange(0, DIM_TILE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_TILE], tl.float32)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    for start in tl.range(low, high, KEYS):
        seen = start + tl.arange(0, KEYS)
        inside = seen < high
        page = tl.load(pages + seen // PAGE, mask=inside, other=0)
        cell = (page.to(tl.int64) * PAGE + seen % PAGE) * cell_stride
        key = tl.load(keys + cell[None, :] + dims[:, None], mask=inside[None, :] & (dims < DIM)[:, None], other=0.0)
        if WIDEN:
            key = key.to(tl.float32)
        scores = tl.dot(query, key, input_precision=precision) * scale
        if SOFTCAP:
            scores = _bent(scores, softcap, LOG2E)
        visible = inside[None, :] & (seen[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (seen[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that sees nothing in this tile
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(top - anchor)
        value = tl.load(values + cell[:, None] + dims[None, :], mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
        if WIDEN:
            value = value.to(tl.float32)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * fade[:, None], input_precision=precision)
        total = total * fade + tl.sum(weights, 1)
        top = higher
    return top, total, mixed


@triton.jit
def _attend_item(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    page_table,
    positions,
    order,
    item,
    out,
    partial,
    partial_lse,
    scale,
    softcap,
    window,
    q_token,
    q_head,
    cell_stride,
    table_stride,
    out_token,
    out_head,
    head,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
    LOG2E: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One item and one KV head, `keys` and `values` that head's: into the output, or into partial results."""
    first, count, row = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    low, high, slot = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    tile = tl.arange(0, ROWS)
    entry = tile // GROUP
    real = entry < count
    token = tl.load(order + first + entry, mask=real, other=0)
    position = tl.load(positions + token, mask=real, other=-1)
    dims = tl.arange(0, DIM_TILE)
    heads = head * GROUP + tile % GROUP
    stored = real[:, None] & (dims < DIM)[None, :]
    at = q + token.to(tl.int64) * q_token + heads * q_head
    query = tl.load(at[:, None] + dims[None, :], mask=stored, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    pages = page_table + row * table_stride
    top, total, mixed = _folded(
        query, position, keys, values, pages, low, high, scale, softcap, window, cell_stride,
        DIM, DIM_TILE, PAGE, ROWS, KEYS, SOFTCAP, WINDOW, EXACT, LOG2E, WIDEN,
    )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    if slot < 0:
        to = out + token.to(tl.int64) * out_token + heads * out_head
        tl.store(to[:, None] + dims[None, :], mixed.to(out.dtype.element_ty), mask=stored)
    else:
        place = (slot + entry).to(tl.int64) * (tl.num_programs(1) * GROUP) + heads
        tl.store(partial + place[:, None] * DIM + dims[None, :], mixed, mask=stored)
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(partial_lse + place, lse, mask=real)


@triton.jit
def _attend_items(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    page_table,
    positions,
    order,
    items,
    count,  # how many items there are; read with LOOP alone
    out,
    partial,
    partial_lse,
    scale,  # float32, log2(e) included when there is no softcap
    softcap,
    window,  # of positions back, itself included; 0: all
    q_token,
    q_head,
    cell_stride,
    head_stride,
    table_stride,
    out_token,
    out_head,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,  # the next power of two
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    EXACT: tl.constexpr,  # float32 products without TF32
    LOG2E: tl.constexpr,
    WIDEN: tl.constexpr,  # bfloat16 as float32: Triton's interpreter cannot multiply it
    LOOP: tl.constexpr,  # a fixed number of programs share the items; else there is one program to an item
):
    head = tl.program_id(1)
    k, v = keys + head * head_stride, values + head * head_stride
    last = tl.load(count) if LOOP else tl.program_id(0) + 1
    for number in tl.range(tl.program_id(0), last, tl.num_programs(0)):
        _attend_item(
            q, k, v, page_table, positions, order, items + number * 6, out, partial, partial_lse,
            scale, softcap, window, q_token, q_head, cell_stride, table_stride, out_token, out_head, head,
            DIM, DIM_TILE, GROUP, PAGE, ROWS, KEYS, SOFTCAP, WINDOW, EXACT, LOG2E, WIDEN,
        )  # fmt: skip


@triton.jit
def _merge_parts(  # type: ignore[no-untyped-def]
    merges,
    partial,
    partial_lse,
    out,
    out_token,
    out_head,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One token and one head: two runs of partial results into one output."""
    merge = merges + tl.program_id(0) * 7
    head = tl.program_id(1)
    token = tl.load(merge)
    dims = tl.arange(0, DIM_TILE)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([DIM_TILE], tl.float32)
    for run in tl.static_range(2):
        first, stride = tl.load(merge + 1 + 3 * run), tl.load(merge + 2 + 3 * run)
        count = tl.load(merge + 3 + 3 * run)
        for part in tl.range(count):
            place = (first + part * stride).to(tl.int64) * HEADS + head
            lse = tl.load(partial_lse + place)
            higher = tl.maximum(top, lse)
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - anchor), tl.exp2(lse - anchor)
            result = tl.load(partial + place * DIM + dims, mask=dims < DIM, other=0.0)
            mixed = mixed * fade + result * weight
            total = total * fade + weight
            top = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    to = out + token.to(tl.int64) * out_token + head * out_head
    if tl.load(merge + 3) + tl.load(merge + 6) > 0:  # a row of padding merges nothing
        tl.store(to + dims, mixed.to(out.dtype.element_ty), mask=dims < DIM)


@dataclass(slots=True)
class GpuPlan:
    """What every layer of a forward shares, on the device: items, order, merges, positions and room for partials.

    With `counts`, two int32 tensors of one element, so many of the narrow and wide items are real, and `programs`
    share them for each KV head: the launch is the same however many there are, as a graph's has to be. No wide items
    are launched where `wide` is empty. Rows of `merges` that are zero merge nothing.
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
    programs: int = 0


def make_plan(q: Tensor, batch: PagedBatch, kv_heads: int, window: int, cascade: bool = True) -> GpuPlan:
    """Work out the items of a forward over queries like `q` and copy them to its device, in one copy."""
    _, heads, dim = q.shape
    work = attention_work(batch, heads // kv_heads, kv_heads, window, cascade)
    arrays = plan_arrays(work, batch)
    buffer, offsets = spread(arrays)
    device = torch.from_numpy(buffer).to(q.device, non_blocking=True)
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


def attend_gpu(
    q: Tensor, kv: Tensor, layer: int, batch: PagedBatch, scale: float, window: int, softcap: float
) -> Tensor:
    """See `attention.paged_attention`; `window` 0 and `softcap` 0 mean none. Shapes are checked there.

    Raises ValueError where heads are not in one piece or pages not evenly spaced.
    """
    if q.stride(2) != 1 or kv.stride(5) != 1 or kv.stride(2) != kv.shape[3] * kv.stride(3):
        raise ValueError(f"strides {q.stride()} of the queries or {kv.stride()} of the store cannot be read in place")
    plan: GpuPlan | None = batch.plans.get(plan_key(window))
    if plan is None:
        plan = batch.plans[plan_key(window)] = make_plan(q, batch, kv.shape[4], window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_items(q, kv, layer, batch, plan, out, scale, window, softcap)
    return out


def launch_items(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    plan: GpuPlan,
    out: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Run a plan's items and merges for one layer, into `out` [T, heads, head_dim]."""
    heads, dim = q.shape[1:]
    arguments = (scale if softcap else scale * _LOG2E, softcap, window)
    for kind, (items, rows) in enumerate(((plan.narrow, plan.narrow_rows), (plan.wide, WIDE_ROWS))):
        if len(items):
            count = plan.counts[kind] if plan.counts is not None else None
            _launch(q, kv, layer, batch, plan, items, count, rows, out, arguments)
    if len(plan.merges):
        _merge_parts[(len(plan.merges), heads)](
            plan.merges,
            plan.partial,
            plan.partial_lse,
            out,
            out.stride(0),
            out.stride(1),
            DIM=dim,
            DIM_TILE=triton.next_power_of_2(dim),
            HEADS=heads,
            num_warps=1,
        )


def _launch(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    plan: GpuPlan,
    items: Tensor,
    count: Tensor | None,
    rows: int,
    out: Tensor,
    arguments: tuple[float, float, int],  # scale, softcap, window
) -> None:
    """Run items of one kind, in tiles of `rows` query rows; `count` of them, None for all."""
    heads, dim = q.shape[1:]
    tile, wide = max(16, triton.next_power_of_2(dim)), rows > NARROW_ROWS
    _attend_items[(len(items) if count is None else plan.programs, kv.shape[4])](
        q,
        kv[layer, 0],
        kv[layer, 1],
        batch.page_table,
        plan.positions,
        plan.order,
        items,
        items if count is None else count,
        out,
        plan.partial,
        plan.partial_lse,
        *arguments,
        *q.stride()[:2],
        *kv.stride()[3:5],
        batch.page_table.stride(0),
        *out.stride()[:2],
        DIM=dim,
        DIM_TILE=tile,
        GROUP=heads // kv.shape[4],
        PAGE=batch.page_size,
        ROWS=rows,
        KEYS=32 if tile > 128 else 64,
        SOFTCAP=bool(arguments[1]),
        WINDOW=bool(arguments[2]),
        EXACT=q.dtype == torch.float32,
        LOG2E=_LOG2E,
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        LOOP=count is not None,
        num_warps=8 if wide else 4,
        num_stages=3,
    )
