"""Products with matrices that stay, the weights of a model: reordered once for a CPU, plain elsewhere; on a GPU few
rows may go another way, where that was measured to be faster (`stream_gpu`).

Maths: y = x W^T + b, and a gated pair's y = silu(x G^T) * (x U^T). Shapes: x [..., in], W, G and U [out, in], b [out],
y [..., out].

On a GPU the order of a sum may depend on the number of rows: the libraries cut a sum into parts where rows are few.
`Route` says which numbers of rows go another way, because it is faster or because it is the one order for all.

A step streams every weight through the cores. A plain product on a CPU does that at half the memory's bandwidth: with
one row it walks the matrix badly, with more of them it reorders the matrix in every call. Our own kernel has the order
in which it reads (`product_c`); where that is not, oneDNN's layout is 1.4 times faster than none at one row and up to 3
times at eight, and what follows a product runs in its registers (docs/performance.md). Small matrices, which stay in a
cache, gain nothing by oneDNN's.

Where int8 is asked for, all matrices are, whatever their size (`int8`).
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from holdfast.kernels import product_c
from holdfast.kernels.int8 import Int8Matrix

PACKED_BYTES = 1 << 20  # smaller matrices stay in a cache
_ROWS = 4  # oneDNN asks for how many rows to pack; its answer for 4 is good from 1 to 1,024


@dataclass(frozen=True, slots=True)
class Route:
    """Which way products of so many rows take: by our kernel where they are `streamed`, in its other tiles where they
    are `tall`, by torch's with as many rows as `filled` says, and as they are by torch's."""

    streamed: Container[int] = ()
    tall: Container[int] = ()
    filled: Mapping[int, int] = field(default_factory=dict)


class Matrix:
    """A weight [out, in] with an optional bias [out]; calling it multiplies.

    Drop the plain weight after making one of it: where it was packed, or in `int8`, this is a second copy. `leave`: it
    is not, because another kernel reads it.
    """

    __slots__ = ("_bias", "_ours", "_outputs", "_packed", "_plain", "route")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, int8: bool = False, leave: bool = False) -> None:
        """Raises ValueError for `int8` of a weight that is not on a CPU."""
        self._bias, self._outputs = bias, len(weight)
        self._ours = None if leave else _ours(weight, bias, int8=int8)
        self._packed = _pack(weight) if not leave and self._ours is None and can_pack(weight) else None
        self._plain = weight if self._packed is None and self._ours is None else None
        self.route = Route()

    @property
    def plain(self) -> Tensor | None:
        """The weight, where it was neither packed nor quantised."""
        return self._plain

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [..., in] in the weight's dtype -> [..., out]; `plus` [..., out] is added, in float32 where packed or int8.

        In int8 x has whichever dtype, float32 or bfloat16, and y has it, too.
        """
        if self._ours is not None:
            if x.ndim == 2:
                return self._ours(x, plus)
            added = None if plus is None else plus.reshape(-1, self._outputs)
            return self._ours(x.reshape(-1, x.shape[-1]), added).view(*x.shape[:-1], self._outputs)
        if self._plain is not None:
            y = _routed(x, self._plain, self._bias, self.route)
            return y if plus is None else plus + y
        if plus is None:
            return _times(x, self._packed, self._bias)
        return _then(x, plus, self._packed, self._bias, "add")


class GatedMatrix:
    """The two matrices in front of a gated activation, given one above the other: [2 * out, in], the gate's first.

    `int8`, `leave`: as of a `Matrix`.
    """

    __slots__ = ("_gate", "_ours", "_plain", "_up", "route")

    def __init__(self, gate_up: Tensor, int8: bool = False, leave: bool = False) -> None:
        """Raises ValueError for `int8` of weights that are not on a CPU."""
        self._plain: Tensor | None = None
        self.route = Route()
        self._ours = None if leave else _ours(gate_up, gated=True, int8=int8)
        gate, up = gate_up.chunk(2)
        if self._ours is not None:
            return
        if not leave and can_pack(gate):
            self._gate, self._up = _pack(gate), _pack(up)
        else:
            self._plain = gate_up

    @property
    def plain(self) -> Tensor | None:
        """Both weights, where they were neither packed nor quantised."""
        return self._plain

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self._ours is not None:
            return self._ours(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        if self._plain is None:
            return _then(x, _times(x, self._gate, None, "swish"), self._up, None, "mul")
        gate, up = self.both(x).chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def both(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., 2 * out]: gate and up before the activation, for a kernel that does the rest.

        Raises ValueError for packed and int8 matrices, whose activation runs inside the products.
        """
        if self._plain is None:
            raise ValueError("packed and int8 matrices give no more than the product of both")
        return _routed(x, self._plain, None, self.route)


def matrix_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
    """`Matrix`, in float64."""
    y = x.double() @ weight.double().T
    for term in (bias, plus):
        y = y if term is None else y + term.double()
    return y


def gated_reference(x: Tensor, gate_up: Tensor) -> Tensor:
    """`GatedMatrix`, in float64."""
    gate, up = matrix_reference(x, gate_up).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN is there, takes this dtype on this core, and the matrix is worth a layout of its own."""
    if weight.device.type != "cpu" or weight.nbytes < PACKED_BYTES or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def reordered(weight: Tensor) -> bool:
    """Whether products with the weight are by our kernel, or by oneDNN in a layout of its own."""
    return product_c.way_for(weight) is not None or can_pack(weight)


def _ours(
    weight: Tensor, bias: Tensor | None = None, gated: bool = False, int8: bool = False
) -> Int8Matrix | product_c.Product | None:
    """What multiplies with the weight where our kernel can."""
    if int8:
        return Int8Matrix(weight, bias, gated)
    way = product_c.way_for(weight)
    return None if way is None else product_c.Product(way, weight, bias, gated)


def _routed(x: Tensor, weight: Tensor, bias: Tensor | None, route: Route) -> Tensor:
    """x W^T + b."""
    rows = x.shape[0]
    if rows in route.streamed or rows in route.tall:
        from holdfast.kernels import stream_gpu  # Triton comes with torch for a GPU and not for a CPU

        return (stream_gpu.streamed if rows in route.streamed else stream_gpu.streamed_tall)(x, weight, bias)
    more = route.filled.get(rows, rows) - rows
    return linear(pad(x, (0, 0, 0, more)), weight, bias)[:rows] if more else linear(x, weight, bias)


def _times(x: Tensor, packed: Tensor | None, bias: Tensor | None, after: str = "none") -> Tensor:
    """x W^T + b, and a function of it."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, after, [], "")
    return y


def _then(x: Tensor, other: Tensor, packed: Tensor | None, bias: Tensor | None, after: str) -> Tensor:
    """x W^T + b, and a function of it and `other`."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, after)
    return y


def _pack(weight: Tensor) -> Tensor:
    """A copy of `weight` in oneDNN's layout."""
    with torch.no_grad():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
    return packed
