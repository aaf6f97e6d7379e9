"""RMSNorm with the residual's sum in one pass: y = w r / sqrt(mean(r^2) + eps) with r = x + residual, written back.

Shapes: x, residual [T, D]; w [D]. Sums in float32. Source: Zhang and Sennrich 2019.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, out, eps, row_stride, WIDTH: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * row_stride
    at = tl.arange(0, TILE)
    real = at < WIDTH
    value = tl.load(x + row + at, mask=real, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + at, mask=real, other=0.0).to(tl.float32)
        # What the next layer adds to is rounded to the residual's dtype, and so is what is normed here.
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row + at, rounded, mask=real)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
    normed = value * scale * tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row + at, normed.to(out.dtype.element_ty), mask=real)


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The norm of `x` + `residual`, a new tensor [T, D]; the sum replaces `residual`. Without one: the norm of `x`.

    Raises ValueError for shapes that differ or rows that are not in one piece.
    """
    if residual is not None and (residual.shape != x.shape or residual.stride() != x.stride()):
        raise ValueError(f"residual {tuple(residual.shape)} and input {tuple(x.shape)} differ")
    if x.ndim != 2 or x.stride(1) != 1 or weight.shape != x.shape[1:] or x.stride(0) != x.shape[1]:
        raise ValueError(f"input {tuple(x.shape)}, strides {x.stride()}, and weight {tuple(weight.shape)} do not fit")
    out = torch.empty_like(x)
    if len(x):
        tile = triton.next_power_of_2(x.shape[1])
        _add_norm[(len(x),)](
            x,
            x if residual is None else residual,
            weight,
            out,
            eps,
            x.stride(0),
            WIDTH=x.shape[1],
            TILE=tile,
            ADD=residual is not None,
            num_warps=max(1, min(16, tile // 512)),
        )
    return out


def add_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`add_norm` in float64."""
    total = x
    if residual is not None:
        total = residual.copy_((x.double() + residual.double()).to(x.dtype))
    exact = total.double()
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)
