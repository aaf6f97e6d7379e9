"""Attention of any mix of chunks over the paged KV store: the choice of a way, the C kernel, torch's way, a reference.

Maths, for query token t of chunk c at position p, head h of KV head h // group, over the positions j of its sequence
that it may see, p - window < j <= p:

    s_j = scale * q_t . k_j                  s_j = softcap * tanh(s_j / softcap) with a softcap
    o_t = sum_j softmax(s)_j v_j

Some models have a learnt sink for each query head. It is a score of its own, unscaled and uncapped, that joins the
softmax's sum and has no value, so that a token may attend to nothing. With l the log-sum-exp of the s_j, the output is
o_t / (1 + e^(sink - l)). Source: gpt-oss (OpenAI 2025), after Xiao et al. 2023.

Shapes: q [T, heads, head_dim]; k, v [T, kv_heads, head_dim] of the same tokens; the store as in `kv`; sinks [heads];
output [T, heads, head_dim]; group = heads / kv_heads. The tokens' own keys and values must already be in the store
(`kv.store_kv`).

Attention over a split set of positions merges exactly: with o_i, l_i the output and log-sum-exp over part i,
o = sum_i exp(l_i - l) o_i, l = log sum_i exp(l_i).

On a CPU the kernel in `attention_c.c` attends, in float32 and bfloat16, over a store of the same dtype or in int8. It
is built with the package, for x86-64 on Linux. A token's result depends on itself and the positions that it sees, and
on nothing else: not on how a prompt was cut, on drafts, on other sequences in the batch, or on threads. So the work may
be cut into tasks for any number of threads, which are those of torch's own OpenMP team. Order of sums, tiles and tasks:
`attention_c.c`. Without the kernel torch attends, and for what the kernel does not take. On a GPU: `attention_gpu`.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from holdfast.kernels import native
from holdfast.kernels.kv import PagedBatch, head_dim, in_numbers

Ints = npt.NDArray[np.int32]
Function = Callable[..., None]

LIBRARY = native.Library("attention")
# The functions of each level, and the float32 values of their vectors.
FUNCTIONS: dict[native.Level, tuple[dict[torch.dtype, str], int]] = {
    "avx512_bf16": ({torch.bfloat16: "attend_pairs_avx512", torch.float32: "attend_float32_avx512"}, 16),
    "avx512": ({torch.bfloat16: "attend_bfloat16_avx512", torch.float32: "attend_float32_avx512"}, 16),
    "avx2": ({torch.bfloat16: "attend_bfloat16_avx2", torch.float32: "attend_float32_avx2"}, 8),
}

MAX_DIM = 512
MAX_ROWS = 128  # query rows, the heads of a group counted, of a span
PART = 384  # positions that are summed by themselves, `PART` in attention_c.c
_TASKS = 4  # for each thread, at least, where the work can be cut into so many
_READING = 16  # rows that take as long as reading the keys and values does

# Columns of a span, as `Span` in attention_c.c documents them.
FIRST, COUNT, START, ROW, LOW, HIGH, BEFORE, TASKS, SLOT = range(9)
_BLOCK = 128  # tokens that torch attends with at a time, so that their mask stays small


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with `q` of one layer; see the module's maths and shapes. Returns [T, heads, head_dim] in q's dtype.

    `window`: how many positions back a token sees, itself included; None: all. Raises ValueError for shapes that do
    not fit together.
    """
    tokens, heads, dim = q.shape
    if dim != head_dim(kv):
        raise ValueError(f"query {tuple(q.shape)} does not fit the store {tuple(kv.shape)}")
    if heads % kv.shape[4] or tokens != batch.cells.shape[0]:
        raise ValueError(f"{heads} heads over {kv.shape[4]}, {tokens} tokens against {batch.cells.shape[0]} cells")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks {tuple(sinks.shape)} for {heads} heads")
    if q.device.type == "cpu":
        if takes(q, kv, batch):
            return attend_c(q, kv, layer, batch, scale, window or 0, softcap or 0.0, sinks)
        if softcap or sinks is not None:  # torch's own attention knows neither
            return paged_attention_reference(q, kv, layer, batch, scale, window, softcap, torch.float32, sinks)
        return attend_torch(q, kv, layer, batch, scale, window)
    if kv.dtype == torch.int8:
        raise ValueError("a store in int8 is read on a CPU only")
    from holdfast.kernels.attention_gpu import attend_gpu  # Triton comes with torch for a GPU and not for a CPU

    return attend_gpu(q, kv, layer, batch, scale, window or 0, softcap or 0.0, sinks)


# ---- the C kernel


