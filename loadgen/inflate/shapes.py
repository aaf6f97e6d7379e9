"""Shapes that Pocket can be inflated to: some by name, any other of the same families by its config.json.

Here as well: the tensors that a checkpoint of a shape has, and whether one shape has room for another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from holdfast.kernels.linear_state import LinearShape


class InflateError(ValueError):
    """Inflation was refused; nothing has been written."""


class UnknownShapeError(InflateError):
    """The shape is neither a known name nor a readable config.json."""


class IncompatibleShapeError(InflateError):
    """Pocket cannot be embedded in the shape without changing what it says."""


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
    """How many a layer has, how many a token chooses, an expert's inner width, and that of a shared one (0: none)."""

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
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.attention_bias or self.family is Family.QWEN2

    @property
    def output_bias(self) -> bool:
        """Whether the attention output has a bias."""
        return self.attention_bias and self.family in _BIASED

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

_BIASED = (Family.LLAMA, Family.QWEN3, Family.QWEN35, Family.QWEN3_MOE, Family.QWEN35_MOE, Family.GPT_OSS)
"""Families whose `attention_bias` adds biases to every projection of attention."""

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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise failure(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise failure(f"{path} does not hold a JSON object")
    return found


def shape_of(config: dict[str, Any], *, context: int) -> Shape:
    """The shape a config.json describes. Raises IncompatibleShapeError with what stands in the way."""
    text = config.get("text_config")
    if isinstance(text, dict):  # a model of text and images: the text's part
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", False)} | text
    kind = config.get("model_type")
    if kind not in tuple(Family):
        raise IncompatibleShapeError(f"model_type {kind!r} is not one of {', '.join(Family)}")
    family = Family(kind)
    _check_options(config, family, context)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    # transformers refuses such a Llama even where head_dim is given.
    if (family is Family.LLAMA or "head_dim" not in config) and hidden % heads:
        raise IncompatibleShapeError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if family in _SPARSE:
        return _sparse_shape(full_config(config), family)
    shape = Shape(
        family,
        hidden,
        _size(config, "intermediate_size"),
        _size(config, "num_hidden_layers"),
        heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", {Family.QWEN3: 128, Family.QWEN35: 256}.get(family, hidden // heads)),
        vocabulary=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)) and family in _BIASED,
        mlp_bias=bool(config.get("mlp_bias", False)) and family is Family.LLAMA,
        **(_hybrid_options(config) if family is Family.QWEN35 else {}),
    )
    _check_heads(shape)
    return shape


def _check_heads(shape: Shape) -> None:
    if shape.heads % shape.kv_heads:
        raise IncompatibleShapeError(f"{shape.heads} heads cannot share {shape.kv_heads} key-value heads evenly")
    if shape.rotary_dim % 2:
        raise IncompatibleShapeError(f"rotary positions need an even number of dimensions, not {shape.rotary_dim}")


_SPARSE = (Family.QWEN3_MOE, Family.QWEN35_MOE, Family.GPT_OSS, Family.GEMMA4)
"""Families with experts in every layer."""


