"""Reading a checkpoint's files, offline: its tokenizer, end-of-sequence ids, sampling defaults and weights.

Weights are loaded as transformers' own module (`load_model`), or into our decoder's matrices (`read_weights`): shard by
shard, each tensor copied once, from the mapped file to its place. There an unexpected tensor is an error and never
ignored: it would change the output.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError, TemplateSyntaxError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from holdfast.replicas.config import DType
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model.description import LOADING_ERRORS, Description, LayerDescription, ModelInfo, first_lines
from holdfast.replicas.model.folder import cannot_serve, read_chat_template

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
    for source in (settings, info.config):
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


def has_safetensors(path: str) -> bool:
    """Whether a folder has weights that `read_weights` can read."""
    return any((Path(path) / name).is_file() for name in (_ONE_FILE, _INDEX))


def read_weights(path: str, description: Description, dtype: torch.dtype, device: str) -> DecoderWeights:
    """Read a checkpoint folder.

    Raises ConfigError for a tensor that is missing, unknown or of another size, and for a head that differs from the
    embedding where the two are tied: transformers would take both.
    """
    weights = allocate(description, dtype, device)
    try:
        _fill(weights, path, description)
    except (OSError, ValueError, SafetensorError) as error:
        raise cannot_serve(path, str(error)) from error
    return weights


def allocate(description: Description, dtype: torch.dtype, device: str) -> DecoderWeights:
    """Weights with undefined values."""
    hidden, vocabulary = description.hidden, description.vocabulary

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def layer(each: LayerDescription) -> LayerWeights:
        mixer, inner = each.mixer, each.feed_forward.inner
        qkv_width = mixer.q_width + 2 * mixer.kv_width
        return LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(qkv_width, hidden),
            qkv_bias=empty(qkv_width) if mixer.bias else None,
            q_norm=empty(mixer.head_dim) if mixer.qk_norm else None,
            k_norm=empty(mixer.head_dim) if mixer.qk_norm else None,
            out=empty(hidden, mixer.q_width),
            post_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
        )

    embedding = empty(vocabulary, hidden)
    head = embedding if description.tied else empty(vocabulary, hidden)
    return DecoderWeights(embedding, [layer(each) for each in description.layers], empty(hidden), head)


def _fill(weights: DecoderWeights, path: str, description: Description) -> None:
    slots = _slots(weights, description)
    missing = set(slots)
    with torch.no_grad():
        for name, tensor in _tensors(Path(path)):
            if name.endswith("rotary_emb.inv_freq"):
                continue
            slot = _EMBEDDING if name == _HEAD and description.tied else name  # of tied ones a file has either or both
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
                why = f"two different weights for {slot} (tie_word_embeddings is {str(description.tied).lower()})"
                raise cannot_serve(path, f"its files have {why}")
    if missing:
        raise cannot_serve(path, f"its files lack {len(missing)} weights, {min(missing)} among them")


def _slots(weights: DecoderWeights, description: Description) -> dict[str, Tensor]:
    """Where each tensor of the checkpoint goes, by its name: our tensors, and views into our fused matrices."""
    slots = {_EMBEDDING: weights.embedding, "model.norm.weight": weights.norm}
    if not description.tied:
        slots[_HEAD] = weights.head
    for i, (layer, described) in enumerate(zip(weights.layers, description.layers, strict=True)):
        at, mixer = f"model.layers.{i}.", described.mixer
        gate, up = layer.gate_up.chunk(2)
        named = {
            "input_layernorm.weight": layer.input_norm,
            "post_attention_layernorm.weight": layer.post_norm,
            "self_attn.o_proj.weight": layer.out,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down,
        }
        for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if fused is not None:
                parts = torch.split(fused, [mixer.q_width, mixer.kv_width, mixer.kv_width])
                named |= {f"self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
        slots |= {at + name: tensor for name, tensor in named.items() if tensor is not None}
    return slots


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in _files(folder):
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  # a shard is no mapping
                yield name, shard.get_tensor(name)


def _files(folder: Path) -> list[str]:
    """The files of a checkpoint. Where one file and an index are both there, the one file, as with transformers."""
    if (folder / _ONE_FILE).is_file():
        return [_ONE_FILE]
    index = json.loads((folder / _INDEX).read_text())
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ValueError(f"{_INDEX} has no weight_map")
    return sorted({str(file) for file in places.values()})
