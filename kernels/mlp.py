"""SiLU-and-multiply of a fused gate and up projection: y = silu(gate) up, silu(z) = z / (1 + e^-z).

Shapes: input [T, 2 I], the gate's half first; output [T, I]. In float32 within.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

_TILE = 1024


@triton.jit
def _silu_and_mul(gate_up, out, row_stride, INNER: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = at < INNER
    gate = tl.load(gate_up + row * row_stride + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + INNER + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=real)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) up, a new tensor [T, I]. Raises ValueError for an odd width or rows that are not in one piece."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"a fused projection {tuple(gate_up.shape)} with strides {gate_up.stride()} has no two halves")
    inner = gate_up.shape[1] // 2
    out = torch.empty(len(gate_up), inner, dtype=gate_up.dtype, device=gate_up.device)
    if len(out):
        _silu_and_mul[(len(out), triton.cdiv(inner, _TILE))](gate_up, out, gate_up.stride(0), INNER=inner, TILE=_TILE)
    return out


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` in float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return (silu(gate) * up).to(gate_up.dtype)
