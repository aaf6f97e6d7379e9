"""Attention on a CPU by the kernel in `attention_c.c`: which of its ways is used, and how a forward becomes its tasks.

The kernel is built with the package, for x86-64 on Linux (setup.py). Its ways are named by what a processor must have,
the fastest first: AVX512-BF16, AVX512, and AVX2 with FMA. It takes float32 and bfloat16, over a store of the same or
in int8 (`kv`); everything else, and every machine without it, goes torch's way (`attention_cpu`). `use` chooses one for
the whole process.

What a token comes to depends on itself and the positions that it sees alone: not on how a prompt was cut, on drafts, on
what else is in the batch, or on threads. So the work may be cut into tasks as the threads need it, which are those of
torch's own OpenMP team. Maths, order, tiles and the tasks themselves: `attention_c.c`.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels import native
from holdfast.kernels.paging import PagedBatch

Ints = npt.NDArray[np.int32]

Way: TypeAlias = Literal["avx512_bf16", "avx512", "avx2", "torch"]  # each a `native.Level`

SOURCE, LIBRARY = "attention_c.c", "libattention.so"
TORCH: Final = "torch"  # the way without the kernel
# What each way needs of a processor, as torch names it, and its function for each dtype; the fastest first.
_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_cd", "avx2", "fma3", "bmi2")
_NEEDS: dict[Way, tuple[str, ...]] = {
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma3", "bmi", "bmi2", "f16c"),
}
_FUNCTIONS: dict[Way, dict[torch.dtype, str]] = {
    "avx512_bf16": {torch.bfloat16: "attend_pairs_avx512", torch.float32: "attend_float32_avx512"},
    "avx512": {torch.bfloat16: "attend_bfloat16_avx512", torch.float32: "attend_float32_avx512"},
    "avx2": {torch.bfloat16: "attend_bfloat16_avx2", torch.float32: "attend_float32_avx2"},
}
_LANES: dict[Way, int] = {"avx512_bf16": 16, "avx512": 16, "avx2": 8}  # float32 values of a vector
WAYS: tuple[Way, ...] = (*_FUNCTIONS, TORCH)

MAX_DIM = 256
MAX_ROWS = 128  # query rows, the heads of a group counted, of a span
PART = 384  # positions that are summed by themselves, `PART` in attention_c.c
_TASKS = 4  # for each thread, at least, where the work can be cut into so many
_READING = 16  # rows that take as long as reading the keys and values does

# Columns of a span; `Span` in attention_c.c says what they are.
FIRST, COUNT, START, ROW, LOW, HIGH, BEFORE, TASKS, SLOT = range(9)


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

    Addresses and sizes are in bytes. `held`: what the plan points to.
    """

    function: Callable[..., None]
    plan: int
    kv: Tensor
    store: int
    layer_size: int
    half_size: int
    held: tuple[Any, ...]


def use(way: str = "auto") -> Way:
    """Choose the way of attention on a CPU for this process; "auto": the fastest there is up to `native.level`. Returns
    which it is.

    Raises ValueError for one that is not known, or that this machine or installation does not have.
    """
    there = available()
    if way == "auto":
        chosen = there[0]
    elif way in there:
        chosen = there[there.index(way)]
    else:
        why = library_missing() or "this processor has no more"
        raise ValueError(f"no {way!r} on this machine, only {', '.join(there)}: {why}")
    _chosen[:] = [chosen]
    return chosen


_chosen: list[Way] = []  # the way in use, once there is one


def way() -> Way:
    """The way in use; chooses the fastest where nobody has chosen."""
    return _chosen[0] if _chosen else use()


def available() -> tuple[Way, ...]:
    """The ways that this processor and this installation have, and this process may use, the fastest first; the last
    one is torch.
    """
    if library_missing():
        return (TORCH,)
    has = native.features(native.level())
    return (*(name for name, needs in _NEEDS.items() if all(has.get(need) for need in needs)), TORCH)


@functools.cache
def library_missing() -> str:
    """Why there is no kernel, or ""."""
    return native.missing(_library)


@functools.cache
def _library() -> ctypes.CDLL:
    """The kernel as it was built. Raises OSError where it was not, or from another source than lies beside it."""
    return native.load(Path(__file__).with_name(SOURCE), LIBRARY, "attention_source")


@functools.cache
def _function(way: Way, dtype: torch.dtype) -> Callable[..., None] | None:
    """The kernel's function, or None."""
    if dtype not in _FUNCTIONS[way]:
        return None
    function = _library()[_FUNCTIONS[way][dtype]]
    pointer, long, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    function.argtypes = [*(pointer, pointer, long, long), *(pointer,) * 4, *(real, real, ctypes.c_int32)]
    function.restype = None
    return function


def takes(q: Tensor, kv: Tensor, batch: PagedBatch) -> bool:
    """Whether the kernel attends with `q` over `kv`, in the way that is in use."""
    stride, table = kv.stride(), batch.page_table
    return (
        way() != TORCH
        and kv.dtype in (q.dtype, torch.int8)
        and _function(way(), q.dtype) is not None
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
    """See `attention.paged_attention`; `window` 0 and `softcap` 0 mean none. Only for what the kernel `takes`.

    Raises IndexError for a layer that is not, or a chunk that reaches outside the page table.
    """
    if not 0 <= layer < kv.shape[0]:
        raise IndexError(f"layer {layer} of {kv.shape[0]}")
    key = (way(), window, q.dtype)
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

    Raises IndexError for a chunk outside the page table, ValueError for queries that are not those of the chunks.
    """
    tokens, heads, dim = q.shape
    function = _function(way(), q.dtype)
    assert function is not None
    table = batch.page_table
    if sum(batch.lengths) != tokens:
        raise ValueError(f"{tokens} queries for chunks of {sum(batch.lengths)} tokens")
    extent = max(start + length for start, length in zip(batch.starts, batch.lengths, strict=True))
    if extent > table.shape[1] * batch.page_size or max(batch.rows) >= len(table):
        raise IndexError(f"position {extent - 1} lies outside a page table of {tuple(table.shape)}")
    spans, partials = cut(batch, heads // kv.shape[4], kv.shape[4], window, torch.get_num_threads())
    step = 2 * _LANES[way()]
    width = -(-dim // step) * step
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
    """The spans of a batch [n, 9] int32, the longest first, and how many partial results they have.

    A chunk of more than `MAX_ROWS` rows is cut into blocks of tokens. A block's parts are tasks of their own where it
    would otherwise be more than a fair task for each of `threads`.
    """
    block = max(1, MAX_ROWS // group)
    spans = []
    first = 0
    for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
        for at in range(0, length, block):
            count = min(block, length - at)
            # Pairs of positions are multiplied together, the same ones wherever a window begins.
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