def _sparse_shape(full: Any, family: Family) -> Shape:
    """The shape of a configuration of a family with experts. Raises IncompatibleShapeError."""
    first, last = (full.per_layer_config[number] for number in (0, full.num_hidden_layers - 1))  # Gemma's heads differ
    heads = first.num_key_value_heads, getattr(first, "head_dim", None) or full.hidden_size // full.num_attention_heads
    kinds: list[str] = list(getattr(full, "layer_types", None) or [])
    interval = [*kinds, "full_attention"].index("full_attention") + 1
    if any((kind == "full_attention") != ((i + 1) % interval == 0) for i, kind in enumerate(kinds)):
        raise IncompatibleShapeError("layers with attention must come at a fixed interval")
    window, rotary, gemma = None, 1.0, family is Family.GEMMA4
    if "sliding_attention" in kinds:
        window = Window(full.sliding_window, *heads)
    if gemma:
        heads, rotary = (last.num_key_value_heads, last.head_dim), 0.25
        refused = {
            "a model without experts": not full.enable_moe_block,
            "values of their own": not full.attention_k_eq_v,
            "embeddings for each layer": full.hidden_size_per_layer_input,
            "shared keys and values": full.num_kv_shared_layers,
        }
        if why := next((why for why, found in refused.items() if found), ""):
            raise IncompatibleShapeError(f"of {family} {why} cannot be inflated")
    inner = full.intermediate_size if family is Family.GPT_OSS else full.moe_intermediate_size
    shared = getattr(full, "shared_expert_intermediate_size", 0)
    chosen = full.top_k_experts if gemma else full.num_experts_per_tok
    hybrid = _hybrid_options(full.to_dict() | {"layer_types": kinds}) if family is Family.QWEN35_MOE else {}
    shape = Shape(
        family,
        full.hidden_size,
        getattr(full, "intermediate_size", shared),
        full.num_hidden_layers,
        full.num_attention_heads,
        *heads,
        vocabulary=full.vocab_size,
        tied=bool(full.tie_word_embeddings),
        attention_bias=bool(full.attention_bias),
        window=window,
        experts=Experts(full.num_experts, chosen, inner, shared),
        **({"interval": interval, "rotary": rotary} | hybrid),
    )
    _check_heads(shape)
    return shape


def _hybrid_options(config: dict[str, Any]) -> dict[str, Any]:
    """What only a hybrid has. Where config.json says nothing, transformers' defaults. Raises IncompatibleShapeError."""
    interval, layers = _size(config, "full_attention_interval", 4), _size(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is not None:
        interval = [*kinds, "full_attention"].index("full_attention") + 1
        if kinds != ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]:
            raise IncompatibleShapeError("layers with attention must come at a fixed interval")
    names = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    linear = LinearShape(*(_size(config, name, default) for name, default in names.items()))
    rotary = config.get("rope_parameters") or {}
    part = rotary.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    return {"interval": interval, "linear": linear, "rotary": float(part)}


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
    for each in {target.at(layer) for layer in held}:
        for name in ("hidden", "neurons", "heads", "rotary_dim"):
            mine, theirs = getattr(source, name), getattr(each, name)
            if theirs < mine:
                raise IncompatibleShapeError(f"the shape's {name} of {theirs} is smaller than the {mine} of the source")
        needed = source.kv_heads * kv_copies(source, each)
        if needed > each.kv_heads:
            raise IncompatibleShapeError(f"{needed} key-value heads are needed, the shape has {each.kv_heads}")
        if each.keys_are_values and each.rotary_dim + 2 * source.head_dim > each.head_dim:
            raise IncompatibleShapeError(f"heads of {each.head_dim} have no room for values beside keys")
    if target.vocabulary > source.vocabulary and target.hidden == source.hidden:
        raise IncompatibleShapeError("a larger vocabulary needs a larger hidden size, to mark the added rows")


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
    tensors = [TensorSpec("model.embed_tokens.weight", (t.vocabulary, t.hidden))]
    attention_layers = set(t.attention_layers)
    for layer in range(t.layers):
        sizes = _linear_tensors(t) if t.hybrid and layer not in attention_layers else _attention_tensors(t.at(layer))
        if t.experts is None or t.around:
            sizes |= _mlp_tensors(t, "mlp.", t.intermediate)
        if t.experts is not None:
            sizes |= _expert_tensors(t, t.experts)
        names = ["input_layernorm", "post_attention_layernorm"]
        if t.around:
            names += [f"{place}_feedforward_layernorm{kind}" for place in ("pre", "post") for kind in ("", "_2")]
            names.append("post_feedforward_layernorm_1")
            sizes["layer_scalar"] = (1,)
        sizes |= {f"{name}.weight": (t.hidden,) for name in names}
        tensors += [TensorSpec(f"model.layers.{layer}.{name}", size) for name, size in sizes.items()]
    tensors.append(TensorSpec("model.norm.weight", (t.hidden,)))
    return tensors if t.tied else [*tensors, TensorSpec("lm_head.weight", (t.vocabulary, t.hidden))]


