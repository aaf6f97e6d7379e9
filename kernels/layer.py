"""The small operators of a decoder's layer: RMSNorm, the gated activation, and rotary embedding with the KV store.

Maths, for a row x of d values, its weight w, and half of the values that turn (all d, or the first ones of a head):

    norm      y_i = w_i x_i / sqrt(mean x^2 + eps)                            Zhang and Sennrich 2019
              y_i silu(z_i) behind Gated DeltaNet, with a gate z; behind Mamba-2 the norm of x_i silu(z_i)
    rotate    y_i = x_i cos_i - x_{i+half} sin_i,  y_{i+half} = x_{i+half} cos_i + x_i sin_i     Su et al. 2021,
              in the order of pairs that Hugging Face checkpoints use;  y_i = x_i from 2 half on
    gate      y = silu(gate) up,  silu(z) = z / (1 + e^-z)

Here: the norm and the rotation on a CPU, and the references of all. Each is some ten small operators in torch, which
for one row take as long as the layer's attention. The kernel in `layer_c.c` does each in one call, in float32 in
between. Where it is not built or does not fit, torch computes. On a GPU: `layer_gpu`; the gate on a CPU: `linear`.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.kernels import native
from holdfast.kernels.kv import head_dim, in_store, store_kv

LIBRARY = native.Library("layer")
LANES: dict[native.Level, int] = {"avx512": 16, "avx2": 8}  # float32 values of a vector
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


# ---- the kernel


class _Turn(ctypes.Structure):
    """`Turn` in layer_c.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("team", "positions", "cells", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "dim", "half")),
        *((name, ctypes.c_int64) for name in ("qkv_row", "cell_stride", "head_stride")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("threads", "int8")),
    ]


@functools.cache
def kernel(
    what: str, level: native.Level, dtype: torch.dtype, dim: int = 0, half: int = 0
) -> Callable[..., None] | None:
    """The function `what` at the highest usable level: "norm", or "rotate" of heads of `dim`, twice `half` of which
    turn. None: torch computes.
    """
    levels = (each for each in native.levels_below(level) if each in LANES)
    found = next((each for each in levels if not dim % LANES[each] and not half % LANES[each]), None)
    if found is None or dtype not in _DTYPES or LIBRARY.missing:
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    norm = [pointer, pointer, long, pointer, pointer, long, long, pointer, long, long, ctypes.c_float]
    norm += [ctypes.c_int32] * 2
    return LIBRARY.function(f"{what}_{found}_{_DTYPES[dtype]}", *(norm if what == "norm" else [pointer] * 6))


# ---- the norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each row of x [T, D], a new tensor; `weight` [D] float32."""
    return _norm(x, weight, eps, None, 1)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm(x) silu(gate) for each head: a new tensor [T, H d]. x [T, H, d] in one piece, `gate` [T, H d], `weight` [d]
    float32.
    """
    tokens, heads, dim = x.shape
    return _norm(x.view(-1, dim), weight, eps, gate, heads).view(tokens, heads * dim)


def norm_of_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x silu(gate) for each group: a new tensor [T, G d]. x [T, G, d] in one piece, `gate` [T, G d],
    `weight` [G d] float32.
    """
    tokens, groups, dim = x.shape
    return _norm(x.view(-1, dim), weight, eps, gate, groups, before=True).view(tokens, groups * dim)


def _norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, heads: int, *, before: bool = False) -> Tensor:
    norm = kernel("norm", native.level(), x.dtype) if x.device.type == "cpu" else None
    gated = gate is not None and gate.dtype == x.dtype and gate.stride(1) == 1
    if norm is None or x.stride(1) != 1 or weight.dtype != torch.float32 or gated != (gate is not None):
        silu = None if gate is None else functional.silu(gate.float()).reshape(x.shape)
        y = functional.rms_norm(x.float() * silu if silu is not None and before else x.float(), x.shape[1:], None, eps)
        y = (y.view(-1, weight.numel()) * weight.float()).view(x.shape)
        return (y if silu is None or before else y * silu).to(x.dtype)
    y = torch.empty(x.shape, dtype=x.dtype)
    norm(
        native.team(),
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if gate is None else gate.data_ptr(),
        0 if gate is None else gate.stride(0),
        heads,
        y.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        torch.get_num_threads(),
        before,
    )
    return y


# ---- the rotation


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d] turned by its tokens' `cos`, `sin` [T, 1, half]; values from 2 half on stay as they are."""
    half = cos.shape[-1]
    low, high, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


