"""Reading a checkpoint's files, offline: its tokenizer, end-of-sequence ids, sampling defaults and weights.

Weights are loaded as transformers' own module (`load_model`), or for our decoder (`read_weights`): block by block, each
asks a `Checkpoint` for its tensors by name. There an unexpected tensor is an error and never ignored: it would change
the output.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError, TemplateSyntaxError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from holdfast.kernels.linear_state import LinearWeights
from holdfast.kernels.quantized import QuantizedWeight, Weight, concatenated, dense
from holdfast.replicas.config import DType
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.memory import trim
from holdfast.replicas.model.description import (
    LOADING_ERRORS,
    Attention,
    Block,
    Description,
    FeedForward,
    LinearAttention,
    MixtureOfExperts,
    ModelInfo,
    NextToken,
    first_lines,
)
from holdfast.replicas.model.files import stored_tensors
from holdfast.replicas.model.folder import cannot_serve, read_chat_template
from holdfast.replicas.model.formats import UNUSED
from holdfast.replicas.model.mapped import MappedTensors
from holdfast.replicas.model.progress import Meter, Tell

log = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TEXT_NAMES = (("model.language_model.", "model."), ("language_model.model.", "model."))  # beside a vision tower
_DEFAULTS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**20),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}
"""Sampling settings for which a checkpoint may have defaults, with the least and the largest value."""
_ERRORS = (*LOADING_ERRORS, SafetensorError, StrictDataclassError)


def sampling_defaults(path: str) -> dict[str, float]:
    """The sampling settings in a checkpoint's generation_config.json, by the API's names.

    A value that the API would refuse is left out.
    """
    try:
        settings = json.loads((Path(path) / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    defaults: dict[str, float] = {}
    for name, (least, most) in _DEFAULTS.items():
        value = settings.get(name) if isinstance(settings, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            defaults[name] = int(value) if name == "top_k" else float(value)
    return defaults


def load_tokenizer(info: ModelInfo, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights, with the chat template in the file `chat_template`, if given.

    Raises ConfigError where there is no tokenizer, and for a file that is no template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(info.path, local_files_only=True, trust_remote_code=False)
    except _ERRORS as error:
        raise cannot_serve(info.path, f"its tokenizer does not load ({first_lines(error)})") from error
    if chat_template:
        tokenizer.chat_template = read_chat_template(chat_template)
        # A template may refuse this conversation. Which ones it takes is found out later.
        with suppress(TemplateError, TypeError, ValueError, LookupError, AttributeError):
            try:
                tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
            except TemplateSyntaxError as error:
                raise ConfigError(f"{chat_template} is no chat template: {error}", "chat_template") from error
    return tokenizer


def eos_ids(info: ModelInfo) -> frozenset[int]:
    """End-of-sequence ids of the generation settings and of the configuration, each a number, a list or nothing.

    Raises ConfigError for settings that cannot be read: a model without its end would go on for ever.
    """
    settings = None
    if (Path(info.path) / "generation_config.json").is_file():  # a checkpoint need not have any
        try:
            settings = GenerationConfig.from_pretrained(info.path, local_files_only=True)
        except _ERRORS as error:
            raise cannot_serve(info.path, f"its generation_config.json does not load ({first_lines(error)})") from error
    result: set[int] = set()
    for source in (settings, info.config, info.config.get_text_config(decoder=True)):
        ids = getattr(source, "eos_token_id", None)
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(type(each) is int for each in listed):
            raise cannot_serve(info.path, f"its eos_token_id is {ids!r}, not a number or a list of numbers")
        result.update(listed)
    return frozenset(result)


def load_model(info: ModelInfo, dtype: DType, device: str) -> nn.Module:
    """transformers' module in evaluation mode, in `dtype` ("auto" excluded) on `device`, with its own plain attention.

    Raises ConfigError when the files are missing, damaged or do not fill every weight.
    """
    transformers_logging.disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            info.path,
            config=info.config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # the other format is pickled: to read it may be to run it
            attn_implementation="eager",
            output_loading_info=True,
        )
    except _ERRORS as error:
        raise cannot_serve(info.path, first_lines(error)) from error
    if missing := sorted(report["missing_keys"]):
        raise cannot_serve(info.path, f"its files lack {len(missing)} weights, {missing[0]} among them")
    loaded: nn.Module = module.eval().requires_grad_(False).to(device)
    return loaded


# ---- our decoder's ----


# A `Weight` is in the model's dtype, or quantised as in the checkpoint where the device multiplies with that.


@dataclass(slots=True)
class AttentionWeights:
    """qkv [gates, if there are any, queries, keys, values; hidden], out [hidden, heads head_dim]; norms in float32."""

    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Weight
    out_bias: Tensor | None
    sinks: Tensor | None


@dataclass(slots=True)
class LinearAttentionWeights:
    """qkvz [qkvz_width, hidden], gates [gates value_heads, hidden], out [hidden, value_heads value_dim].

    `gates`, those of the rule, is in the model's dtype where the others are in int8 or quantised. `kernel`: of the
    convolution and decay.
    """

    qkvz: Weight
    gates: Tensor
    kernel: LinearWeights
    norm: Tensor  # [value_dim], or of Mamba-2 [value_heads value_dim]
    out: Weight


@dataclass(slots=True)
class FeedForwardWeights:
    """first [gates and ups, or ups alone; hidden], down [hidden, inner]."""

    first: Weight
    down: Weight


@dataclass(slots=True)
class ExpertsWeights:
    """router [E, hidden] float32, first [E, gates and ups; hidden], down [E, hidden, inner]; biases in float32."""

    router: Tensor
    router_bias: Tensor | None
    correction: Tensor | None
    first: Weight
    first_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    shared: FeedForwardWeights | None
    shared_gate: Tensor | None  # [1, hidden]
    latent: tuple[Weight, Weight] | None  # in front of the experts and behind them


@dataclass(slots=True)
class DenseAndExpertsWeights:
    """`norms`: before and behind each of the two; `router_norm` before the router; `scales` [E] of the experts."""

    dense: FeedForwardWeights
    dense_norms: tuple[Tensor, Tensor]
    experts: ExpertsWeights
    experts_norms: tuple[Tensor, Tensor]
    router_norm: Tensor
    scales: Tensor


OpWeights: TypeAlias = (
    AttentionWeights | LinearAttentionWeights | FeedForwardWeights | ExpertsWeights | DenseAndExpertsWeights
)


@dataclass(slots=True)
class BlockWeights:
    """One block. All norms are vectors in float32, by which the normed row is multiplied."""

    norm: Tensor | None
    op: OpWeights
    post_norm: Tensor | None
    scale: float = 1.0


@dataclass(slots=True)
class NextTokenWeights:
    """`description.NextToken` without its blocks: projection [hidden, 2 hidden], norms in float32."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Weight
    norm: Tensor


