"""Products on a CPU by the kernel in `product_c.c`: which of its ways there are, and weights in the order it reads.

The kernel is built with the package, for x86-64 on Linux (setup.py). Weights are in int8 (`int8` says how they became
so), bfloat16 or float32. A row comes to the same in any batch and with any number of threads, to the last bit; sums of
bfloat16 are taken in float32. It serves one row and hundreds: with few it reads weights as fast as the memory gives
them, with many it multiplies as fast as oneDNN does, so weights are kept in its order alone. Maths and tiles:
`product_c.c`.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from holdfast.kernels import native

SOURCE, LIBRARY = "product_c.c", "libproduct.so"

Kind: TypeAlias = Literal["bytes", "words", "pairs", "reals"]

_AVX2 = ("avx2", "fma3")
_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_cd")


@dataclass(frozen=True, slots=True)
class Way:
    """A function of the kernel. `needs`: of a processor, as torch names it.

    `lanes` outputs in each of `vectors` vectors of a block; `step` weights of each at a time. A row's values have
    `size` bytes as they are multiplied, and come `columns` at a time: integers are padded, floats have to be as many.
    """

    name: str
    kind: Kind
    needs: tuple[str, ...]
    lanes: int
    vectors: int
    step: int
    size: int
    columns: int

    @property
    def block(self) -> int:
        return self.lanes * self.vectors

    def symbol(self, dtype: torch.dtype) -> str:
        """The function's name, for x and y of this dtype."""
        return f"{self.name}_{str(dtype).removeprefix('torch.')}" if self.kind in INTEGERS else self.name


INTEGERS: Final = ("bytes", "words")
WAYS: Final = (  # of each kind the fastest first
    Way("bytes_amx", "bytes", (*_AVX512, "avx512_bf16", "amx_tile", "amx_int8"), 16, 4, 4, 1, 64),
    Way("bytes_vnni", "bytes", (*_AVX512, "avx512_vnni"), 16, 4, 4, 1, 4),
    Way("words_avx2", "words", _AVX2, 8, 2, 2, 2, 2),
    Way("pairs_amx", "pairs", (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"), 16, 4, 2, 2, 32),
    Way("pairs_avx512_bf16", "pairs", (*_AVX512, "avx512_bf16"), 16, 4, 2, 2, 2),
    Way("pairs_avx512", "pairs", _AVX512, 16, 4, 2, 2, 2),
    Way("pairs_avx2", "pairs", _AVX2, 8, 2, 2, 2, 2),
    Way("reals_avx512", "reals", _AVX512, 16, 4, 1, 4, 1),
    Way("reals_avx2", "reals", _AVX2, 8, 2, 1, 4, 1),
)
_FLOATS: dict[torch.dtype, Kind] = {torch.bfloat16: "pairs", torch.float32: "reals"}


def available() -> tuple[Way, ...]:
    """The ways that this processor and this installation have, and this process may use (`native.limit`)."""
    if library_missing():
        return ()
    has = native.features(native.level())
    return tuple(way for way in WAYS if all(has.get(need) for need in way.needs))


def way_for(weight: Tensor) -> Way | None:
    """The fastest way for a float weight [out, in], or None where torch has to multiply."""
    kind = _FLOATS.get(weight.dtype) if weight.device.type == "cpu" else None
    return next((w for w in available() if w.kind == kind and not weight.shape[1] % w.columns), None)


class Product:
    """A weight [out, in] as the kernel reads it, and its bias [out] in float32; calling it multiplies.

    `gated`: the weight is two matrices, the gate's above the other, and y = silu(x G^T) * (x U^T). Integers come with
    the `scales` [out] of their outputs. The weight is copied.
    """

    __slots__ = ("_address", "_functions", "_held", "_inner", "_outputs", "_room_row")

    def __init__(
        self,
        way: Way,
        weight: Tensor,
        bias: Tensor | None = None,
        gated: bool = False,
        scales: Tensor | None = None,
    ) -> None:
        rows, inner = weight.shape
        self._inner, self._outputs = inner, rows // 2 if gated else rows
        padded = -(-inner // way.columns) * way.columns
        order = _order(rows, way.block, gated)

        def placed(x: Tensor) -> Tensor:
            """The rows of x in the order of blocks, zeros where there is none."""
            return pad(x, (0, 0) * (x.ndim - 1) + (0, 1))[order].contiguous()

        filled = pad(weight, (0, padded - inner)) if padded > inner else weight
        blocks = placed(filled).view(-1, way.vectors, way.lanes, padded // way.step, way.step)
        held = [blocks.permute(0, 3, 1, 2, 4).contiguous(), placed(torch.zeros(rows) if bias is None else bias.float())]
        if way.kind in INTEGERS:
            assert scales is not None
            zero = 128 if way.kind == "bytes" else 0  # what is added to a value of a row
            held += [placed(scales), placed(-zero * weight.sum(1, dtype=torch.int32))]
        self._room_row = padded * way.size + 4 if way.kind in INTEGERS else 0
        addresses = [*(each.data_ptr() for each in held), None, None][:4]
        told = _Matrix(native.team(), *addresses, inner, padded, self._outputs, int(gated))
        self._held, self._address = (told, *held), ctypes.addressof(told)
        dtypes = _FLOATS if way.kind in INTEGERS else (weight.dtype,)
        self._functions = {dtype: _function(way.symbol(dtype)) for dtype in dtypes}

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [rows, in] -> y [rows, out] in its dtype; `plus` [rows, out] of that dtype is added in float32.

        x has the dtype of the weight; beside integers it may be float32 or bfloat16. Raises ValueError for another
        dtype or width.
        """
        function = self._functions.get(x.dtype)
        if function is None or x.shape[1] != self._inner:
            raise ValueError(f"{x.dtype} of width {x.shape[1]} against weights for {self._wanted}")
        if x.stride(1) != 1:
            x = x.contiguous()
        count, outputs = x.shape[0], self._outputs
        y = torch.empty((count, outputs), dtype=x.dtype)
        room = None
        if self._room_row:
            room = torch.empty(count * self._room_row + 64, dtype=torch.uint8)
        if plus is not None and (plus.dtype != x.dtype or plus.stride(1) != 1):
            plus = plus.to(x.dtype).contiguous()
        function(
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

    @property
    def _wanted(self) -> str:
        return f"{' or '.join(str(dtype) for dtype in self._functions)} of width {self._inner}"


class _Matrix(ctypes.Structure):
    """`Matrix` in product_c.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parallel", "weights", "bias", "scale", "offset")),
        *((name, ctypes.c_int64) for name in ("inner", "padded", "outputs", "gated")),
    ]


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
    return native.load(Path(__file__).with_name(SOURCE), LIBRARY, "product_source")


@functools.cache
def _function(name: str) -> Callable[..., None]:
    function = _library()[name]
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, long, pointer, long, pointer, long, pointer, ctypes.c_int32]
    function.restype = None
    return function
