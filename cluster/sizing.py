"""How many cells a GPU holds beside a model's weights: from the model's shape alone, nothing is loaded or measured.

    cell     = 2 (key and value) x layers x key-value heads x head size x bytes of a number
    cells    = (share x memory of the GPU - parameters x bytes of a number) / cell

`share` is `engine.gpu_memory`. An engine measures what its largest step takes and gives the cells that much less.
A model with linear attention has cells in its other layers only, and shares this memory between cells and states:

    state    = linear layers x (value heads x key size x value size x 4 bytes
                                + channels x (kernel + drafts) x bytes of a number)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.replicas.config import (
    PROGRAM_STATES,
    SCALE_BYTES,
    DraftConfig,
    EngineConfig,
    Memory,
    ModelShape,
    split_memory,
)
from holdfast.replicas.errors import ConfigError

SHARE = 0.9
GB = 10**9  # as data sheets count
BYTES = 2  # of a number in bfloat16
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear attention (Gated DeltaNet): its layers and heads, and the taps of its convolution."""

    layers: int
    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int = 4

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder: what its config.json says. `tied`: input and output share one matrix.

    `linear`: some of the layers have linear attention, and the attention of the others has an output gate.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool = False
    linear: Linear | None = None

    @property
    def parameters(self) -> int:
        """Of all matrices; norms and biases, less than a thousandth, are left out."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        mixers = self.attention_layers * attention
        if self.linear is not None:
            gates = self.attention_layers * self.hidden * self.head * self.heads
            values = self.linear.value_heads * self.linear.value
            inputs = self.linear.channels + values + 2 * self.linear.value_heads
            layer = self.hidden * (inputs + values) + self.linear.channels * self.linear.kernel
            mixers += gates + self.linear.layers * layer
        feed_forward = self.layers * 3 * self.hidden * self.intermediate
        return mixers + feed_forward + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.layers - (self.linear.layers if self.linear is not None else 0)

    def cell_bytes(self, number: int = BYTES) -> int:
        """Bytes of one token's keys and values in every layer; of a byte a number with their scales."""
        return 2 * self.attention_layers * self.kv_heads * (self.head * number + (SCALE_BYTES if number == 1 else 0))

    def state_bytes(self, number: int = BYTES, window: int = 1 + DraftConfig().max_draft) -> int:
        """Bytes of one sequence's recurrent state, the inputs of its last `window` tokens included; 0: it has none."""
        if self.linear is None:
            return 0
        each = self.linear.value_heads * (self.linear.key * self.linear.value + 2 * window) * 4
        inputs = self.linear.channels * (self.linear.kernel - 1 + window) * number
        return self.linear.layers * (each + inputs)

    def split(self, engine: EngineConfig, number: int, budget: float) -> Memory:
        """Cells and states of an engine that has `budget` bytes for them; what its options fix stays as it is.

        `number`: bytes of a number as the model computes.
        """
        values = 2 * self.attention_layers * self.kv_heads * self.head
        shape = ModelShape(0, "bfloat16", values, 0, self.head, self.state_bytes(number, window(engine)))
        return split_memory(engine, shape, self.cell_bytes(1 if engine.kv_dtype == "int8" else number), budget)

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
    "Qwen3.5-9B": Shape(32, 4096, 12288, 16, 4, 256, 248320, linear=Linear(24, 16, 32, 128, 128)),
    "Qwen3.5-27B": Shape(64, 5120, 17408, 24, 4, 256, 248320, linear=Linear(48, 16, 48, 128, 128)),
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
            linear=_linear(text),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json tells no decoder's shape: {error}", "model") from error


def _linear(text: Mapping[str, Any]) -> Linear | None:
    """The layers of linear attention, where `layer_types` has some. Raises like a mapping and `int`."""
    layers = list(text.get("layer_types") or ()).count("linear_attention")
    if not layers:
        return None
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return Linear(layers, *(int(text[f"linear_{name}"]) for name in names))


def read_shape(folder: Path) -> Shape:
    """The shape of the model in `folder`. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / 'config.json'}: {error}", "model") from error
    return shape_of(config)


def window(engine: EngineConfig) -> int:
    """Tokens after its state that a sequence keeps the inputs of: drafts, and the token before them."""
    return 1 + (engine.speculation.max_draft if engine.speculation.enabled else 0)


def fit(shape: Shape, memory: float, share: float = SHARE, number: int = BYTES) -> Memory:
    """Cells and states that fit into `memory` bytes beside the weights; 0 where not even these do."""
    left = share * memory - shape.weight_bytes(number)
    return shape.split(EngineConfig(page_size=1), number, left) if left > 0 else Memory(0, 0)


def table(models: Mapping[str, Shape], gpus: Mapping[str, int], share: float = SHARE) -> list[Sequence[str]]:
    """Rows, a head first: a model's parameters, the size of a cell and of a state, how many cells each GPU holds ("-":
    under 1,000); of a model with states those that are left beside them.
    """
    sizes = (f"{name} {size}" for name, size in gpus.items())
    rows: list[Sequence[str]] = [("model", "weights", "a cell", "a state", *sizes)]
    for name, shape in models.items():
        held = (fit(shape, size * GB, share).cells for size in gpus.values())
        size = f"{shape.parameters / 1e9:.1f} G"
        state = f"{shape.state_bytes() / MIB:.0f} MiB" if shape.linear is not None else ""
        rows.append((name, size, f"{shape.cell_bytes() // 1024} KiB", state, *(_short(n) for n in held)))
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
    held = fit(shape, memory, share)
    if not held.cells:
        return f"the weights alone take {shape.weight_bytes() / GIB:.1f} GiB: too large for this GPU"
    each, weights = shape.cell_bytes() / 1024, shape.weight_bytes() / GIB
    beside = f"beside {weights:.1f} GiB of weights, in {share:g} of the GPU's memory"
    states = f"and {states_told(held, shape.state_bytes())}, " if held.slots else ""
    return f"{held.cells:,} cells of {each:.0f} KiB {states}{beside}"


def states_told(held: Memory, state: int) -> str:
    """How many recurrent states of `state` bytes there are, and for how many programs that is."""
    programs = max(1, held.slots // PROGRAM_STATES)
    return f"{held.slots:,} states of {state / MIB:.0f} MiB for about {programs:,} programs"
