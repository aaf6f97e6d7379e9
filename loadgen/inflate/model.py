"""Inflate Pocket: write a checkpoint of a large model's shape that says exactly what Pocket says.

``python -m holdfast.loadgen.inflate.model pocket --shape llama-3.1-8b --out DIR``. The mathematics is in
``padding``; here are the checks that come before anything is written, the config and the safetensors files. Memory
holds one of these files, of 512 MiB unless one tensor is larger.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from holdfast.loadgen.inflate import WEIGHTS
from holdfast.loadgen.inflate.padding import LIMIT, Inflation
from holdfast.loadgen.inflate.shapes import (
    EXPERTS,
    SHAPES,
    Family,
    IncompatibleShapeError,
    InflateError,
    NoRoomError,
    Shape,
    TensorSpec,
    UnknownShapeError,
    check_embeds,
    full_config,
    read_object,
    resolve_shape,
    shape_of,
    tensors_of,
)

log = logging.getLogger(__name__)

_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SPARE_BYTES = 64 << 20
SHARD_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to inflate: its folder, transformers configuration, shape and float32 weights."""

    folder: Path
    config: LlamaConfig
    shape: Shape
    weights: dict[str, Tensor]

    @property
    def theta(self) -> float:
        """Rotary base."""
        return float(self.config.rope_parameters["rope_theta"])


def read_source(name: str) -> Source:
    """``pocket``, or the folder of another Llama without biases and rotary scaling. Raises an InflateError."""
    folder = WEIGHTS if name == "pocket" else Path(name)
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise UnknownShapeError(f"{folder} holds no config.json with a model.safetensors")
    config = read_object(folder / "config.json", UnknownShapeError)
    shape = shape_of(config, context=0)
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = rotary.get("rope_type", rotary.get("type", "default")) == "default"
    if shape.family is not Family.LLAMA or shape.attention_bias or shape.mlp_bias or not plain:
        raise IncompatibleShapeError("only a Llama without biases and rotary scaling can be inflated")
    try:
        weights = {key: value.float() for key, value in load_file(folder / "model.safetensors").items()}
    except (OSError, SafetensorError) as error:
        raise InflateError(f"{folder / 'model.safetensors'} cannot be read: {error}") from error
    full = full_config(config)
    for spec in tensors_of(full):
        if spec.name not in weights or weights[spec.name].shape != spec.shape:
            raise InflateError(f"{folder} holds no {spec.name} of {' x '.join(str(size) for size in spec.shape)}")
    return Source(folder, full, shape, weights)


