"""A checkpoint's configuration, read offline as data.

`inspect_model` reads the numbers that every model needs: its KV cell, state, context, vocabulary and dtype. `describe`
makes the `Description` that our own decoder runs: a list of blocks. A family of models is a row of `FAMILIES`. Any
other model runs through `any_model`.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig

from holdfast.kernels.experts import Routing
from holdfast.kernels.linear import ALPHA, LIMIT, Activation
from holdfast.kernels.linear_state import LinearShape
from holdfast.replicas.config import BYTES, DType, ModelShape
from holdfast.replicas.kv.tensors import CellShape, KVKind
from holdfast.replicas.model.folder import cannot_serve, model_folder
from holdfast.replicas.model.formats import PLAIN, Format

ROPE_TYPES = {"default", "linear", "llama3", "yarn", "proportional"}  # others change with the length of the sequence
_KV_LAYERS = {"full_attention", "sliding_attention"}
_FEED_FORWARDS = {"mlp", "moe"}  # where they are layers of their own
_OTHER_LAYERS = {"linear by type": {"linear_attention"}, "alone by type": {"linear_attention", *_FEED_FORWARDS}}
_NO_LIMITS = [0.0, float("inf")]  # of Mamba's time steps
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, ImportError)
"""What transformers raises for files that it cannot load, besides `StrictDataclassError`."""


# ---- what our decoder runs ----


Norms: TypeAlias = Literal["", "head", "row", "unit"]
"""Of queries and keys: none; of each head; of all heads as one vector; of each head without weights."""
Gate: TypeAlias = Literal["", "sigmoid", "softplus", "softplus of heads"]
"""What an attention's outputs are multiplied with: nothing; a number for each of them; one for each head."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over the last `window` tokens, or over all."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    qk_norm: Norms = ""
    q_scale: float = 1.0  # of normed queries without weights
    v_norm: bool = False  # of each head's values, without weights
    k_is_v: bool = False  # values are the keys before their norm
    gate: Gate = ""
    gate_in: str = ""  # the matrix of the gates; "": with each head's queries in one
    scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    sinks: bool = False
    rotary: str | None = ""  # whose `rope_parameters`: all layers', or those of a kind of layer; None: no positions

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def gate_width(self) -> int:
        return 0 if not self.gate else self.heads if self.gate == "softplus of heads" else self.q_width

    @property
    def qkv_width(self) -> int:
        """Outputs of the fused product: gates, if there are any, queries, keys, values."""
        return self.gate_width + self.q_width + 2 * self.kv_width

    def split(self, product: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gates [T, gate_width], if there are any, and queries, keys, values [T, heads + 2 kv_heads, head_dim]."""
        gate, qkv = product[:, : self.gate_width], product[:, self.gate_width :]
        return gate if self.gate else None, qkv.view(len(qkv), -1, self.head_dim)


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """A layer with a recurrent state (`kernels.linear_state`): Gated DeltaNet, each of whose heads is normed and gated,
    or Mamba-2, whose groups of heads are gated and normed.
    """

    shape: LinearShape
    by_key_head: bool = False  # in the checkpoint the parts of q, k, v and z of one key head stand together
    conv_bias: bool = False

    @property
    def v_width(self) -> int:
        return self.shape.value_heads * self.shape.value_dim

    @property
    def norm_width(self) -> int:
        """Weights of the norm: all heads of Gated DeltaNet share theirs."""
        return self.shape.value_dim if self.shape.rule == "delta" else self.v_width

    @property
    def qkvz_width(self) -> int:
        """Outputs of the fused product: queries, keys, values, output gates; of Mamba-2 the gates first."""
        return self.shape.channels + self.v_width

    def split(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys, values [T, channels], and output gates [T, value_heads value_dim]."""
        if self.shape.rule == "delta":
            return product[:, : self.shape.channels], product[:, self.shape.channels :]
        return product[:, self.v_width :], product[:, : self.v_width]


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate(x)) up(x)); with relu2 there is no gate."""

    inner: int
    activation: Activation = "silu"

    @property
    def width(self) -> int:
        """Outputs of the first product."""
        return self.inner if self.activation == "relu2" else 2 * self.inner


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """The weighted sum of the feed-forwards that a router chooses for a token, and of one that all tokens share.

    `inner`, `activation`: of an expert. With `bias` the router and the experts have biases; with `corrected` a bias of
    the scores counts for the choice alone. `shared`: the inner width of the shared one, 0: there is none; with
    `shared_gate` a product decides how much of it is added. `latent`: the width of what experts read and write, between
    two products; 0: they read and write rows of the model.
    """

    inner: int
    routing: Routing
    activation: Activation = "silu"
    bias: bool = False
    corrected: bool = False
    shared: int = 0
    shared_gate: bool = False
    latent: int = 0
    alpha: float = ALPHA  # of "clamped", as `limit`
    limit: float = LIMIT

    @property
    def width(self) -> int:
        """Outputs of an expert's first product."""
        return FeedForward(self.inner, self.activation).width