@dataclass(slots=True)
class DecoderWeights:
    """Everything. embedding and head [vocabulary, hidden]; one tensor where they are tied. `blocks`, those of
    `Description.all_blocks`, may be read as they are taken.
    """

    embedding: Tensor
    norm: Tensor
    head: Tensor
    blocks: Iterable[BlockWeights]
    next_token: NextTokenWeights | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """`outputs` rows of a matrix, from one tensor of the checkpoint, whose rows are taken in the order `rows`. `of`:
    how many the tensor has; 0: just these.
    """

    name: str
    outputs: int
    rows: Tensor | None = None
    of: int = 0


class Source:
    """Where weights come from. This one makes them with undefined values; a `Checkpoint` reads them."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device

    @property
    def sizes(self) -> bool:
        """Whether tensors have a size and no values."""
        return self.device == "meta"

    def has(self, name: str) -> bool:
        return False

    def tensor(self, name: str, *size: int) -> Tensor:
        """A tensor as it is in the checkpoint, in the model's dtype."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def floats(self, name: str, *size: int, plus: float = 0.0) -> Tensor:
        """A tensor in float32, `plus` added."""
        return torch.empty(size, dtype=torch.float32, device=self.device)

    def matrix(self, parts: Sequence[Part], inputs: int) -> Weight:
        """A matrix of parts, one above the other."""
        return torch.empty(sum(part.outputs for part in parts), inputs, dtype=self.dtype, device=self.device)

    def matrices(self, experts: Sequence[Sequence[Part]], inputs: int) -> Weight:
        """A matrix of parts for each expert, [E, outputs, inputs]."""
        outputs = sum(part.outputs for part in experts[0])
        return torch.empty(len(experts), outputs, inputs, dtype=self.dtype, device=self.device)

    def experts(self, name: str, *size: int, rows: Tensor | None = None, transposed: bool = False) -> Weight:
        """The matrices of all experts, [E, outputs, inputs], that are one tensor of the checkpoint. `rows`: of its
        outputs. `transposed`: it has inputs before outputs where it is not quantised.
        """
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def finish(self) -> None:
        """Everything has been asked for."""


