"""Reading a checkpoint, offline: its configuration, tokenizer and end-of-sequence ids, and its weights.

Weights are loaded either as transformers' own module (`load_model`), or into the fused matrices of a Llama-like decoder
(`read_weights`): shard by shard, every tensor copied once, from the mapped file to where it stays. There, what does not
belong to a plain decoder (a bias where none is expected, a tensor of another family) is an error, never ignored: it
would change the output. Where a checkpoint lies is said by `folder`; what is computed with it, by `any_model` and
`decoder`.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError, TemplateSyntaxError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from holdfast.replicas.config import BYTES, DType, ModelShape
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.tensors import CellShape
from holdfast.replicas.model.folder import cannot_serve, model_folder, read_chat_template

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # of a checkpoint in several files
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DEFAULTS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**20),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}
"""Settings of sampling that a checkpoint may have defaults for, with the least and the largest value."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LOADING_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    AttributeError,
    TypeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a checkpoint's configuration says. `path` is its folder, the tokenizer's too."""

    path: str
    config: Any
    cell: CellShape
    shape: ModelShape
    vocabulary: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """transformers' model in evaluation mode on its device."""

    info: ModelInfo
    module: nn.Module


def sampling_defaults(path: str) -> dict[str, float]:
    """What a checkpoint's generation_config.json says of sampling, by the names that the API has for it.

    A value that the API would refuse is left out.
    """
    try:
        told = json.loads((Path(path) / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    found: dict[str, float] = {}
    for name, (least, most) in _DEFAULTS.items():
        value = told.get(name) if isinstance(told, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            found[name] = int(value) if name == "top_k" else float(value)
    return found


def inspect_model(name: str) -> ModelInfo:
    """Read a checkpoint's configuration.

    Raises ConfigError when it is missing, unreadable or not of a causal LM that can be served.
    """
    path = str(model_folder(name))
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except _LOADING_ERRORS as error:
        raise cannot_serve(name, _said(error)) from error
    if getattr(config, "is_encoder_decoder", False):
        raise cannot_serve(name, "it is an encoder-decoder, and only causal language models are served")
    text = config.get_text_config(decoder=True)
    other = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        raise cannot_serve(name, f"it has layers without a plain KV cache: {', '.join(sorted(other))}")
    try:
        heads = text.num_attention_heads
        cell = CellShape(
            layers=text.num_hidden_layers,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        )
        context, vocabulary = _context(text), int(text.vocab_size)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise cannot_serve(name, f"its configuration lacks a number of a transformer's shape ({error})") from error
    shape = ModelShape(context, _dtype_name(config), cell.values, _steady_context(text, context), cell.head_dim)
    return ModelInfo(path, config, cell, shape, vocabulary)


def load_model(info: ModelInfo, dtype: DType, device: str) -> LoadedModel:
    """Load the weights in `dtype` ("auto" excluded) onto `device`, with transformers' own plain attention.

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
    except _LOADING_ERRORS as error:
        raise cannot_serve(info.path, _said(error)) from error
    if missing := sorted(report["missing_keys"]):
        raise cannot_serve(info.path, f"its files lack {len(missing)} weights, {missing[0]} among them")
    module.eval().requires_grad_(False).to(device)
    return LoadedModel(info, module)


def load_tokenizer(info: ModelInfo, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the weights, with the chat template in the file `chat_template`, if that is given.

    Raises ConfigError where there is no tokenizer, and for a file that is no template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(info.path, local_files_only=True, trust_remote_code=False)
    except _LOADING_ERRORS as error:
        raise cannot_serve(info.path, f"its tokenizer does not load ({_said(error)})") from error
    if chat_template:
        tokenizer.chat_template = read_chat_template(chat_template)
        # A template may refuse this conversation: what it takes is seen later.
        with suppress(TemplateError, TypeError, ValueError, LookupError, AttributeError):
            try:
                tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
            except TemplateSyntaxError as error:
                raise ConfigError(f"{chat_template} is no chat template: {error}", "chat_template") from error
    return tokenizer


def eos_ids(info: ModelInfo) -> frozenset[int]:
    """End-of-sequence ids of the generation settings and of the configuration, each a number, a list or nothing.

    Raises ConfigError for settings that cannot be read, because a model that is not stopped goes on for ever.
    """
    settings = None
    if (Path(info.path) / "generation_config.json").is_file():  # a checkpoint need not have any
        try:
            settings = GenerationConfig.from_pretrained(info.path, local_files_only=True)
        except _LOADING_ERRORS as error:
            raise cannot_serve(info.path, f"its generation_config.json does not load ({_said(error)})") from error
    found: set[int] = set()
    for source in (settings, info.config):
        ids = getattr(source, "eos_token_id", None)
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(type(each) is int for each in listed):
            raise cannot_serve(info.path, f"its eos_token_id is {ids!r}, not a number or a list of numbers")
        found.update(listed)
    return frozenset(found)


def _dtype_name(config: Any) -> DType:
    name = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
    for known in BYTES:
        if name == known:
            return known  # type: ignore[return-value]
    return "bfloat16"


def _context(text: Any) -> int:
    """The longest context: what YaRN stretches the original one to, where max_position_embeddings still has that."""
    stretched = (
        int(_number(rope, "factor", 1) * _number(rope, "original_max_position_embeddings"))
        for rope in _rotaries(text)
        if rope.get("rope_type") == "yarn"
    )
    return max((int(text.max_position_embeddings), *stretched))


def _steady_context(text: Any, context: int) -> int:
    """The longest context in which no sequence of a step changes how the others' positions are turned.

    With longrope the longest sequence decides for all of them: one beyond the original context has long factors.
    (`dynamic` does so beyond max_position_embeddings, which no sequence gets to.)
    """
    original = (
        int(rope["original_max_position_embeddings"]) for rope in _rotaries(text) if rope.get("rope_type") == "longrope"
    )
    return min((context, *original))


def _number(rope: dict[str, Any], name: str, default: float | None = None) -> float:
    """A parameter, or `default` where it is left open. Raises ValueError naming one that is no number: Python would
    multiply a text as well, into a longer one.
    """
    value = default if rope.get(name) is None else rope[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"rope_parameters.{name} is {value!r}")
    return value


def _rotaries(text: Any) -> list[dict[str, Any]]:
    """Parameters of rotary embeddings, one for all layers or one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [parameters, *(each for each in parameters.values() if isinstance(each, dict))]


def _said(error: BaseException) -> str:
    """The first two lines of an error, in one: the second often says what is wrong with what the first names."""
    return " ".join(line.strip() for line in str(error).splitlines()[:2]) or type(error).__name__


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers of a Llama-like decoder. `window[i]`: sliding window of layer i, None for full attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    window: tuple[int | None, ...]

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(slots=True)
class LayerWeights:
    """One layer. qkv [(heads + 2 kv_heads) head_dim, hidden], gate_up [2 inner, hidden]; norms are vectors."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class DecoderWeights:
    """Everything. embedding and head [vocabulary, hidden]; one tensor where they are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


def read_weights(path: str, shape: DecoderShape, dtype: torch.dtype, device: str) -> DecoderWeights:
    """Read a checkpoint folder.

    Raises ConfigError for a tensor that is missing, unknown or of another size, and for a head that differs from the
    embedding where the two are tied: transformers would take both.
    """
    weights = allocate(shape, dtype, device)
    try:
        _fill(weights, path, shape)
    except (OSError, ValueError, SafetensorError) as error:
        raise cannot_serve(path, str(error)) from error
    return weights


def has_safetensors(path: str) -> bool:
    """Whether a folder has weights that `read_weights` can read."""
    return any((Path(path) / name).is_file() for name in (_ONE_FILE, _INDEX))


def _fill(weights: DecoderWeights, path: str, shape: DecoderShape) -> None:
    slots = _slots(weights, shape)
    missing = set(slots)
    with torch.no_grad():
        for name, tensor in _tensors(Path(path)):
            if name.endswith("rotary_emb.inv_freq"):
                continue
            slot = _EMBEDDING if name == _HEAD and shape.tied else name  # of tied ones a file has either, or both
            target = slots.get(slot)
            if target is None:
                raise cannot_serve(path, f"unknown weight {name}")
            if target.shape != tensor.shape:
                sizes = f"{tuple(tensor.shape)}, not {tuple(target.shape)}"
                raise cannot_serve(path, f"weight {name} is {sizes}")
            if slot in missing:
                target.copy_(tensor)
                missing.discard(slot)
            elif not torch.equal(target, tensor.to(target)):
                why = f"two different weights for {slot} (tie_word_embeddings is {str(shape.tied).lower()})"
                raise cannot_serve(path, f"its files have {why}")
    if missing:
        raise cannot_serve(path, f"its files lack {len(missing)} weights, {min(missing)} among them")


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in _files(folder):
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  # a shard is no mapping
                yield name, shard.get_tensor(name)


def _files(folder: Path) -> list[str]:
    """The files of a checkpoint: where one file and an index are both there, the one file, as with transformers."""
    if (folder / _ONE_FILE).is_file():
        return [_ONE_FILE]
    index = json.loads((folder / _INDEX).read_text())
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ValueError(f"{_INDEX} has no weight_map")
    return sorted({str(file) for file in places.values()})


def allocate(shape: DecoderShape, dtype: torch.dtype, device: str) -> DecoderWeights:
    """Weights whose numbers are whatever the memory holds."""

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    qkv_width = shape.q_width + 2 * shape.kv_width
    layers = [
        LayerWeights(
            input_norm=empty(shape.hidden),
            qkv=empty(qkv_width, shape.hidden),
            qkv_bias=empty(qkv_width) if shape.qkv_bias else None,
            q_norm=empty(shape.head_dim) if shape.qk_norm else None,
            k_norm=empty(shape.head_dim) if shape.qk_norm else None,
            out=empty(shape.hidden, shape.q_width),
            post_norm=empty(shape.hidden),
            gate_up=empty(2 * shape.inner, shape.hidden),
            down=empty(shape.hidden, shape.inner),
        )
        for _ in range(shape.layers)
    ]
    embedding = empty(shape.vocabulary, shape.hidden)
    head = embedding if shape.tied else empty(shape.vocabulary, shape.hidden)
    return DecoderWeights(embedding, layers, empty(shape.hidden), head)


def _slots(weights: DecoderWeights, shape: DecoderShape) -> dict[str, Tensor]:
    """Where each tensor of the checkpoint goes: views into the fused matrices, by the checkpoint's names."""
    slots = {_EMBEDDING: weights.embedding, "model.norm.weight": weights.norm}
    if not shape.tied:
        slots[_HEAD] = weights.head
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        slots[at + "input_layernorm.weight"] = layer.input_norm
        slots[at + "post_attention_layernorm.weight"] = layer.post_norm
        slots[at + "self_attn.o_proj.weight"] = layer.out
        slots[at + "mlp.down_proj.weight"] = layer.down
        gate, up = torch.split(layer.gate_up, shape.inner)
        slots[at + "mlp.gate_proj.weight"], slots[at + "mlp.up_proj.weight"] = gate, up
        widths = [shape.q_width, shape.kv_width, shape.kv_width]
        for letter, part in zip("qkv", torch.split(layer.qkv, widths), strict=True):
            slots[at + f"self_attn.{letter}_proj.weight"] = part
        if layer.qkv_bias is not None:
            for letter, part in zip("qkv", torch.split(layer.qkv_bias, widths), strict=True):
                slots[at + f"self_attn.{letter}_proj.bias"] = part
        if layer.q_norm is not None and layer.k_norm is not None:
            slots[at + "self_attn.q_norm.weight"] = layer.q_norm
            slots[at + "self_attn.k_norm.weight"] = layer.k_norm
    return slots