class _Plan(ctypes.Structure):
    """`Plan` in attention_c.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parallel", "pages", "spans", "partial", "sums")),
        *((name, ctypes.c_int64) for name in ("slots", "page_size", "cell_stride", "head_stride")),
        *((name, ctypes.c_int32) for name in ("n_spans", "heads", "kv_heads", "dim", "width", "window")),
        *((name, ctypes.c_int32) for name in ("stored", "scaled")),
    ]


@dataclass(slots=True)
class CPlan:
    """What every layer of a forward shares: the kernel's function, its plan, and where the store's layers lie.

    Addresses and sizes are in bytes. `held` keeps alive what the plan points to.
    """

    function: Function
    plan: int
    kv: Tensor
    store: int
    layer_size: int
    half_size: int
    held: tuple[Any, ...]


@functools.cache
def kernel(level: native.Level, dtype: torch.dtype) -> tuple[Function, int] | None:
    """The function for queries of this dtype and the lanes of its vectors, at the highest usable level."""
    names, lanes = next((FUNCTIONS[each] for each in native.levels_below(level) if each in FUNCTIONS), ({}, 0))
    if dtype not in names or LIBRARY.missing:
        return None
    pointer, long, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    arguments = [pointer, pointer, long, long, *[pointer] * 4, real, real, ctypes.c_int32]
    return LIBRARY.function(names[dtype], *arguments), lanes


def takes(q: Tensor, kv: Tensor, batch: PagedBatch) -> bool:
    """Whether the kernel can attend with `q` over `kv`."""
    stride, table = kv.stride(), batch.page_table
    return (
        kernel(native.level(), q.dtype) is not None
        and kv.dtype in (q.dtype, torch.int8)
        and q.shape[2] <= MAX_DIM
        and q.shape[1] // kv.shape[4] <= MAX_ROWS
        and stride[5] == 1
        and stride[2] == kv.shape[3] * stride[3]
        and q.stride(2) == 1
        and table.dtype == torch.int32
        and table.stride(1) == 1
    )


def attend_c(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `paged_attention`; `window` 0 and `softcap` 0 mean none. Only where `takes` is true.

    Raises IndexError for a layer outside the store, or a chunk that reaches outside the page table.
    """
    if not 0 <= layer < kv.shape[0]:
        raise IndexError(f"layer {layer} of {kv.shape[0]}")
    key = (native.level(), window, q.dtype)
    plan: CPlan | None = batch.plans.get(key)
    if plan is None or plan.kv is not kv:
        plan = batch.plans[key] = make_plan(q, kv, batch, window)
    out = torch.empty(q.shape, dtype=q.dtype)
    sinks = None if sinks is None else sinks.float().contiguous()
    keys = plan.store + layer * plan.layer_size
    plan.function(
        plan.plan,
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        keys,
        keys + plan.half_size,
        out.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        scale,
        softcap,
        torch.get_num_threads(),
    )
    return out


