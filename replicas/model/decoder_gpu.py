"""The decoder's forward on a GPU: the weights and the maths of `decoder`, with our kernels around the products.

A layer is four products and five launches: the residual's sum with the norm, the rotary embedding with the store of
keys and values, attention, the sum with the second norm, and the activation. On a machine without a GPU it runs in
Triton's interpreter, which is how it is tested.
"""

import torch
from torch import Tensor

from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.kernels.mlp import silu_and_mul
from holdfast.kernels.norm import add_norm
from holdfast.kernels.rope_gpu import rotate_and_store
from holdfast.replicas.model.batch import StepBatch
from holdfast.replicas.model.decoder import Decoder, Layer


class GpuDecoder(Decoder):
    """`Decoder` with another forward."""

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, vocabulary] of the batch's drawn tokens; stores the KV of all its tokens."""
        eps = self._shape.eps
        residual = self._embedding[batch.token_ids[0]]  # [T, D]
        change: Tensor | None = None
        for index, layer in enumerate(self._layers):
            h, residual = _normed(change, residual, layer.input_norm, eps)
            h = layer.out(self._attend_on_gpu(index, layer, h, batch))
            h, residual = _normed(h, residual, layer.post_norm, eps)
            change = layer.down(silu_and_mul(layer.gate_up.both(h)))
        assert change is not None  # a model has layers
        drawn = residual[batch.drawn]
        h, _ = _normed(change[batch.drawn], drawn, self._norm, eps)
        return self._head(h)

    def _attend_on_gpu(self, index: int, layer: Layer, h: Tensor, batch: StepBatch) -> Tensor:
        """Attention of one layer before its output projection: [T, H d]."""
        shape, pages = self._shape, batch.pages
        qkv = layer.qkv(h).view(len(h), -1, shape.head_dim)  # [T, H + 2 K, d]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        position = batch.position_ids[0]
        table = (self._cos, self._sin, position)
        q = rotate_and_store(qkv, shape.heads, *table, self._kv.data, index, pages.cells, norms, shape.eps)
        out = attend_gpu(q, self._kv.data, index, pages, self._scale, layer.window or 0, 0.0)
        return out.view(len(h), shape.q_width)


def _normed(change: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of the residual with `change` added to it, and that residual."""
    if change is None:
        return add_norm(residual, None, weight, eps), residual
    return add_norm(change, residual, weight, eps), residual