class Checkpoint(Source):
    """A checkpoint folder: tensors by the names of a text model, each copied once from the mapped file to its place.

    `tensors`: by their names in the files. With `keep` quantised weights stay so, where the kernels of a GPU can
    multiply with them. `finish` raises ConfigError for tensors that are missing, or that nobody asked for: they would
    change the output.
    """

    def __init__(
        self,
        path: str,
        description: Description,
        dtype: torch.dtype,
        keep: bool,
        tensors: Mapping[str, Tensor],
        device: str,
    ) -> None:
        super().__init__(dtype, device)
        self._path, self._keep, self._description, self._tensors = path, keep, description, tensors
        self._format = description.format
        self._missing: list[str] = []
        self._dequantized = 0
        self._stored = {self._named(name): name for name in self._tensors}
        self._unread = set(self._stored)

    def _named(self, name: str) -> str:
        """A weight's name in a text model, as this project calls its parts."""
        for old, new in (*_TEXT_NAMES, *self._description.renamed):
            name = name.replace(old, new, 1)
        return name

    def has(self, name: str) -> bool:
        return bool(self._format.stored(name, self._stored))

    def tensor(self, name: str, *size: int) -> Tensor:
        return self._filled(super().tensor(name, *size), name)

    def floats(self, name: str, *size: int, plus: float = 0.0) -> Tensor:
        return self._filled(super().floats(name, *size), name).add_(plus)

    def matrix(self, parts: Sequence[Part], inputs: int) -> Weight:
        matrices = [self._read(part.name, part.of or part.outputs, inputs) for part in parts]
        ordered = [_ordered(each, part.rows) for each, part in zip(matrices, parts, strict=True)]
        kept = [each for each in ordered if isinstance(each, QuantizedWeight)]
        if self._keep and len(kept) == len(parts) and _alike(kept):
            return concatenated(kept).to(self.device)
        weight = super().matrix(parts, inputs)
        assert isinstance(weight, Tensor)
        for each, rows in zip(ordered, torch.split(weight, [part.outputs for part in parts]), strict=True):
            self._fill(rows, each)
        return weight

    def matrices(self, experts: Sequence[Sequence[Part]], inputs: int) -> Weight:
        kept: list[QuantizedWeight] = []
        weight: Weight | None = None
        for expert, parts in enumerate(experts):
            matrix = self.matrix(parts, inputs)
            if isinstance(matrix, QuantizedWeight):
                kept.append(matrix)
            else:
                weight = super().matrices(experts, inputs) if weight is None else weight
                assert isinstance(weight, Tensor)
                weight[expert] = matrix
        if kept and weight is not None:
            raise ValueError(f"experts beside {experts[0][0].name} are of several formats")
        return concatenated(kept, experts=True) if weight is None else weight

    def experts(self, name: str, *size: int, rows: Tensor | None = None, transposed: bool = False) -> Weight:
        count, outputs, inputs = size
        turned = transposed and name in self._stored
        weights = self._read(name, *((count, inputs, outputs) if turned else size))
        ordered = _ordered(weights.mT if turned and isinstance(weights, Tensor) else weights, rows)
        if self._keep and isinstance(ordered, QuantizedWeight) and _alike([ordered]):
            return ordered.to(self.device)
        weight = super().experts(name, *size)
        assert isinstance(weight, Tensor)
        self._fill(weight, ordered)
        return weight

    def finish(self) -> None:
        skipped = self._description.skipped
        unused = {name for name in self._unread if name.startswith(skipped)}
        scales = {name for name in self._unread if UNUSED.search(name)}
        names = self._unread - scales - unused
        if unknown := min((name for name in names if not name.endswith("rotary_emb.inv_freq")), default=""):
            raise cannot_serve(self._path, f"unknown weight {self._stored[unknown]}")
        if self._missing:
            lacks = f"{len(self._missing)} weights, {min(self._missing)} among them"
            raise cannot_serve(self._path, f"its files lack {lacks}")
        if self.sizes:
            return
        if unused:
            begins = [each for each in skipped if any(name.startswith(each) for name in unused)]
            log.info("%d weights are not used: %s", len(unused), " and ".join(f"{each}*" for each in begins))
        if self._format.activations:
            log.info("the configuration asks for quantised activations: they are computed in 16 or 32 bits")
        if scales:
            log.info("%d scales of activations, keys and values are not used: these are not quantised", len(scales))
        if self._dequantized:
            log.info(
                "%d quantised weights are turned into %s", self._dequantized, str(self.dtype).removeprefix("torch.")
            )

    def tied_head(self, embedding: Tensor) -> None:
        """Raises ConfigError for a head in the files that differs from the embedding to which it is tied: transformers
        would take both.
        """
        if not self.has(_HEAD):
            return
        head = self.tensor(_HEAD, *embedding.shape)
        if not self.sizes and not torch.equal(head, embedding):
            why = f"two different weights for {_EMBEDDING} (tie_word_embeddings is true)"
            raise cannot_serve(self._path, f"its files have {why}")

    def _filled(self, target: Tensor, name: str) -> Tensor:
        self._fill(target, self._read(name, *target.shape))
        return target

    def _fill(self, target: Tensor, weight: Weight | None) -> None:
        """Write a weight, dequantised; none where it is missing."""
        if isinstance(weight, QuantizedWeight):
            self._dequantized += 1
        if weight is not None and not self.sizes:
            target.copy_(weight if isinstance(weight, Tensor) else weight.dequantized(target.dtype))

    def _read(self, name: str, *size: int) -> Weight | None:
        """A weight as it is stored; None where it is missing, which `finish` reports."""
        names = self._format.stored(name, self._stored)
        if not names:
            self._missing.append(name)
            return None
        parts = {part: self._stored_tensor(stored) for part, stored in names.items()}
        weights = self._format.read(name, parts, size[-1])
        if weights.shape != size:
            raise cannot_serve(self._path, f"weight {name} is {tuple(weights.shape)}, not {size}")
        return weights

    def _stored_tensor(self, name: str) -> Tensor:
        self._unread.discard(name)
        return self._tensors[self._stored[name]]


