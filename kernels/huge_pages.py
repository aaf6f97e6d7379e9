"""Weights of a CPU in huge pages.

A step reads every weight once. In pages of 4 KiB the processor looks up an address for every 64 lines of a cache. Linux
gives a program pages of 2 MiB where it asks for them, unless the machine's settings forbid that. Then nothing changes.
"""

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes
_MAPPING = 32 * HUGE  # shared by weights that are no larger: few of them fill whole pages

_lock = threading.Lock()
_room = torch.empty(0, dtype=torch.uint8)  # the rest of the latest shared mapping


def copied(values: Tensor) -> Tensor:
    """A contiguous copy, in a mapping that is given back once all tensors in it are gone."""
    size = values.numel() * values.element_size()
    if values.device.type != "cpu" or not size:
        return values.contiguous()
    copy = _taken(size).view(values.dtype).view(values.shape)
    return copy.copy_(values)


def _taken(size: int) -> Tensor:
    """Bytes at a multiple of 64: of the shared mapping, of a new one once that is full, or of one of their own."""
    global _room
    if size > _MAPPING:
        return _mapped(size)
    step = -(-size // 64) * 64
    with _lock:
        if step > len(_room):
            _room = _mapped(_MAPPING)
        taken, _room = _room[:size], _room[step:]
    return taken


def _mapped(size: int) -> Tensor:
    """Bytes that begin with a huge page. They take memory once they are written."""
    memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE
    return whole[skipped : skipped + size]
