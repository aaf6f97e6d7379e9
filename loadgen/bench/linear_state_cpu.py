"""Linear layers alone on a CPU, beside torch: ``python -m holdfast.loadgen.bench.linear_state_cpu [--json FILE]``.

Decodes and prompts over states of many layers, so that they come from memory as in a forward. The ways take turns.
Times are processor time of one thread, so other processes count for less. A decode's bytes are its states, read and
written. They are compared with what torch moves when it multiplies as much memory in place by a number.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from holdfast.kernels.linear_state import (
    LinearShape,
    LinearStates,
    LinearWeights,
    StateBatch,
    gated_delta,
    mamba2,
    recur_torch,
)
from holdfast.loadgen.bench.harness import Row, parser, report, seconds
from holdfast.loadgen.bench.kernels.linear_state import SHAPES

CASES = ((1, 1), (4, 1), (1, 8), (1, 64), (1, 512), (1, 2048))  # sequences, tokens of each
COLUMNS = {
    "shape": "<15",
    "case": "<10",
    "milliseconds": ">12.3f",
    "torch_milliseconds": ">18.3f",
    "bandwidth": ">10.2f",
}
_STATES_BYTES = 160 << 20  # beyond any cache


def measure(name: str, shape: LinearShape, sequences: int, tokens: int, size: int, repeat: int) -> Row:
    """Medians of one layer. Torch is timed in one layer.

    `bandwidth`, of a decode: the states' bytes, read and written, over those of the product in place.
    """
    one = shape.value_heads * shape.key_dim * shape.value_dim * 4
    layers = max(1, size // (one * sequences)) if tokens == 1 else 1
    states = LinearStates(shape, layers, sequences, 0, torch.bfloat16, "cpu")
    states.recurrent.normal_()
    heads, count = shape.value_heads, sequences * tokens
    delta = shape.rule == "delta"
    extra = () if delta else (torch.randn(shape.channels), torch.randn(heads))
    weights = LinearWeights(torch.randn(shape.channels, shape.kernel), torch.rand(heads), torch.randn(heads), *extra)
    mixed, *gates = (torch.randn(count, width).bfloat16() for width in (shape.channels, *[heads] * shape.gates))
    rule: Callable[..., Tensor] = gated_delta if delta else mamba2
    slots, none = torch.arange(sequences, dtype=torch.int32), torch.zeros(sequences, dtype=torch.int32)
    starts = torch.arange(sequences + 1, dtype=torch.int32) * tokens
    batch = StateBatch(starts, slots, slots, none, none, torch.zeros(0, 3, dtype=torch.int32))
    other = torch.ones(layers, one * sequences // 4)
    ours, moved, theirs = [], [], []
    for _ in range(repeat + 1):
        for layer in range(layers):
            ours.append(seconds(partial(rule, mixed, *gates, weights, states, layer, batch), time.thread_time))
            moved.append(seconds(partial(other[layer].mul_, 1.0), time.thread_time))
        call = partial(recur_torch, mixed, gates, weights, states, 0, batch)
        theirs.append(seconds(call, time.thread_time))
    found, best, beside = (statistics.median(each[len(each) // (repeat + 1) :]) for each in (ours, moved, theirs))
    times = {"milliseconds": found * 1e3, "torch_milliseconds": beside * 1e3}
    share = {"bandwidth": best / found} if tokens == 1 else {}
    return {"shape": name, "case": f"{sequences} x {tokens}", **times, **share}


def timings(only: str, size: int, repeat: int) -> Iterator[Row]:
    """All cases of the shapes whose name has `only` in it."""
    for name, shape in SHAPES.items():
        for sequences, tokens in CASES:
            if only in name:
                yield measure(name, shape, sequences, tokens, size, repeat)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    command = parser("linear_state_cpu", "Linear layers on a CPU.")
    command.add_argument("--only", default="", help="only shapes whose name contains this")
    command.add_argument("--repeat", type=int, default=5)
    options = command.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report(timings(options.only, _STATES_BYTES, options.repeat), COLUMNS, options.json)
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
