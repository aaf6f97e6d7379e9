"""The decoder's forward on a GPU: the weights and the maths of `decoder`, with our kernels around the products.

A layer is four products and five launches: the residual's sum with the norm, the rotary embedding with the store of
keys and values, attention, the sum with the second norm, and the activation. Few rows can have norms, activation and
sums inside of the products (`kernels.stream_gpu`): four launches and attention's. On a machine without a GPU it runs in
Triton's interpreter, which is how it is tested.

Which way products of few rows take, torch's or one of our two, is timed when the model is loaded (`choose_ways`).
Decoding and verifying wait for the weights; how near the libraries come to the memory's bandwidth differs with the size
of a matrix and the number of rows. So each size is timed, in as many rows as steps of one sequence have; and then a
whole layer but for its attention, apart or with norms, activation and sums inside of our products.

Where a row's bits must not depend on the other rows nothing is timed: every product is summed in the one order of our
own kernel (`one_order`), by torch's wherever that gives the same bits.
"""

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.kernels.linear import GatedMatrix, Matrix, Route
from holdfast.kernels.mlp import silu_and_mul
from holdfast.kernels.norm import add_norm
from holdfast.kernels.rope_gpu import rotate_and_store
from holdfast.kernels.stream_gpu import MOST_ORDERED, MOST_ROWS, streamed, streamed_tall
from holdfast.replicas.model.batch import AttentionShape, ForwardBatch
from holdfast.replicas.model.decoder import Decoder, Layer

log = logging.getLogger(__name__)

Seconds: TypeAlias = Callable[[Callable[[], object]], float]
"""Times a call on the device."""

_ROWS = ((1, 1), (2, 8), (9, MOST_ROWS))  # from, up to; timed in the most
_GAIN = 1.02  # what ours must be faster by
_CHAIN = 8  # matrices of a size that are timed behind each other: of one alone the two events are a part of the time
_CLOSE = 0.03  # relative error between two ways in 16 bits
_EACH = 1024  # rows up to which every number is tried for its order of sums
_SOME = 64  # beyond, multiples of so many; what lies between is filled up


