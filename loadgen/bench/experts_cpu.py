"""Experts of one layer on a CPU, against its limits: ``python -m holdfast.loadgen.bench.experts_cpu [--json FILE]``.

One token is compared with reading as many bytes; its experts differ in each call, so they come from memory as in a
forward. 256 tokens are compared with a dense feed-forward of as many operations. The ways take turns and the shortest
times count. With one thread (`OMP_NUM_THREADS=1`) times are processor time. Layers have as many experts as fit into
`_WEIGHTS` bytes.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.kernels.experts import Experts
from holdfast.kernels.linear import Activation, GatedMatrix, Matrix
from holdfast.loadgen.bench.harness import Row, parser, report, seconds

_WEIGHTS = 500 << 20  # beyond any cache, and twice that fits into a small machine
_TOKENS = 256
COLUMNS = {"shape": "<16", "experts": ">7", "token": ">9.2f", "read": ">9.2f", "over_read": ">9.2f"}
COLUMNS |= {"tokens": ">9.1f", "dense": ">9.1f", "over_dense": ">10.2f"}
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


def measure(name: str, shape: Shape, dtype: str, repeat: int) -> Row:
    """The shortest times of one layer in milliseconds, one token 8 times as often as the rest; the first warms up.

    `token`: one token; `read`: reading its experts; `tokens`: `_TOKENS` tokens; `dense`: a dense feed-forward for them.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
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
        return seconds(partial(layer, x[:tokens], choice(tokens), torch.ones(tokens, shape.chosen)), clock)

    def read() -> float:
        some = choice(1)[0].tolist()
        return seconds(lambda: [weights[expert].sum() for expert in some], clock)

    taken: list[tuple[float, float, float, float]] = []
    for _ in range(repeat + 1):
        tokens, dense = call(_TOKENS), seconds(lambda: dense_down(gated(x)), clock)
        taken += [(call(1), read(), tokens, dense) for _ in range(8)]
    token, read_ms, tokens, dense = (min(each) * 1e3 for each in zip(*taken[8:], strict=True))
    times = {"token": token, "read": read_ms, "over_read": token / read_ms}
    return {"shape": name, "experts": count, **times, "tokens": tokens, "dense": dense, "over_dense": tokens / dense}


def timings(only: str, dtype: str, repeat: int) -> Iterator[Row]:
    """All shapes whose name has `only` in it."""
    for name, shape in SHAPES.items():
        if only in name:
            yield measure(name, shape, dtype, repeat)


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype).uniform_(-0.1, 0.1)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    command = parser("experts_cpu", "Experts on a CPU against its limits, in milliseconds.")
    command.add_argument("--only", default="", help="only shapes whose name contains this")
    command.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    command.add_argument("--repeat", type=int, default=5)
    options = command.parse_args(argv)
    report(timings(options.only, options.dtype, options.repeat), COLUMNS, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
