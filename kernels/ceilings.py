"""The limits of a GPU, measured: memory bandwidth and the rate of its matrix units. Also the clock that times calls."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 << 20  # beyond any cache
_MATRIX = 8192
_CYCLES = 2e9  # of the device's clock in a second, at its fastest
_SHORTEST_S, _LONGEST_S = 0.03, 0.5  # how long the device waits for the host
_WARM_S = 0.025  # until a device's clocks are up again after it waited for a compiler


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`bandwidth` in bytes a second, of reading; `rate` in floating point operations a second, bfloat16.

    `empty_s`: the measured time of a kernel that does nothing; every timed call contains it.
    """

    bandwidth: float
    rate: float
    empty_s: float = 0.0


def hold(seconds: float) -> None:
    """Keep the GPU busy for about that long: kernels launched meanwhile then run without the host's pauses."""
    torch.cuda._sleep(int(_CYCLES * seconds))  # type: ignore[no-untyped-call]


class Clock:
    """Times calls on the device, each after its caches were flushed."""

    def __init__(self) -> None:
        self._flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def seconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """The median of `repeats` calls, after some to warm up."""
        launching = self._warm_up(call)
        # The device waits until all calls are launched, so that the host is never timed.
        hold(min(max(2 * repeats * launching, _SHORTEST_S), _LONGEST_S))
        pairs = []
        for _ in range(repeats):
            self._empty_caches()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3

    def _warm_up(self, call: Callable[[], object]) -> float:
        """Compile, then call for a while. Returns the seconds that the host takes to launch a call."""
        call()
        torch.cuda.synchronize()
        ends = time.perf_counter() + _WARM_S
        while True:
            began = time.perf_counter()
            self._empty_caches()
            call()
            launching = time.perf_counter() - began
            torch.cuda.synchronize()
            if time.perf_counter() >= ends:
                return launching

    def _empty_caches(self) -> None:
        # By reading: written lines would have to be written back while the call is timed.
        torch.amax(self._flush)


def measure_ceilings(clock: Clock) -> Ceilings:
    """Read 2 GiB by one reduction, copy 1 GiB, multiply two matrices of 8192 x 8192, and do nothing."""
    data = torch.empty(1 << 29, dtype=torch.float32, device="cuda").normal_()  # of 16 bits a thread reads only 8 bytes
    read = clock.seconds(lambda: torch.amax(data))
    copied = clock.seconds(lambda: data[: 1 << 28].copy_(data[1 << 28 :]))
    a, b = torch.randn(2, _MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda").unbind(0)
    multiply = clock.seconds(lambda: a @ b)
    # A reduction may be bound by its own arithmetic; a copy reads and writes. The better of both is the ceiling.
    bandwidth, rate = max(data.nbytes / read, data.nbytes / copied), 2 * _MATRIX**3 / multiply
    return Ceilings(bandwidth, rate, clock.seconds(lambda: hold(0.0)))