def inflate(
    source: str,
    shape: str,
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    pad_vocabulary: bool = False,
    seed: int = 0,
) -> Path:
    """Write ``source`` (``pocket`` or a folder) in ``shape`` (a name or a config.json) to the new folder ``out``.

    With ``layers`` the shape has so many instead of its own. With ``pad_vocabulary`` the shape's vocabulary is kept,
    its added rows never sampled; otherwise the source's is.
    Returns ``out``. Raises an InflateError before anything is written.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise IncompatibleShapeError(
            f"{dtype} is not supported: the scaled residual needs the range of bfloat16 or float32"
        )
    small = read_source(source)
    target = resolve_shape(shape, context=small.config.max_position_embeddings)
    if layers is not None:
        if layers < 1:
            raise IncompatibleShapeError("layers must be at least 1")
        target = replace(target, layers=layers)
    if not pad_vocabulary or target.vocabulary < small.shape.vocabulary:
        target = replace(target, vocabulary=small.shape.vocabulary)
    context = small.config.max_position_embeddings
    check_embeds(small.shape, target, context)
    held = target.layers_for(small.shape, context)
    if target.window is not None and not set(held) <= set(target.attention_layers):
        log.warning("layers with a window hold a part: beyond %d tokens answers differ", target.window.tokens)
    numbers = (small.config.rms_norm_eps, small.theta, held)
    inflation = Inflation(small.shape, target, *numbers, small.weights, dtype, seed)
    config = target_config(small, target, inflation, dtype)
    tensors = tensors_of(config)
    content = config.to_dict() | {"rope_theta": inflation.scales(target).theta}
    content["torch_dtype"] = str(dtype).removeprefix("torch.")
    check_room(out, total_bytes(tensors, dtype))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True, default=str) + "\n")
        for name in _COPIED:
            if (small.folder / name).exists():
                shutil.copy(small.folder / name, folder / name)
        write_shards(folder, tensors, dtype, inflation.tensor)
        if out.exists():
            out.rmdir()
        folder.rename(out)
    return out


def check_room(out: Path, size: int) -> None:
    """Raise NoRoomError unless ``out`` is free and its disk holds ``size`` bytes."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise NoRoomError(f"{out} exists and is not an empty folder")
    standing = next(folder for folder in (out.parent, *out.absolute().parents) if folder.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise NoRoomError(f"{standing} is not a folder that can be written to")
    free = shutil.disk_usage(standing).free
    if free < size + _SPARE_BYTES:
        raise NoRoomError(f"{size / 1e9:.1f} GB are needed, {standing} has {free / 1e9:.1f} GB free")


def target_config(source: Source, target: Shape, inflation: Inflation, dtype: torch.dtype) -> Any:
    """A transformers configuration: the target's sizes with the source's context, rotary base and token ids."""
    scales = inflation.scales(target)
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    options: dict[str, Any] = {name: getattr(source.config, name) for name in names}
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": scales.theta}
    if target.linear is not None:
        rotary["partial_rotary_factor"] = target.rotary
    if target.keys_are_values:
        part = {"rope_type": "proportional", "partial_rotary_factor": target.rotary, "rope_theta": scales.theta}
        windowed = {"rope_type": "default", "rope_theta": inflation.scales(target.at(0)).theta}
        rotary = {"full_attention": part, "sliding_attention": windowed}
    return config_of(target, dtype=dtype, rms_norm_eps=scales.epsilon, rope_parameters=rotary, **options)


def config_of(shape: Shape, **options: Any) -> Any:
    """The transformers configuration of a shape, with these `options`."""
    if shape.family is Family.MISTRAL:
        options["sliding_window"] = None
    if shape.family not in (Family.MISTRAL, Family.QWEN2):
        options["attention_bias"] = shape.attention_bias
    if shape.family is Family.LLAMA:
        options["mlp_bias"] = shape.mlp_bias
    if shape.linear is not None:
        linear = shape.linear
        options |= {
            "full_attention_interval": shape.interval,
            "linear_num_key_heads": linear.key_heads,
            "linear_num_value_heads": linear.value_heads,
            "linear_key_head_dim": linear.key_dim,
            "linear_value_head_dim": linear.value_dim,
            "linear_conv_kernel_dim": linear.kernel,
        }
    if shape.window is not None:
        kinds = {False: "sliding_attention", True: "full_attention"}
        options["sliding_window"] = shape.window.tokens
        options["layer_types"] = [kinds[layer in shape.attention_layers] for layer in range(shape.layers)]
    if shape.keys_are_values:
        options |= {
            "global_head_dim": shape.head_dim,
            "num_global_key_value_heads": shape.kv_heads,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
        }
        shape = replace(shape, head_dim=shape.at(0).head_dim, kv_heads=shape.at(0).kv_heads)
    if shape.experts is not None:
        experts = shape.experts
        options |= dict(zip(EXPERTS[shape.family], (experts.count, experts.chosen, experts.inner), strict=True))
        options |= {"shared_expert_intermediate_size": experts.shared} if experts.shared else {}
        options |= {"norm_topk_prob": True} if shape.family is Family.QWEN3_MOE else {}
        options |= {"swiglu_limit": LIMIT} if shape.family is Family.GPT_OSS else {}
    if shape.family not in (Family.GPT_OSS, Family.QWEN35_MOE):
        options["intermediate_size"] = shape.intermediate
    return AutoConfig.for_model(
        str(shape.family),
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[str(shape.family)]],
        **options,
    )


def total_bytes(tensors: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    """Size of all tensors on disk."""
    return sum(spec.bytes(dtype) for spec in tensors)


def write_shards(
    folder: Path, tensors: Sequence[TensorSpec], dtype: torch.dtype, tensor: Callable[[TensorSpec], Tensor]
) -> None:
    """Write ``tensor(spec)`` for every spec into shards of about ``SHARD_BYTES``, and their index."""
    shards: list[list[TensorSpec]] = [[]]
    for spec in tensors:
        if shards[-1] and total_bytes([*shards[-1], spec], dtype) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(spec)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        values = {spec.name: tensor(spec).to(dtype).contiguous() for spec in shard}
        for spec in shard:
            if tuple(values[spec.name].shape) != spec.shape:
                raise AssertionError(f"{spec.name} has shape {tuple(values[spec.name].shape)}, planned {spec.shape}")
        save_file(values, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        placed = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        index = {"metadata": {"total_size": total_bytes(tensors, dtype)}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; a refusal is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="inflate", description="Give a small model the cost of a large one.")
    parser.add_argument("source", nargs="?", default="pocket", help="'pocket' or a model folder")
    parser.add_argument("--shape", required=True, help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, help="rather than as many as the shape has")
    parser.add_argument("--pad-vocabulary", action="store_true", help="keep the shape's vocabulary size")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        inflate(
            options.source,
            options.shape,
            options.out,
            dtype=getattr(torch, options.dtype),
            layers=options.layers,
            pad_vocabulary=options.pad_vocabulary,
            seed=options.seed,
        )
    except InflateError as error:
        print(f"inflate: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
