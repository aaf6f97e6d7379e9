"""Shapes that Pocket can be inflated to: four by name, any other Llama, Mistral, Qwen2 or Qwen3 by its config.json.

Here as well: the tensors that a checkpoint of a shape has, and whether one shape has room for another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig


class InflateError(ValueError):
    """Inflation was refused; nothing has been written."""


class UnknownShapeError(InflateError):
    """The shape is neither a known name nor a readable config.json."""


class IncompatibleShapeError(InflateError):
    """Pocket cannot be embedded in the shape without changing what it says."""


class NoRoomError(InflateError):
    """The output folder is in use or the disk is too small."""


class Family(StrEnum):
    """Decoder families whose weights carry Llama's names."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and options of a decoder that decide what a forward pass costs."""

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

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.attention_bias or self.family is Family.QWEN2

    @property
    def output_bias(self) -> bool:
        """Whether the attention output has a bias."""
        return self.attention_bias and self.family in (Family.LLAMA, Family.QWEN3)

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.family is Family.QWEN3


SHAPES = {
    "llama-3.1-8b": Shape(Family.LLAMA, 4096, 14336, 32, 32, 8, 128, 128256, tied=False),
    "llama-3.2-1b": Shape(Family.LLAMA, 2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "qwen3-14b": Shape(Family.QWEN3, 5120, 17408, 40, 40, 8, 128, 151936, tied=False),
    "qwen3-0.6b": Shape(Family.QWEN3, 1024, 3072, 28, 16, 8, 128, 151936, tied=True),
}

_ROTARY_SCALINGS = frozenset(("default", "linear", "llama3"))
"""Scalings that only move frequencies: the inflated model has Pocket's rotary positions at the same cost."""


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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise failure(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise failure(f"{path} does not hold a JSON object")
    return found


def shape_of(config: dict[str, Any], *, context: int) -> Shape:
    """The shape a config.json describes. Raises IncompatibleShapeError with what stands in the way."""
    kind = config.get("model_type")
    if kind not in tuple(Family):
        raise IncompatibleShapeError(f"model_type {kind!r} is not one of {', '.join(Family)}")
    family = Family(kind)
    _check_options(config, family, context)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    # transformers refuses such a Llama even where head_dim is given.
    if (family is Family.LLAMA or "head_dim" not in config) and hidden % heads:
        raise IncompatibleShapeError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    shape = Shape(
        family,
        hidden,
        _size(config, "intermediate_size"),
        _size(config, "num_hidden_layers"),
        heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", 128 if family is Family.QWEN3 else hidden // heads),
        vocabulary=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)) and family in (Family.LLAMA, Family.QWEN3),
        mlp_bias=bool(config.get("mlp_bias", False)) and family is Family.LLAMA,
    )
    if shape.heads % shape.kv_heads:
        raise IncompatibleShapeError(f"{shape.heads} heads cannot share {shape.kv_heads} key-value heads evenly")
    if shape.head_dim % 2:
        raise IncompatibleShapeError(f"rotary positions need an even head_dim, not {shape.head_dim}")
    return shape


def full_config(config: dict[str, Any]) -> Any:
    """The transformers configuration that a config.json of a known family stands for, its family's defaults included.

    Raises IncompatibleShapeError for values that transformers does not take.
    """
    try:
        return AutoConfig.for_model(**config)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        why = " ".join(str(error).split())
        raise IncompatibleShapeError(f"not a configuration of {config['model_type']!r}: {why}") from error


def _size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise IncompatibleShapeError(f"{key} must be a positive integer, not {value!r}")
    return value


def _check_options(config: dict[str, Any], family: Family, context: int) -> None:
    """Refuse options under which padding cannot keep the outputs."""
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
    if config.get("partial_rotary_factor", rotary.get("partial_rotary_factor", 1.0)) != 1.0:
        raise IncompatibleShapeError("partial rotary positions are not supported")
    windowed = config.get("use_sliding_window", False) if family is not Family.MISTRAL else True
    window = config.get("sliding_window")
    if windowed and window is not None and window < context:
        raise IncompatibleShapeError(f"a sliding window of {window} is shorter than the context of {context}")


def check_embeds(source: Shape, target: Shape) -> None:
    """Raise IncompatibleShapeError unless every part of ``source`` has room in ``target``."""
    if target.tied and not source.tied:
        raise IncompatibleShapeError("the source has a head of its own, and the shape ties its head to the embedding")
    for name in ("hidden", "intermediate", "layers", "heads", "head_dim"):
        mine, theirs = getattr(source, name), getattr(target, name)
        if theirs < mine:
            raise IncompatibleShapeError(f"the shape's {name} of {theirs} is smaller than the {mine} of the source")
    if target.vocabulary > source.vocabulary and target.hidden == source.hidden:
        raise IncompatibleShapeError("a larger vocabulary needs a larger hidden size, to mark the added rows")
    needed = source.kv_heads * kv_copies(source, target)
    if needed > target.kv_heads:
        raise IncompatibleShapeError(f"{needed} key-value heads are needed, the shape has {target.kv_heads}")


def kv_copies(source: Shape, target: Shape) -> int:
    """How many key-value heads of ``target`` it takes to serve one group of ``source``."""
    return -(-source.group // target.group)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]

    def bytes(self, dtype: torch.dtype) -> int:
        """Its size on disk."""
        count = dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def tensors_of(t: Shape) -> list[TensorSpec]:
    """Every tensor of a checkpoint of this shape, in the order of the layers."""
    queries, keys = t.heads * t.head_dim, t.kv_heads * t.head_dim
    tensors = [TensorSpec("model.embed_tokens.weight", (t.vocabulary, t.hidden))]
    for layer in range(t.layers):
        at = f"model.layers.{layer}."
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        tensors += [TensorSpec(f"{at}self_attn.{name}.weight", (count, t.hidden)) for name, count in rows.items()]
        tensors.append(TensorSpec(f"{at}self_attn.o_proj.weight", (t.hidden, queries)))
        if t.qkv_bias:
            tensors += [TensorSpec(f"{at}self_attn.{name}.bias", (count,)) for name, count in rows.items()]
        if t.output_bias:
            tensors.append(TensorSpec(f"{at}self_attn.o_proj.bias", (t.hidden,)))
        if t.head_norms:
            tensors += [TensorSpec(f"{at}self_attn.{name}.weight", (t.head_dim,)) for name in ("q_norm", "k_norm")]
        sizes = {
            "gate_proj": (t.intermediate, t.hidden),
            "up_proj": (t.intermediate, t.hidden),
            "down_proj": (t.hidden, t.intermediate),
        }
        tensors += [TensorSpec(f"{at}mlp.{name}.weight", size) for name, size in sizes.items()]
        if t.mlp_bias:
            tensors += [TensorSpec(f"{at}mlp.{name}.bias", size[:1]) for name, size in sizes.items()]
        tensors += [
            TensorSpec(f"{at}{name}.weight", (t.hidden,)) for name in ("input_layernorm", "post_attention_layernorm")
        ]
    tensors.append(TensorSpec("model.norm.weight", (t.hidden,)))
    return tensors if t.tied else [*tensors, TensorSpec("lm_head.weight", (t.vocabulary, t.hidden))]
