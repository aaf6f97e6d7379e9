"""The decoder's forward on a GPU: the weights and maths of `decoder`, with our kernels around the products.

A layer is four products and five launches: residual sum and norm, rotary embedding and store of keys and values,
attention, sum and second norm, activation. In a linear layer `linear_state_gpu` takes the place of rotary embedding and
attention. Without a GPU it runs in Triton's interpreter, which is how it is tested.

Decode and verify steps wait for the weights, and how close the libraries come to the memory's bandwidth depends on the
size of the matrix and the number of rows. So products of few rows are timed when a model is loaded, each size of matrix
by torch and by our two kernels, and take the fastest (`choose_products`). With `batch_invariant` nothing is timed:
every product sums in the order of our own kernel (`one_order`), by torch's kernel wherever that gives the same bits.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.kernels.experts_gpu import GpuExperts, route_gpu
from holdfast.kernels.layer import Rotation
from holdfast.kernels.layer_gpu import add_norm, gated_norm, norm_of_gated, rotate_and_store, sigmoid_gate, silu_and_mul
from holdfast.kernels.linear import Activation, GatedMatrix, Matrix, Route
from holdfast.kernels.linear_state import LinearShape
from holdfast.kernels.linear_state_gpu import gated_delta_gpu, mamba2_gpu, supported
from holdfast.kernels.quantized import Weight
from holdfast.kernels.quantized_gpu import QuantizedGatedMatrix, QuantizedMatrix
from holdfast.kernels.stream_gpu import MOST_ORDERED, MOST_ROWS, streamed, streamed_tall
from holdfast.replicas.model.decoder import (
    AllExperts,
    AttentionLayer,
    AttentionShape,
    BlockLayer,
    Decoder,
    DenseAndExpertsLayer,
    ExpertsLayer,
    FeedForwardLayer,
    ForwardBatch,
)
from holdfast.replicas.model.description import Attention, MixtureOfExperts
from holdfast.replicas.model.weights import ExpertsWeights

log = logging.getLogger(__name__)

Seconds: TypeAlias = Callable[[Callable[[], object]], float]
"""Times a call on the device."""

_ROWS = ((1, 1), (2, 8), (9, MOST_ROWS))  # ranges of row counts; each is timed at its upper end
_GAIN = 1.02  # least speed-up at which our kernel replaces torch's
_CHAIN = 8  # matrices of one size that are timed in a row: with one, the two events are part of the time
_CLOSE = 0.03  # largest relative error between two ways in 16 bits
_EACH = 1024  # up to here the order of sums is tested for every number of rows
_SOME = 64  # beyond, for multiples of this; row counts in between are padded


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return add_norm(x, None, weight, eps)


def _normed(change: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of the residual, to which `change` is added in place."""
    return add_norm(residual, None, weight, eps) if change is None else add_norm(change, residual, weight, eps)


