"""Arrays of a step to the device in one copy: packed behind each other in one buffer, and looked at as what they are.

What lies where is said by `packed`, which knows no device. `Mailer` owns the host's buffers, pinned for a GPU: several,
because a copy may still be reading one when the next step is packed.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_ALIGNED = 64  # bytes; what kernels read begins at multiples of 16
_DEPTH = 3  # steps whose copies may be on their way: one in flight, one being begun, one in reserve
_LEAST = 1 << 16


def packed(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins, in bytes, and the bytes of all."""
    offsets, at = [], 0
    for array in arrays:
        offsets.append(at)
        at += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return offsets, at


def write(buffer: npt.NDArray[np.uint8], offset: int, array: Array) -> None:
    """Put an array into a buffer of bytes."""
    if array.size:
        buffer[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()


def view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A part of a buffer of bytes as a tensor."""
    size = prod(shape) * dtype.itemsize
    return buffer[offset : offset + size].view(dtype).view(*shape)


class Mailer:
    """Sends arrays to a device. On a CPU it copies as well, so that what is sent is nobody else's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = [_Slot(device.type == "cuda") for _ in range(_DEPTH)]
        self._sent = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays on the device, each with its dtype and shape: one copy, in the order of the current stream."""
        offsets, size = packed(arrays)
        buffer = self.send_into(None, arrays, offsets, size)
        dtypes = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
        return [
            view(buffer, offset, dtype, array.shape)
            for offset, dtype, array in zip(offsets, dtypes, arrays, strict=True)
        ]

    def send_into(self, target: Tensor | None, arrays: Sequence[Array], offsets: Sequence[int], size: int) -> Tensor:
        """The first `size` bytes of `target`, or of a new buffer, with the arrays at `offsets`. What lies between is
        whatever was sent before."""
        slot = self._slots[self._sent % _DEPTH]
        self._sent += 1
        host = slot.room(max(size, 1))
        for array, offset in zip(arrays, offsets, strict=True):
            write(slot.bytes, offset, array)
        if target is None:
            target = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
        target[:size].copy_(host[:size], non_blocking=True)
        slot.used()
        return target


class _Slot:
    """One of the host's buffers, and the copy that reads it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._host = torch.empty(0, dtype=torch.uint8)
        self._read: torch.cuda.Event | None = None
        self.bytes: npt.NDArray[np.uint8] = self._host.numpy()

    def room(self, size: int) -> Tensor:
        """The buffer, once nobody reads it any more."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None
        if len(self._host) < size:
            room = max(_LEAST, 1 << (size - 1).bit_length())
            self._host = torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)
            self.bytes = self._host.numpy()
        return self._host

    def used(self) -> None:
        """A copy that reads the buffer has begun."""
        if self._pinned:
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record()
