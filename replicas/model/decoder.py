"""Our own decoder for Llama 2 and 3, Qwen2, Qwen2.5, Qwen3 and Mistral: one file of layers over the paged KV store.

Query, key and value are one product, gate and up another. Shapes: T tokens, D hidden, H heads, K KV heads, d head size.
Any other family runs through `any_model`, which is also what this one is tested against.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from holdfast.kernels.attention import paged_attention
from holdfast.kernels.layer_c import Rotation, rms_norm
from holdfast.kernels.linear import GatedMatrix, Matrix
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.batch import AttentionShape, ForwardBatch
from holdfast.replicas.model.smoothing import smooth
from holdfast.replicas.model.weights import (
    DecoderShape,
    DecoderWeights,
    LayerWeights,
    has_safetensors,
    read_weights,
)

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # the others change with the length of the sequence


def decoder_shape(config: Any) -> DecoderShape | None:
    """The shape of a transformers configuration, or None where this decoder would not compute the same."""
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return None
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope_type(config) not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
        window=_windows(config),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window, as transformers' model of the family takes it from the configuration."""
    layers: int = config.num_hidden_layers
    if config.model_type == "llama":  # whatever stands there
        return (None,) * layers
    window: int | None = config.sliding_window
    if config.model_type == "mistral":
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def rotary_table(config: Any, positions: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines for every position, float32 [positions, d / 2], scaling of the context included."""
    kind = rope_type(config)
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
        inverse, factor = 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device(device))
    angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
    return angles.cos() * factor, angles.sin() * factor


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights, ready to multiply with."""

    input_norm: Tensor
    qkv: Matrix
    norms: tuple[Tensor, Tensor] | None  # of queries and keys
    out: Matrix
    post_norm: Tensor
    gate_up: GatedMatrix
    down: Matrix
    window: int | None


def _layer(weights: LayerWeights, window: int | None, int8: bool, leave: bool) -> Layer:
    return Layer(
        input_norm=weights.input_norm,
        qkv=Matrix(weights.qkv, weights.qkv_bias, int8, leave),
        norms=None if weights.q_norm is None or weights.k_norm is None else (weights.q_norm, weights.k_norm),
        out=Matrix(weights.out, None, int8, leave),
        post_norm=weights.post_norm,
        gate_up=GatedMatrix(weights.gate_up, int8, leave),
        down=Matrix(weights.down, None, int8, leave),
        window=window,
    )


class Decoder:
    """Weights and layers; stateless but for the KV store it writes. A `batch.Model`."""

    leave = False  # weights as they are, for kernels that read them so

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        rotary: tuple[Tensor, Tensor],
        kv: KVTensors,
        int8: bool = False,
    ) -> None:
        """Takes over `weights`, whose layers are gone then: on a CPU each is packed in turn, or becomes `int8`."""
        self._shape = shape
        self._embedding, self._norm = weights.embedding, weights.norm
        self._layers = [_layer(weights.layers.pop(0), window, int8, self.leave) for window in shape.window]
        self._head = Matrix(weights.head, None, int8, self.leave)
        angles = torch.float32 if kv.data.device.type == "cpu" else self._norm.dtype
        self._cos, self._sin = (table.to(angles) for table in rotary)
        self._kv = kv
        self._scale = shape.head_dim**-0.5

    @classmethod
    def load(
        cls,
        path: str,
        config: Any,
        kv: KVTensors,
        context_length: int,
        sample: Tensor | None = None,
        int8: bool = False,
    ) -> "Decoder | None":
        """Read a checkpoint, or None where its family, options or files are not this decoder's. Raises ConfigError.

        `int8`: products in it. By what the token ids `sample` [n] show, those are smoothed, and keys of a `kv` in int8.
        """
        shape = decoder_shape(config)
        if shape is None or not has_safetensors(path):
            return None
        device = str(kv.data.device)
        weights = read_weights(path, shape, kv.dtype, device)
        rotary = rotary_table(config, context_length, device)
        if sample is not None:
            smooth(weights, shape, rotary, sample, kv.dtype, products=int8, keys=kv.data.dtype == torch.int8)
        return cls(shape, weights, rotary, kv, int8)

    @property
    def vocabulary(self) -> int:
        return self._shape.vocabulary

    @property
    def layers(self) -> list[Layer]:
        return self._layers

    @property
    def matrices(self) -> list[Matrix | GatedMatrix]:
        """All that the forward multiplies with."""
        layers = [each for layer in self._layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return [*layers, self._head]

    @property
    def attention(self) -> AttentionShape:
        shape = self._shape
        windows = tuple(sorted({window or 0 for window in shape.window}))
        return AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, windows)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, vocabulary] of the batch's drawn tokens; stores the KV of all its tokens."""
        shape = self._shape
        rotation = Rotation(
            self._cos, self._sin, batch.position_ids[0], batch.pages.cells, self._kv.data, shape.heads, shape.eps
        )
        x = self._embedding[batch.token_ids[0]]  # [T, D]
        for index, layer in enumerate(self._layers):
            h = rms_norm(x, layer.input_norm, shape.eps)
            x = layer.out(self._attend(index, layer, h, rotation, batch), plus=x)  # [T, D]
            h = rms_norm(x, layer.post_norm, shape.eps)
            x = layer.down(layer.gate_up(h), plus=x)
        drawn = rms_norm(x[batch.drawn], self._norm, shape.eps)  # [R, D]
        return self._head(drawn)

    def _attend(self, index: int, layer: Layer, h: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Attention of one layer before its output projection: [T, H d]."""
        shape = self._shape
        qkv = layer.qkv(h).view(len(h), -1, shape.head_dim)  # [T, H + 2 K, d]
        q = rotation.rotate_and_store(qkv, index, layer.norms)
        out = paged_attention(q, self._kv.data, index, batch.pages, self._scale, layer.window)
        return out.view(len(h), shape.q_width)
