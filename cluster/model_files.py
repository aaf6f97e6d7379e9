"""Whether a model's folder holds everything that serving needs, and whole: configuration, weights, tokenizer, template.

Only headers are read, so a large model takes no longer than a small one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def missing(folder: Path) -> Iterator[str]:
    """What is wrong with the model in `folder`, one line for each fault; nothing where it is complete."""
    config = folder / "config.json"
    if not config.is_file():
        yield "config.json is missing"
    elif _json(config) is None:
        yield "config.json is not JSON"
    yield from _weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield f"there is no tokenizer ({', '.join(TOKENIZERS)})"


def has_template(folder: Path) -> bool:
    """Whether a chat template comes with the tokenizer."""
    return bool(template(folder))


def template(folder: Path) -> str:
    """The chat templates that come with the tokenizer, one behind the other; "" where there is none."""
    files = (*sorted(folder.glob("chat_template*")), *sorted((folder / "additional_chat_templates").glob("*")))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    config = _json(folder / "tokenizer_config.json")
    own = config.get("chat_template") if isinstance(config, dict) else None
    return "\n".join([*texts, own if isinstance(own, str) else json.dumps(own) if own else ""]).strip()


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights, as their index says, or else their files; 0 where there is neither."""
    index = _json(folder / INDEX)
    if isinstance(index, dict) and not (folder / SINGLE).is_file():
        total = (index.get("metadata") or {}).get("total_size")
        if isinstance(total, int | float):
            return int(total)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _weights(folder: Path) -> Iterator[str]:
    names = [SINGLE]
    if (folder / INDEX).is_file():
        index = _json(folder / INDEX)
        if index is None or not isinstance(index.get("weight_map"), dict):
            yield f"{INDEX} is not an index of weights"
            return
        names = sorted(set(index["weight_map"].values()))
    elif not (folder / SINGLE).is_file():
        others = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.gguf")))
        yield f"there are no safetensors weights{f', only {others[0]}' if others else ''}"
        return
    for name in names:
        if not (folder / name).is_file():
            yield f"{name} is missing"
        elif fault := _cut(folder / name):
            yield f"{name} {fault}"


def _cut(path: Path) -> str:
    """Why a safetensors file is not whole, or "": 8 bytes say how long its header is, that where its tensors end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return "is empty or cut off"
        (length,) = struct.unpack("<Q", start)
        if length > size:
            return "is no safetensors file, or a pointer to one (git lfs pull)"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "is no safetensors file"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"has {size} bytes instead of {expected}: the download broke off"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