class GpuDecoder(Decoder):
    """`Decoder` with another forward."""

    leave = True
    rms_norm, gated_norm, norm_of_gated = staticmethod(_rms_norm), staticmethod(gated_norm), staticmethod(norm_of_gated)
    route = staticmethod(route_gpu)
    _invariant = False

    def _matrix(self, weight: Weight, bias: Tensor | None = None) -> Matrix:
        return super()._matrix(weight, bias) if isinstance(weight, Tensor) else QuantizedMatrix(weight, bias)

    def _gated_matrix(self, weight: Weight, activation: Activation) -> GatedMatrix:
        if isinstance(weight, Tensor):
            return super()._gated_matrix(weight, activation)
        return QuantizedGatedMatrix(weight, activation)

    def _all_experts(self, op: MixtureOfExperts, of: ExpertsWeights) -> AllExperts:
        biases = (of.first_bias, of.down_bias)
        return GpuExperts(of.first, of.down, op.activation, *biases, alpha=op.alpha, limit=op.limit)

    @property
    def experts(self) -> dict[int, list[GpuExperts]]:
        """The layers of experts, by how many a token chooses."""
        experts: dict[int, list[GpuExperts]] = {}
        for block in self.all_blocks:
            layer = block.op.experts if isinstance(block.op, DenseAndExpertsLayer) else block.op
            if isinstance(layer, ExpertsLayer) and isinstance(layer.experts, GpuExperts):
                experts.setdefault(layer.op.routing.chosen, []).append(layer.experts)
        return experts

    def keep_order(self, rows: int, draws: int) -> None:
        """Make a token's bits independent of the rest of its step, for steps of up to so many rows and draws.

        Raises RuntimeError where the libraries do not allow it, or weights are quantised.
        """
        if any(matrix.plain is None for matrix in self.matrices):
            raise RuntimeError("products with quantised weights are summed by the number of rows")
        if any(isinstance(block.op, ExpertsLayer | DenseAndExpertsLayer) for block in self.blocks):
            raise RuntimeError("products of experts are summed by the number of rows")
        one_order(self.matrices[:-1], rows)
        one_order(self.matrices[-1:], draws)
        self._invariant = True

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        return tuple(replace(each, invariant=self._invariant) for each in super().attention)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, vocabulary] of the batch's drawn tokens; stores the KV of all its tokens."""
        eps = self.description.eps
        residual, change = self._sums(self.blocks, self._embedded(batch.token_ids[0]), batch)
        if self.next_token is not None:
            self.hidden = _normed(change, residual, self._norm, eps)
            return self._logits(self.hidden[batch.drawn])
        drawn = residual[batch.drawn]
        return self._logits(_normed(None if change is None else change[batch.drawn], drawn, self._norm, eps))

    def _through(self, blocks: Sequence[BlockLayer], x: Tensor, batch: ForwardBatch) -> Tensor:
        residual, change = self._sums(blocks, x, batch)
        return residual if change is None else residual + change

    def _sums(
        self, blocks: Sequence[BlockLayer], residual: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """Rows [T, D] behind the last of `blocks`, and what is still to be added to them."""
        eps, post_eps = self.description.eps, self.description.post_eps
        change: Tensor | None = None
        for block in blocks:
            if block.norm is None:
                h = residual = residual if change is None else residual + change
            else:
                h = _normed(change, residual, block.norm, eps)
            change = self._apply(block.op, h, batch)
            if block.post_norm is not None:
                change = add_norm(change, None, block.post_norm, post_eps)
            if block.scale != 1.0:
                residual, change = (residual + change) * block.scale, None
        return residual, change

    def _attend(self, layer: AttentionLayer, h: Tensor, batch: ForwardBatch, rotations: Sequence[Rotation]) -> Tensor:
        op, pages = layer.op, batch.pages[layer.kind]
        gate, qkv = op.split(layer.qkv(h))
        norms = self._norm_heads(layer, qkv)
        table, store = (*self._rotary[op.rotary], batch.position_ids[0]), (self._kv.kinds[layer.kind].data, layer.index)
        q = rotate_and_store(qkv, op.heads, *table, *store, pages.cells, norms, self.description.eps)
        scale = op.scale or op.head_dim**-0.5
        out = attend_gpu(q, *store, pages, scale, op.window or 0, 0.0, layer.sinks).flatten(1)
        return out if gate is None else self._gated(out, gate, op)

    def _gated(self, out: Tensor, gate: Tensor, op: Attention) -> Tensor:
        return sigmoid_gate(out, gate) if op.gate == "sigmoid" else super()._gated(out, gate, op)

    def _rule(self, shape: LinearShape) -> Callable[..., Tensor]:
        """Our kernel, or torch's way for heads that it does not take."""
        if not supported(shape):
            return super()._rule(shape)
        return gated_delta_gpu if shape.rule == "delta" else mamba2_gpu

    def _inner(self, layer: FeedForwardLayer, h: Tensor) -> Tensor:
        if layer.op.activation == "silu":
            return silu_and_mul(layer.first.both(h))
        return super()._inner(layer, h)


@dataclass(frozen=True, slots=True)
class Product:
    """Mean seconds of one product [rows, inputs] x [inputs, outputs] by each way."""

    outputs: int
    inputs: int
    rows: int
    ours_s: float  # `streamed`
    tall_s: float  # `streamed_tall`
    torchs_s: float

    @property
    def ours_is_faster(self) -> bool:
        return min(self.ours_s, self.tall_s) * _GAIN < self.torchs_s


@torch.inference_mode()
def choose_products(matrices: Sequence[Matrix | GatedMatrix], seconds: Seconds) -> list[Product]:
    """Time each size of matrix that is not packed, and let its products take the faster way. Returns the times."""
    timed = []
    for (outputs, inputs), alike in _by_size(matrices):
        weights = [each.plain for each in alike[:_CHAIN] if each.plain is not None]
        weight, chosen, tall = weights[0], set[int](), set[int]()
        for least, most in _ROWS:
            x = torch.randn(most, inputs, device=weight.device).to(weight.dtype)
            ours, high, torchs = (
                seconds(lambda way=way, x=x, chain=weights: [way(x, each) for each in chain]) / len(weights)  # type: ignore[misc]
                for way in (streamed, streamed_tall, linear)
            )
            timed.append(Product(outputs, inputs, most, ours, high, torchs))
            way, into = (streamed, chosen) if ours <= high else (streamed_tall, tall)
            if timed[-1].ours_is_faster and _alike(linear(x, weight), way(x, weight)):
                into.update(range(least, most + 1))
        for matrix in alike:
            matrix.route = Route(frozenset(chosen), frozenset(tall))
        counts = (len(chosen), len(tall), MOST_ROWS)
        log.info("products with %d x %d: %d and %d of %d row counts by our kernels", outputs, inputs, *counts)
    return timed


def _by_size(matrices: Sequence[Matrix | GatedMatrix]) -> Iterator[tuple[torch.Size, list[Matrix | GatedMatrix]]]:
    """The matrices that are not packed, grouped by size."""
    sizes: dict[torch.Size, list[Matrix | GatedMatrix]] = {}
    for matrix in matrices:
        if matrix.plain is not None:
            sizes.setdefault(matrix.plain.shape, []).append(matrix)
    yield from sizes.items()


@torch.inference_mode()
def one_order(matrices: Sequence[Matrix | GatedMatrix], most: int) -> dict[torch.Size, Route]:
    """Make every product of up to `most` rows sum in the order of our own kernel. Returns the route of each size.

    Where torch's bits differ, our kernel computes up to `MOST_ORDERED` rows, and more rows are padded to a number where
    torch's bits agree. Raises RuntimeError where no number does.
    """
    chosen = {}
    for size, alike in _by_size(matrices):
        weight = alike[0].plain
        assert weight is not None
        highest = most if most <= _EACH else _EACH + -(-(most - _EACH) // _SOME) * _SOME
        x = torch.randn(highest, size[1], device=weight.device).to(weight.dtype)
        exact = torch.cat([streamed(part, weight) for part in torch.split(x, MOST_ORDERED)])
        tried = [*range(1, min(most, _EACH) + 1), *range(_EACH + _SOME, len(x) + 1, _SOME)]
        good = [rows for rows in tried if torch.equal(linear(x[:rows], weight), exact[:rows])]
        others = sorted({*range(1, most + 1)}.difference(good))
        filled = {rows: next((each for each in good if each > rows), 0) for rows in others if rows > MOST_ORDERED}
        if lost := [rows for rows, more in filled.items() if not more]:
            raise RuntimeError(f"torch sums {lost[-1]} rows with {size[0]} x {size[1]} in another order than fewer")
        own = frozenset(rows for rows in others if rows <= MOST_ORDERED)
        chosen[size] = route = Route(own, filled=filled)
        for matrix in alike:
            matrix.route = route
        log.info("products with %d x %d: %d row counts by our kernel, %d padded", *size, len(own), len(filled))
    return chosen


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two ways agree up to the rounding of 16 bits; the log says so where not."""
    error = float((a.float() - b.float()).norm() / a.float().norm())
    if not error <= _CLOSE:  # nor a NaN
        log.error("products are left to torch: ours are off by %.2g", error)
    return error <= _CLOSE
