"""A safetensors checkpoint written tensor by tensor: the headers are known beforehand, so memory holds one tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SHARD_BYTES = 2 << 30
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]

    def bytes(self, dtype: torch.dtype) -> int:
        """Its size on disk."""
        count = dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def total_bytes(slots: Sequence[Slot], dtype: torch.dtype) -> int:
    """Size of all tensors on disk."""
    return sum(slot.bytes(dtype) for slot in slots)


def write_shards(
    folder: Path,
    slots: Sequence[Slot],
    dtype: torch.dtype,
    tensor: Callable[[Slot], Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``tensor(slot)`` for every slot into shards of about ``shard_bytes``, and their index."""
    shards: list[list[Slot]] = [[]]
    for slot in slots:
        if shards[-1] and total_bytes([*shards[-1], slot], dtype) > shard_bytes:
            shards.append([])
        shards[-1].append(slot)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, dtype, tensor)
    if len(shards) > 1:
        placed = {slot.name: name for name, shard in zip(names, shards, strict=True) for slot in shard}
        index = {"metadata": {"total_size": total_bytes(slots, dtype)}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(path: Path, slots: Sequence[Slot], dtype: torch.dtype, tensor: Callable[[Slot], Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for slot in slots:
        header[slot.name] = {
            "dtype": _NAMES[dtype],
            "shape": slot.shape,
            "data_offsets": (at, at + slot.bytes(dtype)),
        }
        at += slot.bytes(dtype)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for slot in slots:
            values = tensor(slot)
            if tuple(values.shape) != slot.shape:
                raise AssertionError(f"{slot.name} has shape {tuple(values.shape)}, planned {slot.shape}")
            values.to(dtype).contiguous().flatten().view(torch.uint8).numpy().tofile(file)