@dataclass(frozen=True, slots=True)
class DenseAndExperts:
    """Gemma 4's: a dense feed-forward and experts beside each other, each with norms of its own, summed."""

    dense: FeedForward
    experts: MixtureOfExperts


Op: TypeAlias = Attention | LinearAttention | FeedForward | MixtureOfExperts | DenseAndExperts


@dataclass(frozen=True, slots=True)
class Block:
    """x + post_norm(op(norm(x))), times a number of its own with `scaled`.

    Names are those of the checkpoint behind `at`: of the op's weights and the norms'. `norm` is "" where the op has
    its own norms.
    """

    op: Op
    at: str
    name: str
    norm: str
    post_norm: str = ""
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class NextToken:
    """A layer that predicts one token further: multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    It reads the last layer's normed output for a token and the embedding of the token after that, each behind a norm of
    its own, joined by a projection. Its blocks and a norm follow. The model's embedding and head are its own, too.
    Names are those of the checkpoint.
    """

    blocks: tuple[Block, ...]
    embedding_norm: str
    hidden_norm: str
    projection: str  # [hidden, 2 hidden]: the embedding's columns first
    norm: str


@dataclass(frozen=True, slots=True)
class Description:
    """A model that our decoder runs.

    Its attention blocks share one KV store; its linear ones have the same heads and share the states. `next_token`: its
    attention is the last layer of that store.
    """

    blocks: tuple[Block, ...]
    hidden: int
    vocabulary: int
    eps: float
    tied: bool  # the embedding is the head, too
    post_eps: float  # of the norms behind ops
    centred: bool = False  # a norm's weight w in the checkpoint stands for 1 + w; not so of a linear layer's own norm
    last_centred: bool = False  # the same of the last norm
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # 0: none
    skipped: tuple[str, ...] = ()  # beginnings of the names of weights that are not read
    renamed: tuple[tuple[str, str], ...] = ()  # parts of names in the checkpoint, and what they are called here
    format: Format = PLAIN
    next_token: NextToken | None = None

    @property
    def all_blocks(self) -> tuple[Block, ...]:
        """The blocks of the model, then those of the layer that predicts one token further."""
        return self.blocks if self.next_token is None else (*self.blocks, *self.next_token.blocks)

    @property
    def attentions(self) -> list[Attention]:
        """The ops that use the KV store, in its order."""
        return [block.op for block in self.all_blocks if isinstance(block.op, Attention)]

    @property
    def attention(self) -> Attention:
        """The first of them."""
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
        return next((block.op.shape for block in self.blocks if isinstance(block.op, LinearAttention)), None)

    @property
    def linear_layers(self) -> int:
        """How many layers have a state."""
        return sum(isinstance(block.op, LinearAttention) for block in self.blocks)


