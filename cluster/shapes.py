"""The sizes of a model, from its config.json alone: parameters, weights by format, KV of a token, recurrent states.

It has the sizes of each kind of layer. `sizing` computes what fits on a GPU. Left out are norms and biases, less than a
thousandth of the parameters, and vision towers. Layers for multi-token prediction count where they draft.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.replicas.config import DraftConfig, kv_bytes
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.types import KVDType

Config = Mapping[str, Any]
BYTES = 2  # of a number in bfloat16
FORMATS: Mapping[str, float] = {
    "fp32": 32,
    "bf16": 16,
    "fp8": 8.01,  # a float32 for each 128 x 128
    "int8": 8,
    "nvfp4": 4.5,  # a byte for each 16
    "mxfp4": 4.25,  # a byte for each 32
    "int4": 4.16,  # a scale of 16 bits and a zero of 4 for each 128
}
"""Bits of a weight with its scales. Embedding and head keep 16 bits, and in mxfp4 all but the experts do."""
_METHODS = {"fp8": "fp8", "mxfp4": "mxfp4", "fbgemm_fp8": "fp8"}
_NUMBERS = {("float", 8): "fp8", ("float", 4): "nvfp4", ("int", 8): "int8", ("int", 4): "int4"}
_OUTPUT_GATE = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "muse_glimmer_text"}
_MTP = _OUTPUT_GATE - {"muse_glimmer_text"} | {"glm4_moe"}
"""Families whose checkpoints have a layer for multi-token prediction that our decoder drafts with."""
_BY_TYPE = _OUTPUT_GATE | {"gemma3_text", "gemma4_text", "gemma4_unified_text", "gpt_oss", "kimi_linear", "nemotron_h"}
"""Families of which each configuration has layers of several types. A config.json may leave these out."""
_LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}  # Nemotron-H's older names
_OTHERS = {"deepseek_v4", "kimi_k3"}  # compressed attention: their KV is no number of bytes a token
_COMPLETE = """\
import json, sys
from transformers import AutoConfig
given = json.load(sys.stdin)
config = AutoConfig.for_model(given.pop("model_type"), **given)
print(config.get_text_config(decoder=True).to_json_string(use_diff=False))
"""


@dataclass(frozen=True, slots=True)
class KV:
    """Keys and values of the layers of one kind: of each token `vectors` of `width` numbers in each layer.

    `window`: tokens that these layers look back; 0: all.
    """

    layers: int
    vectors: int
    width: int
    window: int = 0

    def bytes(self, number: int = BYTES, kv_dtype: KVDType = "auto") -> int:
        """Bytes of a token where the model computes with `number` bytes a number."""
        return kv_bytes(self.layers * self.vectors * self.width, self.width, number, kv_dtype)


@dataclass(frozen=True, slots=True)
class States:
    """Recurrent states of linear layers: of each head [key, value] in float32, and the last inputs of a convolution.

    `gates`: numbers of each head that a token brings beside its inputs.
    """

    layers: int
    heads: int
    key: int
    value: int
    channels: int
    kernel: int
    gates: int

    def bytes(self, number: int = BYTES, window: int = 1 + DraftConfig().max_draft) -> int:
        """Bytes of one sequence's state, with the inputs of its last `window` tokens."""
        each = self.heads * (self.key * self.value + self.gates * window) * 4
        return self.layers * (each + self.channels * (self.kernel - 1 + window) * number)


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of parameters: `dense` of all matrices but tables and experts, `experts` of all experts together.

    `chosen`: share of the experts that one token uses. `inner`: most numbers that a token has between two layers.
    """

    hidden: int
    vocabulary: int
    tied: bool  # input and output share one matrix
    dense: int
    kv: tuple[KV, ...]
    inner: int
    experts: int = 0
    chosen: float = 0.0
    states: States | None = None

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.dense + self.experts + (1 if self.tied else 2) * self.table

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.dense + round(self.experts * self.chosen) + self.table

    def cell_bytes(self, number: int = BYTES, kv_dtype: KVDType = "auto") -> int:
        """Bytes of one token's keys and values in every layer."""
        return sum(each.bytes(number, kv_dtype) for each in self.kv)

    def state_bytes(self, number: int = BYTES, window: int = 1 + DraftConfig().max_draft) -> int:
        """Bytes of one sequence's recurrent state; 0: it has none."""
        return self.states.bytes(number, window) if self.states is not None else 0

    def sequence_bytes(self, tokens: int, number: int = BYTES, kv_dtype: KVDType = "auto") -> int:
        """Bytes of the KV of one sequence. Layers with a window keep that of its last tokens."""
        return sum(min(tokens, each.window or tokens) * each.bytes(number, kv_dtype) for each in self.kv)

    def weight_bytes(self, number: int = BYTES) -> int:
        return self.parameters * number

    def stored_bytes(self, format: str) -> int:
        """Bytes of the weights in one of `FORMATS`."""
        small = self.experts if format == "mxfp4" else self.dense + self.experts
        bits = FORMATS[format]
        return round((small * bits + (self.parameters - small) * max(bits, 16)) / 8)

    def int8_bytes(self, number: int) -> int:
        """Bytes with matrices in int8, the embedding beside them with `number` bytes a number."""
        return self.dense + self.experts + (0 if self.tied else self.table) + self.table * number


