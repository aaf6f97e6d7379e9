"""Weights of a Llama-like checkpoint, read shard by shard into the fused matrices that `decoder` multiplies with.

Every tensor is copied once, from the mapped file to where it stays. What does not belong to a plain decoder (a bias
where none is expected, a tensor of another family) is an error, never ignored: it would change the output.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holdfast.replicas.errors import ConfigError

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # of a checkpoint in several files
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
        raise ConfigError(f"cannot serve model {path!r}: {error}", "model") from error
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
                raise ConfigError(f"cannot serve model {path!r}: unknown weight {name}", "model")
            if target.shape != tensor.shape:
                sizes = f"{tuple(tensor.shape)}, not {tuple(target.shape)}"
                raise ConfigError(f"cannot serve model {path!r}: weight {name} is {sizes}", "model")
            if slot in missing:
                target.copy_(tensor)
                missing.discard(slot)
            elif not torch.equal(target, tensor.to(target)):
                why = f"two different weights for {slot} (tie_word_embeddings is {str(shape.tied).lower()})"
                raise ConfigError(f"cannot serve model {path!r}: its files have {why}", "model")
    if missing:
        raise ConfigError(
            f"cannot serve model {path!r}: its files lack {len(missing)} weights, {min(missing)} among them", "model"
        )


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
