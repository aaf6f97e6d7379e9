"""Products of a few rows with a large matrix on a GPU, bound by reading the matrix.

Maths: y = x W^T + b. Shapes: x [R, in], W [out, in], b [out], y [R, out]; sums in float32. A program reads some whole
rows of W, in tiles with several loads in flight, so that memory is always busy. Rows of x are filled up to the 16 that
the matrix units take: 16 rows cost as much as one. Whether this beats the libraries' product is measured at the caller.

`streamed` takes up to `MOST_ORDERED` rows and sums over the inputs from the first to the last, whatever the number of
rows. On a Hopper GPU its bits are those of the libraries' kernels wherever these do not split the sum.
`streamed_tall` takes up to `MOST_ROWS` rows and is faster there on Hopper: rows of W take the place of rows of x, which
is enough for Hopper's wider instructions. Its bits are the same there.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.attention_gpu import INTERPRETED

MOST_ROWS = 16
MOST_ORDERED = 128
_WIDE = 16384  # with so many outputs a program reads twice as many rows of W


@dataclass(frozen=True, slots=True)
class _Tile:
    """A program's share: rows of x, rows of W, how many of their numbers at a time, and tiles in flight."""

    rows: int
    columns: int
    depth: int
    stages: int


# The fastest on an H100 (docs/gpu/README.md).
_FEW = _Tile(MOST_ROWS, 16, 256, 5)
_MORE = _Tile(64, 32, 128, 6)
_MANY = _Tile(64, 64, 128, 4)
_TALL = _Tile(MOST_ROWS, 64, 128, 6)


@triton.jit
def _tile(at, inside, WHOLE: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of W, which is read once; without a mask where the matrix divides evenly."""
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
    WIDEN: tl.constexpr,  # as float32: Triton's interpreter cannot multiply bfloat16
):
    WHOLE: tl.constexpr = INPUTS % DEPTH == 0 and OUTPUTS % COLUMNS == 0
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real, inside = (row < rows)[:, None], (column < OUTPUTS)[None, :]
    at = weight + column.to(tl.int64)[None, :] * INPUTS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, INPUTS, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        deep = depth < INPUTS
        a = tl.load(x + row[:, None] * x_stride + depth[None, :], mask=real & deep[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
        w = _tile(at + depth[:, None], inside & deep[:, None], WHOLE, WIDEN)
        total = tl.dot(a, w, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_stride + column[None, :], total.to(out.dtype.element_ty), mask=real & inside)


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
    tl.store(out + row[None, :] * out_stride + column[:, None], total.to(out.dtype.element_ty), mask=real & inside)


def streamed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y [R, out] in x's dtype, a new tensor.

    Raises ValueError for more than `MOST_ORDERED` rows and for strided tensors.
    """
    tile = _FEW if len(x) <= MOST_ROWS else _MORE if len(x) <= _MORE.rows else _MANY
    if tile is _FEW and len(weight) >= _WIDE:
        tile = replace(tile, columns=2 * tile.columns)
    return _launch(_stream, tile, MOST_ORDERED, x, weight, bias)


def streamed_tall(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`streamed`, for up to `MOST_ROWS` rows."""
    return _launch(_stream_tall, _TALL, MOST_ROWS, x, weight, bias)


def _launch(
    kernel: "triton.JITFunction", tile: _Tile, most: int, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    rows, (outputs, inputs) = len(x), weight.shape
    if x.shape != (rows, inputs) or rows > most or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"rows {tuple(x.shape)}, strides {x.stride()}, and a matrix {tuple(weight.shape)} do not fit")
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows:
        kernel[(triton.cdiv(outputs, tile.columns), triton.cdiv(rows, tile.rows))](
            x,
            weight,
            weight if bias is None else bias,
            out,
            rows,
            x.stride(0),
            out.stride(0),
            INPUTS=inputs,
            OUTPUTS=outputs,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth if x.element_size() == 2 else tile.depth // 2,
            BIAS=bias is not None,
            WIDEN=INTERPRETED and x.dtype == torch.bfloat16,
            num_warps=4,
            num_stages=tile.stages,
        )
    return out


def streamed_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`streamed` in float64."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()
