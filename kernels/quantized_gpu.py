"""Products with quantised weights on a GPU: few rows read them as they are stored, many rows multiply in 16 bits.

Maths: y = x W^T + b with W as in `quantized`. Shapes: x [R, in], W [out, in], y [R, out].

Few rows: one or half a byte is read for each weight, and becomes a 16-bit number in registers, which is exact. Where a
scale has many inputs, 64 or 128 are summed in float32 before it multiplies the sum. So the error is below that of a
product with the weights rounded to bfloat16. Scales of fewer inputs multiply the numbers. In bfloat16 that is exact for
MXFP4, MXFP8 and NVFP4, and for integers rounds like a weight in bfloat16. Rows of W take the place of rows of x.
Several programs may share the inputs of an output; the last one to finish adds their sums, always in one order.

Many rows: W in the dtype of x is written first, for torch to multiply with. That costs 4 bytes moved for each weight,
and those of the weight itself. Activations are not quantised.

Codes of 4 bits are ordered anew when a matrix is made: of 128 inputs the first 64 have the lower halves of 64 bytes, so
both halves meet neighbouring values of x.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad

from holdfast.kernels.attention_gpu import INTERPRETED, packed_numbers
from holdfast.kernels.linear import Activation, GatedMatrix, Matrix, Route, activate
from holdfast.kernels.quantized import E8M0, FP8, MIDDLE, QuantizedWeight

MOST_STREAMED = 128
_DEPTH = 128  # inputs that a program multiplies at once
_WIDTH = 2048  # weights that one program turns into another dtype
_UNITS: Final = {"e4m3": 256.0, "e2m1": 2.0**14, "uint4": 1.0, "uint8": 1.0}  # of what `_numbers` returns


@triton.jit
def _numbers(code, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers over their unit (`_UNITS`), exactly. Floats keep their bits, with zeros before the exponent in float16,
    whose bias differs by 8 and 14.
    """
    if NUMBERS == "e4m3":
        wide = code.to(tl.uint16)
        number = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    elif NUMBERS == "e2m1":
        wide = code.to(tl.uint16)
        number = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)
    else:
        number = code.to(tl.float32)
    return number


