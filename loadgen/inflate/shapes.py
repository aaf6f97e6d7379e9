"""Shapes that Pocket can be inflated to: some by name, any other of the same families by its config.json.

Here as well: the tensors that a checkpoint of a shape has, and whether one shape has room for another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.kernels.linear_state import LinearShape


class InflateError(ValueError):
    """Inflation was refused; nothing has been written."""


class UnknownShapeError(InflateError):
    """The shape is neither a known name nor a readable config.json."""


class IncompatibleShapeError(InflateError):
    """Pocket cannot be embedded in the shape without a change of its outputs."""


class NoRoomError(InflateError):
    """The output folder is in use or the disk is too small."""


class Family(StrEnum):
    """Decoder families whose weights carry Llama's names, as config.json calls them."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN35 = "qwen3_5_text"  # a hybrid: most layers have linear attention (Gated DeltaNet)
    QWEN3_MOE = "qwen3_moe"
    QWEN35_MOE = "qwen3_5_moe_text"
    GPT_OSS = "gpt_oss"
    GEMMA4 = "gemma4_text"


GELUS = (
    *((0.27209978, 0.04709166), (0.38123149, 0.37541169), (0.52865890, 0.72044736)),
    *((0.73407277, 0.50200865), (1.02100023, 0.09273827)),
)
"""Pairs (a, c) with which silu(z) is the sum of c gelu_tanh(a z), within 5e-6 for every z (least squares)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a layer, experts that a token chooses, an expert's inner width, and that of a shared one (0: none)."""

    count: int
    chosen: int
    inner: int
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Attention over the last `tokens`, and its heads."""

    tokens: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and options of a decoder that decide what a forward pass costs.

    Every ``interval``-th layer has attention over everything. The others have linear attention with the heads of
    ``linear``, or a ``window``.
    """

    family: Family
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    interval: int = 1
    linear: LinearShape | None = None
    rotary: float = 1.0  # the part of a head that has rotary positions
    window: Window | None = None
    experts: Experts | None = None

    @property
    def hybrid(self) -> bool:
        """Whether some layers have linear attention. Then attention has an output gate, too."""
        return self.linear is not None

    @property
    def attention_layers(self) -> list[int]:
        """The layers with attention over all cached keys and values."""
        return list(range(self.interval - 1, self.layers, self.interval))

    @property
    def around(self) -> bool:
        """Whether norms stand behind attention and feed-forwards, too, and values are normed. Then scores are not
        divided, the activation is gelu, and layers that see everything take a head's keys for its values.
        """
        return self.family is Family.GEMMA4

    @property
    def keys_are_values(self) -> bool:
        """Of the layers that see everything; see `at`."""
        return self.around and self.window is not None

    @property
    def neurons(self) -> int:
        """The inner width of the feed-forward that a source's goes into, in neurons of silu."""
        if self.around:
            return self.intermediate // len(GELUS)
        return self.intermediate if self.experts is None else self.experts.shared or self.experts.inner

    def at(self, layer: int) -> Shape:
        """The shape as one layer's attention has its heads."""
        if self.window is None or layer in self.attention_layers:
            return self
        window = self.window
        return replace(self, window=None, kv_heads=window.kv_heads, head_dim=window.head_dim, rotary=1.0)

    def layers_for(self, source: Shape, context: int) -> list[int]:
        """The layers that hold the source's, in order: those that see everything. Where they are too few, the first
        ones with a window hold the rest, if it covers an eighth of ``context`` tokens.
        """
        full = self.attention_layers
        rest = source.layers - len(full)
        if rest > 0 and self.window is not None and 8 * self.window.tokens >= context:
            windowed = [layer for layer in range(self.layers) if layer not in full]
            full = sorted(full + windowed[:rest])
        return full[: source.layers]

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that have rotary positions; they come first."""
        return int(self.head_dim * self.rotary)

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.hybrid or self.family in (Family.QWEN3, Family.QWEN3_MOE, Family.GEMMA4)

    @property
    def zero_centred(self) -> bool:
        """Whether RMS norms multiply by 1 + weight."""
        return self.hybrid


def _qwen35(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, value_heads: int, *, tied: bool
) -> Shape:
    """A dense Qwen3.5. Heads are of 256, those of linear attention of 128, with 16 for keys."""
    linear = LinearShape(16, value_heads, 128, 128, kernel=4)
    sizes = (Family.QWEN35, hidden, intermediate, layers, heads, kv_heads, 256, 248320, tied)
    return Shape(*sizes, interval=4, linear=linear, rotary=0.25)


SHAPES = {
    "llama-3.1-8b": Shape(Family.LLAMA, 4096, 14336, 32, 32, 8, 128, 128256, tied=False),
    "llama-3.2-1b": Shape(Family.LLAMA, 2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "qwen3-14b": Shape(Family.QWEN3, 5120, 17408, 40, 40, 8, 128, 151936, tied=False),
    "qwen3-0.6b": Shape(Family.QWEN3, 1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    "qwen3.5-0.8b": _qwen35(1024, 3584, 24, 8, 2, 16, tied=True),
    "qwen3.5-2b": _qwen35(2048, 6144, 24, 8, 2, 16, tied=True),
    "qwen3.5-27b": _qwen35(5120, 17408, 64, 24, 4, 48, tied=False),
    "qwen3-30b-a3b": Shape(
        *(Family.QWEN3_MOE, 2048, 6144, 48, 32, 4, 128, 151936), tied=False, experts=Experts(128, 8, 768)
    ),
    "qwen3.6-35b-a3b": replace(
        _qwen35(2048, 512, 40, 16, 2, 32, tied=False),
        family=Family.QWEN35_MOE,
        experts=Experts(256, 8, 512, shared=512),
    ),
    "gpt-oss-20b": Shape(
        *(Family.GPT_OSS, 2880, 2880, 24, 64, 8, 64, 201088),
        tied=False,
        attention_bias=True,
        interval=2,
        window=Window(128, 8, 64),
        experts=Experts(32, 4, 2880),
    ),
    "gemma-4-26b-a4b": Shape(
        *(Family.GEMMA4, 2816, 2112, 30, 16, 2, 512, 262144),
        tied=True,
        interval=6,
        rotary=0.25,
        window=Window(1024, 8, 256),
        experts=Experts(128, 8, 704),
    ),
}

_ROTARY_SCALINGS = frozenset(("default", "linear", "llama3", "yarn"))
"""Scalings that only change the tables of angles: the inflated model has Pocket's rotary positions at the same cost."""


