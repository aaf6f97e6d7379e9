"""Weights in FP8 with a scale for each block of 128 x 128, as Qwen's and DeepSeek's checkpoints store them.

    W_ok = w_ok * scale[o // 128, k // 128]

The numbers w are e4m3 (4 bits of exponent, 3 of mantissa, at most 448), the scales float32. A checkpoint stores them as
`weight` and `weight_scale_inv`; in spite of its name the scale multiplies. The last blocks of a matrix may be smaller.
Activations can be quantised, too: each row in groups of 128, with a scale for each group.

Shapes: x [R, in], W [out, in], y [R, out].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 128
FP8: Final = torch.float8_e4m3fn
_MOST = torch.finfo(FP8).max


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Blocks:
    """A matrix [out, in]: `weight` in e4m3, and `scale` [ceil(out / 128), ceil(in / 128)] float32.

    Raises ValueError for other dtypes and for sizes that do not belong together.
    """

    weight: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.weight.dtype != FP8 or self.scale.dtype != torch.float32:
            raise ValueError(f"{self.weight.dtype} weights and {self.scale.dtype} scales are not FP8 in blocks")
        if self.scale.shape != _blocks(*self.weight.shape):
            sizes = f"{tuple(self.weight.shape)} weights with {tuple(self.scale.shape)} scales"
            raise ValueError(f"{sizes} are not blocks of {BLOCK} x {BLOCK}")

    @staticmethod
    def empty(outputs: int, inputs: int, device: str | torch.device = "cpu") -> "Fp8Blocks":
        """A matrix of undefined values."""
        weight = torch.empty(outputs, inputs, dtype=FP8, device=device)
        return Fp8Blocks(weight, torch.empty(_blocks(outputs, inputs), dtype=torch.float32, device=device))

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def split(self, sizes: Sequence[int]) -> list["Fp8Blocks"]:
        """Views of the matrices that stand in this one, one above the other, with so many outputs each.

        Raises ValueError where one of them begins inside a block: it would share scales with the one above.
        """
        if any(size % BLOCK for size in sizes[:-1]):
            raise ValueError(f"matrices of {tuple(sizes)} outputs do not begin with blocks of {BLOCK}")
        scales = torch.split(self.scale, [-(-size // BLOCK) for size in sizes])
        return [Fp8Blocks(*each) for each in zip(torch.split(self.weight, list(sizes)), scales, strict=True)]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The matrix in another dtype: each product is rounded once, from float32 (or float64) to it."""
        exact = torch.promote_types(dtype, torch.float32)
        outputs, inputs = self.shape
        if outputs % BLOCK == 0 and inputs % BLOCK == 0:  # then no scale is copied
            blocks = self.weight.view(-1, BLOCK, inputs // BLOCK, BLOCK).to(exact)
            return (blocks * self.scale.to(exact)[:, None, :, None]).to(dtype).view(outputs, inputs)
        return (self.weight.to(exact) * _spread(self.scale, outputs, inputs).to(exact)).to(dtype)


def quantized_blocks(weight: Tensor) -> Fp8Blocks:
    """The nearest matrix in FP8: the largest value of each block becomes 448."""
    outputs, inputs = weight.shape
    rows, columns = _blocks(outputs, inputs)
    filled = torch.zeros(rows * BLOCK, columns * BLOCK, device=weight.device)
    filled[:outputs, :inputs] = weight
    scale = _scales(filled.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)))
    return Fp8Blocks((weight.float() / _spread(scale, outputs, inputs)).to(FP8), scale)


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, in] in FP8, and the scales [R, in / 128] of its groups in float32. `in` is a multiple of 128."""
    groups = x.float().view(len(x), -1, BLOCK)
    scale = _scales(groups.abs().amax(-1))
    return (groups / scale[..., None]).to(FP8).view(x.shape), scale


def fp8_reference(x: Tensor, blocks: Fp8Blocks, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in float64, from the weights as they are stored."""
    y = x.double() @ blocks.dequantized(torch.float64).T
    return y if bias is None else y + bias.double()


def _blocks(outputs: int, inputs: int) -> tuple[int, int]:
    return -(-outputs // BLOCK), -(-inputs // BLOCK)


def _scales(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest / _MOST, 1.0)


def _spread(scale: Tensor, outputs: int, inputs: int) -> Tensor:
    """The scale of each weight [out, in]."""
    return scale.repeat_interleave(BLOCK, 0)[:outputs].repeat_interleave(BLOCK, 1)[:, :inputs]