@triton.jit
def _scales(stored, SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales in float32."""
    if SCALES == "e8m0":
        scale = (stored.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    elif SCALES == "e4m3":
        scale = _numbers(stored, "e4m3").to(tl.float32) * 256.0
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit(do_not_specialize=["rows"])
def _stream_quantized(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    zeros,
    global_scale,
    bias,
    out,
    partial,  # [SPLIT, rows, out] float32, and
    arrived,  # [programs of a part]: zeros, of programs that are done; both with SPLIT > 1 only
    rows,
    x_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,  # programs that share the inputs of an output
    DEPTH: tl.constexpr,
    HIGH: tl.constexpr,  # outputs of a scale
    WIDE: tl.constexpr,  # inputs of a scale
    NUMBERS: tl.constexpr,
    SCALES: tl.constexpr,
    UNIT: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    GLOBAL: tl.constexpr,
    BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,  # four codes of e4m3 become numbers of bfloat16 at once
):
    HALVES: tl.constexpr = 2 if NUMBERS == "e2m1" or NUMBERS == "uint4" else 1
    PIECE: tl.constexpr = DEPTH // HALVES  # inputs that are multiplied at once, one a byte
    TILES: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    STRIDE: tl.constexpr = TILES * PIECE if HALVES == 2 else INPUTS
    GROUPS: tl.constexpr = (INPUTS + WIDE - 1) // WIDE
    EACH: tl.constexpr = (TILES + SPLIT - 1) // SPLIT
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    held = tl.minimum(column, OUTPUTS - 1)  # rows of W beyond the last are read as the last, and not stored
    at = codes + held.to(tl.int64)[:, None] * STRIDE
    if HIGH % COLUMNS == 0:
        line = tl.zeros([COLUMNS], tl.int32) + tl.program_id(0) * COLUMNS // HIGH * GROUPS
    else:
        line = held // HIGH * GROUPS
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    part_of = tl.program_id(1)
    for tile in tl.range(part_of * EACH, tl.minimum(part_of * EACH + EACH, TILES)):
        byte = tile * PIECE + tl.arange(0, PIECE)
        if STRIDE % PIECE == 0:
            pair = tl.load(at + byte[None, :], eviction_policy="evict_first")
        else:
            pair = tl.load(at + byte[None, :], mask=(byte < STRIDE)[None, :], other=0)
        for half in tl.static_range(HALVES):
            code = pair if HALVES == 1 else (pair >> 4 * half) & 15
            first = tile * DEPTH + half * PIECE
            depth = first + tl.arange(0, PIECE)
            there = (row < rows)[None, :] & (depth < INPUTS)[:, None]
            a = tl.load(x + row[None, :] * x_stride + depth[:, None], mask=there, other=0.0).to(OPERAND)
            if PACKED:
                number = packed_numbers(code)
            else:
                number = _numbers(code, NUMBERS)
            if WIDE >= PIECE:
                place = line + tl.minimum(first // WIDE, GROUPS - 1)
                if ZEROS:
                    number -= tl.load(zeros + place).to(tl.float32)[:, None]
                elif MIDDLE:
                    number -= MIDDLE
                part = tl.dot(number.to(OPERAND), a, input_precision=PRECISION)
                total += part * (_scales(tl.load(scales + place), SCALES) * UNIT)[:, None]
            else:
                group = first // WIDE + tl.arange(0, PIECE // WIDE)
                place, real = line[:, None] + group[None, :], (group < GROUPS)[None, :]
                each = number.to(tl.float32).reshape(COLUMNS, PIECE // WIDE, WIDE)
                if ZEROS:
                    each -= tl.load(zeros + place, mask=real, other=0).to(tl.float32)[:, :, None]
                elif MIDDLE:
                    each -= MIDDLE
                each *= (_scales(tl.load(scales + place, mask=real, other=0), SCALES) * UNIT)[:, :, None]
                total = tl.dot(each.reshape(COLUMNS, PIECE).to(OPERAND), a, total, input_precision=PRECISION)
    real = (column < OUTPUTS)[:, None] & (row < rows)[None, :]
    place = row[None, :] * OUTPUTS + column[:, None]
    last = True
    if SPLIT > 1:
        tl.store(partial + part_of * rows * OUTPUTS + place, total, mask=real)
        tl.debug_barrier()  # the whole program's sums are written before it is counted
        last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == SPLIT - 1
        if last:  # the sums of all parts in their order; what other multiprocessors wrote is not read from a cache
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for each in tl.static_range(SPLIT):
                total += tl.load(partial + each * rows * OUTPUTS + place, mask=real, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
    if last:
        if GLOBAL:
            total *= tl.load(global_scale + held)[:, None]
        if BIAS:
            total += tl.load(bias + held).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=real)


@triton.jit
def _dequantise(  # type: ignore[no-untyped-def]
    codes,
    scales,
    zeros,
    global_scale,
    out,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    NUMBERS: tl.constexpr,
    SCALES: tl.constexpr,
    UNIT: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    GLOBAL: tl.constexpr,
):
    row = tl.program_id(0)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = k < INPUTS
    if NUMBERS == "e2m1" or NUMBERS == "uint4":
        HALF: tl.constexpr = DEPTH // 2
        place = row.to(tl.int64) * ((INPUTS + DEPTH - 1) // DEPTH * HALF) + k // DEPTH * HALF + k % HALF
        code = (tl.load(codes + place, mask=real, other=0) >> (k // HALF % 2 * 4).to(tl.uint8)) & 15
    else:
        code = tl.load(codes + row.to(tl.int64) * INPUTS + k, mask=real, other=0)
    at = row // HIGH * ((INPUTS + WIDE - 1) // WIDE) + k // WIDE
    number = _numbers(code, NUMBERS).to(tl.float32)
    if ZEROS:
        number -= tl.load(zeros + at, mask=real, other=0).to(tl.float32)
    elif MIDDLE:
        number -= MIDDLE
    number *= _scales(tl.load(scales + at, mask=real, other=0), SCALES) * UNIT
    if GLOBAL:
        number *= tl.load(global_scale + row)
    tl.store(out + row.to(tl.int64) * INPUTS + k, number.to(out.dtype.element_ty), mask=real)


# ---- the matrices of a model


@dataclass(frozen=True, slots=True)
class _PackedTile:
    """A program's outputs, the programs that share their inputs, its warps, and tiles in flight."""

    columns: int
    split: int
    warps: int
    stages: int


class QuantizedMatrix(Matrix):
    """A `linear.Matrix` of a quantised weight [out, in]: calling it multiplies. No choice of routes concerns it.

    Raises ValueError for a weight that is not `in_tiles`, or of experts.
    """

    __slots__ = ("_arrived", "_form", "_tensors", "shape")

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        if not weight.in_tiles or len(weight.shape) != 2:
            sizes = f"{tuple(weight.shape)} in blocks of {weight.block}"
            raise ValueError(f"weights {sizes} are not for the kernels of a GPU")
        self.bias, self.plain, self.route, self.shape = bias, None, Route(), weight.shape
        codes = _in_halves(weight.codes) if weight.bits == 4 else weight.codes.contiguous()
        scales, zeros, global_scale = (None if each is None else each.contiguous() for each in weight.tensors[1:])
        assert scales is not None
        plain = scales.view(torch.uint8) if scales.itemsize == 1 else scales
        # Of two tensors that need not be there another takes the place, and is not read.
        self._tensors = (
            codes,
            plain,
            codes if zeros is None else zeros,
            plain if global_scale is None else global_scale,
        )
        self._arrived = torch.zeros(triton.cdiv(weight.shape[0], 16), dtype=torch.int32, device=codes.device)
        self._form = {
            "INPUTS": weight.shape[1],
            "DEPTH": _DEPTH,
            "HIGH": weight.block[0],
            "WIDE": weight.block[1],
            "NUMBERS": weight.numbers,
            "SCALES": {FP8: "e4m3", E8M0: "e8m0"}.get(scales.dtype, "plain"),
            "UNIT": _UNITS[weight.numbers],
            "MIDDLE": MIDDLE.get(weight.numbers, 0),
            "ZEROS": zeros is not None,
            "GLOBAL": global_scale is not None,
        }

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out] in its dtype; `plus` [..., out] is added."""
        flat = x.reshape(-1, x.shape[-1])
        y = self.streamed(flat) if len(flat) <= MOST_STREAMED else linear(flat, self.dequantised(x.dtype), self.bias)
        y = y.view(*x.shape[:-1], -1)
        return y if plus is None else plus + y

    def streamed(self, x: Tensor) -> Tensor:
        """x [R, in] -> y [R, out], for up to `MOST_STREAMED` rows. Raises ValueError for more, and for strided rows."""
        rows, (outputs, inputs) = len(x), self.shape
        if x.shape != (rows, inputs) or rows > MOST_STREAMED or x.stride(1) != 1:
            raise ValueError(
                f"rows {tuple(x.shape)}, strides {x.stride()}, and a weight {outputs} x {inputs} do not fit"
            )
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        if rows:
            tile = self._tile(rows)
            parts = (triton.cdiv(outputs, tile.columns), tile.split)
            partial = out
            if tile.split > 1:
                partial = torch.empty(tile.split, rows, outputs, dtype=torch.float32, device=x.device)
            exact, form = x.dtype == torch.float32, dict(self._form)
            packed = form["NUMBERS"] == "e4m3" and x.dtype == torch.bfloat16 and not INTERPRETED
            if packed:
                form["UNIT"] = 1.0
            _stream_quantized[parts](
                x,
                *self._tensors,
                out if self.bias is None else self.bias,
                out,
                partial,
                self._arrived,
                rows,
                x.stride(0),
                OUTPUTS=outputs,
                ROWS=max(16, triton.next_power_of_2(rows)),
                COLUMNS=tile.columns,
                SPLIT=tile.split,
                BIAS=self.bias is not None,
                OPERAND=tl.float32 if INTERPRETED or exact else getattr(tl, str(x.dtype).removeprefix("torch.")),
                PRECISION="tf32x3" if exact else "tf32",
                PACKED=packed,
                **form,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        return out

    def _tile(self, rows: int) -> _PackedTile:
        """The tile for so many rows. Up to 32 rows, programs share the inputs where there are few outputs."""
        outputs, inputs = self.shape
        if rows > 64:
            return _PackedTile(64, 1, 8, 3)
        if rows > 32:
            return _PackedTile(64, 1, 4, 4)
        tile, programs = (
            (_PackedTile(32, 1, 2, 6), 640) if rows <= 16 else (_PackedTile(64, 1, 4, 3), 480)
        )  # the fastest on Hopper
        split = min(programs // triton.cdiv(outputs, tile.columns), inputs // (8 * _DEPTH))
        return replace(tile, split=max(1, split))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight's `dequantized(dtype)`, in one launch."""
        outputs, inputs = self.shape
        out = torch.empty(outputs, inputs, dtype=dtype, device=self._tensors[0].device)
        _dequantise[(outputs, triton.cdiv(inputs, _WIDTH))](
            *self._tensors, out, WIDTH=_WIDTH, **self._form, num_warps=4
        )
        return out


class QuantizedGatedMatrix(GatedMatrix):
    """A `linear.GatedMatrix` of a quantised weight [2 * out, in], the gate's first."""

    __slots__ = ("_both",)

    def __init__(self, gate_up: QuantizedWeight, activation: Activation = "silu") -> None:
        self._both, self.plain, self.route, self.activation = QuantizedMatrix(gate_up), None, Route(), activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return activate(self.both(x), self.activation)

    def both(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., 2 * out]: gate and up before the activation."""
        return self._both(x)


def _in_halves(codes: Tensor) -> Tensor:
    """Codes of 4 bits [out, in / 2] in the kernels' order, with zeros up to 128: byte j of 64 has columns j, j + 64."""
    each = pad(torch.stack((codes & 15, codes >> 4), -1).flatten(1), (0, -2 * codes.shape[1] % _DEPTH))
    low, high = each.view(len(each), -1, 2, _DEPTH // 2).unbind(2)
    return (low | high << 4).flatten(1)