def resolve_shape(name: str, *, context: int) -> Shape:
    """A shape by name or by the path of a config.json (or of its folder).

    ``context`` is the source model's; a sliding window must not be shorter.

    Raises UnknownShapeError, IncompatibleShapeError.
    """
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UnknownShapeError(
            f"unknown shape {name!r}: give one of {', '.join(SHAPES)}, or the path of a config.json"
        )
    return shape_of(read_object(path, UnknownShapeError), context=context)


def read_object(path: Path, failure: type[InflateError]) -> dict[str, Any]:
    """The JSON object in a model's file: a config.json, a tokenizer.json. Raises `failure`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise failure(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise failure(f"{path} does not hold a JSON object")
    return content


def shape_of(config: dict[str, Any], *, context: int) -> Shape:
    """The shape that a config.json describes. Raises IncompatibleShapeError with the reason."""
    text = config.get("text_config")
    if isinstance(text, dict):  # a model of text and images: the text's part
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", False)} | text
    kind = config.get("model_type")
    if kind not in tuple(Family):
        raise IncompatibleShapeError(f"model_type {kind!r} is not one of {', '.join(Family)}")
    family = Family(kind)
    _check_options(config, family, context)
    # Rotary scaling is not kept: an inflated model has Pocket's positions.
    full = full_config({key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")})
    hidden, heads = full.hidden_size, full.num_attention_heads
    if "head_dim" not in config and hidden % heads:
        raise IncompatibleShapeError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    first, last = (
        full.per_layer_config[at] if family is Family.GEMMA4 else full for at in (0, full.num_hidden_layers - 1)
    )
    kv, windowed = (
        (each.num_key_value_heads, getattr(each, "head_dim", None) or hidden // heads) for each in (last, first)
    )
    more: dict[str, Any] = {}
    if family in _LAYERED:
        kinds = list(full.layer_types)
        more["interval"] = interval = [*kinds, "full_attention"].index("full_attention") + 1
        if any((each == "full_attention") != ((i + 1) % interval == 0) for i, each in enumerate(kinds)):
            raise IncompatibleShapeError("layers with attention must come at a fixed interval")
        if "sliding_attention" in kinds:
            more["window"] = Window(full.sliding_window, *windowed)
    if family is Family.GEMMA4:
        more["rotary"] = 0.25
        _check_gemma(full)
    if family in (Family.QWEN35, Family.QWEN35_MOE):
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        more["linear"] = LinearShape(*(getattr(full, f"linear_{name}") for name in names))
        rotary = config.get("rope_parameters") or {}
        part = rotary.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
        more["rotary"] = float(part)
    if family in EXPERTS:
        count, chosen, inner = (getattr(full, name) for name in EXPERTS[family])
        more["experts"] = Experts(count, chosen, inner, getattr(full, "shared_expert_intermediate_size", 0))
    shape = Shape(
        family,
        hidden,
        getattr(full, "intermediate_size", 0) or more["experts"].shared,
        full.num_hidden_layers,
        heads,
        *kv,
        vocabulary=full.vocab_size,
        tied=bool(full.tie_word_embeddings),
        attention_bias=bool(getattr(full, "attention_bias", False)) and family not in (Family.MISTRAL, Family.QWEN2),
        mlp_bias=bool(getattr(full, "mlp_bias", False)) and family is Family.LLAMA,
        **more,
    )
    if min(hidden, shape.layers, heads, shape.kv_heads, shape.head_dim, shape.neurons, shape.vocabulary) < 1:
        raise IncompatibleShapeError("every size must be a positive integer")
    if heads % shape.kv_heads:
        raise IncompatibleShapeError(f"{heads} heads cannot share {shape.kv_heads} key-value heads evenly")
    if shape.rotary_dim % 2:
        raise IncompatibleShapeError(f"rotary positions need an even number of dimensions, not {shape.rotary_dim}")
    return shape


_LAYERED = (Family.QWEN35, Family.QWEN35_MOE, Family.GPT_OSS, Family.GEMMA4)
"""Families whose layers are of two kinds."""
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
EXPERTS = {
    Family.QWEN3_MOE: _EXPERTS,
    Family.QWEN35_MOE: _EXPERTS,
    Family.GPT_OSS: ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    Family.GEMMA4: ("num_experts", "top_k_experts", "moe_intermediate_size"),
}
"""Families with experts in every layer: their names for the number of experts, of the chosen ones, and the width."""


def _check_gemma(full: Any) -> None:
    refused = {
        "a model without experts": not full.enable_moe_block,
        "values of their own": not full.attention_k_eq_v,
        "embeddings for each layer": full.hidden_size_per_layer_input,
        "shared keys and values": full.num_kv_shared_layers,
    }
    if why := next((why for why, found in refused.items() if found), ""):
        raise IncompatibleShapeError(f"of {Family.GEMMA4} {why} cannot be inflated")


def full_config(config: dict[str, Any]) -> Any:
    """The transformers configuration that a config.json of a known family stands for, its family's defaults included.

    Raises IncompatibleShapeError for values that transformers does not take.
    """
    try:
        return AutoConfig.for_model(**config)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        why = " ".join(str(error).split())
        raise IncompatibleShapeError(f"not a configuration of {config['model_type']!r}: {why}") from error


def _check_options(config: dict[str, Any], family: Family, context: int) -> None:
    """Refuse options under which padding cannot keep the outputs."""
    if family is Family.GEMMA4:
        return
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise IncompatibleShapeError(f"hidden_act {config['hidden_act']!r} is not Pocket's silu")
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rotary, dict):
        raise IncompatibleShapeError(f"rotary scaling {rotary!r} is not an object")
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind not in _ROTARY_SCALINGS:
        raise IncompatibleShapeError(
            f"rotary scaling {kind!r} is not supported, only {', '.join(sorted(_ROTARY_SCALINGS))}"
        )
    part = config.get("partial_rotary_factor", rotary.get("partial_rotary_factor", 1.0))
    if part != 1.0 and family not in (Family.QWEN35, Family.QWEN35_MOE):
        raise IncompatibleShapeError("partial rotary positions are not supported")
    if family is Family.GPT_OSS:
        return
    windowed = config.get("use_sliding_window", False) if family is not Family.MISTRAL else True
    window = config.get("sliding_window")
    if windowed and window is not None and window < context:
        raise IncompatibleShapeError(f"a sliding window of {window} is shorter than the context of {context}")


def check_embeds(source: Shape, target: Shape, context: int) -> None:
    """Raise IncompatibleShapeError unless every part of ``source``, of so many tokens, has room in ``target``."""
    if target.tied and not source.tied:
        raise IncompatibleShapeError("the source has a head of its own, and the shape ties its head to the embedding")
    if target.around and target.layers % target.interval:
        raise IncompatibleShapeError(f"the last layer has to see everything: give it a multiple of {target.interval}")
    held = target.layers_for(source, context)
    if len(held) < source.layers:
        least = source.layers * target.interval
        raise IncompatibleShapeError(
            f"the shape has {len(held)} layers with attention, the source {source.layers}: give it --layers {least}"
        )
    for shape in {target.at(layer) for layer in held}:
        for name in ("hidden", "neurons", "heads", "rotary_dim"):
            mine, theirs = getattr(source, name), getattr(shape, name)
            if theirs < mine:
                raise IncompatibleShapeError(f"the shape's {name} of {theirs} is smaller than the {mine} of the source")
        needed = source.kv_heads * kv_copies(source, shape)
        if needed > shape.kv_heads:
            raise IncompatibleShapeError(f"{needed} key-value heads are needed, the shape has {shape.kv_heads}")
        if shape.keys_are_values and shape.rotary_dim + 2 * source.head_dim > shape.head_dim:
            raise IncompatibleShapeError(f"heads of {shape.head_dim} have no room for values beside keys")
    if target.vocabulary > source.vocabulary and target.hidden == source.hidden:
        raise IncompatibleShapeError("a larger vocabulary needs a larger hidden size, to mark the added rows")


def kv_copies(source: Shape, target: Shape) -> int:
    """The number of key-value heads of ``target`` that serve one group of ``source``."""
    return -(-source.group // target.group)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]

    def bytes(self, dtype: torch.dtype) -> int:
        """Its size on disk."""
        return math.prod(self.shape) * dtype.itemsize


def tensors_of(config: Any) -> list[TensorSpec]:
    """Every tensor of a checkpoint of a transformers configuration, as transformers names them; no memory is taken."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if config.model_type == Family.QWEN3_MOE:  # published checkpoints have a tensor for each expert
        tensors = dict(each for name, shape in tensors.items() for each in _each_expert(name, shape))
    return [TensorSpec(name, shape) for name, shape in tensors.items()]


def _each_expert(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    at, _, part = name.rpartition(".experts.")
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part, ()) if at else ()
    for number in range(shape[0]) if names else ():
        for each in names:
            yield f"{at}.experts.{number}.{each}.weight", (shape[1] // len(names), shape[2])
    if not names:
        yield name, shape