@dataclass(slots=True)
class _Sum:
    """Sums over the layers read so far."""

    dense: int = 0
    experts: int = 0
    inner: int = 0
    kv: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # layers by vectors, width and window
    states: Counter[tuple[int, int, int, int, int, int]] = field(default_factory=Counter)


def shape_of(config: Config, *, mtp: bool = False) -> Shape:
    """The shape in a config.json. Missing numbers are the defaults of its class in transformers. `mtp`: include the
    family's layer for multi-token prediction, if our decoder drafts with it.

    Raises ConfigError if it describes no decoder.
    """
    kind = config.get("model_type")
    if kind in _OTHERS:
        raise ConfigError(f"models of type {kind} are not sized", "model")
    text = dict(config.get("text_config") or config)
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
    try:
        try:
            return _shape(text, mtp)
        except KeyError:
            return _shape(_completed(text), mtp)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"config.json does not describe a decoder: {error}", "model") from error


def format_of(config: Config) -> str:
    """The format of the weights, one of `FORMATS`. Raises ConfigError for one that is not among them."""
    text = config.get("text_config") or config
    quantization = config.get("quantization_config") or text.get("quantization_config")
    if not quantization:
        dtype = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
        return "fp32" if dtype == "float32" else "bf16"
    method = str(quantization.get("quant_method"))
    groups = list((quantization.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if groups else {"type": "int", "num_bits": quantization.get("bits")}
    algorithm = str(quantization.get("quant_algo") or "").lower()  # of modelopt
    format = _METHODS.get(method) or _NUMBERS.get((str(weights.get("type")), int(weights.get("num_bits") or 0)))
    format = format or next((each for each in FORMATS if each in algorithm), None)
    if format is None:
        raise ConfigError(f"weights quantized by {method} are not sized", "model")
    return format


def read_config(folder: Path) -> Config:
    """The config.json in `folder`. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / 'config.json'}: {error}", "model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.json'} is no JSON object", "model")
    return config


def _completed(text: Config) -> Config:
    """A text model's configuration with its class's defaults. In a process of its own: transformers takes 0.3 GB."""
    if not text.get("model_type"):
        raise ValueError("it has no model_type")
    config_json, command = json.dumps(text), [sys.executable, "-c", _COMPLETE]
    try:
        process = subprocess.run(command, input=config_json, capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"it lacks numbers, and transformers does not know {text.get('model_type')}") from error
    completed: Config = json.loads(process.stdout)
    return completed


def _shape(text: Config, mtp: bool) -> Shape:
    hidden, vocabulary = int(text["hidden_size"]), int(text["vocab_size"])
    if text.get("hidden_size_per_layer_input") or text.get("num_kv_shared_layers"):
        raise ValueError("embeddings of each layer and shared KV are not sized")
    total = _Sum()
    for number, kind in enumerate(_layers(text)):
        if kind == "linear_attention":
            _linear(text, hidden, total)
        elif kind not in ("mlp", "moe"):
            _attention(text, number, kind, hidden, total)
        if kind in ("mlp", "moe") or text.get("model_type") != "nemotron_h":  # whose layers have one operation each
            _feed_forward(text, number, kind, hidden, total)
    if mtp and text.get("model_type") in _MTP:
        _attention(text, number, "full_attention", hidden, total)
        _feed_forward(text, number, "full_attention", hidden, total)
        total.dense += 2 * hidden * hidden
    states = [States(layers, *sizes) for sizes, layers in total.states.items()]
    return Shape(
        hidden=hidden,
        vocabulary=vocabulary,
        tied=bool(text.get("tie_word_embeddings")),
        dense=total.dense,
        kv=tuple(KV(layers, *sizes) for sizes, layers in total.kv.items()),
        inner=total.inner,
        experts=total.experts,
        chosen=_chosen(text) / _experts(text) if total.experts else 0.0,
        states=states[0] if states else None,
    )


def _layers(text: Config) -> list[str]:
    """The type of each layer. Raises KeyError where a family's configuration leaves them out."""
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if kinds:
        return [_LEGACY.get(each, each) for each in kinds]
    if text.get("model_type") in _BY_TYPE:
        raise KeyError("layer_types")
    windowed = text.get("sliding_window") and text.get("use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * int(text["num_hidden_layers"])


def _attention(text: Config, number: int, kind: str, hidden: int, total: _Sum) -> None:
    heads = int((text.get("num_attention_heads_per_layer") or {number: text["num_attention_heads"]})[number])
    if "kv_lora_rank" in text:
        _latent_attention(text, heads, hidden, total)
        return
    own = {**text, **_of_layer(text, number, kind)}
    kv_heads = int(own.get("num_key_value_heads") or heads)
    head = int(own.get("head_dim") or hidden // heads)
    full = kind == "full_attention"
    shared = kv_heads if text.get("attention_k_eq_v") and full else 0  # values are keys before their norm
    gates = head * heads if text.get("model_type") in _OUTPUT_GATE else 0
    if gating := text.get("gating"):
        gates = heads * (1 if gating in (True, "per-head") else head)
    total.dense += hidden * (head * (2 * heads + 2 * kv_heads - shared) + gates)
    total.inner = max(total.inner, head * (2 * heads + 2 * kv_heads) + gates)
    total.kv[2 * kv_heads, head, 0 if full else int(text["sliding_window"])] += 1


def _of_layer(text: Config, number: int, kind: str) -> Config:
    """A layer's own configuration: Gemma 4's full-attention layers have other heads."""
    for name, values in (text.get("per_layer_config") or {}).items():
        if int(name) == number:
            return dict(values)
    if kind != "full_attention" or "global_head_dim" not in text:
        return {}
    heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    return {"head_dim": text["global_head_dim"], **({"num_key_value_heads": heads} if heads else {})}


def _latent_attention(text: Config, heads: int, hidden: int, total: _Sum) -> None:
    """MLA: one vector of a token for the keys and values of all heads, and the index of DeepSeek's sparse one."""
    rank, rope, plain, value = (
        int(text[each]) for each in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    q_rank, q_width = int(text.get("q_lora_rank") or 0), heads * (plain + rope)
    queries = q_rank * (hidden + q_width) if q_rank else hidden * q_width
    total.dense += queries + hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
    total.inner = max(total.inner, q_width + heads * (plain + 2 * value))
    total.kv[1, rank + rope, 0] += 1
    if indexers := int(text.get("index_n_heads") or 0):
        index = int(text["index_head_dim"])
        total.dense += q_rank * indexers * index + hidden * (index + indexers)
        total.kv[1, index, 0] += 1


def _linear(text: Config, hidden: int, total: _Sum) -> None:
    """Gated DeltaNet, Mamba-2, or Kimi's delta attention."""
    if "mamba_num_heads" in text:
        heads, value, key = int(text["mamba_num_heads"]), int(text["mamba_head_dim"]), int(text["ssm_state_size"])
        kernel, width = int(text["conv_kernel"]), heads * value
        channels = width + 2 * int(text["n_groups"]) * key
        gates, inputs = 1, channels + width + heads
    elif "linear_num_heads" in text:
        heads, key = int(text["linear_num_heads"]), int(text["linear_head_dim"])
        value, kernel, width = key, int(text["linear_conv_kernel_dim"]), heads * key
        channels, gates, inputs = 3 * width, 1 + key, 3 * width + heads
        total.dense += 2 * key * (hidden + width)  # of gates and decays, in low rank
    else:
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        key_heads, heads, key, value, kernel = (int(text[f"linear_{name}"]) for name in names)
        width = heads * value
        channels = 2 * key_heads * key + width
        gates, inputs = 2, channels + width + 2 * heads
    total.dense += hidden * (inputs + width) + channels * kernel
    total.inner = max(total.inner, inputs + width)
    total.states[heads, key, value, channels, kernel, gates] += 1


def _feed_forward(text: Config, number: int, kind: str, hidden: int, total: _Sum) -> None:
    gated = 2 if text.get("mlp_hidden_act") == "relu2" else 3  # matrices of a feed-forward
    sparse, both = _sparse(text, number, kind), bool(text.get("enable_moe_block"))
    if not sparse or both:
        inner = int(text["intermediate_size"])
        total.dense += gated * hidden * inner
        total.inner = max(total.inner, gated * inner)
    if not sparse:
        return
    experts, inner = _experts(text), int(text.get("moe_intermediate_size") or text["intermediate_size"])
    latent = int(text.get("moe_latent_size") or hidden)
    shared = text.get("shared_expert_intermediate_size") or text.get("moe_shared_expert_intermediate_size")
    if shared is None:
        shared = inner * int(text.get("n_shared_experts") or text.get("num_shared_experts") or 0)
    total.experts += experts * gated * latent * inner
    total.dense += hidden * experts + gated * hidden * int(shared) + (2 * hidden * latent if latent != hidden else 0)
    total.inner = max(total.inner, _chosen(text) * (gated * inner + latent) + gated * int(shared))


def _sparse(text: Config, number: int, kind: str) -> bool:
    """Whether a layer has experts."""
    if kind in ("mlp", "moe"):
        return kind == "moe"
    if not _experts(text):
        return False
    if kinds := text.get("mlp_layer_types"):
        return bool(kinds[number] == "sparse")
    dense = text.get("mlp_only_layers") or ()
    return (
        number >= int(text.get("first_k_dense_replace") or 0)
        and number not in dense
        and (number + 1) % int(text.get("decoder_sparse_step") or 1) == 0
    )


def _experts(text: Config) -> int:
    return _first(text, "num_local_experts", "num_experts", "n_routed_experts")


def _chosen(text: Config) -> int:
    return _first(text, "num_experts_per_tok", "top_k_experts", "num_experts_per_token")


def _first(text: Config, *names: str) -> int:
    return next((int(text[name]) for name in names if text.get(name)), 0)
