"""Checking and loading a checkpoint, offline. Where one lies is said by `folder`, what it computes by `any_model`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from holdfast.replicas.config import BYTES, DType, ModelShape
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.tensors import CellShape
from holdfast.replicas.model.folder import model_folder

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
    """A model in evaluation mode on its device. `eos` are the token ids that end its turn."""

    info: ModelInfo
    module: nn.Module
    eos: frozenset[int]


def inspect_model(name: str) -> ModelInfo:
    """Read a checkpoint's configuration.

    Raises ConfigError when it is missing, unreadable or not of a causal LM that can be served.
    """
    path = str(model_folder(name))
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except _LOADING_ERRORS as error:
        raise _error(name, _said(error)) from error
    if getattr(config, "is_encoder_decoder", False):
        raise _error(name, "it is an encoder-decoder, and only causal language models are served")
    text = config.get_text_config(decoder=True)
    other = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        raise _error(name, f"it has layers without a plain KV cache: {', '.join(sorted(other))}")
    try:
        heads = text.num_attention_heads
        cell = CellShape(
            layers=text.num_hidden_layers,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        )
        context, vocabulary = _context(text), int(text.vocab_size)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _error(name, f"its configuration lacks a number of a transformer's shape ({error})") from error
    shape = ModelShape(context, _dtype_name(config), cell.values, _steady_context(text, context))
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
            attn_implementation="eager",
            output_loading_info=True,
        )
    except _LOADING_ERRORS as error:
        raise _error(info.path, _said(error)) from error
    if missing := sorted(report["missing_keys"]):
        raise _error(info.path, f"its files lack {len(missing)} weights, {missing[0]} among them")
    module.eval().requires_grad_(False).to(device)
    return LoadedModel(info, module, eos_ids(info))


def load_tokenizer(info: ModelInfo) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the weights. Raises ConfigError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(info.path, local_files_only=True)
    except _LOADING_ERRORS as error:
        raise _error(info.path, f"its tokenizer does not load ({_said(error)})") from error


def eos_ids(info: ModelInfo) -> frozenset[int]:
    """End-of-sequence ids of the generation settings and of the configuration, each a number, a list or nothing.

    Raises ConfigError for settings that cannot be read, because a model that is not stopped goes on for ever.
    """
    settings = None
    if (Path(info.path) / "generation_config.json").is_file():  # a checkpoint need not have any
        try:
            settings = GenerationConfig.from_pretrained(info.path, local_files_only=True)
        except _LOADING_ERRORS as error:
            raise _error(info.path, f"its generation_config.json does not load ({_said(error)})") from error
    found: set[int] = set()
    for source in (settings, info.config):
        ids = getattr(source, "eos_token_id", None)
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(type(each) is int for each in listed):
            raise _error(info.path, f"its eos_token_id is {ids!r}, not a number or a list of numbers")
        found.update(listed)
    return frozenset(found)


def served_name(name: str) -> str:
    """What the API calls a model that was given no name: the folder's name, or the hub name."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


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


def _error(name: str, why: str) -> ConfigError:
    return ConfigError(f"cannot serve model {name!r}: {why}", "model")
