"""Products of a CPU with weights in int8: a scale for each output, and one for each row that is multiplied.

Maths: for a weight W [out, in] and a row x [in],

    c_o = max_k |W_ok| / 127,  w_ok = round(W_ok / c_o)          once, when the model is loaded
    s   = max_k |x_k| / 127,   q_k  = round(x_k / s)             for each row, in each product
    y_o = (sum_k q_k w_ok) * (s * c_o) + b_o

with sums of integers, which are exact: a row comes to the same beside whatever other rows. A row's largest value sets
the step of all others, so columns that are far larger than the rest have to be evened out before (`even_out`).

There are three ways, and they agree but for the last bit of the rescaling: the kernel in `int8_c.c`; oneDNN, on
processors that add products of bytes in 32 bits (VNNI); and float32 products of the integers, slow, for all others.
Without VNNI oneDNN is not used: it adds pairs of products in 16 bits, which overflow (found with torch 2.13 on AVX2).
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from holdfast.kernels import native

log = logging.getLogger(__name__)

MOST = 127  # the largest integer of a weight or a value; -128 has no counterpart
SOURCE, LIBRARY = "int8_c.c", "libint8.so"
_VNNI = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_cd", "avx512_vnni")
# What a processor needs for each of the kernel's ways, as torch names it; 32-bit lanes, vectors of a block, and bytes
# of a quantised value. The fastest first.
_WAYS = {"vnni": (_VNNI, 16, 4, 1), "avx2": (("avx2", "fma3"), 8, 2, 2)}
ONEDNN, FLOATS = "onednn", "floats"
_CHUNK = 1 << 20  # weights that are turned into float32 at once


class Int8Matrix:
    """A weight [out, in] in int8 with an optional bias [out]; calling it multiplies.

    `gated`: the weight is two matrices, the gate's above the other [2 * out, in], and y = silu(x G^T) * (x U^T).
    `way`: one of `available()`; "": the first of them.
    """

    __slots__ = ("_product", "inner", "outputs", "way")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False, way: str = "") -> None:
        """Raises ValueError for a weight that is not on a CPU, or a way that is not there."""
        if weight.device.type != "cpu":
            raise ValueError("int8 products are computed on a CPU")
        self.way = way or available()[0]
        if self.way not in available():
            raise ValueError(f"no way {self.way!r} on this machine, only {', '.join(available())}")
        rows, self.inner = weight.shape
        self.outputs = rows // 2 if gated else rows
        numbers, scales = quantise(weight)
        bias = torch.zeros(rows) if bias is None else bias.float()
        make = {ONEDNN: _by_onednn, FLOATS: _by_floats}.get(self.way) or functools.partial(_by_kernel, self.way)
        self._product: Product = make(numbers, scales[:, 0], bias, gated)

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [..., in], float32 or bfloat16 -> [..., out] in its dtype; `plus` [..., out] is added in float32.

        Raises ValueError for another dtype or width.
        """
        if x.shape[-1] != self.inner or x.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{x.dtype} of width {x.shape[-1]} against int8 weights of width {self.inner}")
        rows = x.reshape(-1, self.inner)
        added = None if plus is None else plus.reshape(-1, self.outputs).to(x.dtype)
        return self._product(rows, added).view(*x.shape[:-1], self.outputs)


Product = Callable[[Tensor, Tensor | None], Tensor]
"""x [rows, in], plus [rows, out] or None -> y [rows, out]."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, columns] -> int8 of its shape, and float32 [rows, 1]: x is about their product. Of a row with a NaN, the
    scale is NaN.
    """
    x = x.float()
    most = x.abs().amax(1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, MOST) / most, 0.0)  # `MOST / most` rounds twice
    return (x * inverse).round_().nan_to_num_(0.0).to(torch.int8), most / MOST


def even_out(columns: Tensor, weight: Tensor) -> Tensor:
    """Factors [in], powers of two, by which columns of x are divided and those of its weight [out, in] multiplied.

    `columns` [in]: the largest magnitudes seen in x. A column that is larger than most gives half of what it has more
    (by the geometric mean) to the weight, whose columns are wide where those of x are narrow: f_k = sqrt(max |x_k| /
    max_o |W_ok|), over the median of that. Source: SmoothQuant (Xiao et al. 2023), equation 4 with alpha = 1/2. Being
    powers of two they change no bit of a float.
    """
    own = weight.float().abs().amax(0).clamp_min(1e-20)
    wanted = (columns.float().clamp_min(1e-20) / own).sqrt()
    return torch.exp2((wanted / wanted.median()).log2().round_().clamp_(-16, 16))