# ---- families ----


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's layers differ from Llama's; what each option means says the op that has it."""

    bias: Literal["all", "qkv", "always qkv"] = "all"  # which `attention_bias` switches on; or without that
    qk_norm: Norms | Literal["option"] = ""  # "option": of each head by `use_qk_norm`
    v_norm: bool = False
    gate: Gate = ""
    gate_in: str = ""
    sinks: bool = False
    scale: Callable[[Any], float] = lambda text: 0.0
    centred: bool = False
    last_centred: bool | None = None  # None: as `centred`
    around: bool = False  # norms before and behind each op
    scaled: bool = False  # each layer's result is multiplied by a number of its own
    embedding: Literal["", "scaled", "normed"] = ""
    partial_rotary: bool = False  # it knows `partial_rotary_factor`
    by_key_head: bool = False
    # "by type": as `layer_types` says. "alone by type": a layer is one block, with a mixer or a feed-forward.
    mixers: Literal["full", "window", "windows by type", "linear by type", "alone by type"] = "full"
    rotary: bool = True
    activations: frozenset[Activation] = frozenset({"silu", "gelu_tanh"})
    score: Literal["softmax", "sigmoid"] = "softmax"
    clamped: bool = False  # the experts' activation
    router_bias: bool = False
    shared_gate: bool = False
    # Where checkpoints have a layer that predicts one token further: below `mtp.`, or as a layer behind the last.
    next_token: Literal["", "mtp", "behind"] = ""
    skipped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def by_type(self) -> bool:
        return self.mixers.endswith("by type")


_NOT_TEXT = (  # towers of other media, and layers that predict further tokens
    *("model.visual.", "model.vision_tower.", "model.vision_adapter.", "model.vision_projection.", "mtp."),
    *("model.audio_tower.", "model.embed_vision.", "model.embed_audio.", "model.multi_modal_projector."),
    *("vision_tower.", "multi_modal_projector."),  # as older checkpoints call them
)
_LLAMA_LIKE = Family(mixers="windows by type")
_QWEN3 = replace(_LLAMA_LIKE, qk_norm="head")
_QWEN3_5 = Family(
    qk_norm="head",
    gate="sigmoid",
    centred=True,
    partial_rotary=True,
    mixers="linear by type",
    shared_gate=True,
    next_token="mtp",
    skipped=_NOT_TEXT,
)
_GEMMA3 = replace(
    _QWEN3,
    scale=lambda text: text.query_pre_attn_scalar**-0.5,
    centred=True,
    around=True,
    embedding="scaled",
    skipped=_NOT_TEXT,
)
_GEMMA4 = replace(
    _GEMMA3,
    v_norm=True,
    scaled=True,
    scale=lambda text: 1.0,
    centred=False,
    partial_rotary=True,
    renamed=((".router.proj.", ".gate."),),
)
_GPT_OSS = replace(_LLAMA_LIKE, sinks=True, clamped=True, router_bias=True, renamed=((".mlp.router.", ".mlp.gate."),))
_GLM4_MOE = Family(
    bias="qkv",
    qk_norm="option",
    partial_rotary=True,
    score="sigmoid",
    next_token="behind",
    renamed=((".shared_experts.", ".shared_expert."),),
)
_LAGUNA = replace(
    _QWEN3,
    gate="softplus of heads",
    gate_in="g_proj",
    partial_rotary=True,
    score="sigmoid",
    renamed=(
        (".shared_experts.", ".shared_expert."),
        (".experts.e_score_correction_bias", ".gate.e_score_correction_bias"),
    ),
)
_MUSE = Family(
    qk_norm="unit",
    gate="sigmoid",
    gate_in="gate_proj",
    centred=True,
    last_centred=False,
    around=True,
    embedding="normed",
    mixers="windows by type",
    skipped=_NOT_TEXT,
)
_MINIMAX_M2 = Family(
    qk_norm="row",
    partial_rotary=True,
    score="sigmoid",
    renamed=(
        (".block_sparse_moe.", ".mlp."),
        (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ),
)
_NEMOTRON_H = Family(
    mixers="alone by type",
    rotary=False,
    activations=frozenset({"relu2"}),
    score="sigmoid",
    skipped=("mtp.",),
    renamed=(
        ("backbone.", "model."),
        ("model.embeddings.", "model.embed_tokens."),
        ("model.norm_f.", "model.norm."),
        (".shared_experts.", ".shared_expert."),
    ),
)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(mixers="window"),
    "qwen2": replace(_LLAMA_LIKE, bias="always qkv"),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, mixers="window"),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_next": replace(_QWEN3_5, by_key_head=True),
    "gpt_oss": _GPT_OSS,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm4_moe": _GLM4_MOE,
    "laguna": _LAGUNA,
    "muse_glimmer": _MUSE,
    "minimax_m2": _MINIMAX_M2,
    "nemotron_h": _NEMOTRON_H,
}
"""The families that our decoder runs, by `model_type`. Of those with a vision tower it runs the text."""


def describe(config: Any) -> Description | None:
    """The description of a transformers configuration; None where our decoder would not compute the same."""
    family = FAMILIES.get(config.model_type)
    if family is None or why_not(config):
        return None
    text = config.get_text_config(decoder=True)
    layers: int = text.num_hidden_layers
    further = getattr(text, "num_nextn_predict_layers", None) or 0  # layers behind the last that predict further tokens
    kinds = text.layer_types if family.by_type else ["full_attention"] * layers
    blocks: list[Block] = []
    for number, kind in enumerate(kinds):
        at = f"model.layers.{number}."
        mixer = None if kind in _FEED_FORWARDS else _mixer(text, family, number, kind)
        if family.mixers == "alone by type":
            blocks.append(Block(mixer or _feed_forward(text, family, number), at, "mixer", "norm"))
        elif mixer is not None:
            blocks += _layer(at, mixer, _feed_forward(text, family, number), family)
    scale = {"": 1.0, "scaled": float(torch.tensor(text.hidden_size**0.5)), "normed": 1.0}[family.embedding]
    return Description(
        tuple(blocks),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        eps=_eps(text),
        tied=bool(getattr(config, "tie_word_embeddings", text.tie_word_embeddings)),
        post_eps=getattr(text, "post_norm_eps", _eps(text)),
        centred=family.centred,
        last_centred=family.centred if family.last_centred is None else family.last_centred,
        embedding_scale=scale,
        embedding_norm=family.embedding == "normed",
        logit_scale=getattr(text, "output_multiplier", 1.0),
        logit_cap=getattr(text, "final_logit_softcapping", None) or 0.0,
        skipped=(*family.skipped, *(f"model.layers.{layers + i}." for i in range(further))),
        renamed=family.renamed,
        format=Format.of(config),
    )


def with_next_token(info: "ModelInfo", stored: Container[str]) -> "ModelInfo":
    """The same model with its layer that predicts one token further. `stored`: names of the tensors in its files.

    Returns `info` itself where the family or the files have none.
    """
    described, family = info.description, FAMILIES.get(info.config.model_type)
    if described is None or family is None or not family.next_token:
        return info
    text = info.config.get_text_config(decoder=True)
    layer = _next_token(text, family)
    if not described.format.stored(layer.projection, stored):
        return info
    described = replace(described, next_token=layer)
    shape = replace(info.shape, cell_values=described.cell.values)
    return replace(info, description=described, cell=described.cell, shape=shape)


def _next_token(text: Any, family: Family) -> NextToken:
    """The layer has the shapes of the model's last one that sees all tokens."""
    kinds = text.layer_types if family.by_type else ["full_attention"] * text.num_hidden_layers
    number = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
    parts = _attention(text, family, number), _feed_forward(text, family, number)
    if family.next_token == "mtp":
        norms = "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"
        return NextToken(tuple(_layer("mtp.layers.0.", *parts, family)), *norms, "mtp.fc.weight", "mtp.norm.weight")
    at = f"model.layers.{text.num_hidden_layers}."
    names = (f"{at}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    return NextToken(tuple(_layer(at, *parts, family)), *names)


def _eps(text: Any) -> float:
    return float(_first(text, "rms_norm_eps", "layer_norm_epsilon"))


def _mixer(text: Any, family: Family, number: int, kind: str) -> Attention | LinearAttention:
    if kind != "linear_attention":
        return _attention(text, family, number)
    return LinearAttention(_linear_shape(text), family.by_key_head, bool(getattr(text, "use_conv_bias", False)))


def _layer(at: str, mixer: Attention | LinearAttention, feed_forward: Op, family: Family) -> list[Block]:
    """The two blocks of a layer."""
    name = "linear_attn" if isinstance(mixer, LinearAttention) else "self_attn"
    if not family.around:
        first = Block(mixer, at, name, "input_layernorm")
        return [first, Block(feed_forward, at, "mlp", "post_attention_layernorm")]
    before = "" if isinstance(feed_forward, DenseAndExperts) else "pre_feedforward_layernorm"
    return [
        Block(mixer, at, name, "input_layernorm", "post_attention_layernorm"),
        Block(feed_forward, at, "mlp", before, "post_feedforward_layernorm", scaled=family.scaled),
    ]


def _attention(text: Any, family: Family, number: int) -> Attention:
    """The attention of a layer."""
    own = text.per_layer_config[number]  # Gemma 4's heads differ
    kind = text.layer_types[number] if family.by_type else "full_attention"
    windowed = kind == "sliding_attention" or family.mixers == "window"
    heads = getattr(text, "num_attention_heads_per_layer", None) or [text.num_attention_heads] * (number + 1)
    rope, thetas = getattr(text, "rope_parameters", None) or {}, getattr(text, "layer_rope_theta", None)
    rotary = kind if isinstance(rope.get(kind), dict) else ""
    bias = bool(getattr(text, "attention_bias", False))
    norms = family.qk_norm if family.qk_norm != "option" else "head" if text.use_qk_norm else ""
    gate = family.gate
    if gate == "softplus of heads" and text.gating is not True and text.gating != "per-head":
        gate = "softplus"
    return Attention(
        heads[number],
        own.num_key_value_heads,
        head_dim(own),
        text.sliding_window if windowed else None,
        bias=bias or family.bias == "always qkv",
        out_bias=bias and family.bias == "all",
        qk_norm=norms,
        q_scale=getattr(text, "qk_scale_factor", 1.0),
        v_norm=family.v_norm,
        k_is_v=bool(getattr(text, "attention_k_eq_v", False)) and not windowed,
        gate=gate,
        gate_in=family.gate_in,
        scale=family.scale(text),
        sinks=family.sinks,
        rotary=None if not family.rotary or (thetas is not None and not thetas[number]) else rotary,
    )


def _feed_forward(text: Any, family: Family, number: int) -> FeedForward | MixtureOfExperts | DenseAndExperts:
    """The feed-forward of a layer, whatever its family calls the numbers."""
    activation = _ACTIVATIONS[_activation(text)]
    if not _has_experts(text, number):
        return FeedForward(text.intermediate_size, activation)
    inner = _first(text, "moe_intermediate_size", "intermediate_size")
    routing = Routing(
        experts=_first(text, "num_experts", "num_local_experts", "n_routed_experts"),
        chosen=_first(text, "top_k_experts", "num_experts_per_tok"),
        score=family.score,
        normalised=bool(getattr(text, "norm_topk_prob", True)),
        groups=getattr(text, "n_group", 1),
        kept_groups=getattr(text, "topk_group", 1),
        scale=float(_first(text, "routed_scaling_factor", "moe_routed_scaling_factor", default=1.0)),
        softcap=float(getattr(text, "moe_router_logit_softcapping", 0.0)),
    )
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared = _first(text, *names, default=inner * getattr(text, "n_shared_experts", 0))
    experts = MixtureOfExperts(
        inner,
        routing,
        "clamped" if family.clamped else activation,
        bias=family.router_bias,
        corrected=family.score == "sigmoid",
        shared=shared,
        shared_gate=family.shared_gate and shared > 0,
        latent=getattr(text, "moe_latent_size", None) or 0,
        alpha=getattr(text, "swiglu_alpha", ALPHA),
        limit=getattr(text, "swiglu_limit", LIMIT),
    )
    if getattr(text, "enable_moe_block", False):
        return DenseAndExperts(FeedForward(text.intermediate_size, activation), experts)
    return experts


def _has_experts(text: Any, number: int) -> bool:
    """Whether a layer has experts in place of a dense feed-forward, or beside it."""
    if not getattr(text, "enable_moe_block", True) or not _first(text, "num_experts", "num_local_experts", default=0):
        return False
    if kinds := getattr(text, "mlp_layer_types", None):
        return bool(kinds[number] == "sparse")
    if kinds := [each for each in getattr(text, "layer_types", None) or () if each in _FEED_FORWARDS]:
        return bool(text.layer_types[number] == "moe")
    if number in (getattr(text, "mlp_only_layers", None) or ()):
        return False
    step = getattr(text, "decoder_sparse_step", 1)
    return bool(step > 0 and (number + 1) % step == 0 and number >= getattr(text, "first_k_dense_replace", 0))


def has_experts(model_type: str) -> bool:
    """Whether a family's models may have experts, by its configuration class."""
    text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    return any(hasattr(text, name) for name in ("num_experts", "num_local_experts"))


def _first(text: Any, *names: str, default: Any = None) -> Any:
    """The first of these numbers that a configuration has. Raises AttributeError where it has none of them."""
    found = next((value for name in names if (value := getattr(text, name, None)) is not None), default)
    if found is None:
        raise AttributeError(f"no {' or '.join(names)}")
    return found


def _activation(text: Any) -> str:
    return str(_first(text, "hidden_activation", "hidden_act", "mlp_hidden_act"))


def why_not(config: Any) -> str:
    """The option of a configuration of a known family that our decoder does not compute; "": there is none."""
    text, family = config.get_text_config(decoder=True), FAMILIES[config.model_type]
    kinds = set(getattr(text, "layer_types", None) or ()) if family.by_type else set()
    others = kinds - _KV_LAYERS - _OTHER_LAYERS.get(family.mixers, set())
    ropes = {str(each.get("rope_type", "default")) for each in _rotaries(text)} - ROPE_TYPES
    partial = any(each.get("partial_rotary_factor", 1.0) != 1.0 for each in _rotaries(text))
    refused = {
        f"the activation {_activation(text)}": _ACTIVATIONS.get(_activation(text)) not in family.activations,
        "projections with a bias": getattr(text, "mlp_bias", False) or getattr(text, "use_bias", False),
        f"rotary positions of type {min(ropes, default='')}": bool(ropes),
        "rotary positions over a part of each head": partial and not family.partial_rotary,
        f"layers of type {min(others, default='')}": bool(others),
        "layers without attention alone": bool(kinds) and not kinds & _KV_LAYERS,
        "limits of time steps": list(getattr(text, "time_step_limit", None) or _NO_LIMITS) != _NO_LIMITS,
        f"the activation {_linear_activation(text)}": _linear_activation(text) != "silu",
        "soft caps of scores": getattr(text, "attn_logit_softcapping", None),
        "attention to later tokens": getattr(text, "use_bidirectional_attention", None) in (True, "all"),
        "embeddings for each layer": getattr(text, "hidden_size_per_layer_input", 0),
        "layers that share keys and values": getattr(text, "num_kv_shared_layers", 0),
        "heads that differ in layers of one type": _uneven_heads(text, family),
    }
    return next((reason for reason, applies in refused.items() if applies), "") or _unread_weights(config)


def _uneven_heads(text: Any, family: Family) -> bool:
    """Whether layers that see all, or those with a window, have different numbers or sizes of heads: one plan of a
    step's attention is for all layers of a type.
    """
    if family.mixers == "linear by type":
        return False
    layers = [_attention(text, family, number) for number in range(text.num_hidden_layers)]
    each = {(op.window, op.heads, op.kv_heads, op.head_dim) for op in layers}
    return len(each) > len({op.window for op in layers})


def _unread_weights(config: Any) -> str:
    """The format of a checkpoint's weights where `formats` does not read it."""
    try:
        Format.of(config)
    except ValueError as error:
        return str(error)
    return ""


def _linear_activation(text: Any) -> str:
    """The activation after the convolution of linear layers."""
    return str(getattr(text, "mamba_hidden_act", "silu"))


def _linear_shape(text: Any) -> LinearShape:
    if hasattr(text, "mamba_num_heads"):
        heads, sizes = (text.n_groups, text.mamba_num_heads), (text.ssm_state_size, text.mamba_head_dim)
        return LinearShape(*heads, *sizes, text.conv_kernel, rule="mamba2")
    return LinearShape(
        text.linear_num_key_heads,
        text.linear_num_value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
    )


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


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
        cell = described.cell if described else _cell(text)
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


def _cell(text: Any) -> CellShape:
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return CellShape(text.num_hidden_layers, kv_heads, head_dim(text))


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
