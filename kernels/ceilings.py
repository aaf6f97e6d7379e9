"""What a GPU can do, measured: memory bandwidth and the rate of its matrix units; and how calls are timed."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 << 20  # beyond any cache
_MATRIX = 8192
_CYCLES = 2e9  # a second, of the device's clock at its fastest
_LONGEST_S = 0.5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`bandwidth` in bytes a second, of reading; `rate` in floating point operations a second, bfloat16."""

    bandwidth: float
    rate: float


def hold(seconds: float) -> None:
    """Keep the GPU busy for about so long: what is begun meanwhile runs without the host's pauses in it."""
    torch.cuda._sleep(int(_CYCLES * seconds))  # type: ignore[no-untyped-call]


class Clock:
    """Times calls on the device, each after its caches were flushed."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def seconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """The median of `repeats` calls, after three to warm up."""
        began = 0.0
        for _ in range(3):
            began = time.perf_counter()
            self._flush.zero_()
            call()
        launching = time.perf_counter() - began
        torch.cuda.synchronize()
        # The device waits until all calls are launched, so that it is never the host that is timed.
        hold(min(2 * repeats * launching, _LONGEST_S))
        pairs = []
        for _ in range(repeats):
            self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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
    copied = clock.seconds(lambda: data[: 1 << 29].copy_(data[1 << 29 :]))
    a, b = torch.randn(2, _MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda").unbind(0)
    multiply = clock.seconds(lambda: a @ b)
    # A reduction may be bound by its own arithmetic; a copy reads and writes. The better of both is the ceiling.
    return Ceilings(max(data.nbytes / read, data.nbytes / copied), 2 * _MATRIX**3 / multiply)
