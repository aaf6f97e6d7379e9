"""Products with the weights of a model: on a CPU packed once for our C kernel, elsewhere by torch.

Maths: y = x W^T + b, and for a gated pair y = act(x G^T) * (x U^T). Shapes: x [..., in], W, G and U [out, in],
b [out], y [..., out].

In int8 (`dtype: int8`), for a weight W [out, in] and a row x [in],

    c_o = max_k |W_ok| / 127,  w_ok = round(W_ok / c_o)          once, when the model is loaded
    s   = max_k |x_k| / 127,   q_k  = round(x_k / s)             for each row, in each product
    y_o = (sum_k q_k w_ok) * (s * c_o) + b_o

with sums of integers, which are exact. A row's largest value sets the step of all others, so columns that are far
larger than the rest must be evened out before (`even_out`).

The kernel (`product_c.c`) is built with the package, for x86-64 on Linux. A row's result depends on that row alone, to
the last bit: not on other rows, nor on the number of threads. bfloat16 is summed in float32. With few rows the kernel
reads weights at the memory's speed, with many it multiplies at the processor's, so one packed copy serves both. Without
the kernel torch multiplies; int8 becomes float32 products of the integers, which are slow.

On a GPU the order of a sum may depend on the number of rows: the libraries cut a sum into parts where rows are few.
`Route` names the numbers of rows that go another way, because it is faster or because it is the one order for all.
"""

import ctypes
import functools
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, pad, relu, silu

from holdfast.kernels import huge_pages, native
from holdfast.kernels.kv import quantise

LIBRARY = native.Library("product")

Kind: TypeAlias = Literal["bytes", "words", "pairs", "reals"]
Activation: TypeAlias = Literal["silu", "gelu_tanh", "clamped", "relu2"]
_ACTIVATIONS: Final = (None, *get_args(Activation))  # as product_c.c counts them
ALPHA, LIMIT = 1.702, 7.0  # of "clamped", in gpt-oss
INTEGERS: Final = ("bytes", "words")
_FLOATS: dict[torch.dtype, Kind] = {torch.bfloat16: "pairs", torch.float32: "reals"}
_CHUNK = 1 << 20  # int8 weights that are turned into float32 at once


# ---- the kernel


@dataclass(frozen=True, slots=True)
class Variant:
    """A function of the kernel, and the `level` and other `features` that a processor needs for it.

    A block is `lanes` outputs in each of `vectors` vectors, with `step` weights of each at a time. A row's values take
    `size` bytes as they are multiplied, and come `columns` at a time: integers are padded to that, floats must fit.
    """

    name: str
    kind: Kind
    level: native.Level
    lanes: int
    vectors: int
    step: int
    size: int
    columns: int
    features: tuple[str, ...] = ()

    @property
    def block(self) -> int:
        return self.lanes * self.vectors

    def symbol(self, dtype: torch.dtype) -> str:
        """The function's name, for x and y of this dtype."""
        return f"{self.name}_{str(dtype).removeprefix('torch.')}" if self.kind in INTEGERS else self.name


VARIANTS: Final = (  # of each kind the fastest first
    Variant("bytes_amx", "bytes", "amx", 16, 4, 4, 1, 64, ("amx_int8",)),
    Variant("bytes_vnni", "bytes", "avx512", 16, 4, 4, 1, 4, ("avx512_vnni",)),
    Variant("words_avx2", "words", "avx2", 8, 2, 2, 2, 2),
    Variant("pairs_amx", "pairs", "amx", 16, 4, 2, 2, 32, ("amx_bf16",)),
    Variant("pairs_avx512_bf16", "pairs", "avx512_bf16", 16, 4, 2, 2, 2),
    Variant("pairs_avx512", "pairs", "avx512", 16, 4, 2, 2, 2),
    Variant("pairs_avx2", "pairs", "avx2", 8, 2, 2, 2, 2),
    Variant("reals_avx512", "reals", "avx512", 16, 4, 1, 4, 1),
    Variant("reals_avx2", "reals", "avx2", 8, 2, 1, 4, 1),
)


def available() -> tuple[Variant, ...]:
    """The variants that the processor, the installation and `native.limit` allow."""
    if LIBRARY.missing:
        return ()
    return tuple(each for each in VARIANTS if native.allowed(each.level, each.features))


