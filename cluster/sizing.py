"""How many cells a GPU holds beside a model's weights: from the model's shape alone, nothing is loaded or measured.

    cell     = 2 (key and value) x layers x key-value heads x head size x bytes of a number
    cells    = (share x memory of the GPU - parameters x bytes of a number) / cell

`share` is `engine.gpu_memory`. An engine measures what its largest step takes and gives the cells that much less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.replicas.config import SCALE_BYTES
from holdfast.replicas.errors import ConfigError

SHARE = 0.9
GB = 10**9  # as data sheets count
BYTES = 2  # of a number in bfloat16
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder: what its config.json says. `tied`: input and output share one matrix."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Of all matrices; norms and biases, less than a thousandth, are left out."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + (1 if self.tied else 2) * self.vocabulary * self.hidden

    def cell_bytes(self, number: int = BYTES) -> int:
        """Bytes of one token's keys and values in every layer; of a byte a number with their scales."""
        return 2 * self.layers * self.kv_heads * (self.head * number + (SCALE_BYTES if number == 1 else 0))

    def weight_bytes(self, number: int = BYTES) -> int:
        return self.parameters * number

    def int8_bytes(self, number: int) -> int:
        """Matrices in int8, the embedding beside them with `number` bytes a number."""
        tables = 1 if self.tied else 2
        matrices = self.parameters - (tables - 1) * self.vocabulary * self.hidden
        return matrices + self.vocabulary * self.hidden * number


# The models' own configurations on the Hugging Face hub.
MODELS: Mapping[str, Shape] = {
    "Qwen3-0.6B": Shape(28, 1024, 3072, 16, 8, 128, 151936, tied=True),
    "Qwen3-4B": Shape(36, 2560, 9728, 32, 8, 128, 151936, tied=True),
    "Qwen2.5-7B": Shape(28, 3584, 18944, 28, 4, 128, 152064),
    "Mistral-7B-v0.3": Shape(32, 4096, 14336, 32, 8, 128, 32768),
    "Llama-3.1-8B": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "Qwen3-8B": Shape(36, 4096, 12288, 32, 8, 128, 151936),
    "Qwen3-14B": Shape(40, 5120, 17408, 40, 8, 128, 151936),
    "Qwen3-32B": Shape(64, 5120, 25600, 64, 8, 128, 151936),
    "Llama-3.1-70B": Shape(80, 8192, 28672, 64, 8, 128, 128256),
}
GPUS: Mapping[str, int] = {"L4": 24, "A100": 40, "L40S": 48, "H100": 80, "H200": 141, "B200": 180}  # GB


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json tells. Raises ConfigError for one without these numbers, or with experts."""
    text = config.get("text_config") or config
    if any(text.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError("models with experts are not sized: their weights do not follow from these numbers", "model")
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        return Shape(
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(text["intermediate_size"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head=int(text.get("head_dim") or hidden // heads),
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json tells no decoder's shape: {error}", "model") from error


def read_shape(folder: Path) -> Shape:
    """The shape of the model in `folder`. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / 'config.json'}: {error}", "model") from error
    return shape_of(config)


def cells(shape: Shape, memory: float, share: float = SHARE, number: int = BYTES) -> int:
    """Cells that fit into `memory` bytes beside the weights; 0 where not even these do."""
    return max(0, int((share * memory - shape.weight_bytes(number)) / shape.cell_bytes(number)))


def table(models: Mapping[str, Shape], gpus: Mapping[str, int], share: float = SHARE) -> list[Sequence[str]]:
    """Rows, a head first: a model's parameters, the size of a cell, how many each GPU holds ("-": under 1,000)."""
    rows: list[Sequence[str]] = [("model", "weights", "a cell", *(f"{name} {size}" for name, size in gpus.items()))]
    for name, shape in models.items():
        held = (cells(shape, size * GB, share) for size in gpus.values())
        size = f"{shape.parameters / 1e9:.1f} G"
        rows.append((name, size, f"{shape.cell_bytes() // 1024} KiB", *(_short(n) for n in held)))
    return rows


def _short(n: int) -> str:
    if n < 1000:
        return "-"
    return f"{n / 1e3:.0f}k" if n < 10**6 else f"{n / 1e6:.2f}M"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table for the documentation."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]])


def advice(shape: Shape, memory: float, share: float = SHARE) -> str:
    """What a GPU of `memory` bytes holds."""
    n = cells(shape, memory, share)
    if not n:
        return f"the weights alone take {shape.weight_bytes() / GIB:.1f} GiB: too large for this GPU"
    each, weights = shape.cell_bytes() / 1024, shape.weight_bytes() / GIB
    return f"{n:,} cells of {each:.0f} KiB beside {weights:.1f} GiB of weights, in {share:g} of the GPU's memory"
