"""What a decoder's layer does between its products on a CPU: RMSNorm, and rotary embedding with the KV store.

Maths, for a row x of d values, its weight w, and half = d / 2:

    norm      y_i = w_i x_i / sqrt(mean x^2 + eps)                            Zhang and Sennrich 2019
    rotate    y_i = x_i cos_i - x_{i+half} sin_i,  y_{i+half} = x_{i+half} cos_i + x_i sin_i     Su et al. 2021,
              in the order of pairs that checkpoints of Hugging Face have

Each is some ten small operators in torch, which cost a layer of one row as long as its attention. The kernel in
`layer_c.c` does each in one call, in float32 in between. Where it is not, or cannot be, torch computes.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.kernels import native
from holdfast.kernels.kv import head_dim, store_kv

SOURCE, LIBRARY = "layer_c.c", "liblayer.so"
# What a processor needs for each of the kernel's ways, as torch names it, and the values of a vector.
_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_cd")
_WAYS = {"avx512": (_AVX512, 16), "avx2": (("avx2", "fma3"), 8)}  # the fastest first
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each row of x [T, D], a new tensor; `weight` [D] in x's dtype."""
    way = _ways(native.level())[0] if x.dtype in _DTYPES and x.device.type == "cpu" else ""
    if not way or x.stride(1) != 1 or weight.dtype != x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    y = torch.empty(x.shape, dtype=x.dtype)
    _function("norm", way, x.dtype)(
        native.team(),
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        y.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        torch.get_num_threads(),
    )
    return y


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d] turned by its tokens' `cos`, `sin` [T, 1, d / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@dataclass(slots=True)
class Rotation:
    """What the layers of a forward share: its tokens' positions and cells, and the angles of all positions.

    `cos`, `sin` [context, d / 2] float32; `positions`, `cells` [T] int64; `kv`: the paged store. `heads`: of queries.
    Cells must differ from each other. Raises IndexError for positions or cells that are not there.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    cells: Tensor
    kv: Tensor
    heads: int
    eps: float
    _turn: "_Turn | None" = None
    _way: str = ""

    def __post_init__(self) -> None:
        kv, tokens = self.kv, len(self.positions)
        _check("positions", self.positions, tokens, len(self.cos))
        _check("cells", self.cells, tokens, kv.shape[2] * kv.shape[3])
        way, dim = _way_for(self), head_dim(kv)
        if way is None:
            return
        self._way = way
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
            (self.heads + 2 * kv.shape[4]) * dim,
            kv.stride(3) * kv.itemsize,
            kv.stride(4) * kv.itemsize,
            self.eps,
            torch.get_num_threads(),
            kv.dtype == torch.int8,
        )

    def rotate_and_store(self, qkv: Tensor, layer: int, norms: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Turn queries and keys in place, store keys and values of `layer`; returns the queries, a view [T, heads, d].

        `qkv` [T, heads + 2 kv_heads, d] in one piece, in the store's dtype unless that is int8; `norms`: weights [d] of
        queries and keys, which are normed before. Raises ValueError for other shapes.
        """
        kv, heads = self.kv, self.heads
        kv_heads, dim = kv.shape[4], head_dim(kv)
        if qkv.shape != (len(self.positions), heads + 2 * kv_heads, dim) or not qkv.is_contiguous():
            raise ValueError(f"{tuple(qkv.shape)} with {heads} heads does not fit the store {tuple(kv.shape)}")
        if self._turn is None or qkv.dtype not in _DTYPES or kv.dtype not in (qkv.dtype, torch.int8):
            self._in_torch(qkv, layer, norms)
        else:
            of_layer = kv.data_ptr() + layer * kv.stride(0) * kv.itemsize
            q_norm, k_norm = (norm.data_ptr() for norm in norms) if norms is not None else (None, None)
            _function("rotate", self._way, qkv.dtype)(
                ctypes.addressof(self._turn),
                qkv.data_ptr(),
                q_norm,
                k_norm,
                of_layer,
                of_layer + kv.stride(1) * kv.itemsize,
            )
        return qkv[:, :heads]

    def _in_torch(self, qkv: Tensor, layer: int, norms: tuple[Tensor, Tensor] | None) -> None:
        heads, kv_heads = self.heads, self.kv.shape[4]
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            for x, weight in zip((q, k), norms, strict=True):
                x.copy_(functional.rms_norm(x, weight.shape, weight, self.eps))
        cos, sin = (table[self.positions][:, None] for table in (self.cos, self.sin))
        qk = qkv[:, : heads + kv_heads]
        qk.copy_(rotated(qk.float(), cos, sin))
        store_kv(self.kv, layer, k, v, self.cells)


def _check(name: str, numbers: Tensor, tokens: int, most: int) -> None:
    if numbers.shape != (tokens,) or numbers.dtype != torch.int64:
        raise ValueError(f"{name} of {tokens} tokens are {numbers.dtype} {tuple(numbers.shape)}")
    if tokens and numbers.device.type == "cpu":  # elsewhere torch looks, where it writes
        low, high = (int(each) for each in torch.aminmax(numbers))
        if low < 0 or high >= most:
            raise IndexError(f"{name} from {low} to {high}, of {most}")


# ---- the kernel


class _Turn(ctypes.Structure):
    """`Turn` in layer_c.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("team", "positions", "cells", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int64) for name in ("qkv_row", "cell_stride", "head_stride")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("threads", "int8")),
    ]


@functools.cache
def library_missing() -> str:
    """Why there is no kernel, or ""."""
    return native.missing(_library)


@functools.cache
def _ways(level: native.Level) -> tuple[str, ...]:
    """The kernel's ways that processor and installation have up to a level, the fastest first, and "" for torch."""
    has = native.features(level)
    found = () if library_missing() else tuple(w for w, (needs, _) in _WAYS.items() if all(map(has.get, needs)))
    return (*found, "")


def _way_for(rotation: Rotation) -> str | None:
    """The fastest way that fits heads and store; None: torch's."""
    kv, tables = rotation.kv, (rotation.cos, rotation.sin)
    usable = (
        kv.device.type == "cpu"
        and kv.dtype in (*_DTYPES, torch.int8)
        and kv.stride(5) == 1
        and kv.stride(2) == kv.shape[3] * kv.stride(3)
        and all(table.dtype == torch.float32 and table.is_contiguous() for table in tables)
        and rotation.positions.is_contiguous()
        and rotation.cells.is_contiguous()
    )
    fitting = (way for way in _ways(native.level()) if way and head_dim(kv) % (2 * _WAYS[way][1]) == 0)
    return next(fitting, None) if usable else None


@functools.cache
def _library() -> ctypes.CDLL:
    """The kernel as it was built. Raises OSError where it was not, or from another source than lies beside it."""
    return native.load(Path(__file__).with_name(SOURCE), LIBRARY, "layer_source")


@functools.cache
def _function(what: str, way: str, dtype: torch.dtype) -> Callable[..., Any]:
    function = _library()[f"{what}_{way}_{_DTYPES[dtype]}"]
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    if what == "norm":
        function.argtypes = [pointer, pointer, long, pointer, pointer, long, long, ctypes.c_float, ctypes.c_int32]
    else:
        function.argtypes = [pointer] * 6
    function.restype = None
    return function
