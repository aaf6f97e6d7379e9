"""What a GPU can do, measured: memory bandwidth and the rate of its matrix units; and how calls are timed."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 << 20  # beyond any cache
_MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`bandwidth` in bytes a second, of reading; `rate` in floating point operations a second, bfloat16."""

    bandwidth: float
    rate: float


@dataclass(frozen=True, slots=True)
class Timed:
    """A call's seconds and the share of its bound that it reaches: bandwidth, rate, or what it is held against."""

    name: str
    seconds: float
    bound: str
    share: float


class Clock:
    """Times calls on the device, each after its caches were flushed."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def seconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """The median of `repeats` calls, after three to warm up."""
        for _ in range(3):
            call()
        pairs = []
        for _ in range(repeats):
            self._flush.zero_()
            begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3


def measure_ceilings(clock: Clock) -> Ceilings:
    """Read 2 GiB by one reduction, and multiply two matrices of 8192 x 8192."""
    data = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    read = clock.seconds(lambda: torch.amax(data))
    a, b = torch.randn(2, _MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda").unbind(0)
    multiply = clock.seconds(lambda: a @ b)
    copied = clock.seconds(lambda: data[: 1 << 29].copy_(data[1 << 29 :]))
    # A reduction may be bound by its own arithmetic; a copy reads and writes. The better of both is the ceiling.
    return Ceilings(max(data.nbytes / read, data.nbytes / copied), 2 * _MATRIX**3 / multiply)
