"""What a checkpoint's configuration says, read offline as data.

`inspect_model` reads the numbers that every model needs: its KV cell, context, vocabulary and dtype. `describe` makes
the `Description` that our own decoder runs: layers of a mixer and a feed-forward. A family of models that differs only
in options is a row of `FAMILIES`. Any other model runs through `any_model`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from holdfast.replicas.config import BYTES, DType, ModelShape
from holdfast.replicas.kv.tensors import CellShape
from holdfast.replicas.model.folder import cannot_serve, model_folder

ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # the others change with the length of the sequence
_KV_LAYERS = {"full_attention", "sliding_attention"}
LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, ImportError)
"""What transformers raises for files that it cannot load, besides `StrictDataclassError`."""


# ---- what our decoder runs ----


@dataclass(frozen=True, slots=True)
class Attention:
    """A mixer: causal attention with rotary positions, over the last `window` tokens or over all."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    bias: bool  # of queries, keys and values
    qk_norm: bool

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(silu(gate(x)) up(x))."""

    inner: int


@dataclass(frozen=True, slots=True)
class LayerDescription:
    mixer: Attention
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Description:
    """A model that our decoder runs. All layers have attention with the same heads: they share one KV store."""

    layers: tuple[LayerDescription, ...]
    hidden: int
    vocabulary: int
    eps: float
    tied: bool  # the embedding is the head, too

    @property
    def attention(self) -> Attention:
        """The first layer's. Others differ in the window alone."""
        return self.layers[0].mixer

    @property
    def cell(self) -> CellShape:
        return CellShape(len(self.layers), self.attention.kv_heads, self.attention.head_dim)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's layers differ from Llama's. `windows`: which layers have the configuration's sliding window."""

    bias: bool = False
    qk_norm: bool = False
    windows: Literal["none", "all", "by type"] = "none"


FAMILIES = {
    "llama": Family(),
    "mistral": Family(windows="all"),
    "qwen2": Family(bias=True, windows="by type"),
    "qwen3": Family(qk_norm=True, windows="by type"),
}


def describe(config: Any) -> Description | None:
    """The description of a transformers configuration; None where our decoder would not compute the same."""
    family = FAMILIES.get(config.model_type)
    if family is None or config.hidden_act != "silu":
        return None
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope_type(config) not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    layers: int = config.num_hidden_layers
    windows: tuple[int | None, ...] = (None,)
    if family.windows == "all":
        windows = (config.sliding_window,)
    elif family.windows == "by type":
        kinds = config.layer_types
        windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    heads, inner = config.num_attention_heads, FeedForward(config.intermediate_size)
    mixers = (
        Attention(heads, config.num_key_value_heads, head_dim(config), window, family.bias, family.qk_norm)
        for window in (windows * layers)[:layers]
    )
    return Description(
        tuple(LayerDescription(mixer, inner) for mixer in mixers),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
    )


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


# ---- what every model has ----


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A checkpoint's folder, which holds its tokenizer too, its transformers configuration, and numbers from that."""

    path: str
    config: Any
    cell: CellShape
    shape: ModelShape
    vocabulary: int


def inspect_model(name: str) -> ModelInfo:
    """Read a checkpoint's configuration.

    Raises ConfigError when it is missing, unreadable or not of a causal LM that can be served.
    """
    path = str(model_folder(name))
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (*LOADING_ERRORS, StrictDataclassError) as error:
        raise cannot_serve(name, first_lines(error)) from error
    if getattr(config, "is_encoder_decoder", False):
        raise cannot_serve(name, "it is an encoder-decoder, and only causal language models are served")
    text = config.get_text_config(decoder=True)
    other = set(getattr(text, "layer_types", None) or ()) - _KV_LAYERS
    if other:
        raise cannot_serve(name, f"it has layers without a plain KV cache: {', '.join(sorted(other))}")
    try:
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        cell = CellShape(text.num_hidden_layers, kv_heads, head_dim(text))
        context, vocabulary = _context(text), int(text.vocab_size)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise cannot_serve(name, f"its configuration lacks a number of a transformer's shape ({error})") from error
    shape = ModelShape(context, _dtype_name(config), cell.values, _steady_context(text, context), cell.head_dim)
    return ModelInfo(path, config, cell, shape, vocabulary)


def sliding_window(config: Any) -> int:
    """Tokens of the sliding window that a transformers configuration asks for; 0: none."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if not getattr(text, "use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return 0
    return getattr(text, "sliding_window", None) or 0


def first_lines(error: BaseException) -> str:
    """The first two lines of an error, in one: the second often says what is wrong with what the first names."""
    return " ".join(line.strip() for line in str(error).splitlines()[:2]) or type(error).__name__


def _dtype_name(config: Any) -> DType:
    name = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
    return name if name in BYTES else "bfloat16"  # type: ignore[return-value]


def _context(text: Any) -> int:
    """The longest context: YaRN's stretched one, where max_position_embeddings still has the original."""
    stretched = (
        int(_number(rope, "factor", 1) * _number(rope, "original_max_position_embeddings"))
        for rope in _rotaries(text)
        if rope.get("rope_type") == "yarn"
    )
    return max((int(text.max_position_embeddings), *stretched))


def _steady_context(text: Any, context: int) -> int:
    """The longest context in which no sequence of a step changes the others' rotary angles.

    With longrope the longest sequence decides for all: beyond the original context it brings long factors. (`dynamic`
    does so beyond max_position_embeddings, which no sequence reaches.)
    """
    original = (
        int(rope["original_max_position_embeddings"]) for rope in _rotaries(text) if rope.get("rope_type") == "longrope"
    )
    return min((context, *original))


def _number(rope: dict[str, Any], name: str, default: float | None = None) -> float:
    """A parameter, or `default` where it is absent. Raises ValueError for one that is no number: Python would multiply
    a text as well, into a longer one.
    """
    value = default if rope.get(name) is None else rope[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"rope_parameters.{name} is {value!r}")
    return value


def _rotaries(text: Any) -> list[dict[str, Any]]:
    """Parameters of rotary embeddings, one for all layers or one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
