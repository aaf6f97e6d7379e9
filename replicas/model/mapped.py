"""Tensors of a checkpoint's files, each mapped into memory while it is used and no longer.

So a process that copies one tensor after the other never has more of the files in its memory than these, whatever the
size of a file.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from holdfast.replicas.model.files import Stored

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class MappedTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint, by their names in its files.

    `sizes`: without memory, on the device "meta". `read` is called with the bytes of each tensor that is asked for.
    Raises ValueError for a tensor of a dtype that torch does not have.
    """

    def __init__(self, stored: Mapping[str, Stored], read: Callable[[int], None], sizes: bool = False) -> None:
        self._stored, self._read, self._sizes = stored, read, sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        if stored.dtype not in _DTYPES:
            raise ValueError(f"{name} in {stored.file.name} is {stored.dtype}, which torch does not have")
        dtype = _DTYPES[stored.dtype]
        self._read(stored.end - stored.begin)
        return torch.empty(stored.shape, dtype=dtype, device="meta") if self._sizes else mapped(stored, dtype)


def mapped(stored: Stored, dtype: torch.dtype) -> Tensor:
    """A tensor over the bytes of its file. Its memory is the file's, until it is written to."""
    if stored.begin == stored.end:
        return torch.empty(stored.shape, dtype=dtype)
    first = stored.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with stored.file.open("rb") as file:
        memory = mmap.mmap(file.fileno(), stored.end - first, access=mmap.ACCESS_COPY, offset=first)
    memory.madvise(mmap.MADV_WILLNEED)
    whole = torch.frombuffer(memory, dtype=torch.uint8, offset=stored.begin - first)  # it keeps the mapping
    if whole.data_ptr() % dtype.itemsize:  # a file may have a tensor of bytes before one of numbers
        whole = whole.clone()
    return whole.view(dtype).view(stored.shape)