def _ordered(weight: Weight | None, rows: Tensor | None) -> Weight | None:
    """The outputs [..., out, in] in this order."""
    if weight is None or rows is None:
        return weight
    return weight[..., rows, :] if isinstance(weight, Tensor) else weight.rows(rows)


def _alike(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether they can be one weight of a GPU's kernels."""
    return all(each.in_tiles for each in weights) and len({each.kind for each in weights}) == 1


def read_weights(
    path: str,
    description: Description,
    dtype: torch.dtype,
    device: str,
    keep: bool = False,
    tell: Tell | None = None,
) -> DecoderWeights:
    """Read a checkpoint folder, the blocks as they are taken: who lets go of each has one of them in memory at a time.

    `keep`: see `Checkpoint`. `tell` is called with how far the reading is, now and then.
    Raises ConfigError for a tensor that is missing, unknown or of another size, before any is read, and for a head that
    differs from the embedding where the two are tied.
    """
    sizes: list[int] = []
    try:
        stored = stored_tensors(path, Path(path))
        of = partial(Checkpoint, path, description, dtype, keep)
        for _ in weights_from(of(MappedTensors(stored, sizes.append, sizes=True), "meta"), description).blocks:
            pass  # missing weights are found without reading any
        meter = Meter(sum(sizes), tell)
        weights = weights_from(of(MappedTensors(stored, meter.add), device), description)
    except (OSError, ValueError) as error:
        raise cannot_serve(path, str(error)) from error
    return replace(weights, blocks=_checked(path, weights.blocks))


def _checked(path: str, blocks: Iterable[BlockWeights]) -> Iterator[BlockWeights]:
    """The same blocks. What was only needed to read and pack one is given back before the next."""
    try:
        for block in blocks:
            yield block
            del block
            trim()
    except (OSError, ValueError) as error:
        raise cannot_serve(path, str(error)) from error


def weights_from(source: Source, description: Description) -> DecoderWeights:
    """The weights of a description."""
    size = (description.vocabulary, description.hidden)
    if description.tied:
        name = _HEAD if source.has(_HEAD) and not source.has(_EMBEDDING) else _EMBEDDING
        head = embedding = source.tensor(name, *size)
        if isinstance(source, Checkpoint):
            source.tied_head(embedding)
    else:
        embedding, head = source.tensor(_EMBEDDING, *size), source.tensor(_HEAD, *size)
    norm = source.floats("model.norm.weight", description.hidden, plus=float(description.last_centred))
    next_token = _next_token(source, description.next_token, description) if description.next_token else None
    return DecoderWeights(embedding, norm, head, _blocks(source, description), next_token)


def _next_token(source: Source, layer: NextToken, description: Description) -> NextTokenWeights:
    hidden, plus = description.hidden, float(description.centred)
    norms = (layer.embedding_norm, layer.hidden_norm, layer.norm)
    embedding_norm, hidden_norm, norm = (source.floats(name, hidden, plus=plus) for name in norms)
    projection = source.matrix([Part(layer.projection, hidden)], 2 * hidden)
    return NextTokenWeights(embedding_norm, hidden_norm, projection, norm)


def _blocks(source: Source, description: Description) -> Iterator[BlockWeights]:
    hidden = description.hidden
    for block in description.all_blocks:
        norms = [
            source.floats(f"{block.at}{name}.weight", hidden, plus=float(description.centred)) if name else None
            for name in (block.norm, block.post_norm)
        ]
        scale = source.floats(f"{block.at}layer_scalar", 1) if block.scaled else None
        factor = 1.0 if scale is None or source.sizes else scale.item()
        yield BlockWeights(norms[0], _op(source, block, description), norms[1], factor)
    source.finish()


def _op(source: Source, block: Block, description: Description) -> OpWeights:
    op, at, hidden = block.op, f"{block.at}{block.name}.", description.hidden
    if isinstance(op, Attention):
        return _attention(source, at, op, description)
    if isinstance(op, LinearAttention):
        return _linear_attention(source, at, op, hidden)
    if isinstance(op, FeedForward):
        return _feed_forward(source, at, op, hidden)
    if isinstance(op, MixtureOfExperts):
        return _experts(source, at, op, hidden)
    names = ("pre_feedforward_layernorm", "post_feedforward_layernorm_1")
    others = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    (before, behind), (before_2, behind_2) = (
        (source.floats(f"{block.at}{first}.weight", hidden), source.floats(f"{block.at}{second}.weight", hidden))
        for first, second in (names, others)
    )
    return DenseAndExpertsWeights(
        _feed_forward(source, at, op.dense, hidden),
        (before, behind),
        _experts(source, block.at, op.experts, hidden),
        (before_2, behind_2),
        source.floats(f"{block.at}router.scale", hidden) * hidden**-0.5,
        source.floats(f"{block.at}router.per_expert_scale", op.experts.routing.experts),
    )


def _attention(source: Source, at: str, op: Attention, description: Description) -> AttentionWeights:
    order, parts, centred = None, [], float(description.centred)
    if op.gate and not op.gate_in:  # each head's query and gate stand together; we have all gates before all queries
        order = torch.arange(2 * op.q_width).view(op.heads, 2, op.head_dim).transpose(0, 1).flip(0).flatten()
        parts.append(Part(f"{at}q_proj", 2 * op.q_width, order))
    elif op.gate:
        parts.append(Part(f"{at}{op.gate_in}", op.gate_width))
    if order is None:
        parts.append(Part(f"{at}q_proj", op.q_width))
    values = "k_proj" if op.k_is_v else "v_proj"
    parts += [Part(f"{at}k_proj", op.kv_width), Part(f"{at}{values}", op.kv_width)]
    weights, biases = ([replace(part, name=f"{part.name}.{kind}") for part in parts] for kind in ("weight", "bias"))
    q_norm = k_norm = None
    widths = (op.q_width, op.kv_width) if op.qk_norm == "row" else (op.head_dim, op.head_dim)
    if op.qk_norm == "unit":
        q_norm, k_norm = (torch.full((op.head_dim,), value, device=source.device) for value in (op.q_scale, 1.0))
    elif op.qk_norm:
        q_norm, k_norm = (
            source.floats(f"{at}{name}_norm.weight", width, plus=centred)
            for name, width in zip("qk", widths, strict=True)
        )
    qkv_bias = None
    if op.bias:
        tensors = [source.floats(part.name, part.outputs) for part in biases]
        qkv_bias = torch.cat(
            [each if part.rows is None else each[part.rows] for each, part in zip(tensors, biases, strict=True)]
        ).to(source.dtype)
    return AttentionWeights(
        source.matrix(weights, description.hidden),
        qkv_bias,
        q_norm,
        k_norm,
        out=source.matrix([Part(f"{at}o_proj.weight", description.hidden)], op.q_width),
        out_bias=source.tensor(f"{at}o_proj.bias", description.hidden) if op.out_bias else None,
        sinks=source.floats(f"{at}sinks", op.heads) if op.sinks else None,
    )


def _linear_attention(source: Source, at: str, op: LinearAttention, hidden: int) -> LinearAttentionWeights:
    shape, heads = op.shape, op.shape.value_heads
    qkvz, gates = (_of_mamba2 if shape.rule == "mamba2" else _of_delta)(source, at, op, hidden)
    conv = source.floats(f"{at}conv1d.weight", shape.channels, 1, shape.kernel)[:, 0]
    kernel = LinearWeights(
        conv,
        source.floats(f"{at}A_log", heads),
        source.floats(f"{at}dt_bias", heads),
        source.floats(f"{at}conv1d.bias", shape.channels) if op.conv_bias else None,
        source.floats(f"{at}D", heads) if shape.rule == "mamba2" else None,
    )
    return LinearAttentionWeights(
        qkvz,
        dense(gates, source.dtype),
        kernel,
        source.floats(f"{at}norm.weight", op.norm_width),
        source.matrix([Part(f"{at}out_proj.weight", hidden)], op.v_width),
    )


def _of_delta(source: Source, at: str, op: LinearAttention, hidden: int) -> tuple[Weight, Weight]:
    shape, heads = op.shape, op.shape.value_heads
    if op.by_key_head:
        group = heads // shape.key_heads
        values = group * shape.value_dim
        joined = _joined(shape.key_heads, [shape.key_dim, shape.key_dim, values, values])
        b_then_a = _joined(shape.key_heads, [group, group])
        qkvz = [Part(f"{at}in_proj_qkvz.weight", op.qkvz_width, joined)]
        ab = [Part(f"{at}in_proj_ba.weight", 2 * heads, b_then_a.roll(heads))]
    else:
        qkvz = [Part(f"{at}in_proj_qkv.weight", shape.channels), Part(f"{at}in_proj_z.weight", op.v_width)]
        ab = [Part(f"{at}in_proj_{name}.weight", heads) for name in "ab"]
    return source.matrix(qkvz, hidden), source.matrix(ab, hidden)


def _of_mamba2(source: Source, at: str, op: LinearAttention, hidden: int) -> tuple[Weight, Weight]:
    """One matrix in the checkpoint: output gates, values, keys, queries, dt."""
    widths = [op.qkvz_width, op.shape.value_heads]
    first, dt = (
        source.matrix([Part(f"{at}in_proj.weight", len(rows), rows, of=sum(widths))], hidden)
        for rows in torch.split(torch.arange(sum(widths)), widths)
    )
    return first, dt


def _joined(heads: int, widths: list[int]) -> Tensor:
    """The order that puts the parts of all heads together, where the checkpoint has all parts of a head together."""
    rows = torch.arange(heads * sum(widths)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, widths, dim=1)])


