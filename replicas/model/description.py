"""What a checkpoint's configuration says, read offline as data.

`inspect_model` reads the numbers that every model needs: its KV cell, state, context, vocabulary and dtype. `describe`
makes the `Description` that our own decoder runs: layers of a mixer and a feed-forward. A family of models that differs
only in options is a row of `FAMILIES`. Any other model runs through `any_model`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig

from holdfast.kernels.fp8 import BLOCK
from holdfast.kernels.linear_state import LinearShape
from holdfast.replicas.config import BYTES, DType, ModelShape
from holdfast.replicas.kv.tensors import CellShape, KVKind
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
    gate: bool = False  # a product of its own decides how much of each output passes: out * sigmoid(gate)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Outputs of the fused product: gates, if there are any, queries, keys, values."""
        return (1 + self.gate) * self.q_width + 2 * self.kv_width

    def split(self, product: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gates [T, heads head_dim], if there are any, and queries, keys, values [T, heads + 2 kv_heads, head_dim]."""
        gate, qkv = product[:, : self.gate * self.q_width], product[:, self.gate * self.q_width :]
        return gate if self.gate else None, qkv.view(len(qkv), -1, self.head_dim)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """A mixer: linear attention with a recurrent state (`kernels.linear_state`), each head normed and gated."""

    shape: LinearShape
    by_key_head: bool = False  # in the checkpoint the parts of q, k, v and z of one key head stand together

    @property
    def v_width(self) -> int:
        return self.shape.value_heads * self.shape.value_dim

    @property
    def qkvz_width(self) -> int:
        """Outputs of the fused product: queries, keys, values, gates."""
        return self.shape.channels + self.v_width

    def split(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys, values [T, channels], and gates [T, value_heads value_dim]."""
        return product[:, : self.shape.channels], product[:, self.shape.channels :]


Mixer: TypeAlias = Attention | GatedDeltaNet


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(silu(gate(x)) up(x))."""

    inner: int


@dataclass(frozen=True, slots=True)
class LayerDescription:
    mixer: Mixer
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Description:
    """A model that our decoder runs.

    Its attention layers have the same heads and share one KV store; its linear layers have the same heads and share
    the states.
    """

    layers: tuple[LayerDescription, ...]
    hidden: int
    vocabulary: int
    eps: float
    tied: bool  # the embedding is the head, too
    centred: bool = False  # a norm's weight w in the checkpoint stands for 1 + w; not so of a linear layer's own norm
    skipped: tuple[str, ...] = ()  # beginnings of the names of weights that are not read

    @property
    def attentions(self) -> list[Attention]:
        """The mixers that use the KV store, in its order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]

    @property
    def attention(self) -> Attention:
        """The first of them. Others differ in the window alone."""
        return self.attentions[0]

    @property
    def cell(self) -> CellShape:
        return CellShape(len(self.attentions), self.attention.kv_heads, self.attention.head_dim)

    def kinds(self, context: int) -> tuple[KVKind, ...]:
        """The attention layers by kind, for sequences of up to `context` tokens: those that see all before those with a
        window.

        All are one kind where freeing pages would not pay: the window is as long as the context, or every layer has
        one. So are those of a model with recurrent states, which has no checkpoints of both.
        """
        whole = [each for each in self.attentions if each.window is None]
        windowed = [each for each in self.attentions if each.window is not None]
        windows = {each.window for each in windowed}
        cells = [CellShape(len(each), each[0].kv_heads, each[0].head_dim) for each in (whole, windowed) if each]
        if len(cells) == 1 or len(windows) > 1 or self.state is not None:
            return (KVKind(self.cell),)
        (window,) = windows
        alike = len({(cell.kv_heads, cell.head_dim) for cell in cells}) == 1
        if alike and window is not None and window >= context:
            return (KVKind(self.cell),)
        return KVKind(cells[0]), KVKind(cells[1], window)

    @property
    def state(self) -> LinearShape | None:
        """The heads of the linear layers; None where there are none."""
        return next((layer.mixer.shape for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet)), None)

    @property
    def linear_layers(self) -> int:
        """How many layers have a state."""
        return len(self.layers) - len(self.attentions)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's layers differ from Llama's; what each option means says the mixer that has it."""

    bias: bool = False
    qk_norm: bool = False
    gate: bool = False
    centred: bool = False
    partial_rotary: bool = False  # it knows `partial_rotary_factor`
    by_key_head: bool = False
    mixers: Literal["full", "window", "windows by type", "linear by type"] = "full"  # as `layer_types` says
    skipped: tuple[str, ...] = ()

    @property
    def by_type(self) -> bool:
        return self.mixers.endswith("by type")


_NOT_TEXT = ("model.visual.", "mtp.")  # the vision tower, and layers that predict further tokens
_QWEN3_5 = Family(
    qk_norm=True, gate=True, centred=True, partial_rotary=True, mixers="linear by type", skipped=_NOT_TEXT
)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(mixers="window"),
    "qwen2": Family(bias=True, mixers="windows by type"),
    "qwen3": Family(qk_norm=True, mixers="windows by type"),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": replace(_QWEN3_5, by_key_head=True),
}
"""The families that our decoder runs, by `model_type`. Of those with a vision tower it runs the text."""


def describe(config: Any) -> Description | None:
    """The description of a transformers configuration; None where our decoder would not compute the same."""
    family = FAMILIES.get(config.model_type)
    if family is None or why_not(config):
        return None
    text = config.get_text_config(decoder=True)
    layers: int = text.num_hidden_layers
    kinds = text.layer_types if family.by_type else ["full_attention"] * layers
    heads, kv_heads, window = text.num_attention_heads, text.num_key_value_heads, None
    if family.mixers == "window":
        window = text.sliding_window
    full = Attention(heads, kv_heads, head_dim(text), window, family.bias, family.qk_norm, family.gate)
    mixers: dict[str, Mixer] = {"full_attention": full}
    if "sliding_attention" in kinds:
        mixers["sliding_attention"] = replace(full, window=text.sliding_window)
    if "linear_attention" in kinds:
        mixers["linear_attention"] = GatedDeltaNet(_linear_shape(text), family.by_key_head)
    feed_forward = FeedForward(text.intermediate_size)
    return Description(
        tuple(LayerDescription(mixers[kind], feed_forward) for kind in kinds),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        eps=text.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        centred=family.centred,
        skipped=family.skipped,
    )


def why_not(config: Any) -> str:
    """The option of a configuration of a known family that our decoder does not compute; "": there is none."""
    text, family = config.get_text_config(decoder=True), FAMILIES[config.model_type]
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = set(getattr(text, "layer_types", None) or ()) if family.by_type else set()
    if text.hidden_act != "silu":
        return f"the activation {text.hidden_act}"
    if getattr(text, "mlp_bias", False) or getattr(text, "attention_bias", False):
        return "projections with a bias"
    if rope_type(text) not in ROPE_TYPES:
        return f"rotary positions of type {rope_type(text)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not family.partial_rotary:
        return "rotary positions over a part of each head"
    if others := kinds - _KV_LAYERS - ({"linear_attention"} if family.mixers == "linear by type" else set()):
        return f"layers of type {min(others)}"
    if kinds == {"linear_attention"}:
        return "linear layers alone"
    if _has_experts(text):
        return "layers with experts"
    return _unread_weights(config)


def _unread_weights(config: Any) -> str:
    """The format of a checkpoint's weights where `weights` does not read it."""
    given = getattr(config, "quantization_config", None) or {}
    settings = given if isinstance(given, dict) else given.to_dict()
    method = settings.get("quant_method")
    if not settings or (method == "fp8" and list(settings.get("weight_block_size") or ()) == [BLOCK, BLOCK]):
        return ""
    return (
        f"weights in FP8 without blocks of {BLOCK} x {BLOCK}" if method == "fp8" else f"weights quantized by {method}"
    )


