"""Linear layers alone on a CPU, beside torch: ``python -m holdfast.loadgen.bench.linear_state_cpu [--json FILE]``.

Decodes and prompts over states of many layers, so that they come from memory as in a forward. The ways take turns.
Times are processor time of one thread, so other processes count for less. A decode's bytes are its states, read and
written. They are compared with what torch moves when it multiplies as much memory in place by a number.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

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
from holdfast.loadgen.bench.kernels.linear_state import SHAPES

CASES = ((1, 1), (4, 1), (1, 8), (1, 64), (1, 512), (1, 2048))  # sequences, tokens of each
_STATES_BYTES = 160 << 20  # beyond any cache


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one layer. `bandwidth`: the states' bytes, read and written, over those of the product in place."""

    shape: str
    case: str
    milliseconds: float
    torch_milliseconds: float
    bandwidth: float


def measure(name: str, shape: LinearShape, sequences: int, tokens: int, size: int, repeat: int) -> Timing:
    """Time a case in every layer, `repeat` times; torch in one layer of them."""
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
            ours.append(_seconds(partial(rule, mixed, *gates, weights, states, layer, batch)))
            moved.append(_seconds(partial(other[layer].mul_, 1.0)))
        theirs.append(_seconds(partial(recur_torch, mixed, gates, weights, states, 0, batch)))
    found, best, beside = (statistics.median(each[len(each) // (repeat + 1) :]) for each in (ours, moved, theirs))
    return Timing(name, f"{sequences} x {tokens}", found * 1e3, beside * 1e3, best / found)


def timings(only: str, size: int, repeat: int) -> Iterator[Timing]:
    """All cases of the shapes whose name has `only` in it."""
    for name, shape in SHAPES.items():
        for sequences, tokens in CASES:
            if only in name:
                yield measure(name, shape, sequences, tokens, size, repeat)


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench linear_state_cpu", description="Linear layers on a CPU.")
    parser.add_argument("--only", default="", help="only shapes whose name has this in it")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the timings there as well")
    options = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        print(f"{'':15} {'':10} {'ms':>9} {'torch ms':>9} {'of bandwidth':>13}")
        found = []
        for timing in timings(options.only, _STATES_BYTES, options.repeat):
            found.append(timing)
            share = f"{timing.bandwidth:13.2f}" if timing.case.endswith(" 1") else ""
            numbers = f"{timing.milliseconds:9.3f} {timing.torch_milliseconds:9.3f}"
            print(f"{timing.shape:15} {timing.case:10} {numbers} {share}", flush=True)
    finally:
        torch.set_num_threads(threads)
    if options.json:
        options.json.write_text(json.dumps([asdict(timing) for timing in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
