"""Reading a checkpoint's files, offline: its tokenizer, end-of-sequence ids, sampling defaults and weights.

Weights are loaded as transformers' own module (`load_model`), or into our decoder's matrices (`read_weights`): shard by
shard, each tensor copied once, from the mapped file to its place. There an unexpected tensor is an error and never
ignored: it would change the output.
"""

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError, TemplateSyntaxError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from holdfast.kernels.fp8 import BLOCK, FP8, Fp8Blocks
from holdfast.kernels.linear_state import LinearWeights
from holdfast.replicas.config import DType
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model.description import (
    LOADING_ERRORS,
    Attention,
    Description,
    GatedDeltaNet,
    LayerDescription,
    ModelInfo,
    first_lines,
)
from holdfast.replicas.model.folder import cannot_serve, read_chat_template

log = logging.getLogger(__name__)

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # of a checkpoint in several files
_SCALES = "_scale_inv"  # behind the name of a weight in FP8
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
        given = json.loads((Path(path) / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    found: dict[str, float] = {}
    for name, (least, most) in _DEFAULTS.items():
        value = given.get(name) if isinstance(given, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            found[name] = int(value) if name == "top_k" else float(value)
    return found


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
    found: set[int] = set()
    for source in (settings, info.config, info.config.get_text_config(decoder=True)):
        ids = getattr(source, "eos_token_id", None)
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(type(each) is int for each in listed):
            raise cannot_serve(info.path, f"its eos_token_id is {ids!r}, not a number or a list of numbers")
        found.update(listed)
    return frozenset(found)


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


@dataclass(slots=True)
class AttentionWeights:
    """qkv [gates, if there are any, queries, keys, values; hidden], out [hidden, heads head_dim]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor


@dataclass(slots=True)
class DeltaWeights:
    """qkvz [queries, keys, values, gates; hidden], ab [2 value heads, hidden], out [hidden, value_heads value_dim].

    `ab` is apart, because it stays as it is where products are in int8 or FP8. `kernel`: of the convolution and decay.
    """

    qkvz: Tensor
    ab: Tensor
    kernel: LinearWeights
    norm: Tensor  # [value_dim]
    out: Tensor


@dataclass(slots=True)
class LayerWeights:
    """One layer. gate_up [2 inner, hidden]. All norms are vectors in float32, by which the normed row is multiplied.

    `scales`: of the matrices that stay in FP8 (`kernels.fp8`), by their names here.
    """

    input_norm: Tensor
    mixer: AttentionWeights | DeltaWeights
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    scales: dict[str, Tensor] = field(default_factory=dict)

    def owner(self, matrix: str) -> "LayerWeights | AttentionWeights | DeltaWeights":
        return self if matrix in ("gate_up", "down") else self.mixer


@dataclass(slots=True)
class DecoderWeights:
    """Everything. embedding and head [vocabulary, hidden]; one tensor where they are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


def has_safetensors(path: str) -> bool:
    """Whether a folder has weights that `read_weights` can read."""
    return any((Path(path) / name).is_file() for name in (_ONE_FILE, _INDEX))


def read_weights(
    path: str, description: Description, dtype: torch.dtype, device: str, fp8: bool = False
) -> DecoderWeights:
    """Read a checkpoint folder. Weights in FP8 become `dtype`, or with `fp8` stay as they are.

    Raises ConfigError for a tensor that is missing, unknown or of another size, and for a head that differs from the
    embedding where the two are tied: transformers would take both.
    """
    try:
        weights = allocate(description, dtype, device, _in_fp8(Path(path)) if fp8 else ())
        _fill(weights, path, description)
    except (OSError, ValueError, SafetensorError) as error:
        raise cannot_serve(path, str(error)) from error
    return weights


def allocate(description: Description, dtype: torch.dtype, device: str, in_fp8: Collection[str] = ()) -> DecoderWeights:
    """Weights with undefined values. `in_fp8`: names in the checkpoint. A matrix whose parts all are stays in FP8."""
    hidden, vocabulary = description.hidden, description.vocabulary

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def floats(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    def attention(mixer: Attention) -> AttentionWeights:
        return AttentionWeights(
            qkv=empty(mixer.qkv_width, hidden),
            qkv_bias=empty(mixer.qkv_width) if mixer.bias else None,
            q_norm=floats(mixer.head_dim) if mixer.qk_norm else None,
            k_norm=floats(mixer.head_dim) if mixer.qk_norm else None,
            out=empty(hidden, mixer.q_width),
        )

    def delta(mixer: GatedDeltaNet) -> DeltaWeights:
        shape, heads = mixer.shape, mixer.shape.value_heads
        return DeltaWeights(
            qkvz=empty(mixer.qkvz_width, hidden),
            ab=empty(2 * heads, hidden),
            kernel=LinearWeights(floats(shape.channels, shape.kernel), floats(heads), floats(heads)),
            norm=floats(shape.value_dim),
            out=empty(hidden, mixer.v_width),
        )

    def layer(number: int, each: LayerDescription) -> LayerWeights:
        made = LayerWeights(
            input_norm=floats(hidden),
            mixer=attention(each.mixer) if isinstance(each.mixer, Attention) else delta(each.mixer),
            post_norm=floats(hidden),
            gate_up=empty(2 * each.feed_forward.inner, hidden),
            down=empty(hidden, each.feed_forward.inner),
        )
        if in_fp8:
            _keep_fp8(made, _layer_places(made, each, f"model.layers.{number}.", 0.0), in_fp8)
        return made

    embedding = empty(vocabulary, hidden)
    head = embedding if description.tied else empty(vocabulary, hidden)
    return DecoderWeights(embedding, [layer(*each) for each in enumerate(description.layers)], floats(hidden), head)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of a checkpoint goes: into `target`, its rows in the order `rows`, and `plus` added to it."""

    target: Tensor
    rows: Tensor | None = None
    plus: float = 0.0

    @property
    def first(self) -> int:
        """The target's first row in its matrix."""
        return self.target.storage_offset() // self.target.shape[1]

    @property
    def in_blocks(self) -> bool:
        """Whether it begins with a block of 128 rows, and its order moves whole blocks."""
        rows = torch.arange(0) if self.rows is None else self.rows
        blocks = rows[::BLOCK]
        moved = (blocks[:, None] + torch.arange(BLOCK)).flatten()
        return self.first % BLOCK == 0 and torch.equal(moved, rows) and not (blocks % BLOCK).any()

    def of_scales(self, scale: Tensor) -> "_Place":
        """Where its scales go, in those of its matrix."""
        begin, blocks = self.first // BLOCK, -(-len(self.target) // BLOCK)
        return _Place(scale[begin : begin + blocks], None if self.rows is None else self.rows[::BLOCK] // BLOCK)

    def fitted(self, tensor: Tensor) -> Tensor:
        """The tensor in the order, dtype and device of its target."""
        if self.target.dtype == FP8 and self.rows is not None:  # torch has no order of these, but one of bytes
            return tensor.view(torch.uint8)[self.rows].view(FP8).to(self.target)
        ordered = tensor if self.rows is None else tensor[self.rows]
        return ordered.to(self.target) + self.plus if self.plus else ordered.to(self.target)


def _keep_fp8(layer: LayerWeights, places: dict[str, _Place], in_fp8: Collection[str]) -> None:
    """Make those matrices of a layer FP8 that are in the checkpoint, as far as their parts begin with blocks."""
    for name in ("qkv", "qkvz", "out", "gate_up", "down"):
        owner = layer.owner(name)
        matrix: Tensor | None = getattr(owner, name, None)
        if matrix is None:
            continue
        parts = _parts_of(matrix, places)
        if all(each in in_fp8 and place.in_blocks for each, place in parts.items()):
            outputs, inputs = matrix.shape
            blocks = Fp8Blocks.empty(outputs, inputs, matrix.device)
            setattr(owner, name, blocks.weight)
            layer.scales[name] = blocks.scale


def _parts_of(matrix: Tensor, places: dict[str, _Place]) -> dict[str, _Place]:
    """The tensors of a checkpoint that go into a matrix."""
    storage = matrix.untyped_storage().data_ptr()
    return {name: each for name, each in places.items() if each.target.untyped_storage().data_ptr() == storage}


def _fill(weights: DecoderWeights, path: str, description: Description) -> None:
    places = _places(weights, description)
    missing, skipped = set(places), 0
    with torch.no_grad():
        for name, tensor in _dequantized(_tensors(Path(path)), weights.embedding.dtype, places):
            if name.endswith("rotary_emb.inv_freq"):
                continue
            if name.startswith(description.skipped):
                skipped += 1
                continue
            slot = _EMBEDDING if name == _HEAD and description.tied else name  # of tied ones a file has either or both
            place = places.get(slot)
            if place is None:
                raise cannot_serve(path, f"unknown weight {name}")
            if place.target.shape != tensor.shape:
                sizes = f"{tuple(tensor.shape)}, not {tuple(place.target.shape)}"
                raise cannot_serve(path, f"weight {name} is {sizes}")
            if slot in missing:
                place.target.copy_(place.fitted(tensor) if place.plus or place.rows is not None else tensor)
                missing.discard(slot)
            elif not torch.equal(place.target, place.fitted(tensor)):
                why = f"two different weights for {slot} (tie_word_embeddings is {str(description.tied).lower()})"
                raise cannot_serve(path, f"its files have {why}")
    if missing:
        raise cannot_serve(path, f"its files lack {len(missing)} weights, {min(missing)} among them")
    if skipped:
        log.info("%d weights are not used: %s", skipped, " and ".join(f"{each}*" for each in description.skipped))


def _places(weights: DecoderWeights, description: Description) -> dict[str, _Place]:
    """Where each tensor of the checkpoint goes, by its name: our tensors, and views into our fused matrices."""
    centred = 1.0 if description.centred else 0.0
    places = {_EMBEDDING: _Place(weights.embedding), "model.norm.weight": _Place(weights.norm, plus=centred)}
    if not description.tied:
        places[_HEAD] = _Place(weights.head)
    for i, (layer, described) in enumerate(zip(weights.layers, description.layers, strict=True)):
        of_layer = _layer_places(layer, described, f"model.layers.{i}.", centred)
        for matrix, scale in layer.scales.items():
            parts = _parts_of(getattr(layer.owner(matrix), matrix), of_layer)
            places |= {name + _SCALES: place.of_scales(scale) for name, place in parts.items()}
        places |= of_layer
    return places


def _layer_places(layer: LayerWeights, described: LayerDescription, at: str, centred: float) -> dict[str, _Place]:
    gate, up = layer.gate_up.chunk(2)
    named = {
        "input_layernorm.weight": _Place(layer.input_norm, plus=centred),
        "post_attention_layernorm.weight": _Place(layer.post_norm, plus=centred),
        "mlp.gate_proj.weight": _Place(gate),
        "mlp.up_proj.weight": _Place(up),
        "mlp.down_proj.weight": _Place(layer.down),
    }
    if isinstance(layer.mixer, AttentionWeights):
        assert isinstance(described.mixer, Attention)
        named |= _attention_places(layer.mixer, described.mixer, centred)
    else:
        assert isinstance(described.mixer, GatedDeltaNet)
        named |= _delta_places(layer.mixer, described.mixer)
    return {at + name: place for name, place in named.items()}


def _attention_places(weights: AttentionWeights, mixer: Attention, centred: float) -> dict[str, _Place]:
    named = {"self_attn.o_proj.weight": _Place(weights.out)}
    for name, norm in (("q_norm", weights.q_norm), ("k_norm", weights.k_norm)):
        if norm is not None:
            named[f"self_attn.{name}.weight"] = _Place(norm, plus=centred)
    widths = [(1 + mixer.gate) * mixer.q_width, mixer.kv_width, mixer.kv_width]
    order = None
    if mixer.gate:  # the checkpoint has each head's query and gate together, we have all gates before all queries
        order = torch.arange(widths[0]).view(mixer.heads, 2, mixer.head_dim).transpose(0, 1).flip(0).flatten()
    for kind, fused in (("weight", weights.qkv), ("bias", weights.qkv_bias)):
        if fused is not None:
            for name, part in zip("qkv", torch.split(fused, widths), strict=True):
                named[f"self_attn.{name}_proj.{kind}"] = _Place(part, order if name == "q" else None)
    return named


def _delta_places(weights: DeltaWeights, mixer: GatedDeltaNet) -> dict[str, _Place]:
    shape, kernel = mixer.shape, weights.kernel
    named = {
        "conv1d.weight": _Place(kernel.conv[:, None]),
        "A_log": _Place(kernel.a_log),
        "dt_bias": _Place(kernel.dt_bias),
        "norm.weight": _Place(weights.norm),
        "out_proj.weight": _Place(weights.out),
    }
    if mixer.by_key_head:
        group = shape.value_heads // shape.key_heads
        values = group * shape.value_dim
        named["in_proj_qkvz.weight"] = _Place(
            weights.qkvz, _joined(shape.key_heads, [shape.key_dim, shape.key_dim, values, values])
        )
        b_then_a = _joined(shape.key_heads, [group, group])
        named["in_proj_ba.weight"] = _Place(weights.ab, b_then_a.roll(shape.value_heads))
    else:
        qkv, z = torch.split(weights.qkvz, [shape.channels, mixer.v_width])
        a, b = weights.ab.chunk(2)
        parts = {"qkv": qkv, "z": z, "a": a, "b": b}
        named |= {f"in_proj_{name}.weight": _Place(part) for name, part in parts.items()}
    return {f"linear_attn.{name}": place for name, place in named.items()}


def _joined(heads: int, widths: list[int]) -> Tensor:
    """The order that puts the parts of all heads together, where the checkpoint has all parts of a head together."""
    rows = torch.arange(heads * sum(widths)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, widths, dim=1)])


def _dequantized(
    tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, places: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The same, each weight in FP8 together with its scales in `dtype`, unless there is a place for the scales.

    Raises ValueError for a weight without scales, or scales without a weight.
    """
    halves: dict[str, Tensor] = {}
    found = 0
    for name, tensor in tensors:
        of = name.removesuffix(_SCALES)
        if (tensor.dtype != FP8 and of == name) or of + _SCALES in places:
            yield name, tensor
        elif of not in halves:
            halves[of] = tensor
        else:
            scale, weight = (tensor, halves.pop(of)) if of != name else (halves.pop(of), tensor)
            yield of, Fp8Blocks(weight, scale.float()).dequantized(dtype)
            found += 1
    if halves:
        raise ValueError(f"weight {min(halves)} is in FP8 without scales, or there are scales without it")
    if found:
        log.info("%d weights in FP8 are turned into %s", found, str(dtype).removeprefix("torch."))


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in _files(folder):
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  # a shard is no mapping
                yield _text_name(name), shard.get_tensor(name)


def _in_fp8(folder: Path) -> set[str]:
    """The names of the weights that have scales."""
    names: set[str] = set()
    for file in _files(folder):
        with safe_open(folder / file, framework="pt") as shard:
            names.update(_text_name(name) for name in shard.keys())  # noqa: SIM118
    return {name.removesuffix(_SCALES) for name in names if name.endswith(_SCALES)}


def _text_name(name: str) -> str:
    """A weight's name as in the checkpoint of a text model."""
    return name.replace("model.language_model.", "model.", 1)


def _files(folder: Path) -> list[str]:
    """The files of a checkpoint. Where one file and an index are both there, the one file, as with transformers."""
    if (folder / _ONE_FILE).is_file():
        return [_ONE_FILE]
    index = json.loads((folder / _INDEX).read_text())
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ValueError(f"{_INDEX} has no weight_map")
    return sorted({str(file) for file in places.values()})