def int8_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """`Int8Matrix` in float64, from sums of 64-bit integers."""
    (q, s), (w, c) = quantise(x), quantise(weight)
    y = (q.long() @ w.long().T).double() * (s.double() * c.double().T)
    y = y if bias is None else y + bias.double()
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@functools.cache
def available() -> tuple[str, ...]:
    """The ways that processor and installation have, the fastest first. Says once if the kernel is missing."""
    has = torch.cpu.get_capabilities()
    ways = [name for name, (needs, *_) in _WAYS.items() if all(has.get(need) for need in needs)]
    missing = library_missing()
    if missing and ways:
        log.warning("int8 products run in torch, which is slower: %s", missing)
    found = () if missing else tuple(ways)
    if "vnni" in ways and torch._C._has_mkldnn:
        found = (*found, ONEDNN)
    return (*found, FLOATS)


# ---- torch's ways


def _rescale(y: Tensor, x: Tensor, bias: Tensor, gated: bool, plus: Tensor | None) -> Tensor:
    """What follows a product, from float32 y; in the dtype of `x`."""
    y += bias
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = silu(gate).mul_(up)
    return (y if plus is None else y + plus).to(x.dtype)


def _by_floats(numbers: Tensor, scales: Tensor, bias: Tensor, gated: bool) -> Product:
    at_once = max(1, _CHUNK // numbers.shape[1])

    def product(x: Tensor, plus: Tensor | None) -> Tensor:
        q, s = quantise(x)
        floats = q.float()
        sums = torch.cat([linear(floats, part.float()) for part in torch.split(numbers, at_once)], dim=1)
        return _rescale(sums * (s * scales), x, bias, gated, plus)

    return product


def _by_onednn(numbers: Tensor, scales: Tensor, bias: Tensor, gated: bool) -> Product:
    """oneDNN takes values in bytes, with 128 for zero; with signed ones it was 300 times slower."""
    packed = torch.ops.onednn.qlinear_prepack(numbers, None)
    zeros = torch.zeros(len(scales), dtype=torch.int32)

    def product(x: Tensor, plus: Tensor | None) -> Tensor:
        q, s = quantise(x)
        shifted = (q.to(torch.int16) + 128).to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(
            shifted, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return _rescale(y * s, x, bias, gated, plus)

    return product


# ---- the kernel


class _Weights(ctypes.Structure):
    """`Weights` in int8_c.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parallel", "weight", "scale", "bias", "offset")),
        *((name, ctypes.c_int64) for name in ("inner", "padded", "outputs", "gated")),
    ]


def _by_kernel(way: str, numbers: Tensor, scales: Tensor, bias: Tensor, gated: bool) -> Product:
    _, lanes, vectors, size = _WAYS[way]
    step = 4 // size
    rows, inner = numbers.shape
    padded = -(-inner // step) * step
    order = _order(rows, lanes * vectors, gated)

    def placed(x: Tensor) -> Tensor:
        """The rows of x in the order of blocks, zeros where there is none."""
        return pad(x, (0, 0) * (x.ndim - 1) + (0, 1))[order].contiguous()

    blocks = placed(pad(numbers, (0, padded - inner))).view(-1, vectors, lanes, padded // step, step)
    weight = blocks.permute(0, 3, 1, 2, 4).contiguous()
    offset = -128 * (2 - size) * numbers.sum(1, dtype=torch.int32)
    held = (weight, placed(scales), placed(bias), placed(offset))
    outputs = rows // 2 if gated else rows
    told = _Weights(native.team(), *(tensor.data_ptr() for tensor in held), inner, padded, outputs, int(gated))
    functions = {torch.float32: _function(f"int8_{way}_float32"), torch.bfloat16: _function(f"int8_{way}_bfloat16")}

    def product(x: Tensor, plus: Tensor | None, held: Any = (told, *held)) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        count = len(x)
        y = torch.empty(count, outputs, dtype=x.dtype)
        room = torch.empty(count * (padded * size + 4) + 64, dtype=torch.uint8)
        added, added_row = (None, 0) if plus is None else (plus.contiguous(), outputs)
        functions[x.dtype](
            ctypes.addressof(told),
            x.data_ptr(),
            x.stride(0),
            None if added is None else added.data_ptr(),
            added_row,
            y.data_ptr(),
            count,
            room.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    return product


def _order(rows: int, block: int, gated: bool) -> Tensor:
    """Which row of the weight stands where in the blocks; `rows`, which is none, where they are not full."""
    if not gated:
        order = torch.arange(-(-rows // block) * block)
        return order.clamp_max(rows)
    half, outputs = block // 2, rows // 2
    gates = torch.arange(-(-outputs // half) * half).view(-1, half)
    both = torch.stack((gates, gates + outputs), dim=1)  # [blocks, 2, half]
    return torch.where(gates.unsqueeze(1) < outputs, both, rows).flatten()


@functools.cache
def library_missing() -> str:
    """Why there is no kernel, or ""."""
    return native.missing(_library)


@functools.cache
def _library() -> ctypes.CDLL:
    """The kernel as it was built. Raises OSError where it was not, or from another source than lies beside it."""
    return native.load(Path(__file__).with_name(SOURCE), LIBRARY, "int8_source")


@functools.cache
def _function(name: str) -> Callable[..., None]:
    function = _library()[name]
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, long, pointer, long, pointer, long, pointer, ctypes.c_int32]
    function.restype = None
    return function
