"""What a decoder cannot beat on a device: bytes to read and operations to do over its measured ceilings."""

from dataclasses import dataclass

from holdfast.kernels.ceilings import Ceilings
from holdfast.replicas.model.weights import DecoderShape


@dataclass(frozen=True, slots=True)
class Bounds:
    """`item_bytes` of one weight, `cell_bytes` of one token's KV in all layers."""

    shape: DecoderShape
    item_bytes: int
    cell_bytes: int
    ceilings: Ceilings

    @property
    def weight_bytes(self) -> int:
        """Read by every forward: all weights but the embedding."""
        return (self.shape.layers * self._layer + self.shape.hidden * self.shape.vocabulary) * self.item_bytes

    @property
    def layer_bytes(self) -> int:
        """Of one layer's matrices."""
        return self._layer * self.item_bytes

    def flops(self, tokens: int, cached: int = 0) -> float:
        """Multiplications and additions of `tokens` after `cached` ones, attention with its causal mask; no head."""
        shape = self.shape
        pairs = tokens * cached + tokens * (tokens + 1) / 2
        return 2.0 * tokens * shape.layers * self._layer + 4.0 * pairs * shape.heads * shape.head_dim * shape.layers

    def compute_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds for these operations."""
        return self.flops(tokens, cached) / self.ceilings.rate

    def read_s(self, positions: int, forwards: int = 1) -> float:
        """Seconds in which `forwards` read the weights, and all of them together the KV of `positions`."""
        return (forwards * self.weight_bytes + positions * self.cell_bytes) / self.ceilings.bandwidth

    @property
    def _layer(self) -> int:
        """Weights of one layer's matrices."""
        shape = self.shape
        return shape.hidden * (2 * shape.q_width + 2 * shape.kv_width) + 3 * shape.hidden * shape.inner
