"""Paged attention on a GPU: one Triton kernel for every kind of item, and one that merges partial results.

Maths and shapes are those of `attention`; `attention_plan` cuts the work into items. Each program walks
its positions in tiles with the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022): running maximum m, sum l
and output o of the positions so far, in float32 and in base 2, because the hardware has exp2:

    m' = max(m, max_j s_j)     l' = l 2^(m - m') + sum_j 2^(s_j - m')     o' = o 2^(m - m') + sum_j 2^(s_j - m') v_j

A multiprocessor multiplies matrices and computes powers of two at about the same pace, so long chunks do both at once:
tile i's product with the values starts after tile i + 1's product with the keys, and overlaps tile i + 1's softmax.

A head's sink joins last, after all positions: o / l / (1 + 2^(sink - m) / l).

Keys are found through the page table cell by cell, so any page size works; addresses cost least where a tile is whole
pages. The contents of cells at or behind an item's end do not matter. The order of every sum is fixed: the same step
gives the same bits.

Keys and values of a store in FP8 become numbers of the queries' dtype in registers, which is exact. A NaN is read as
+-480.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.attention_plan import NARROW_ROWS, WIDE_ROWS, GpuPlan, make_plan, plan_key, tile_of
from holdfast.kernels.kv import FP8, PagedBatch

_LOG2E = 1.4426950408889634
_MERGED = 16  # partial results read at a time
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on a CPU."""


# Four codes to bfloat16, exactly: sign, exponent and mantissa move to their places. The exponent's bias is 7 and not
# 127, so that is 2^-120 of the number, and is multiplied. Every instruction works on two numbers.
_E4M3_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 low, high, rest, factor, zero;
mov.b32 factor, 0x7B807B80;
mov.b32 zero, 0x80008000;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 high, $2, 0, 0x3424;
and.b32 rest, low, 0x7F007F00;
shr.b32 rest, rest, 4;
lop3.b32 low, low, 0x80008000, rest, 0xEA;
fma.rn.bf16x2 $0, low, factor, zero;
and.b32 rest, high, 0x7F007F00;
shr.b32 rest, rest, 4;
lop3.b32 high, high, 0x80008000, rest, 0xEA;
fma.rn.bf16x2 $1, high, factor, zero;
}""")


@triton.jit
def packed_numbers(codes, PURE: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """Bytes of e4m3 as bfloat16, four at a time."""
    return tl.inline_asm_elementwise(_E4M3_TO_BFLOAT16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=PURE, pack=4)


@triton.jit
def _numbers(stored, query, FORM: tl.constexpr, WIDEN: tl.constexpr, PURE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values as numbers to multiply `query`, or weights, with. `FORM`: "plain", or of FP8 how it is read.

    `PURE`: Triton may move the bytes to where a product needs them, and turn them into numbers there. That is good for
    keys. Of values it would read every byte by itself: only 16-bit numbers are loaded by columns.
    """
    if FORM == "packed":
        number = packed_numbers(stored, PURE)
    elif FORM == "bits":  # those of float16 over 256, as in `quantized_gpu`
        wide = stored.to(tl.uint16)
        number = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        number = (number.to(tl.float32) * 256.0).to(query.dtype)
    else:
        number = stored.to(tl.float32) if WIDEN else stored
    return number


@triton.jit
def _capped(scores, softcap, LOG2E: tl.constexpr):  # type: ignore[no-untyped-def]
    """softcap tanh(scores / softcap) in base 2; exp2 takes no argument above zero, so it does not overflow."""
    shrunk = tl.exp2(-2.0 * LOG2E * tl.abs(scores) / softcap)
    size = softcap * (1.0 - shrunk) / (1.0 + shrunk) * LOG2E
    return tl.where(scores < 0, -size, size)