@dataclass(slots=True)
class Rotation:
    """What the layers of a forward share: its tokens' positions and cells, and the angles of all positions.

    `cos`, `sin` [context, half] float32, twice `half` at most d; `positions`, `cells` [T] int64; `kv`: the paged store.
    `heads`: of queries. Cells must differ from each other. Raises IndexError for positions or cells that do not exist.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    cells: Tensor
    kv: Tensor
    heads: int
    eps: float
    _turn: _Turn | None = None

    def __post_init__(self) -> None:
        kv, tokens, tables = self.kv, len(self.positions), (self.cos, self.sin)
        _check("positions", self.positions, tokens, len(self.cos))
        _check("cells", self.cells, tokens, kv.shape[2] * kv.shape[3])
        dim = head_dim(kv)
        usable = (
            kv.device.type == "cpu"
            and not LIBRARY.missing
            and kv.stride(5) == 1
            and kv.stride(2) == kv.shape[3] * kv.stride(3)
            and all(table.dtype == torch.float32 and table.is_contiguous() for table in tables)
            and self.positions.is_contiguous()
            and self.cells.is_contiguous()
        )
        if not usable:
            return
        self._turn = _Turn(
            native.team(),
            self.positions.data_ptr(),
            self.cells.data_ptr(),
            self.cos.data_ptr(),
            self.sin.data_ptr(),
            tokens,
            self.heads,
            kv.shape[4],
            dim,
            self.cos.shape[1],
            0,  # the row of `qkv`, which may differ from layer to layer
            kv.stride(3) * kv.itemsize,
            kv.stride(4) * kv.itemsize,
            self.eps,
            torch.get_num_threads(),
            kv.dtype == torch.int8,
        )

    def rotate_and_store(self, qkv: Tensor, layer: int, norms: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Turn queries and keys in place, store keys and values of `layer`; returns the queries, a view [T, heads, d].

        `qkv` [T, heads + 2 kv_heads, d], a token's in one piece, in the store's dtype unless that is int8; `norms`:
        weights [d] float32 of queries and keys, which are normed before. Raises ValueError for other shapes.
        """
        kv, heads = self.kv, self.heads
        kv_heads, dim = kv.shape[4], head_dim(kv)
        if qkv.shape != (len(self.positions), heads + 2 * kv_heads, dim) or qkv.stride()[1:] != (dim, 1):
            raise ValueError(f"{tuple(qkv.shape)} with {heads} heads does not fit the store {tuple(kv.shape)}")
        rotate = kernel("rotate", native.level(), qkv.dtype, dim, self.cos.shape[1])
        if rotate is None or self._turn is None or kv.dtype not in (qkv.dtype, torch.int8):
            self._in_torch(qkv, layer, norms)
        else:
            of_layer = kv.data_ptr() + layer * kv.stride(0) * kv.itemsize
            q_norm, k_norm = (norm.data_ptr() for norm in norms) if norms is not None else (None, None)
            values = of_layer + kv.stride(1) * kv.itemsize
            self._turn.qkv_row = qkv.stride(0)
            rotate(ctypes.addressof(self._turn), qkv.data_ptr(), q_norm, k_norm, of_layer, values)
        return qkv[:, :heads]

    def _in_torch(self, qkv: Tensor, layer: int, norms: tuple[Tensor, Tensor] | None) -> None:
        heads, kv_heads = self.heads, self.kv.shape[4]
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            for x, weight in zip((q, k), norms, strict=True):
                x.copy_(functional.rms_norm(x.float(), weight.shape, weight.float(), self.eps))
        cos, sin = (table[self.positions][:, None] for table in (self.cos, self.sin))
        qk = qkv[:, : heads + kv_heads]
        qk.copy_(rotated(qk.float(), cos, sin))
        store_kv(self.kv, layer, k, v, self.cells)


def _check(name: str, numbers: Tensor, tokens: int, most: int) -> None:
    if numbers.shape != (tokens,) or numbers.dtype != torch.int64:
        raise ValueError(f"{name} of {tokens} tokens are {numbers.dtype} {tuple(numbers.shape)}")
    if tokens and numbers.device.type == "cpu":  # on other devices torch checks when it writes
        low, high = (int(each) for each in torch.aminmax(numbers))
        if low < 0 or high >= most:
            raise IndexError(f"{name} from {low} to {high}, of {most}")


# ---- references


def add_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`add_norm` in float64."""
    total = x
    if residual is not None:
        total = residual.copy_((x.double() + residual.double()).to(x.dtype))
    exact = total.double()
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def rotate_and_store_reference(
    qkv: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    layer: int,
    cells: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`rotate_and_store` in torch, in float64; queries are a new tensor."""
    kv_heads = kv.shape[4]
    q, k, v = torch.split(qkv.double(), [heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.double()
            for x, w in zip((q, k), norms, strict=True)
        )
    angles = [table[positions].double()[:, None] for table in (cos, sin)]
    q, k = (rotated(x, *angles) for x in (q, k))
    stored = kv[layer].flatten(1, 2)
    stored[0, cells], stored[1, cells] = in_store(k, kv.dtype), in_store(v, kv.dtype)
    return q.to(qkv.dtype)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`gated_norm` in float64."""
    normed = add_norm_reference(x.double(), None, weight, eps)
    return (normed.flatten(1) * functional.silu(gate.double())).to(x.dtype)


def norm_of_gated_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm_of_gated` in float64."""
    gated = x.double() * functional.silu(gate.double()).view(x.shape)
    normed = add_norm_reference(gated, None, torch.ones(x.shape[2], dtype=torch.float64, device=x.device), eps)
    return (normed.flatten(1) * weight.double()).to(x.dtype)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` in float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up.dtype)
