"""Products of a few rows with a large matrix on a GPU, bound by reading the matrix, and what stands around them.

Maths, for up to 16 rows: y = x W^T + b. Around it, in the same launch: before it RMSNorm, whose scale is a number of
its row and so comes after the sum, (s x) W'^T = s (x W'^T) with W' the matrix times the norm's weight; behind it
silu(x G^T) (x U^T) of two matrices, one above the other; and the sum with a residual, which is written back.

Shapes: x [R, in], W [out, in], b [out], y [R, out]; sums in float32. A program reads some whole rows of W, in tiles
with several on their way, so that memory is never waited for by all; rows of x are filled up to the 16 that the matrix
units take, and 16 cost what one does. Whether that beats the libraries' own product is measured where it is used.

A sum goes over the inputs from the first to the last, whatever the number of rows: on a Hopper GPU with the bits of the
libraries' kernels wherever those do not cut it. So the product alone is there for more rows, too, up to `MOST_ORDERED`.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from holdfast.kernels.attention_gpu import INTERPRETED

MOST_ROWS = 16
MOST_ORDERED = 128
_WIDE = 16384  # outputs from which on a program reads twice as many rows of W


@dataclass(frozen=True, slots=True)
class _Tile:
    """A program's share: rows of x, rows of W, how many of their numbers at a time, and tiles on their way."""

    rows: int
    columns: int
    depth: int
    stages: int


_FEW = _Tile(MOST_ROWS, 16, 256, 5)
_MORE = _Tile(64, 32, 128, 6)
_MANY = _Tile(64, 64, 128, 4)
_TALL = _Tile(MOST_ROWS, 64, 128, 6)


def _tile_of(rows: int, outputs: int, gated: bool, exact: bool) -> _Tile:
    """What was fastest on an H100 (docs/gpu/README.md). `exact`: float32, whose tiles are twice as large."""
    tile = _FEW if rows <= MOST_ROWS else _MORE if rows <= _MORE.rows else _MANY
    if tile is _FEW and outputs >= _WIDE and not gated:
        tile = replace(tile, columns=2 * tile.columns)
    return replace(tile, depth=tile.depth // 2) if exact else tile


@triton.jit
def _tile(at, inside, WHOLE: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of a matrix, which nobody reads again; without a mask where the matrix is cut evenly."""
    if WHOLE:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=inside, other=0.0)
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit(do_not_specialize=["rows"])
def _stream(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    norm,
    out,  # with ADD the residual, too
    rows,
    x_stride,
    out_stride,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    WIDEN: tl.constexpr,  # as float32: Triton's interpreter cannot multiply bfloat16
):
    WHOLE: tl.constexpr = INPUTS % DEPTH == 0 and OUTPUTS % COLUMNS == 0
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = (row < rows)[:, None]
    inside = (column < OUTPUTS)[None, :]
    at = weight + column.to(tl.int64)[None, :] * INPUTS
    up = at + OUTPUTS * INPUTS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in tl.range(0, INPUTS, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        deep = depth < INPUTS
        a = tl.load(x + row[:, None] * x_stride + depth[None, :], mask=real & deep[None, :], other=0.0)
        if NORM:
            wide = a.to(tl.float32)
            squares += wide * wide
            a = (wide * tl.load(norm + depth, mask=deep, other=0.0).to(tl.float32)[None, :]).to(x.dtype.element_ty)
        if WIDEN:
            a = a.to(tl.float32)
        w = _tile(at + depth[:, None], inside & deep[:, None], WHOLE, WIDEN)
        total = tl.dot(a, w, total, input_precision="ieee")
        if GATED:
            u = _tile(up + depth[:, None], inside & deep[:, None], WHOLE, WIDEN)
            other = tl.dot(a, u, other, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)[:, None]
        total, other = total * scale, other * scale
    if BIAS:
        total += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * other
    to = out + row[:, None] * out_stride + column[None, :]
    if ADD:
        total += tl.load(to, mask=real & inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=real & inside)


@triton.jit(do_not_specialize=["rows"])
def _stream_tall(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    rows,
    x_stride,
    out_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The product alone, with rows of W where `_stream` has those of x: enough for Hopper's wider instructions."""
    WHOLE: tl.constexpr = INPUTS % DEPTH == 0 and OUTPUTS % COLUMNS == 0
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    real, inside = (row < rows)[None, :], (column < OUTPUTS)[:, None]
    at = weight + column.to(tl.int64)[:, None] * INPUTS
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in tl.range(0, INPUTS, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        deep = depth < INPUTS
        w = _tile(at + depth[None, :], inside & deep[None, :], WHOLE, WIDEN)
        a = tl.load(x + row[None, :] * x_stride + depth[:, None], mask=real & deep[:, None], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
        total = tl.dot(w, a, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    to = out + row[None, :] * out_stride + column[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real & inside)


def streamed_tall(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`streamed` of the product alone, by other tiles: y [R, out], the same to the bit on Hopper.

    Raises ValueError for more than `MOST_ROWS` rows, or tensors that are not in one piece.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    if x.shape != (rows, inputs) or rows > MOST_ROWS or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"rows {tuple(x.shape)}, strides {x.stride()}, and a matrix {tuple(weight.shape)} do not fit")
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows:
        _stream_tall[(triton.cdiv(outputs, _TALL.columns),)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            rows,
            x.stride(0),
            out.stride(0),
            INPUTS=inputs,
            OUTPUTS=outputs,
            ROWS=_TALL.rows,
            COLUMNS=_TALL.columns,
            DEPTH=_TALL.depth if x.element_size() == 2 else _TALL.depth // 2,
            BIAS=bias is not None,
            WIDEN=INTERPRETED and x.dtype == torch.bfloat16,
            num_warps=4,
            num_stages=_TALL.stages,
        )
    return out


def streamed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """y [R, out] in x's dtype: a new tensor, or `residual` [R, out] with y added to it.

    `norm`: weight [in] and epsilon of the norm of x before. `gated`: `weight` is [2 out, in], the gate's rows first.
    Raises ValueError for more than `MOST_ROWS` rows (`MOST_ORDERED` of a product alone), or tensors that are not in one
    piece.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    outputs //= 1 + gated
    most = MOST_ORDERED if norm is None and residual is None and not gated else MOST_ROWS
    if x.shape != (rows, inputs) or rows > most or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"rows {tuple(x.shape)}, strides {x.stride()}, and a matrix {tuple(weight.shape)} do not fit")
    if residual is not None and (residual.shape != (rows, outputs) or residual.stride(1) != 1):
        raise ValueError(f"a residual {tuple(residual.shape)} does not fit {rows} rows of {outputs}")
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if residual is None else residual
    if not rows:
        return out
    tile = _tile_of(rows, outputs, gated, exact=x.element_size() == 4)
    _stream[(triton.cdiv(outputs, tile.columns), triton.cdiv(rows, tile.rows))](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm[0],
        out,
        rows,
        x.stride(0),
        out.stride(0),
        0.0 if norm is None else norm[1],
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BIAS=bias is not None,
        NORM=norm is not None,
        GATED=gated,
        ADD=residual is not None,
        WIDEN=INTERPRETED and x.dtype == torch.bfloat16,
        num_warps=4,
        num_stages=tile.stages,
    )
    return out


def streamed_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`streamed` in float64; a new tensor in any case."""
    exact = x.double()
    if norm is not None:
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + norm[1]) * norm[0].double()
    y = exact @ weight.double().T
    if bias is not None:
        y += bias.double()
    if gated:
        gate, up = y.chunk(2, -1)
        y = silu(gate) * up
    return y if residual is None else y + residual.double()