def variant_for(weight: Tensor, int8: bool = False) -> Variant | None:
    """The fastest variant for a weight [out, in] in its own dtype or in int8, or None where torch has to multiply."""
    if weight.device.type != "cpu":
        return None
    kinds = INTEGERS if int8 else (_FLOATS.get(weight.dtype),)
    fits = (each for each in available() if each.kind in kinds and (int8 or not weight.shape[1] % each.columns))
    return next(fits, None)


class PackedMatrix:
    """A weight [out, in] in the kernel's layout, and its bias [out] in float32; calling it multiplies.

    `activation`: of all outputs, as `activate` does it; of a gated one the weight is two matrices, the gate's above the
    other. The weight is copied, and becomes integers where the variant takes those.
    """

    __slots__ = ("_address", "_functions", "_held", "_inner", "_outputs", "_room_row", "matrix")

    def __init__(
        self,
        variant: Variant,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        alpha: float = ALPHA,
        limit: float = LIMIT,
    ) -> None:
        rows, inner = weight.shape
        gated = activation not in (None, "relu2")
        self._inner, self._outputs = inner, rows // 2 if gated else rows
        padded = -(-inner // variant.columns) * variant.columns
        order = _order(rows, variant.block, gated)
        full = len(order) == rows

        def placed(x: Tensor) -> Tensor:
            """The rows of x in the order of blocks, with zeros where a block is not full."""
            return (x if full else pad(x, (0, 0) * (x.ndim - 1) + (0, 1)))[order].contiguous()

        dtypes: Iterable[torch.dtype] = (weight.dtype,)
        if variant.kind in INTEGERS:
            dtypes = _FLOATS
            weight, scales = quantise(weight)
        filled = pad(weight, (0, padded - inner)) if padded > inner else weight
        step = torch.int16 if variant.step * weight.itemsize == 2 else torch.int32  # a step's weights are moved as one
        blocks = placed(filled).view(step).view(-1, variant.block, padded // variant.step)
        held = [huge_pages.copied(blocks.mT), placed(torch.zeros(rows) if bias is None else bias.float())]
        if variant.kind in INTEGERS:
            zero = 128 if variant.kind == "bytes" else 0  # added to each value of a row
            held += [placed(scales[:, 0]), placed(-zero * weight.sum(1, dtype=torch.int32))]
        self._room_row = padded * variant.size + 4 if variant.kind in INTEGERS else 0
        addresses = [*(each.data_ptr() for each in held), None, None][:4]
        sizes = (inner, padded, self._outputs, _ACTIVATIONS.index(activation))
        self.matrix, self._held = _Matrix(native.team(), *addresses, *sizes, alpha, limit), held
        self._address = ctypes.addressof(self.matrix)
        self._functions = {dtype: _function(variant.symbol(dtype)) for dtype in dtypes}

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [rows, in] -> y [rows, out] in its dtype; `plus` [rows, out] is added in float32.

        x has the dtype of the weight; with integers it may be float32 or bfloat16. Raises ValueError for another dtype
        or width.
        """
        x, plus = self.fitting(x, plus)
        count, outputs = x.shape[0], self._outputs
        y = torch.empty((count, outputs), dtype=x.dtype)
        room = None
        if self._room_row:
            room = torch.empty(count * self._room_row + 64, dtype=torch.uint8)
        self._functions[x.dtype](
            self._address,
            x.data_ptr(),
            x.stride(0),
            None if plus is None else plus.data_ptr(),
            0 if plus is None else plus.stride(0),
            y.data_ptr(),
            count,
            None if room is None else room.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def fitting(self, x: Tensor, plus: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x and `plus` as the kernel reads them. Raises ValueError for an x of another dtype or width."""
        if x.dtype not in self._functions or x.shape[1] != self._inner:
            wanted = " or ".join(str(dtype) for dtype in self._functions)
            raise ValueError(f"{x.dtype} of width {x.shape[1]} against weights for {wanted} of width {self._inner}")
        if x.stride(1) != 1:
            x = x.contiguous()
        if plus is not None and (plus.dtype != x.dtype or plus.stride(1) != 1):
            plus = plus.to(x.dtype).contiguous()
        return x, plus


class _Matrix(ctypes.Structure):
    """`Matrix` in product_c.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parallel", "weights", "bias", "scale", "offset")),
        *((name, ctypes.c_int64) for name in ("inner", "padded", "outputs", "activation")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    ]


def _order(rows: int, block: int, gated: bool) -> Tensor:
    """The row of the weight for each place in the blocks; `rows`, one past the last, where a block is not full."""
    if not gated:
        order = torch.arange(-(-rows // block) * block)
        return order.clamp_max(rows)
    half, outputs = block // 2, rows // 2
    gates = torch.arange(-(-outputs // half) * half).view(-1, half)
    both = torch.stack((gates, gates + outputs), dim=1)  # [blocks, 2, half]
    return torch.where(gates.unsqueeze(1) < outputs, both, rows).flatten()


@functools.cache
def _function(name: str) -> Callable[..., None]:
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    return LIBRARY.function(name, pointer, pointer, long, pointer, long, pointer, long, pointer, ctypes.c_int32)


# ---- the matrices of a model


Product: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""x [rows, in], plus [rows, out] or None -> y [rows, out]."""


def _product_of(weight: Tensor, bias: Tensor | None, activation: Activation | None, int8: bool) -> Product | None:
    """Packs the weight for our kernel, in int8 where asked; None: torch multiplies with it as it is."""
    variant = variant_for(weight, int8)
    if int8:
        return int8_product(variant, weight, bias, activation)
    return None if variant is None else PackedMatrix(variant, weight, bias, activation)


@dataclass(frozen=True, slots=True)
class Route:
    """How products run, by their number of rows: by our kernel where `streamed`, by its other tiles where `tall`, by
    torch with as many rows as `filled` says, else by torch with the rows as they are."""

    streamed: Container[int] = ()
    tall: Container[int] = ()
    filled: Mapping[int, int] = field(default_factory=dict)


class Matrix:
    """A weight [out, in] with an optional bias [out]; calling it multiplies.

    A packed or `int8` weight is a copy, so drop the plain one after making a matrix of it. `leave`: keep the weight as
    it is, because another kernel reads it. `plain`: the weight, where it is neither packed nor in int8.
    """

    __slots__ = ("_outputs", "_product", "bias", "plain", "route")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, int8: bool = False, leave: bool = False) -> None:
        """Raises ValueError for `int8` of a weight that is not on a CPU."""
        self.bias, self._outputs = bias, len(weight)
        self._product = None if leave else _product_of(weight, bias, None, int8)
        self.plain = weight if self._product is None else None
        self.route = Route()

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [..., in] in the weight's dtype -> [..., out]; `plus` [..., out] is added, in float32 where packed or int8.

        In int8 x may be float32 or bfloat16, and y has its dtype.
        """
        if self._product is not None:
            if x.ndim == 2:
                return self._product(x, plus)
            added = None if plus is None else plus.reshape(-1, self._outputs)
            return self._product(x.reshape(-1, x.shape[-1]), added).view(*x.shape[:-1], self._outputs)
        assert self.plain is not None
        y = _routed(x, self.plain, self.bias, self.route)
        return y if plus is None else plus + y


class GatedMatrix:
    """The two matrices in front of a gated activation, given one above the other: [2 * out, in], the gate's first.

    `int8`, `leave`, `plain`: as of a `Matrix`.
    """

    __slots__ = ("_product", "activation", "plain", "route")

    def __init__(
        self, gate_up: Tensor, int8: bool = False, leave: bool = False, activation: Activation = "silu"
    ) -> None:
        """Raises ValueError for `int8` of weights that are not on a CPU."""
        self.activation: Activation = activation
        self._product = None if leave else _product_of(gate_up, None, activation, int8)
        self.plain = gate_up if self._product is None else None
        self.route = Route()

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self._product is not None:
            return self._product(x.reshape(-1, x.shape[-1]), None).view(*x.shape[:-1], -1)
        return activate(self.both(x), self.activation)

    def both(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., 2 * out]: gate and up before the activation, for a kernel that does the rest.

        Raises ValueError for packed and int8 matrices, which apply the activation inside the product.
        """
        if self.plain is None:
            raise ValueError("packed and int8 matrices only compute the gated product")
        return _routed(x, self.plain, None, self.route)


def _routed(x: Tensor, weight: Tensor, bias: Tensor | None, route: Route) -> Tensor:
    """x W^T + b."""
    rows = x.shape[0]
    if rows in route.streamed or rows in route.tall:
        from holdfast.kernels import stream_gpu  # Triton comes with torch for a GPU and not for a CPU

        return (stream_gpu.streamed if rows in route.streamed else stream_gpu.streamed_tall)(x, weight, bias)
    more = route.filled.get(rows, rows) - rows
    return linear(pad(x, (0, 0, 0, more)), weight, bias)[:rows] if more else linear(x, weight, bias)


def activate(y: Tensor, activation: Activation, alpha: float = ALPHA, limit: float = LIMIT) -> Tensor:
    """[..., 2 * out], the gates first -> [..., out]; "relu2" has no gates: relu(y)^2, [..., out] -> [..., out].

    "clamped" is gpt-oss's: (up + 1) gate sigmoid(alpha gate), the gate at most `limit` and up within it.
    """
    if activation == "relu2":
        return relu(y).square()
    gate, up = y.chunk(2, dim=-1)
    if activation == "silu":
        return silu(gate).mul_(up)
    if activation == "gelu_tanh":
        return gelu(gate, approximate="tanh").mul_(up)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


# ---- int8


def int8_product(
    variant: Variant | None, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None
) -> Product:
    """The product with a weight in int8, by this variant of the kernel; None: by torch.

    Raises ValueError for a weight that is not on a CPU.
    """
    if weight.device.type != "cpu":
        raise ValueError("int8 products are computed on a CPU")
    if variant is not None:
        return PackedMatrix(variant, weight, bias, activation)
    return _int8_by_torch(weight, bias, activation)


def _int8_by_torch(weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Product:
    """float32 products of the integers, as many weights at a time as `_CHUNK`. Sums up to 2^24 are exact."""
    numbers, scales = quantise(weight)
    inner = numbers.shape[1]
    at_once = max(1, _CHUNK // inner)

    def product(x: Tensor, plus: Tensor | None) -> Tensor:
        if x.shape[1] != inner or x.dtype not in _FLOATS:
            raise ValueError(f"{x.dtype} of width {x.shape[1]} against int8 weights of width {inner}")
        q, s = quantise(x)
        floats = q.float()
        sums = torch.cat([linear(floats, part.float()) for part in torch.split(numbers, at_once)], dim=1)
        y = sums * (s * scales.T)
        y = y if bias is None else y + bias.float()
        y = y if activation is None else activate(y, activation)
        return (y if plus is None else y + plus).to(x.dtype)

    return product


def even_out(columns: Tensor, weight: Tensor) -> Tensor:
    """Factors [in], powers of two, by which columns of x are divided and those of its weight [out, in] multiplied.

    `columns` [in]: the largest magnitudes seen in x. A column of x that is larger than most passes half of its excess
    (by the geometric mean) on to the weight: f_k = sqrt(max |x_k| / max_o |W_ok|), over the median of that. Powers of
    two change no bit of a float product. Source: SmoothQuant (Xiao et al. 2023), equation 4 with alpha = 1/2.
    """
    own = weight.float().abs().amax(0).clamp_min(1e-20)
    wanted = (columns.float().clamp_min(1e-20) / own).sqrt()
    return torch.exp2((wanted / wanted.median()).log2().round_().clamp_(-16, 16))


# ---- references


def matrix_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
    """`Matrix`, in float64."""
    y = x.double() @ weight.double().T
    for term in (bias, plus):
        y = y if term is None else y + term.double()
    return y


def gated_reference(x: Tensor, gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`GatedMatrix`, in float64."""
    return activate(matrix_reference(x, gate_up), activation)


def int8_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """`int8_product` in float64, from sums of 64-bit integers."""
    (q, s), (w, c) = quantise(x), quantise(weight)
    y = (q.long() @ w.long().T).double() * (s.double() * c.double().T)
    y = y if bias is None else y + bias.double()
    return y if activation is None else activate(y, activation)
