"""Products with weights in FP8 blocks on a GPU: few rows read them as they are stored, many rows multiply in 16 bits.

Maths: y = x W^T + b with W_ok = w_ok * scale[o // 128, k // 128]. Shapes: x [R, in], W [out, in], y [R, out].

Few rows: a byte is read for each weight. It becomes a 16-bit number in registers, which is exact, and 128 inputs are
summed in float32 before the block's scale multiplies the sum. So the error is smaller than that of a product with the
weights rounded to bfloat16. Rows of W take the place of rows of x, which is enough for Hopper's wide instructions.

Many rows: W in the dtype of x is written first, for torch to multiply with. That costs 5 bytes moved for each weight.
Activations are not quantised.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from holdfast.kernels.attention_gpu import INTERPRETED
from holdfast.kernels.fp8 import BLOCK, Fp8Blocks
from holdfast.kernels.linear import Activation, GatedMatrix, Matrix, Route, activate

MOST_STREAMED = 128
_COLUMNS = 64  # outputs of one program; they lie in one block
_WIDTH = 2048  # weights that one program turns into another dtype


@triton.jit
def _numbers(bytes_of):  # type: ignore[no-untyped-def]
    """e4m3 over 256, exactly, in float16: the same bits with two zeros before the exponent, whose bias differs by 8."""
    wide = bytes_of.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _stream_blocks(  # type: ignore[no-untyped-def]
    x,
    weight,  # bytes
    scale,
    bias,
    out,
    rows,
    x_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BIAS: tl.constexpr,
):
    WHOLE: tl.constexpr = INPUTS % BLOCK == 0 and OUTPUTS % COLUMNS == 0
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real, inside = (row < rows)[None, :], (column < OUTPUTS)[:, None]
    at = weight + column.to(tl.int64)[:, None] * INPUTS
    scales = scale + tl.program_id(0) * COLUMNS // BLOCK * ((INPUTS + BLOCK - 1) // BLOCK)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in tl.range(0, INPUTS, BLOCK):
        depth = start + tl.arange(0, BLOCK)
        deep = depth < INPUTS
        if WHOLE:
            w = tl.load(at + depth[None, :], eviction_policy="evict_first")
        else:
            w = tl.load(at + depth[None, :], mask=inside & deep[None, :], other=0)
        a = tl.load(x + row[None, :] * x_stride + depth[:, None], mask=real & deep[:, None], other=0.0)
        part = tl.dot(_numbers(w).to(OPERAND), a.to(OPERAND), input_precision=PRECISION)
        total += part * (tl.load(scales + start // BLOCK) * 256.0)
    if BIAS:
        total += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row[None, :] * OUTPUTS + column[:, None], total.to(out.dtype.element_ty), mask=real & inside)


@triton.jit
def _dequantise(  # type: ignore[no-untyped-def]
    weight, scale, out, INPUTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place, real = row.to(tl.int64) * INPUTS + at, at < INPUTS
    w = _numbers(tl.load(weight + place, mask=real, other=0)).to(tl.float32)
    s = tl.load(scale + row // BLOCK * ((INPUTS + BLOCK - 1) // BLOCK) + at // BLOCK, mask=real, other=0.0)
    tl.store(out + place, (w * 256.0 * s).to(out.dtype.element_ty), mask=real)


def streamed_blocks(x: Tensor, blocks: Fp8Blocks, bias: Tensor | None = None) -> Tensor:
    """y [R, out] in x's dtype, for up to `MOST_STREAMED` rows. Raises ValueError for more, and for strided tensors."""
    rows, (outputs, inputs) = len(x), blocks.shape
    if x.shape != (rows, inputs) or rows > MOST_STREAMED or x.stride(1) != 1 or not _in_one_piece(blocks):
        raise ValueError(f"rows {tuple(x.shape)}, strides {x.stride()}, and blocks {outputs} x {inputs} do not fit")
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows:
        exact = x.dtype == torch.float32
        tile = max(16, triton.next_power_of_2(rows))
        _stream_blocks[(triton.cdiv(outputs, _COLUMNS), 1)](
            x,
            blocks.weight.view(torch.uint8),
            blocks.scale,
            blocks.scale if bias is None else bias,
            out,
            rows,
            x.stride(0),
            INPUTS=inputs,
            OUTPUTS=outputs,
            ROWS=tile,
            COLUMNS=_COLUMNS,
            BLOCK=BLOCK,
            OPERAND=tl.float32 if INTERPRETED or exact else getattr(tl, str(x.dtype).removeprefix("torch.")),
            PRECISION="tf32x3" if exact else "tf32",
            BIAS=bias is not None,
            num_warps=4,
            num_stages=6 if tile <= 32 else 4 if tile <= 64 else 3,  # as many bytes in flight as there is room for
        )
    return out


def dequantised(blocks: Fp8Blocks, dtype: torch.dtype) -> Tensor:
    """`blocks.dequantized(dtype)` in one launch. Raises ValueError for strided tensors."""
    if not _in_one_piece(blocks):
        raise ValueError(f"blocks with strides {blocks.weight.stride()} and {blocks.scale.stride()}")
    outputs, inputs = blocks.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=blocks.weight.device)
    _dequantise[(outputs, triton.cdiv(inputs, _WIDTH))](
        blocks.weight.view(torch.uint8), blocks.scale, out, INPUTS=inputs, BLOCK=BLOCK, WIDTH=_WIDTH, num_warps=4
    )
    return out


def _in_one_piece(blocks: Fp8Blocks) -> bool:
    return blocks.weight.is_contiguous() and blocks.scale.is_contiguous()


# ---- the matrices of a model


class Fp8Matrix(Matrix):
    """A `linear.Matrix` of a weight in FP8 blocks: calling it multiplies. No choice of routes concerns it."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: Fp8Blocks, bias: Tensor | None = None) -> None:
        self.blocks, self.bias, self.plain, self.route = blocks, bias, None, Route()

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out] in its dtype; `plus` [..., out] is added."""
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) <= MOST_STREAMED:
            y = streamed_blocks(flat, self.blocks, self.bias)
        else:
            y = linear(flat, dequantised(self.blocks, x.dtype), self.bias)
        y = y.view(*x.shape[:-1], -1)
        return y if plus is None else plus + y


class Fp8GatedMatrix(GatedMatrix):
    """A `linear.GatedMatrix` of weights in FP8 blocks: [2 * out, in], the gate's first."""

    __slots__ = ("_both",)

    def __init__(self, gate_up: Fp8Blocks, activation: Activation = "silu") -> None:
        self._both, self.plain, self.route, self.activation = Fp8Matrix(gate_up), None, Route(), activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return activate(self.both(x), self.activation)

    def both(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., 2 * out]: gate and up before the activation."""
        return self._both(x)
