"""Inflate Pocket: write a checkpoint of a large model's shape that says exactly what Pocket says.

``python -m holdfast.loadgen.pocket.inflate pocket --shape llama-3.1-8b --out DIR``. The mathematics is in
``padding``; here are the checks that come before anything is written, the config and the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from holdfast.loadgen.pocket.export import WEIGHTS
from holdfast.loadgen.pocket.padding import Inflation, Scales, slots_of
from holdfast.loadgen.pocket.shapes import (
    SHAPES,
    Family,
    IncompatibleShapeError,
    InflateError,
    NoRoomError,
    Shape,
    UnknownShapeError,
    check_embeds,
    full_config,
    read_config,
    resolve_shape,
    shape_of,
)
from holdfast.loadgen.pocket.shards import SHARD_BYTES, total_bytes, write_shards

_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SPARE_BYTES = 64 << 20


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
    config = read_config(folder / "config.json")
    shape = shape_of(config, context=0)
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = rotary.get("rope_type", rotary.get("type", "default")) == "default"
    if shape.family is not Family.LLAMA or shape.qkv_bias or shape.mlp_bias or not plain:
        raise IncompatibleShapeError("only a Llama without biases and rotary scaling can be inflated")
    try:
        weights = {key: value.float() for key, value in load_file(folder / "model.safetensors").items()}
    except (OSError, SafetensorError) as error:
        raise InflateError(f"{folder / 'model.safetensors'} cannot be read: {error}") from error
    for slot in slots_of(shape):
        if slot.name not in weights or weights[slot.name].shape != slot.shape:
            raise InflateError(f"{folder} holds no {slot.name} of {' x '.join(str(size) for size in slot.shape)}")
    return Source(folder, full_config(config), shape, weights)


def inflate(
    source: str,
    shape: str,
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    pad_vocabulary: bool = False,
    seed: int = 0,
) -> Path:
    """Write ``source`` (``pocket`` or a folder) in ``shape`` (a name or a config.json) to the new folder ``out``.

    With ``pad_vocabulary`` the shape's vocabulary is kept, its added rows never sampled; otherwise the source's is.
    Returns ``out``. Raises an InflateError before anything is written.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise IncompatibleShapeError(
            f"{dtype} is not supported: the scaled residual needs the range of bfloat16 or float32"
        )
    small = read_source(source)
    target = resolve_shape(shape, context=small.config.max_position_embeddings)
    if not pad_vocabulary or target.vocabulary < small.shape.vocabulary:
        target = replace(target, vocabulary=small.shape.vocabulary)
    check_embeds(small.shape, target)
    scales = Scales.of(small.shape, target, small.config.rms_norm_eps, small.theta)
    inflation = Inflation(small.shape, target, scales, small.weights, dtype, seed)
    slots = slots_of(target)
    config = target_config(small, target, scales, dtype)
    check_room(out, total_bytes(slots, dtype))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as made:
        folder = Path(made) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
        for name in _COPIED:
            if (small.folder / name).exists():
                shutil.copy(small.folder / name, folder / name)
        write_shards(folder, slots, dtype, inflation.tensor, SHARD_BYTES)
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


def target_config(source: Source, target: Shape, scales: Scales, dtype: torch.dtype) -> dict[str, Any]:
    """The target's sizes with the source's context, rotary base and token ids."""
    options: dict[str, Any] = {
        key: getattr(source.config, key)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    }
    if target.family is Family.MISTRAL:
        options["sliding_window"] = None
    if target.family in (Family.LLAMA, Family.QWEN3):
        options["attention_bias"] = target.attention_bias
    if target.family is Family.LLAMA:
        options["mlp_bias"] = target.mlp_bias
    config = AutoConfig.for_model(
        str(target.family),
        vocab_size=target.vocabulary,
        hidden_size=target.hidden,
        intermediate_size=target.intermediate,
        num_hidden_layers=target.layers,
        num_attention_heads=target.heads,
        num_key_value_heads=target.kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=scales.epsilon,
        tie_word_embeddings=target.tied,
        rope_parameters={"rope_type": "default", "rope_theta": scales.theta},
        dtype=dtype,
        **options,
    )
    config.architectures = [f"{target.family.capitalize()}ForCausalLM"]
    written: dict[str, Any] = config.to_dict()
    return written | {"rope_theta": scales.theta, "torch_dtype": str(dtype).removeprefix("torch.")}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; a refusal is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="inflate", description="Give a small model the cost of a large one.")
    parser.add_argument("source", nargs="?", default="pocket", help="'pocket' or a model folder")
    parser.add_argument("--shape", required=True, help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--pad-vocabulary", action="store_true", help="keep the shape's vocabulary size")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        inflate(
            options.source,
            options.shape,
            options.out,
            dtype=getattr(torch, options.dtype),
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