@triton.jit
def _beside_sink(lse, sink, LOG2E: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor of an output whose positions have this log-sum-exp, in base 2, when a sink joins them."""
    return 1.0 / (1.0 + tl.exp2(sink.to(tl.float32) * LOG2E - lse))


@triton.jit
def _slots(pages, start, cells, PAGE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The page table entries of the positions from `start` on."""
    return pages + start // PAGE + cells // PAGE if ALIGNED else pages + (start + cells) // PAGE


@triton.jit
def _in_pages(  # type: ignore[no-untyped-def]
    start, cells, dims, PAGE: tl.constexpr, CELL: tl.constexpr, ALIGNED: tl.constexpr
):
    """Offsets of the positions from `start` on from the beginning of their pages."""
    position = cells if ALIGNED else start + cells
    return (position % PAGE * CELL)[:, None] + dims[None, :]


@triton.jit
def _online_softmax(  # type: ignore[no-untyped-def]
    query,
    position,
    keys,
    values,
    pages,
    low,
    high,
    clear,  # every row sees all positions before this one
    scale,
    softcap,
    window,
    top,
    total,
    mixed,
    CELL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
    LOG2E: tl.constexpr,
    WIDEN: tl.constexpr,
    FORM: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Add the positions [low, high) to the maximum, sum and undivided output of a tile's rows."""
    dims, cells = tl.arange(0, DIM_TILE), tl.arange(0, KEYS)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    ALIGNED: tl.constexpr = KEYS % PAGE == 0  # then tiles begin with pages, as SPLIT is a multiple of KEYS
    factor = 1.0 if SOFTCAP else scale  # then one multiply-add scales a score and subtracts the maximum
    real = (dims < DIM)[None, :]
    if AHEAD:
        page = tl.load(_slots(pages, low, cells, PAGE, ALIGNED), mask=low + cells < high, other=0)
        past = page * PAGE  # of the tile before; of the first tile at first, with weights of zero
        held = tl.zeros([query.shape[0], KEYS], tl.float32)
        fade = tl.full([query.shape[0]], 1.0, tl.float32)
    for start in tl.range(low, high, KEYS):
        seen = start + cells
        if not AHEAD:
            page = tl.load(_slots(pages, start, cells, PAGE, ALIGNED), mask=seen < high, other=0)
        cell = page * PAGE
        at = (cell.to(tl.int64) * CELL)[:, None] + _in_pages(start, cells, dims, PAGE, CELL, ALIGNED)
        # Behind the end these are any keys of the last page or of page 0; their scores are masked below.
        if DIM != DIM_TILE:
            key = tl.load(keys + at, mask=real, other=0.0)
        else:
            key = tl.load(keys + at)
        key = _numbers(key, query, FORM, WIDEN, True)
        scores = tl.dot(query, key.T, input_precision=precision)
        if AHEAD:  # the tile before: its product runs beside this tile's softmax
            before = tl.maximum(start - KEYS, low)
            at = (past.to(tl.int64) * CELL)[:, None] + _in_pages(before, cells, dims, PAGE, CELL, ALIGNED)
            value = tl.load(values + at, mask=(before + cells < high)[:, None] & real, other=0.0)
            value = _numbers(value, query, FORM, WIDEN, False)
            mixed = tl.dot(held.to(value.dtype), value, mixed * fade[:, None], input_precision=precision)
            past = cell
        if SOFTCAP:
            scores = _capped(scores * scale, softcap, LOG2E)
        if start + KEYS > clear:
            visible = (seen < high)[None, :] & (seen[None, :] <= position[:, None])
            if WINDOW:
                visible = visible & (seen[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weights = tl.exp2(scores * factor - anchor[:, None])
        fade = tl.exp2(top - anchor)
        top = higher
        if AHEAD:
            total = total * fade + tl.sum(weights, 1)
            held = weights
            follows = start + KEYS
            page = tl.load(_slots(pages, follows, cells, PAGE, ALIGNED), mask=follows + cells < high, other=0)
        else:
            value = tl.load(values + at, mask=(seen < high)[:, None] & real, other=0.0)
            value = _numbers(value, query, FORM, WIDEN, False)
            weights = weights.to(value.dtype)
            # By the matrix units, whose order is the same in tiles of every size; a reduction's order is not.
            ones = tl.full([KEYS, 16], 1.0, value.dtype)
            total = total * fade + tl.max(tl.dot(weights, ones, input_precision=precision), 1)
            mixed = tl.dot(weights, value, mixed * fade[:, None], input_precision=precision)
    if AHEAD:
        before = low + tl.maximum(high - 1 - low, 0) // KEYS * KEYS
        at = (past.to(tl.int64) * CELL)[:, None] + _in_pages(before, cells, dims, PAGE, CELL, ALIGNED)
        value = tl.load(values + at, mask=(before + cells < high)[:, None] & real, other=0.0)
        value = _numbers(value, query, FORM, WIDEN, False)
        mixed = tl.dot(held.to(value.dtype), value, mixed * fade[:, None], input_precision=precision)
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
    piece,
    out,
    partial,
    partial_lse,
    sinks,
    scale,
    softcap,
    window,
    q_token,
    q_head,
    table_stride,
    out_token,
    out_head,
    head,
    CELL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    EXACT: tl.constexpr,
    LOG2E: tl.constexpr,
    WIDEN: tl.constexpr,
    FORM: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """`ROWS` rows of one item and one KV head, whose `keys` and `values` are given: into the output, or into partial
    results.
    """
    first, count, row = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    low, high, slot = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    tile = piece * ROWS + tl.arange(0, ROWS)
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
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_TILE], tl.float32)
    clear = low  # with a window no row sees everything
    if WINDOW:
        if KEYS % PAGE == 0:  # tiles begin with pages
            low = low // PAGE * PAGE
    else:  # tokens are in order: the first sees least
        clear = tl.minimum(high, tl.load(positions + tl.load(order + first)) + 1)
    top, total, mixed = _online_softmax(
        query, position, keys, values, pages, low, high, clear, scale, softcap, window, top, total, mixed, CELL,
        DIM, DIM_TILE, PAGE, KEYS, SOFTCAP, WINDOW, EXACT, LOG2E, WIDEN, FORM, AHEAD,
    )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
    if slot < 0:
        if SINKS:
            mixed = mixed * _beside_sink(lse, tl.load(sinks + heads), LOG2E)[:, None]
        to = out + token.to(tl.int64) * out_token + heads * out_head
        tl.store(to[:, None] + dims[None, :], mixed.to(out.dtype.element_ty), mask=stored)
    else:
        place = (slot + entry).to(tl.int64) * (KV_HEADS * GROUP) + heads
        tl.store(partial + place[:, None] * DIM + dims[None, :], mixed, mask=stored)
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
    count,  # of the items; read with LOOP only
    out,
    partial,
    partial_lse,
    sinks,  # [heads]; read with SINKS only
    scale,  # float32, log2(e) included when there is no softcap
    softcap,
    window,  # of positions back, itself included; 0: all
    q_token,
    q_head,
    head_stride,
    table_stride,
    out_token,
    out_head,
    CELL: tl.constexpr,  # stride of cells in the store
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,  # the next power of two
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    EXACT: tl.constexpr,  # float32 products without TF32
    LOG2E: tl.constexpr,
    WIDEN: tl.constexpr,  # bfloat16 as float32: Triton's interpreter cannot multiply it
    FORM: tl.constexpr,  # of keys and values, see `_numbers`
    AHEAD: tl.constexpr,  # a tile's product with its values overlaps the next tile's softmax
    LOOP: tl.constexpr,  # a fixed number of programs share the pieces of items; else one program per piece
    PIECES: tl.constexpr,  # of an item's rows
):
    # The heads of an item run side by side, because a cell's heads are neighbours in memory.
    first, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    k, v = keys + head * head_stride, values + head * head_stride
    last = tl.load(count) * PIECES if LOOP else first + 1
    for number in tl.range(first, last, tl.num_programs(0) // KV_HEADS):
        _attend_item(
            q, k, v, page_table, positions, order, items + number // PIECES * 6, number % PIECES, out, partial,
            partial_lse, sinks, scale, softcap, window, q_token, q_head, table_stride, out_token, out_head, head, CELL,
            DIM, DIM_TILE, GROUP, KV_HEADS, PAGE, ROWS, KEYS, SOFTCAP, WINDOW, SINKS, EXACT, LOG2E, WIDEN, FORM, AHEAD,
        )  # fmt: skip


@triton.jit
def _merge_parts(  # type: ignore[no-untyped-def]
    merges,
    partial,
    partial_lse,
    sinks,  # [heads]; read with SINKS only
    out,
    out_token,
    out_head,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,  # read at a time
    SINKS: tl.constexpr,
    LOG2E: tl.constexpr,
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
        for start in tl.range(0, count, PARTS):
            part = start + tl.arange(0, PARTS)
            place = (first + part * stride).to(tl.int64) * HEADS + head
            lse = tl.load(partial_lse + place, mask=part < count, other=float("-inf"))
            higher = tl.maximum(top, tl.max(lse, 0))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = tl.exp2(top - anchor), tl.exp2(lse - anchor)
            inside = (part < count)[:, None] & (dims < DIM)[None, :]
            result = tl.load(partial + place[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
            mixed = mixed * fade + tl.sum(result * weight[:, None], 0)
            total = total * fade + tl.sum(weight, 0)
            top = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    if SINKS:
        lse = top + tl.log2(tl.where(total == 0.0, 1.0, total))
        mixed = mixed * _beside_sink(lse, tl.load(sinks + head), LOG2E)
    to = out + token.to(tl.int64) * out_token + head * out_head
    if tl.load(merge + 3) + tl.load(merge + 6) > 0:  # a row of padding merges nothing
        tl.store(to + dims, mixed.to(out.dtype.element_ty), mask=dims < DIM)


def attend_gpu(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `attention.paged_attention`; `window` 0 and `softcap` 0 mean none. Shapes are checked there.

    Raises ValueError where heads are not in one piece, pages not evenly spaced, or the scale is not positive.
    """
    if scale <= 0:
        raise ValueError(f"scale {scale} of scores")
    if q.stride(2) != 1 or kv.stride(5) != 1 or kv.stride(2) != kv.shape[3] * kv.stride(3):
        raise ValueError(f"strides {q.stride()} of the queries or {kv.stride()} of the store cannot be read in place")
    plan: GpuPlan | None = batch.plans.get(plan_key(window))
    if plan is None:
        plan = batch.plans[plan_key(window)] = make_plan(q, batch, kv.shape[4], window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch_items(q, kv, layer, batch, plan, out, scale, window, softcap, sinks)
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
    sinks: Tensor | None = None,
) -> None:
    """Run a plan's items and merges for one layer, into `out` [T, heads, head_dim]."""
    heads, dim = q.shape[1:]
    arguments = (scale if softcap else scale * _LOG2E, softcap, window)
    for kind, (items, rows) in enumerate(((plan.narrow, plan.narrow_rows), (plan.wide, WIDE_ROWS))):
        if len(items):
            count = plan.counts[kind] if plan.counts is not None else None
            _launch(q, kv, layer, batch, plan, items, count, rows, out, sinks, arguments)
    if len(plan.merges):
        _merge_parts[(len(plan.merges), heads)](
            plan.merges,
            plan.partial,
            plan.partial_lse,
            q if sinks is None else sinks,
            out,
            out.stride(0),
            out.stride(1),
            DIM=dim,
            DIM_TILE=triton.next_power_of_2(dim),
            HEADS=heads,
            PARTS=_MERGED,
            SINKS=sinks is not None,
            LOG2E=_LOG2E,
            num_warps=2,
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
    sinks: Tensor | None,
    arguments: tuple[float, float, int],  # scale, softcap, window
) -> None:
    """Run items of one kind, of up to `rows` query rows each; `count` of them, None for all."""
    heads, dim = q.shape[1:]
    kv_heads, wide = kv.shape[4], rows > NARROW_ROWS
    dim_tile, exact = max(16, triton.next_power_of_2(dim)), q.dtype == torch.float32
    tile = plan.tiles[wide] if plan.tiles is not None else tile_of(rows, dim_tile, exact)
    programs = len(items) * tile.pieces if count is None else plan.programs[wide]
    _attend_items[(programs * kv_heads,)](
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
        q if sinks is None else sinks,
        *arguments,
        *q.stride()[:2],
        kv.stride(4),
        batch.page_table.stride(0),
        *out.stride()[:2],
        CELL=kv.stride(3),
        DIM=dim,
        DIM_TILE=dim_tile,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        PAGE=batch.page_size,
        ROWS=rows // tile.pieces,
        KEYS=tile.keys,
        SOFTCAP=bool(arguments[1]),
        WINDOW=bool(arguments[2]),
        SINKS=sinks is not None,
        EXACT=exact,
        LOG2E=_LOG2E,
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        FORM="plain" if kv.dtype != FP8 else "packed" if q.dtype == torch.bfloat16 and not INTERPRETED else "bits",
        AHEAD=tile.ahead,
        LOOP=count is not None,
        PIECES=tile.pieces,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