def make_plan(q: Tensor, kv: Tensor, batch: PagedBatch, window: int) -> CPlan:
    """Cut the chunks into spans; see `cut`.

    Raises IndexError for a chunk outside the page table, ValueError where the number of queries is not the chunks'.
    """
    tokens, heads, dim = q.shape
    found = kernel(native.level(), q.dtype)
    assert found is not None
    function, lanes = found
    table = batch.page_table
    if sum(batch.lengths) != tokens:
        raise ValueError(f"{tokens} queries for chunks of {sum(batch.lengths)} tokens")
    extent = max(start + length for start, length in zip(batch.starts, batch.lengths, strict=True))
    if extent > table.shape[1] * batch.page_size or max(batch.rows) >= len(table):
        raise IndexError(f"position {extent - 1} lies outside a page table of {tuple(table.shape)}")
    spans, partials = cut(batch, heads // kv.shape[4], kv.shape[4], window, torch.get_num_threads())
    width = -(-dim // (2 * lanes)) * 2 * lanes
    partial = torch.empty(max(partials, 1) * heads * (width + 2), dtype=torch.float32)
    plan = _Plan(
        parallel=native.team(),
        pages=table.data_ptr(),
        spans=spans.ctypes.data,
        partial=partial.data_ptr(),
        sums=partial[max(partials, 1) * heads * width :].data_ptr(),
        slots=table.stride(0),
        page_size=batch.page_size,
        cell_stride=kv.stride(3) * kv.itemsize,
        head_stride=kv.stride(4) * kv.itemsize,
        n_spans=len(spans),
        heads=heads,
        kv_heads=kv.shape[4],
        dim=dim,
        width=width,
        window=window,
        stored=kv.shape[5] * kv.itemsize,
        scaled=kv.dtype == torch.int8,
    )
    return CPlan(
        function=function,
        plan=ctypes.addressof(plan),
        kv=kv,
        store=kv.data_ptr(),
        layer_size=kv.stride(0) * kv.itemsize,
        half_size=kv.stride(1) * kv.itemsize,
        held=(plan, spans, partial, table),
    )


def cut(batch: PagedBatch, group: int, kv_heads: int, window: int, threads: int) -> tuple[Ints, int]:
    """The spans of a batch [n, 9] int32, the longest first, and the number of their partial results.

    A chunk of more than `MAX_ROWS` rows is cut into blocks of tokens. A block's parts are tasks of their own where the
    block would otherwise be more than a fair task for each of `threads`.
    """
    block = max(1, MAX_ROWS // group)
    spans = []
    first = 0
    for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
        for at in range(0, length, block):
            count = min(block, length - at)
            # Positions are multiplied in pairs, which are the same pairs wherever a window begins.
            low, high = max(0, start + at - window + 1) & ~1 if window else 0, start + at + count
            spans.append(((high - low) * (_READING + count * group), first + at, count, start + at, row, low, high))
        first += length
    fair = sum(span[0] for span in spans) * kv_heads / (threads * _TASKS) if threads > 1 else math.inf
    table = np.zeros((len(spans), 9), np.int32)
    partials = 0
    tasks = []
    for i, (work, *span) in enumerate(spans):
        count, low, high = span[1], span[4], span[5]
        parts = -(-high // PART) - low // PART
        parts = parts if work > fair else 1
        table[i] = (*span, 0, parts, partials if parts > 1 else -1)
        partials += parts * count if parts > 1 else 0
        tasks.append(work / parts)
    table = table[np.argsort(tasks)[::-1]]
    table[:, BEFORE] = np.cumsum(table[:, TASKS]) - table[:, TASKS]
    return table, partials


# ---- torch


def attend_torch(q: Tensor, kv: Tensor, layer: int, batch: PagedBatch, scale: float, window: int | None) -> Tensor:
    """`paged_attention` without a kernel of ours: gather the cells that a block of tokens sees, then torch's attention.

    The query heads of a group are query rows of their KV head, so that it is read once for all of them.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    kv_heads, size, first = kv.shape[4], batch.page_size, 0
    store = kv[layer].permute(0, 3, 1, 2, 4)  # [2, kv_heads, pages, page_size, ...]
    for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
        for begin in range(start, start + length, _BLOCK):
            end = min(begin + _BLOCK, start + length)
            low = max(0, begin - window + 1) if window else 0
            pages = store.index_select(2, batch.page_table[row, low // size : -(-end // size)]).flatten(2, 3)
            k, v = in_numbers(pages[:, :, low % size : low % size + end - low], q.dtype).unbind(0)
            some = slice(first, first + end - begin)
            # [kv_heads, group, tokens, head_dim]
            rows = q[some].reshape(end - begin, kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
            visible = _visible(begin, end, low, window).repeat(rows.shape[1], 1)
            found = scaled_dot_product_attention(rows.flatten(1, 2)[None], k[None], v[None], visible, scale=scale)
            out[some] = found[0].view(rows.shape).permute(2, 0, 1, 3).flatten(1, 2)
            first += end - begin
    return out


def _visible(begin: int, end: int, low: int, window: int | None) -> Tensor:
    """Which of the positions [low, end) the tokens at [begin, end) see: [end - begin, end - low]."""
    seen, asking = torch.arange(low, end), torch.arange(begin, end)[:, None]
    return (seen <= asking) & (seen > asking - window) if window else seen <= asking


def paged_attention_reference(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention`, chunk by chunk: gather the sequence's cells, then a plain softmax in `dtype`."""
    out = torch.empty_like(q)
    keys, values = kv[layer].flatten(1, 2).unbind(0)
    group = q.shape[1] // kv.shape[4]
    first = 0
    for chunk, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        low = max(0, start - window + 1) if window else 0  # pages before may be others' by now
        cells = batch.cells_of(chunk, low, start + length)
        k = in_numbers(keys[cells], dtype).repeat_interleave(group, dim=1)  # [positions, heads, head_dim]
        v = in_numbers(values[cells], dtype).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[first : first + length].to(dtype), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        visible = _visible(start, start + length, low, window).to(q.device)
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = scores.softmax(-1)
        if sinks is not None:
            weights = weights * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks.to(dtype)[:, None, None])
        out[first : first + length] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        first += length
    return out
