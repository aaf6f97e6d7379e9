"""Experts of one layer on a CPU, against its limits: ``python -m holdfast.loadgen.bench.experts_cpu [--json FILE]``.

One token, whose experts are other ones in each call, so that they come from memory as in a forward: beside reading as
many bytes. And 256 tokens, beside a dense feed-forward of as many operations. The ways take turns, and the shortest
times are compared, so other processes count for less, and still less with one thread (`OMP_NUM_THREADS=1`), whose
times are processor time. Layers have as many experts as `_WEIGHTS` bytes hold.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from holdfast.kernels.experts import Experts
from holdfast.kernels.linear import Activation, GatedMatrix, Matrix

_WEIGHTS = 500 << 20  # beyond any cache, and twice that fits into a small machine
_TOKENS = 256
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layer: `inner` numbers of each expert."""

    width: int
    inner: int
    experts: int
    chosen: int
    activation: Activation

    def bytes(self, experts: int, of_weight: int) -> int:
        """Of the weights of that many experts."""
        return experts * 3 * self.width * self.inner * of_weight


SHAPES = {
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, "clamped"),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8, "silu"),
    "qwen3.6-35b-a3b": Shape(2048, 512, 256, 8, "silu"),
    "gemma-4-26b-a4b": Shape(2816, 704, 128, 8, "gelu_tanh"),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one token, of reading its experts, of `_TOKENS` tokens, of a dense feed-forward for them."""

    shape: str
    experts: int
    token: float
    read: float
    tokens: float
    dense: float


def measure(name: str, shape: Shape, dtype: str, repeat: int) -> Timing:
    """Time one layer, each way `repeat` times and one token 8 times as often; the first of each warms up."""
    width, inner, of_x, int8 = shape.width, shape.inner, _DTYPES[dtype], dtype == "int8"
    of_weight = 1 if int8 else of_x.itemsize
    count = min(shape.experts, max(2 * shape.chosen, _WEIGHTS // shape.bytes(1, of_x.itemsize)))
    gate_up, down = _random(of_x, count, 2 * inner, width), _random(of_x, count, width, inner)
    layer = Experts(gate_up, down, shape.activation, int8=int8)
    del gate_up, down
    gated = GatedMatrix(_random(of_x, 2 * shape.chosen * inner, width), int8)  # its activation's time is nothing
    dense_down = Matrix(_random(of_x, width, shape.chosen * inner), None, int8)
    weights = torch.zeros(count, shape.bytes(1, of_weight) // 4)
    x = torch.randn(_TOKENS, width).to(of_x)

    def choice(tokens: int) -> torch.Tensor:
        return torch.rand(tokens, count).topk(shape.chosen).indices.int()

    def call(tokens: int) -> float:
        return _seconds(partial(layer, x[:tokens], choice(tokens), torch.ones(tokens, shape.chosen)))

    def read() -> float:
        some = choice(1)[0].tolist()
        return _seconds(lambda: [weights[expert].sum() for expert in some])

    taken: list[tuple[float, float, float, float]] = []
    for _ in range(repeat + 1):
        tokens, dense = call(_TOKENS), _seconds(lambda: dense_down(gated(x)))
        taken += [(call(1), read(), tokens, dense) for _ in range(8)]
    return Timing(name, count, *(min(each) * 1e3 for each in zip(*taken[8:], strict=True)))


def timings(only: str, dtype: str, repeat: int) -> Iterator[Timing]:
    """All shapes whose name has `only` in it."""
    for name, shape in SHAPES.items():
        if only in name:
            yield measure(name, shape, dtype, repeat)


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype).uniform_(-0.1, 0.1)


def _seconds(call: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    call()
    return clock() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench experts_cpu", description="Experts on a CPU against its limits.")
    parser.add_argument("--only", default="", help="only shapes whose name has this in it")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the timings there as well")
    options = parser.parse_args(argv)
    print(f"{'ms':16} {'experts':>7} {'1 token':>9} {'read':>9} {'':6} {_TOKENS:5} tokens {'dense':>9}")
    found = []
    for each in timings(options.only, options.dtype, options.repeat):
        found.append(each)
        one = f"{each.token:9.2f} {each.read:9.2f} {each.token / each.read:6.2f}"
        many = f"{each.tokens:12.1f} {each.dense:9.1f} {each.tokens / each.dense:6.2f}"
        print(f"{each.shape:16} {each.experts:7} {one} {many}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
