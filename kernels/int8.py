"""Products of a CPU with weights in int8: a scale for each output, and one for each row that is multiplied.

Maths: for a weight W [out, in] and a row x [in],

    c_o = max_k |W_ok| / 127,  w_ok = round(W_ok / c_o)          once, when the model is loaded
    s   = max_k |x_k| / 127,   q_k  = round(x_k / s)             for each row, in each product
    y_o = (sum_k q_k w_ok) * (s * c_o) + b_o

with sums of integers, which are exact: a row comes to the same beside whatever other rows. A row's largest value sets
the step of all others, so columns that are far larger than the rest have to be evened out before (`even_out`).

There are three ways, and they agree but for the last bit of the rescaling: the kernel of `product_c`; oneDNN, on
processors that add products of bytes in 32 bits (VNNI); and float32 products of the integers, slow, for all others.
Without VNNI oneDNN is not used: it adds pairs of products in 16 bits, which overflow (found with torch 2.13 on AVX2).
With AMX it takes zero's 128 away in float32, so sums above 2^23 may be off by one (found with torch 2.13).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from holdfast.kernels import product_c

MOST = 127  # the largest integer of a weight or a value; -128 has no counterpart
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
        self._product: Product
        if self.way in (ONEDNN, FLOATS):
            self._product = (_by_onednn if self.way == ONEDNN else _by_floats)(numbers, scales[:, 0], bias, gated)
        else:
            kernel = next(each for each in product_c.WAYS if each.name == self.way)
            self._product = product_c.Product(kernel, numbers, bias, gated, scales[:, 0])

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


def available() -> tuple[str, ...]:
    """The ways that processor and installation have, the fastest first."""
    ours = tuple(way.name for way in product_c.available() if way.kind in product_c.INTEGERS)
    vnni = torch.cpu.get_capabilities().get("avx512_vnni") and torch._C._has_mkldnn
    return (*ours, *((ONEDNN,) if vnni else ()), FLOATS)


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