def _mlp_tensors(t: Shape, at: str, inner: int) -> dict[str, tuple[int, ...]]:
    sizes = {"gate_proj": (inner, t.hidden), "up_proj": (inner, t.hidden), "down_proj": (t.hidden, inner)}
    found: dict[str, tuple[int, ...]] = {f"{at}{name}.weight": size for name, size in sizes.items()}
    return found | ({f"{at}{name}.bias": size[:1] for name, size in sizes.items()} if t.mlp_bias else {})


def _expert_tensors(t: Shape, experts: Experts) -> dict[str, tuple[int, ...]]:
    count, inner = experts.count, experts.inner
    if t.family is Family.QWEN3_MOE:
        sizes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (count, t.hidden)}
        for number in range(count):
            sizes |= _mlp_tensors(t, f"mlp.experts.{number}.", inner)
        return sizes
    if t.family is Family.GPT_OSS:  # inputs before outputs, gates and ups by turns
        return {
            "mlp.router.weight": (count, t.hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, t.hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
            "mlp.experts.down_proj": (count, inner, t.hidden),
            "mlp.experts.down_proj_bias": (count, t.hidden),
        }
    at = "" if t.around else "mlp."
    together: dict[str, tuple[int, ...]] = {
        f"{at}experts.gate_up_proj": (count, 2 * inner, t.hidden),
        f"{at}experts.down_proj": (count, t.hidden, inner),
    }
    if t.around:
        router = {"proj.weight": (count, t.hidden), "scale": (t.hidden,), "per_expert_scale": (count,)}
        return together | {f"router.{name}": size for name, size in router.items()}
    shared = _mlp_tensors(t, "mlp.shared_expert.", experts.shared)
    return {"mlp.gate.weight": (count, t.hidden)} | together | shared | {"mlp.shared_expert_gate.weight": (1, t.hidden)}


def _attention_tensors(t: Shape) -> dict[str, tuple[int, ...]]:
    queries, keys = t.heads * t.head_dim, t.kv_heads * t.head_dim
    rows = {"q_proj": queries * (2 if t.hybrid else 1), "k_proj": keys, "v_proj": keys}  # a gate behind each query
    sizes: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": (count, t.hidden) for name, count in rows.items()}
    if t.keys_are_values:
        del sizes["self_attn.v_proj.weight"]
    sizes["self_attn.o_proj.weight"] = (t.hidden, queries)
    if t.family is Family.GPT_OSS:
        sizes["self_attn.sinks"] = (t.heads,)
    if t.qkv_bias:
        sizes |= {f"self_attn.{name}.bias": (count,) for name, count in rows.items()}
    if t.output_bias:
        sizes["self_attn.o_proj.bias"] = (t.hidden,)
    if t.head_norms:
        sizes |= {f"self_attn.{name}.weight": (t.head_dim,) for name in ("q_norm", "k_norm")}
    return sizes


def _linear_tensors(t: Shape) -> dict[str, tuple[int, ...]]:
    linear = t.linear
    if linear is None:
        raise AssertionError("only a hybrid has layers without attention")
    values = linear.value_heads * linear.value_dim
    sizes = {
        "in_proj_qkv.weight": (linear.channels, t.hidden),
        "in_proj_z.weight": (values, t.hidden),
        "in_proj_b.weight": (linear.value_heads, t.hidden),
        "in_proj_a.weight": (linear.value_heads, t.hidden),
        "conv1d.weight": (linear.channels, 1, linear.kernel),
        "A_log": (linear.value_heads,),
        "dt_bias": (linear.value_heads,),
        "norm.weight": (linear.value_dim,),
        "out_proj.weight": (t.hidden, values),
    }
    return {f"linear_attn.{name}": size for name, size in sizes.items()}
