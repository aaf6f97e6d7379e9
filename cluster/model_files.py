"""Whether a model's folder holds everything that serving needs, and whole: configuration, weights, tokenizer, template.

Only headers are read, so a large model takes no longer than a small one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.replicas.model import files

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def missing(folder: Path) -> Iterator[files.Fault]:
    """What is wrong with the model in `folder`; nothing where it is complete."""
    config = folder / "config.json"
    if not config.is_file():
        yield files.Fault("config.json is missing")
    elif _json(config) is None:
        yield files.Fault("config.json is not JSON")
    yield from files.faults(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield files.Fault(f"there is no tokenizer ({', '.join(TOKENIZERS)})")


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
    index = _json(folder / files.INDEX)
    if isinstance(index, dict) and not (folder / files.ONE_FILE).is_file():
        total = (index.get("metadata") or {}).get("total_size")
        if isinstance(total, int | float):
            return int(total)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
