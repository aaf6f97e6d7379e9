"""Weights of 4 and 8 bits as checkpoints ship them: small numbers, and a scale for each block of n x m of them.

    W_ok = (number(code_ok) - zero_point[o // n, k // m]) * scale[o // n, k // m] * global_scale[o]

| format | numbers | block | scale | further |
|---|---|---|---|---|
| FP8 in blocks | e4m3 | 128 x 128, or others | float32 | |
| FP8 per channel or per tensor | e4m3 | 1 x in | float32 | |
| MXFP8, MXFP4 | e4m3, e2m1 | 1 x 32 | e8m0: a power of two | |
| NVFP4 | e2m1 | 1 x 16 | e4m3 | a global scale |
| AWQ, GPTQ, pack-quantized | uint4, uint8 | 1 x group, 1 x in | float16, bfloat16 | zero points |

e4m3 has 8 bits and is at most 448; e2m1 has 4 bits and is at most 6 (OCP Microscaling Formats, 1.0). Integers without
zero points have theirs in the middle: 8, 128. The last blocks of a matrix may be smaller. Which tensors of a checkpoint
make one weight is not known here.

Shapes: W [out, in], or of experts [experts, out, in].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

Numbers: TypeAlias = Literal["e4m3", "e2m1", "uint4", "uint8"]
FP8: Final = torch.float8_e4m3fn
E8M0: Final = torch.float8_e8m0fnu
MIDDLE: Final[dict[Numbers, int]] = {"uint4": 8, "uint8": 128}
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits of a code; the fourth is the sign
_SCALES: Final = (torch.float32, torch.bfloat16, torch.float16, FP8, E8M0)
_LARGEST: Final[dict[Numbers, float]] = {"e4m3": 448.0, "e2m1": 6.0, "uint4": 7.0, "uint8": 127.0}
_AT_ONCE = 1 << 22  # weights that are dequantised at once


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out, in] or [experts, out, in], see above.

    `codes`: bytes [..., out, in], of 4 bits [..., out, in / 2] with the even column in the lower half. `scales`, and
    `zero_points` in bytes: [..., ceil(out / n), ceil(in / m)] for a `block` (n, m). `global_scale`: float32
    [..., out, 1]. Raises ValueError for other dtypes and for sizes that do not belong together.
    """

    numbers: Numbers
    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    zero_points: Tensor | None = None
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        (*leading, outputs, inputs), (n, m) = self.shape, self.block
        blocks = (*leading, -(-outputs // n), -(-inputs // m))
        wanted = ((torch.uint8,), _SCALES, (torch.uint8,), (torch.float32,))
        shapes = (self.codes.shape, blocks, blocks, (*leading, outputs, 1))
        for tensor, dtypes, shape in zip(self.tensors, wanted, shapes, strict=True):
            if tensor is not None and (tensor.dtype not in dtypes or tensor.shape != shape):
                weight = f"a weight {tuple(self.shape)} of {self.numbers} in blocks of {n} x {m}"
                raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)} is no part of {weight}")

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.codes, self.scales, self.zero_points, self.global_scale

    @property
    def bits(self) -> int:
        return 4 if self.numbers in ("e2m1", "uint4") else 8

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits))

    @property
    def kind(self) -> tuple[Numbers, int, torch.dtype]:
        """What weights have in common that can become one."""
        return self.numbers, self.block[1], self.scales.dtype

    @property
    def in_tiles(self) -> bool:
        """Whether a GPU's kernels can multiply with it: a scale has 16, 32, 64 or many times 128 inputs, or all."""
        width = self.block[1]
        return width >= self.shape[-1] or width % 128 == 0 or width in (16, 32, 64)

    def __getitem__(self, expert: int) -> "QuantizedWeight":
        return self._changed(lambda each: each[expert])

    def to(self, device: str | torch.device) -> "QuantizedWeight":
        return self._changed(lambda each: each.to(device))

    def rows(self, order: Tensor) -> "QuantizedWeight":
        """The outputs in this order [out']. Blocks become lower where it cuts them."""
        begins = torch.cat((order.new_zeros(1), 1 + torch.nonzero(order.diff() != 1).flatten()))
        height = math.gcd(self.block[0], *begins.tolist(), *order[begins].tolist())
        blocks = order[::height] // height
        return self.lower(height)._changed(lambda each: _rows(each, order), lambda each: _rows(each, blocks))

    def lower(self, height: int) -> "QuantizedWeight":
        """The same weight in blocks of `height` outputs, a divisor of the present number."""
        n, m = self.block
        blocks = -(-self.shape[-2] // height)
        spread = torch.arange(blocks, device=self.codes.device) // (n // height)
        return self if n == height else self._changed(lambda each: each, lambda each: _rows(each, spread), (height, m))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight in another dtype: each product is rounded once to it, from float32 (or float64)."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        self._write(out, torch.promote_types(dtype, torch.float32))
        return out

    def _write(self, out: Tensor, exact: torch.dtype) -> None:
        if out.ndim > 2:
            for expert, matrix in enumerate(out):
                self[expert]._write(matrix, exact)
            return
        (outputs, inputs), n = self.shape, self.block[0]
        height = max(1, _AT_ONCE // (n * inputs)) * n
        for first in range(0, outputs, height):
            out[first : first + height] = self._numbers(first, min(first + height, outputs), exact)

    def _numbers(self, first: int, end: int, exact: torch.dtype) -> Tensor:
        """Rows of a matrix in float32 or float64. The first begins a block."""
        codes, (n, m) = self.codes[first:end], self.block

        def spread(blocks: Tensor) -> Tensor:
            """The value of each weight."""
            some = blocks[first // n : -(-end // n)].to(exact)
            return some[:, None, :, None].expand(-1, n, -1, m).flatten(2).flatten(0, 1)[: end - first, : self.shape[1]]

        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        if self.numbers == "e4m3":
            found = codes.view(FP8).to(exact)
        elif self.numbers == "e2m1":
            found = codes.new_tensor((*E2M1, *(-each for each in E2M1)), dtype=exact)[codes.int()]
        else:
            middle = MIDDLE[self.numbers] if self.zero_points is None else spread(self.zero_points)
            found = codes.to(exact).sub_(middle)
        found.mul_(spread(self.scales))
        return found if self.global_scale is None else found.mul_(self.global_scale[first:end])

    def _changed(
        self,
        of_rows: Callable[[Tensor], Tensor],
        of_blocks: Callable[[Tensor], Tensor] | None = None,
        block: tuple[int, int] | None = None,
    ) -> "QuantizedWeight":
        """With other tensors: those that have a row for each output, and those that have one for each block."""
        blocks = of_blocks or of_rows
        return QuantizedWeight(
            self.numbers,
            of_rows(self.codes),
            blocks(self.scales),
            block or self.block,
            None if self.zero_points is None else blocks(self.zero_points),
            None if self.global_scale is None else of_rows(self.global_scale),
        )

    def _filled(self, zero_points: bool, global_scale: bool) -> "QuantizedWeight":
        """With zero points and a global scale, where asked, though they change nothing."""
        middle, ones = self.zero_points, self.global_scale
        if zero_points and middle is None:
            middle = torch.full_like(self.scales, MIDDLE[self.numbers], dtype=torch.uint8)
        if global_scale and ones is None:
            ones = torch.ones((*self.shape[:-1], 1), device=self.codes.device)
        return replace(self, zero_points=middle, global_scale=ones)


Weight: TypeAlias = Tensor | QuantizedWeight


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A weight in this dtype."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantized(dtype)


def concatenated(weights: Sequence[QuantizedWeight], experts: bool = False) -> QuantizedWeight:
    """One weight of matrices [out, in]: one above the other, or [experts, out, in].

    Raises ValueError where they are not of one format.
    """
    first = weights[0]
    if len({each.kind for each in weights}) > 1:
        raise ValueError("weights of different formats do not become one")
    begins = () if experts else (each.shape[-2] for each in weights[:-1])
    height = math.gcd(*(each.block[0] for each in weights), *begins)
    zero_points = any(each.zero_points is not None for each in weights)
    global_scale = any(each.global_scale is not None for each in weights)
    alike = [each.lower(height)._filled(zero_points, global_scale).tensors for each in weights]

    def joined(part: int) -> Tensor:
        tensors = [tensor for each in alike if (tensor := each[part]) is not None]
        return torch.stack(tensors) if experts else torch.cat(tensors, -2)

    return QuantizedWeight(
        first.numbers,
        joined(0),
        joined(1),
        (height, first.block[1]),
        joined(2) if zero_points else None,
        joined(3) if global_scale else None,
    )


def _rows(tensor: Tensor, order: Tensor) -> Tensor:
    """Rows in another order. torch has one of bytes in every version, but not of each dtype of 8 bits."""
    plain = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    return plain.index_select(-2, order.to(tensor.device)).view(tensor.dtype)


# ---- from weights in floats


def quantized(
    weight: Tensor,
    numbers: Numbers,
    block: tuple[int, int],
    scales: torch.dtype = torch.float32,
    asymmetric: bool = False,
) -> QuantizedWeight:
    """The nearest numbers to a weight [out, in], by the largest value of each block; with scales in e4m3 by a global
    scale as well. `asymmetric`: integers with zero points, by the least value too. Scales in e8m0 are the next power
    of two above, so nothing is cut off.
    """
    outputs, inputs = weight.shape
    n, m = min(block[0], outputs), min(block[1], inputs)
    rows, columns = -(-outputs // n), -(-inputs // m)
    padded = torch.nn.functional.pad(weight.float(), (0, columns * m - inputs, 0, rows * n - outputs))
    blocks = padded.view(rows, n, columns, m)
    low, high = blocks.amin((1, 3)).clamp_max(0), blocks.amax((1, 3)).clamp_min(0)
    step = (high - low) / (2 * _LARGEST[numbers] + 1) if asymmetric else torch.maximum(high, -low) / _LARGEST[numbers]
    global_scale = None
    if scales == FP8:
        overall = (step.max() / torch.finfo(FP8).max).clamp_min(1e-30)
        step, global_scale = step / overall, overall.expand(outputs, 1).contiguous()
    elif scales == E8M0:
        step = torch.exp2(torch.ceil(torch.log2(step.clamp_min(2.0**-126))))
    step = torch.where(step > 0, step, 1.0).to(scales)
    spread = step.float() if global_scale is None else step.float() * global_scale[0]
    units = blocks / torch.where(spread > 0, spread, 1.0)[:, None, :, None]
    zero_points = None
    if asymmetric:
        zero_points = (-low / spread).round().clamp(0, 2 * _LARGEST[numbers] + 1).to(torch.uint8)
    codes = _codes(units, numbers, zero_points).view(rows * n, columns * m)[:outputs, :inputs]
    if numbers in ("e2m1", "uint4"):
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return QuantizedWeight(numbers, codes.contiguous(), step, (n, m), zero_points, global_scale)


def _codes(units: Tensor, numbers: Numbers, zero_points: Tensor | None) -> Tensor:
    """The code of the nearest number to each unit [rows, n, columns, m]."""
    if numbers == "e4m3":
        return units.clamp(-448, 448).to(FP8).view(torch.uint8)
    if numbers == "e2m1":  # by the middles between numbers; a tie goes to the even code
        numbers_of = units.new_tensor(E2M1)
        middles = (numbers_of[1:] + numbers_of[:-1]) / 2
        size = units.abs().contiguous()
        up, down = torch.bucketize(size, middles, right=True), torch.bucketize(size, middles)
        return (torch.where(up % 2 == 0, up, down) + 8 * (units < 0)).to(torch.uint8)
    middle = MIDDLE[numbers] if zero_points is None else zero_points[:, None, :, None].float()
    return (units.round() + middle).clamp(0, 2 * MIDDLE[numbers] - 1).to(torch.uint8)


def quantized_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in float64, from the weight as it is stored."""
    y = x.double() @ weight.dequantized(torch.float64).mT
    return y if bias is None else y + bias.double()
