"""Arrays from the host to a device, without waiting for what the device is still doing.

From ordinary memory a copy to a GPU would wait for everything that the GPU was given before. So arrays go through
pinned memory, and those that belong together go in one copy: packed one behind the other into a buffer of bytes
(`packed`), and seen on the device as what they are (`view`). `Sender` does that once a step from buffers of its own. A
CPU takes the same way without pinning.
"""

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]

ALIGNED = 64  # bytes; what kernels read begins at multiples of 16
_DEPTH = 3  # copies that may be on their way: of the step in flight, of the one being begun, and one in reserve
_LEAST = 1 << 16  # bytes of a buffer


def sent(array: Array, device: torch.device) -> Tensor:
    """`array` on a device, by a copy that nobody waits for. On a CPU it is the array's own memory."""
    tensor = torch.from_numpy(array)
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def sent_together(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays on a device, each with its dtype and shape, by one such copy."""
    offsets, size = packed(arrays)
    buffer = np.empty(max(size, 1), np.uint8)
    _fill(buffer, arrays, offsets)
    return views(sent(buffer, device), arrays, offsets)


def packed(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins, in bytes, and the bytes of all."""
    offsets, at = [], 0
    for array in arrays:
        offsets.append(at)
        at += -(-array.nbytes // ALIGNED) * ALIGNED
    return offsets, at


def view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A part of a buffer of bytes as a tensor."""
    part = buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype)
    return part if len(shape) == 1 else part.view(*shape)


@cache
def _dtype(dtype: "np.dtype[Any]") -> torch.dtype:
    """torch's name of it."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def views(buffer: Tensor, arrays: Sequence[Array], offsets: Sequence[int]) -> list[Tensor]:
    """What lies at `offsets` of a buffer of bytes, as tensors like `arrays`."""
    return [
        view(buffer, offset, _dtype(array.dtype), array.shape) for offset, array in zip(offsets, arrays, strict=True)
    ]


def _fill(buffer: npt.NDArray[np.uint8], arrays: Sequence[Array], offsets: Sequence[int]) -> None:
    for array, offset in zip(arrays, offsets, strict=True):
        if array.size:
            buffer[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()


class Sender:
    """Sends arrays to one device, from a few pinned buffers that it uses in turn.

    Several, because a copy may still be reading one when the next arrays are packed. On a CPU it copies as well, so
    that what was sent is nobody else's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        """What everything is sent in the order of: it takes longer to ask for than to use."""
        self._buffers = [_Buffer(self.stream) for _ in range(_DEPTH)]
        self._sent = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays on the device, each with its dtype and shape: one copy."""
        offsets, size = packed(arrays)
        target = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
        self.send_into(target, arrays, offsets, size)
        return views(target, arrays, offsets)

    def send_into(self, target: Tensor, arrays: Sequence[Array], offsets: Sequence[int], size: int) -> None:
        """Fill the first `size` bytes of `target`, the arrays at `offsets`; what lies between them is left open."""
        buffer = self._buffers[self._sent % _DEPTH]
        self._sent += 1
        host = buffer.reserve(size)
        _fill(buffer.bytes, arrays, offsets)
        target[:size].copy_(host[:size], non_blocking=True)
        buffer.mark_read()


class _Buffer:
    """Host memory, and the copy that reads it."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._host = torch.empty(0, dtype=torch.uint8)
        self._read: torch.cuda.Event | None = None
        self.bytes: npt.NDArray[np.uint8] = self._host.numpy()

    def reserve(self, size: int) -> Tensor:
        """At least `size` bytes, once nobody reads them any more."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None
        if len(self._host) < size:
            room = max(_LEAST, 1 << (size - 1).bit_length())
            self._host = torch.empty(room, dtype=torch.uint8, pin_memory=self._stream is not None)
            self.bytes = self._host.numpy()
        return self._host

    def mark_read(self) -> None:
        """A copy that reads the memory has begun."""
        if self._stream is not None:
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record(self._stream)