def _feed_forward(source: Source, at: str, op: FeedForward, hidden: int) -> FeedForwardWeights:
    names = ("up_proj",) if op.width == op.inner else ("gate_proj", "up_proj")
    first = [Part(f"{at}{name}.weight", op.inner) for name in names]
    down = [Part(f"{at}down_proj.weight", hidden)]
    return FeedForwardWeights(source.matrix(first, hidden), source.matrix(down, op.inner))


def _experts(source: Source, at: str, op: MixtureOfExperts, hidden: int) -> ExpertsWeights:
    count, size = op.routing.experts, op.latent or hidden
    fused = f"{at}experts.gate_up_proj"
    first_bias = down_bias = None
    if op.activation == "clamped":  # gpt-oss: inputs before outputs, and gates and ups by turns
        gates_first = torch.arange(op.width).view(-1, 2).T.flatten()
        first = source.experts(fused, count, op.width, hidden, rows=gates_first, transposed=True)
        down = source.experts(f"{at}experts.down_proj", count, hidden, op.inner, transposed=True)
        first_bias = source.floats(f"{fused}_bias", count, op.width)[:, gates_first]
        down_bias = source.floats(f"{at}experts.down_proj_bias", count, hidden)
    elif source.has(fused):
        first = source.experts(fused, count, op.width, size)
        down = source.experts(f"{at}experts.down_proj", count, size, op.inner)
    else:
        names = ("up_proj",) if op.width == op.inner else ("gate_proj", "up_proj")
        each = range(count)
        first = source.matrices(
            [[Part(f"{at}experts.{i}.{name}.weight", op.inner) for name in names] for i in each], size
        )
        down = source.matrices([[Part(f"{at}experts.{i}.down_proj.weight", size)] for i in each], op.inner)
    return ExpertsWeights(
        router=source.floats(f"{at}gate.weight", count, hidden),
        router_bias=source.floats(f"{at}gate.bias", count) if op.bias else None,
        correction=source.floats(f"{at}gate.e_score_correction_bias", count) if op.corrected else None,
        first=first,
        first_bias=first_bias,
        down=down,
        down_bias=down_bias,
        shared=_feed_forward(source, f"{at}shared_expert.", FeedForward(op.shared, op.activation), hidden)
        if op.shared
        else None,
        shared_gate=source.tensor(f"{at}shared_expert_gate.weight", 1, hidden) if op.shared_gate else None,
        latent=_latent(source, at, op.latent, hidden) if op.latent else None,
    )


def _latent(source: Source, at: str, latent: int, hidden: int) -> tuple[Weight, Weight]:
    into = source.matrix([Part(f"{at}fc1_latent_proj.weight", latent)], hidden)
    return into, source.matrix([Part(f"{at}fc2_latent_proj.weight", hidden)], latent)
