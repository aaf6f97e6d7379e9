"""Attention alone on a CPU, beside torch's way: ``python -m holdfast.loadgen.bench.attention_cpu [--json FILE]``.

Decodes, verification windows and chunks over a store of many layers with their own keys and values, so they come from
memory as in a forward. The ways take turns. Each time is compared with the machine's limits, measured in the same run:
reading the keys and values once, and multiplying as many numbers. The kernel: `kernels/attention_c.c`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels import linear, native
from holdfast.kernels.attention import paged_attention
from holdfast.kernels.kv import PagedBatch, page_runs
from holdfast.loadgen.bench.harness import Row, by_turns, parser, report, seconds
from holdfast.replicas.kv.tensors import CellShape, KVTensors

_READ_BYTES = 512 << 20  # beyond any cache
_MATRIX = 2048
_PAGE = 16
COLUMNS = {"case": "<16", "way": ">16", "milliseconds": ">12.2f", "bandwidth": ">10.2f", "rate": ">10.2f"}


@dataclass(frozen=True, slots=True)
class Case:
    """`sequences` chunks of `tokens` tokens, each after `cached` cells."""

    sequences: int
    tokens: int
    cached: int

    @property
    def name(self) -> str:
        return f"{self.sequences} x {self.tokens} at {self.cached}"

    @property
    def pages(self) -> int:
        """Of one sequence."""
        return -(-(self.cached + self.tokens) // _PAGE)


CASES = (
    *(Case(n, 1, cached) for n, cached in ((1, 3000), (8, 850), (8, 3000))),
    *(Case(n, tokens, 3000) for n in (1, 8) for tokens in (4, 8)),
    *(Case(1, tokens, 3000) for tokens in (64, 200, 256)),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model."""

    layers: int = 20
    heads: int = 16
    kv_heads: int = 8
    dim: int = 64


class Machine:
    """What memory and multipliers give at best: bytes read and floating point operations a second.

    By whatever is fastest here: torch's sum, or one row times a large matrix by our kernel, which reads it once;
    torch's products of square matrices, or our kernel's.
    """

    def __init__(self) -> None:
        data = torch.ones(_READ_BYTES // 4)
        readers: list[Callable[[], object]] = [data.sum]
        wide = data[: _READ_BYTES // 8].view(torch.bfloat16).view(-1, _MATRIX)
        if variant := linear.variant_for(wide):
            readers.append(partial(linear.PackedMatrix(variant, wide), torch.ones(1, _MATRIX, dtype=torch.bfloat16)))
        self.bandwidth = max(
            size / min(seconds(read) for _ in range(8))
            for read, size in zip(readers, (data.nbytes, wide.nbytes), strict=False)
        )
        multipliers: list[Callable[[], object]] = []
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.randn(2, _MATRIX, _MATRIX).to(dtype).unbind(0)
            multipliers.append(partial(torch.matmul, a, b))
            if variant := linear.variant_for(b):
                multipliers.append(partial(linear.PackedMatrix(variant, b), a))
        quick = [multiply for multiply in multipliers if seconds(multiply) < 1]
        self.rate = 2 * _MATRIX**3 / min(seconds(multiply) for multiply in quick for _ in range(5))


def measure(shape: Shape, cases: Sequence[Case], ways: Sequence[str], dtype: torch.dtype, repeat: int) -> Iterator[Row]:
    """Time the cases in each way: a kernel, with `/int8` behind it over a store in int8.

    `milliseconds` are of all layers. `bandwidth` and `rate` are shares of what the machine gives.
    """
    machine = Machine()
    print(f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.rate / 1e9:.0f} GFLOP/s, {torch.get_num_threads()} threads")
    pages = max(case.sequences * case.pages for case in cases)
    stores = {kv: _store(shape, pages, dtype, bool(kv)) for kv in {way.partition("/")[2] for way in ways}}
    for case in cases:
        layers = {kv: _layers(shape, case, store, dtype) for kv, store in stores.items()}

        def call(way: str, layers: Mapping[str, Callable[[], None]] = layers) -> None:
            kernel, _, kv = way.partition("/")
            native.limit(cast(native.Level, kernel))
            layers[kv]()

        seen = case.cached + (case.tokens + 1) / 2  # positions, by a token on average
        products = 4 * case.sequences * case.tokens * seen * shape.heads * shape.dim
        for way, took in by_turns({way: partial(call, way) for way in ways}, repeat).items():
            store = stores[way.partition("/")[2]]
            size = case.sequences * (case.cached + case.tokens) * 2 * shape.kv_heads * store.shape[5] * store.itemsize
            best = shape.layers / took
            shares = {"bandwidth": size * best / machine.bandwidth, "rate": products * best / machine.rate}
            yield {"case": case.name, "way": way, "milliseconds": took * 1e3, **shares}


def _store(shape: Shape, pages: int, dtype: torch.dtype, int8: bool) -> Tensor:
    """A store as a CPU has it, filled layer by layer."""
    kv = KVTensors(CellShape(shape.layers, shape.kv_heads, shape.dim), pages, _PAGE, dtype, int8=int8)
    cells = torch.arange(kv.cells)
    for layer in range(shape.layers):
        k, v = torch.randn(2, kv.cells, shape.kv_heads, shape.dim).to(dtype).unbind(0)
        kv.store(layer, k, v, cells)
    return kv.data


def _layers(shape: Shape, case: Case, kv: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """A call of attention for every layer, as a forward makes them: with a batch of its own."""
    table = np.arange(case.sequences * case.pages, dtype=np.int32).reshape(case.sequences, case.pages)
    tokens = case.sequences * case.tokens
    q = torch.randn(tokens, shape.heads, shape.dim).to(dtype)

    def run() -> None:
        batch = PagedBatch(
            page_size=_PAGE,
            page_table=torch.from_numpy(table),
            rows=range(case.sequences),
            starts=[case.cached] * case.sequences,
            lengths=[case.tokens] * case.sequences,
            cells=torch.zeros(tokens, dtype=torch.int64),
            runs=[page_runs(row) for row in table],
        )
        for layer in range(shape.layers):
            paged_attention(q, kv, layer, batch, shape.dim**-0.5)

    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    usual = Shape()
    command = parser("attention_cpu", "Attention on a CPU against its limits.")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    text = "comma separated, WAY/int8 over a store in int8 (default: the fastest kernel, and torch)"
    command.add_argument("--ways", default="", help=text)
    command.add_argument("--threads", type=int, default=0, help="of torch; 0: all cores")
    for name in ("layers", "heads", "kv_heads", "dim"):
        command.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(usual, name))
    command.add_argument("--repeat", type=int, default=5)
    command.add_argument("--only", default="", help="only cases whose name contains this")
    options = command.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    ways = options.ways.split(",") if options.ways else list(dict.fromkeys((native.limit("auto"), "torch")))
    shape = Shape(options.layers, options.heads, options.kv_heads, options.dim)
    cases = [case for case in CASES if options.only in case.name]
    rows = measure(shape, cases, ways, getattr(torch, options.dtype), options.repeat)
    report(rows, COLUMNS, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
