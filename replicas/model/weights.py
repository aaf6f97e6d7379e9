"""Finding, checking and loading a checkpoint, offline: a folder as transformers saves it, a cached hub name, "pocket".

Nothing is downloaded. What a model computes with is `any_model`'s matter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from holdfast.replicas.config import BYTES, POCKET, DType, ModelShape
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.tensors import CellShape

_POCKET_FOLDER = Path(__file__).parent.parent / "pocket" / "weights"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, AttributeError, ImportError, SafetensorError)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a checkpoint's configuration says. `path` is what transformers' loaders take, the tokenizer's too."""

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


def model_path(name: str) -> str:
    """The folder or hub name behind a configured model name. Raises ConfigError for a folder that is not there."""
    path = str(_POCKET_FOLDER) if name == POCKET else name
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise _error(name, "the folder has no config.json")
        return str(folder)
    if name == POCKET or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise _error(name, f"there is no folder {folder}")
    return name


def inspect_model(name: str) -> ModelInfo:
    """Read a checkpoint's configuration.

    Raises ConfigError when it is missing, unreadable or not of a causal LM that can be served.
    """
    path = model_path(name)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except _LOADING_ERRORS as error:
        raise _error(name, _first_line(error)) from error
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
        context, vocabulary = int(text.max_position_embeddings), int(text.vocab_size)
    except (AttributeError, TypeError) as error:
        raise _error(name, f"its configuration lacks a number of a transformer's shape ({error})") from error
    return ModelInfo(path, config, cell, ModelShape(context, _dtype_name(config), cell.values), vocabulary)


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
        raise _error(info.path, _first_line(error)) from error
    if missing := sorted(report["missing_keys"]):
        raise _error(info.path, f"its files lack {len(missing)} weights, {missing[0]} among them")
    module.eval().requires_grad_(False).to(device)
    return LoadedModel(info, module, eos_ids(info))


def load_tokenizer(info: ModelInfo) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the weights. Raises ConfigError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(info.path, local_files_only=True)
    except _LOADING_ERRORS as error:
        raise _error(info.path, f"its tokenizer does not load ({_first_line(error)})") from error


def eos_ids(info: ModelInfo) -> frozenset[int]:
    """End-of-sequence ids of the generation settings and of the configuration, each a number, a list or nothing."""
    try:
        settings = GenerationConfig.from_pretrained(info.path, local_files_only=True)
    except OSError:  # a checkpoint need not have any
        settings = None
    found: set[int] = set()
    for source in (settings, info.config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
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


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _error(name: str, why: str) -> ConfigError:
    return ConfigError(f"cannot serve model {name!r}: {why}", "model")
