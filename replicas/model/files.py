"""The files of a checkpoint: which there are, whether they are whole, and which tensors are stored in them.

Only headers are read, so a large model takes no longer than a small one. Nothing heavy is imported: command lines ask,
too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.replicas.model.folder import cannot_serve

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of a checkpoint in several files
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4}
_POINTER = b"version https://git-lfs"
_AGAIN = "Download it again: hf download NAME --local-dir FOLDER"


class Fault(NamedTuple):
    """An error in a checkpoint's files, and its remedy."""

    found: str
    mend: str = _AGAIN


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file: `dtype` by the format's name, and which bytes of the file it is."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def has_safetensors(folder: Path) -> bool:
    """Whether a folder has weights of this format, or names some."""
    return any((folder / name).is_file() for name in (ONE_FILE, INDEX))


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint. Where one file and an index are both there, the one file, as with transformers.

    Raises ValueError for an index that is none, OSError where there is neither.
    """
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    return [folder / name for name in sorted(set(weight_map(folder).values()))]


def weight_map(folder: Path) -> Mapping[str, str]:
    """The file of each tensor, by the index. Raises ValueError and OSError like `weight_files`."""
    index = json.loads((folder / INDEX).read_text())
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ValueError(f"{INDEX} has no weight_map")
    return {str(tensor): str(file) for tensor, file in places.items()}


def stored_tensors(model: str, folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint by their names. Raises ConfigError for the first fault of its files."""
    stored: dict[str, Stored] = {}
    for fault in faults(folder, stored):
        raise cannot_serve(model, f"{fault.found}. {fault.mend}")
    return stored


def faults(folder: Path, stored: dict[str, Stored] | None = None) -> Iterator[Fault]:
    """The errors in the weights in `folder`; none if they are complete. Fills `stored`."""
    stored = {} if stored is None else stored
    if not has_safetensors(folder):
        others = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        only = f", only {others[0]}, which may run code when it is read" if others else ""
        yield Fault(f"there are no safetensors weights{only}", "Download them: hf download NAME --local-dir FOLDER")
        return
    try:
        files = weight_files(folder)
    except (OSError, ValueError) as error:
        yield Fault(f"{INDEX} is not an index of weights ({error})")
        return
    whole = True
    for file in files:
        if fault := _read_header(file, stored):
            whole = False
            yield fault
    if whole and files != [folder / ONE_FILE]:
        named = weight_map(folder)
        if lacking := sorted(named.keys() - stored.keys()):
            first = f"{lacking[0]} in {named[lacking[0]]}"
            yield Fault(f"its files lack {len(lacking)} weights that the index names, {first} among them")


def _read_header(file: Path, stored: dict[str, Stored]) -> Fault | None:
    """Add the tensors of a file. 8 bytes say how long its header is, and that where each tensor begins and ends."""
    name = file.name
    if not file.is_file():
        return Fault(f"{name} is missing")
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(_POINTER))
        if start == _POINTER:
            return Fault(f"{name} is a git-lfs pointer to the weights", "Fetch them: git lfs pull")
        if len(start) < 8:
            return Fault(f"{name} is empty or cut off")
        length = struct.unpack("<Q", start[:8])[0]
        if length > size:
            return Fault(f"{name} is no safetensors file, or its header is cut off")
        opened.seek(8)
        try:
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            tensors = {tensor: _stored(file, 8 + length, entry) for tensor, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return Fault(f"{name} is no safetensors file")
    expected = max((each.end for each in tensors.values()), default=8 + length)
    if size != expected:
        return Fault(f"{name} has {size:,} bytes instead of {expected:,}: the download broke off")
    for tensor, each in tensors.items():
        if (bits := _BITS.get(each.dtype)) and (each.end - each.begin) * 8 != math.prod(each.shape) * bits:
            shape = f"{each.dtype} of {list(each.shape)}"
            return Fault(f"{tensor} in {name} has {each.end - each.begin:,} bytes, which is not {shape}")
    stored.update(tensors)
    return None


def _stored(file: Path, data: int, entry: Any) -> Stored:
    begin, end = entry["data_offsets"]
    return Stored(file, str(entry["dtype"]), tuple(map(int, entry["shape"])), data + int(begin), data + int(end))