def _has_experts(text: Any) -> bool:
    """Whether a layer of a Qwen3-Next has experts in place of a dense feed-forward."""
    dense = set(getattr(text, "mlp_only_layers", None) or ())
    step = getattr(text, "decoder_sparse_step", 0) if getattr(text, "num_experts", 0) else 0
    return step > 0 and any(i not in dense and (i + 1) % step == 0 for i in range(text.num_hidden_layers))


def _linear_shape(text: Any) -> LinearShape:
    return LinearShape(
        text.linear_num_key_heads,
        text.linear_num_value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
    )


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


# ---- what every model has ----


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A checkpoint's folder, which holds its tokenizer too, its transformers configuration, and numbers from that.

    `description`: of a model that our decoder runs; None: transformers' model runs.
    """

    path: str
    config: Any
    cell: CellShape
    shape: ModelShape
    vocabulary: int
    description: Description | None


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
    try:
        described = describe(config)
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        cell = described.cell if described else CellShape(text.num_hidden_layers, kv_heads, head_dim(text))
        context, vocabulary = _context(text), int(text.vocab_size)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise cannot_serve(name, f"its configuration lacks a number of a transformer's shape ({error})") from error
    other = set(getattr(text, "layer_types", None) or ()) - _KV_LAYERS
    if other and described is None:
        why = f"it has layers without a plain KV cache: {', '.join(sorted(other))}"
        known = f", and our decoder does not compute {why_not(config)}" if config.model_type in FAMILIES else ""
        raise cannot_serve(name, why + known)
    dtype = _dtype_name(config, text)
    shape = ModelShape(context, dtype, cell.values, _steady_context(text, context), cell.head_dim)
    return ModelInfo(path, config, cell, shape, vocabulary, described)


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


def _dtype_name(config: Any, text: Any) -> DType:
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    name = str(dtype).removeprefix("torch.")
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
