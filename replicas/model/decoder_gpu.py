"""The decoder's forward on a GPU: the weights and the maths of `decoder`, with our kernels around the products.

A layer is four products and five launches: the residual's sum with the norm, the rotary embedding with the store of
keys and values, attention, the sum with the second norm, and the activation. Few rows can have norms, activation and
sums inside of the products (`kernels.stream_gpu`): four launches and attention's. On a machine without a GPU it runs in
Triton's interpreter, which is how it is tested.
"""

from collections.abc import Container

import torch
from torch import Tensor

from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.kernels.linear import GatedMatrix, Matrix
from holdfast.kernels.mlp import silu_and_mul
from holdfast.kernels.norm import add_norm
from holdfast.kernels.rope_gpu import rotate_and_store
from holdfast.kernels.stream_gpu import streamed
from holdfast.replicas.model.batch import StepBatch
from holdfast.replicas.model.decoder import Decoder, Layer


class GpuDecoder(Decoder):
    """`Decoder` with another forward."""

    _fused: Container[int] = ()

    def fuse(self, rows: Container[int]) -> None:
        """Have steps of so many tokens take norms, activation and sums into the products."""
        self._fused = rows

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, vocabulary] of the batch's drawn tokens; stores the KV of all its tokens."""
        residual = self._embedding[batch.token_ids[0]]  # [T, D]
        if len(residual) in self._fused and len(batch.drawn) in self._fused:
            return self._forward_fused(residual, batch)
        eps = self._shape.eps
        change: Tensor | None = None
        for index, layer in enumerate(self._layers):
            h = normed(change, residual, layer.input_norm, eps)
            h = layer.out(self._attend_on_gpu(index, layer, layer.qkv(h), batch))
            h = normed(h, residual, layer.post_norm, eps)
            change = layer.down(silu_and_mul(layer.gate_up.both(h)))
        assert change is not None  # a model has layers
        drawn = residual[batch.drawn]
        return self._head(normed(change[batch.drawn], drawn, self._norm, eps))

    def _forward_fused(self, residual: Tensor, batch: StepBatch) -> Tensor:
        """The same; `residual` [T, D] is written over."""
        for index, layer in enumerate(self._layers):
            mixed = self._attend_on_gpu(index, layer, qkv_fused(layer, residual, self._shape.eps), batch)
            rest_fused(layer, mixed, residual, self._shape.eps)
        return streamed(residual[batch.drawn], weight_of(self._head), norm=(self._norm, self._shape.eps))

    def _attend_on_gpu(self, index: int, layer: Layer, qkv: Tensor, batch: StepBatch) -> Tensor:
        """Attention of one layer between its projections: [T, H d]."""
        shape, pages = self._shape, batch.pages
        heads = qkv.view(len(qkv), -1, shape.head_dim)  # [T, H + 2 K, d]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        table = (self._cos, self._sin, batch.position_ids[0])
        q = rotate_and_store(heads, shape.heads, *table, self._kv.data, index, pages.cells, norms, shape.eps)
        out = attend_gpu(q, self._kv.data, index, pages, self._scale, layer.window or 0, 0.0)
        return out.view(len(qkv), shape.q_width)


def normed(change: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of the residual, which has `change` added to it."""
    return add_norm(residual, None, weight, eps) if change is None else add_norm(change, residual, weight, eps)


def qkv_fused(layer: Layer, residual: Tensor, eps: float) -> Tensor:
    """Query, key and value of the normed residual, in one launch."""
    return streamed(residual, weight_of(layer.qkv), layer.qkv.bias, (layer.input_norm, eps))


def rest_fused(layer: Layer, mixed: Tensor, residual: Tensor, eps: float) -> None:
    """What follows attention, into the residual, in three launches."""
    streamed(mixed, weight_of(layer.out), residual=residual)
    h = streamed(residual, weight_of(layer.gate_up), norm=(layer.post_norm, eps), gated=True)
    streamed(h, weight_of(layer.down), residual=residual)


def weight_of(matrix: Matrix | GatedMatrix) -> Tensor:
    """The plain weight of a matrix on a GPU."""
    assert matrix.plain is not None  # only a CPU packs
    return matrix.plain