class GpuDecoder(Decoder):
    """`Decoder` with another forward."""

    leave = True
    _fused: Container[int] = ()
    _invariant = False

    def fuse(self, rows: Container[int]) -> None:
        """Have steps of so many tokens take norms, activation and sums into the products."""
        self._fused = rows

    def keep_order(self, rows: int, draws: int) -> None:
        """Have a token's numbers not depend, by a bit, on what else is in a step of up to so many rows and draws.

        Raises RuntimeError where the libraries cannot be had to.
        """
        one_order(self.matrices[:-1], rows)
        one_order(self.matrices[-1:], draws)
        self._invariant = True

    @property
    def attention(self) -> AttentionShape:
        return replace(super().attention, invariant=self._invariant)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
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

    def _forward_fused(self, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """The same; `residual` [T, D] is written over."""
        for index, layer in enumerate(self._layers):
            mixed = self._attend_on_gpu(index, layer, qkv_fused(layer, residual, self._shape.eps), batch)
            rest_fused(layer, mixed, residual, self._shape.eps)
        return streamed(residual[batch.drawn], weight_of(self._head), norm=(self._norm, self._shape.eps))

    def _attend_on_gpu(self, index: int, layer: Layer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Attention of one layer between its projections: [T, H d]."""
        shape, pages = self._shape, batch.pages
        heads = qkv.view(len(qkv), -1, shape.head_dim)  # [T, H + 2 K, d]
        table = (self._cos, self._sin, batch.position_ids[0])
        q = rotate_and_store(heads, shape.heads, *table, self._kv.data, index, pages.cells, layer.norms, shape.eps)
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


@dataclass(frozen=True, slots=True)
class Product:
    """Seconds of one product [rows, inputs] x [inputs, outputs], by our kernel, by it in tall tiles, and by torch: the
    mean of a chain."""

    outputs: int
    inputs: int
    rows: int
    ours_s: float
    tall_s: float
    torchs_s: float

    @property
    def ours_is_faster(self) -> bool:
        """In one way or the other."""
        return min(self.ours_s, self.tall_s) * _GAIN < self.torchs_s


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer but for its attention: in launches of their own, and fused into our products."""

    rows: int
    apart_s: float
    fused_s: float


def choose_ways(model: GpuDecoder, seconds: Seconds) -> tuple[list[Product], list[LayerTimes]]:
    """Let products and layers of few rows take the faster way; what was timed."""
    products = choose_products(model.matrices, seconds)
    return products, _choose_fused(model, seconds)


@torch.inference_mode()
def _choose_fused(model: GpuDecoder, seconds: Seconds) -> list[LayerTimes]:
    layer, eps = model.layers[0], 1e-6
    weight = layer.out.plain
    if weight is None or weight.dtype == torch.float16:  # a residual times the norm's weight may leave its range
        return []
    timed, chosen = [], set[int]()
    for least, most in _ROWS:
        mixed = torch.randn(most, weight.shape[1], device=weight.device).to(weight.dtype)
        residual = torch.randn(most, weight.shape[0], device=weight.device).to(weight.dtype)

        def apart(into: Tensor = residual, mixed: Tensor = mixed) -> tuple[Tensor, Tensor]:
            qkv = layer.qkv(normed(None, into, layer.input_norm, eps))
            h = normed(layer.out(mixed), into, layer.post_norm, eps)
            return qkv, layer.down(silu_and_mul(layer.gate_up.both(h)))

        def fused(into: Tensor = residual, mixed: Tensor = mixed) -> Tensor:
            qkv = qkv_fused(layer, into, eps)
            rest_fused(layer, mixed, into, eps)
            return qkv

        one, other = residual.clone(), residual.clone()
        (qkv, change), same_qkv = apart(one), fused(other)
        alike = _alike(qkv, same_qkv) and _alike(one + change, other)
        timed.append(LayerTimes(most, seconds(apart), seconds(fused)))
        if alike and timed[-1].fused_s * _GAIN < timed[-1].apart_s:
            chosen.update(range(least, most + 1))
    model.fuse(frozenset(chosen))
    log.info("layers of %d row counts of %d have their norms and sums inside of products", len(chosen), MOST_ROWS)
    return timed


@torch.inference_mode()
def choose_products(matrices: Sequence[Matrix | GatedMatrix], seconds: Seconds) -> list[Product]:
    """Time every size of matrix that is not packed and let its products take the faster way; what was timed."""
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
        log.info("products with %d x %d: %d and %d row counts of %d by our kernels", outputs, inputs, *counts)
    return timed


def _by_size(matrices: Sequence[Matrix | GatedMatrix]) -> Iterator[tuple[torch.Size, list[Matrix | GatedMatrix]]]:
    """Matrices that are not packed, those of a size together."""
    sizes: dict[torch.Size, list[Matrix | GatedMatrix]] = {}
    for matrix in matrices:
        if matrix.plain is not None:
            sizes.setdefault(matrix.plain.shape, []).append(matrix)
    yield from sizes.items()


@torch.inference_mode()
def one_order(matrices: Sequence[Matrix | GatedMatrix], most: int) -> dict[torch.Size, Route]:
    """Have every product of up to `most` rows sum in the order of our own kernel; the way of each size of matrix.

    Where torch's has other bits ours computes up to `MOST_ORDERED` rows, and torch's of more rows, which has them, the
    others. Raises RuntimeError where nothing does.
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
        log.info("products with %d x %d: %d row counts by our kernel, %d filled up", *size, len(own), len(filled))
    return chosen


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two ways gave the same, but for what 16 bits round; the log says so where not."""
    error = float((a.float() - b.float()).norm() / a.float().norm())
    if not error <= _CLOSE:  # nor a NaN
        log.error("products are left to torch: ours are off by %.2g", error)
    return error <= _CLOSE
