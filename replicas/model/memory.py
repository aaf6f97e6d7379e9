"""How many cells of KV a GPU has room for: what a share of its memory leaves beside the model and its largest step.

The arithmetic is pure. What it starts from is measured once, when the model is loaded: the memory that is taken while
the largest step the configuration allows runs over a store of a few pages. Whatever does not fit is an error that names
the setting to change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.replicas.errors import ConfigError, EngineError

_GIB = 2**30


class MemorySource(Protocol):
    """A device's memory, in bytes."""

    def total(self) -> int: ...

    def others(self) -> int:
        """What is taken, but not by tensors of this process."""

    def taken(self) -> int:
        """What tensors of this process take now."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        """The most that this process had reserved for tensors since `reset_peak`."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes. `weights`: the model; `step`: what its largest step takes besides, at its peak; no KV in either."""

    total: int
    others: int
    weights: int
    step: int


def measure(source: MemorySource, kv_bytes: int, largest_step: Callable[[], object]) -> MemoryUse:
    """Run the largest step and see what it takes; `kv_bytes` are those of the store it runs over.

    Raises ConfigError, for `step_tokens`, when there is no memory for it.
    """
    weights = source.taken() - kv_bytes
    source.reset_peak()
    try:
        largest_step()
    except (EngineError, RuntimeError) as error:
        if "out of memory" not in str(error).lower():
            raise
        message = f"the largest step does not fit on the GPU beside {_gib(weights)} of weights: lower step_tokens"
        raise ConfigError(message, "step_tokens") from error
    step = max(source.peak() - kv_bytes - weights, 0)
    return MemoryUse(source.total(), source.others(), weights, step)


def cells_left(use: MemoryUse, share: float, reserve: int, cell_bytes: int, page_size: int) -> int:
    """Cells in whole pages that fit into `share` of the memory, with `reserve` bytes kept for graphs.

    Raises ConfigError, naming the setting to change, where not a page is left.
    """
    allowed = int(use.total * share) - use.others
    left = allowed - use.weights - use.step - reserve
    pages = left // (cell_bytes * page_size)
    if pages >= 1:
        return pages * page_size
    of_it = f"of {_gib(use.total)}, {_gib(use.others)} are taken by others and gpu_memory allows {share:g}"
    if use.weights >= use.total - use.others:
        raise ConfigError(f"the weights take {_gib(use.weights)}; {of_it}: use a smaller model or dtype", "model")
    if use.weights + reserve >= allowed:
        raise ConfigError(f"the weights take {_gib(use.weights)}; {of_it}: raise gpu_memory", "gpu_memory")
    message = f"weights take {_gib(use.weights)} and the largest step {_gib(use.step)}; {of_it}: lower step_tokens"
    raise ConfigError(f"{message} or raise gpu_memory", "step_tokens")


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


class GpuMemory:
    """The memory of the current CUDA device."""

    def total(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def others(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())

    def taken(self) -> int:
        return int(torch.cuda.memory_allocated())

    def reset_peak(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_reserved())
