"""How a small Llama is padded to a large shape without a change of its outputs.

Notation: the source has hidden size d and head dim h, the target D and H.

- Residual: the first d channels are the source's, the others stay zero, because embedding columns and rows of output
  projections beyond d are zero. RMS norm divides by the mean square over D channels, so norm weights are scaled by
  sqrt(d/D) and epsilon by d/D.
- Heads: source head j keeps its group; added dims of its keys are zero and so are the output columns of added value
  dims. Scores are divided by sqrt(H), so queries are scaled by sqrt(H/h).
- Rotary: pair i of h/2 goes to pair i*H/h, which turns at the same frequency when theta is kept. Where H/h is no
  integer, pair i stays at i and theta becomes theta^(H/h).
- Head norms (Qwen3): q / sqrt(mean(q^2) + eps) is q / sqrt(eps) when eps outweighs q. The residual is scaled by a power
  of two so that every norm's epsilon is near 1, queries and keys are scaled by 2^-17, and the head norms' weights undo
  both. Relative error about 1e-9; float16 would overflow and is refused.
- Added vocabulary: every token carries a tiny constant in channel d, which no layer reads. After the final norm it is
  positive in every state; the added rows weigh it with a large negative number, so none of them is ever sampled.
- Added layers, heads and neurons are random where they are read and zero where they are written to the residual.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.loadgen.pocket.shapes import Shape, TensorSpec, kv_copies

HEAD_NORM_SHIFT = 2.0**-17
MARKER = 2.0**-13
MARKER_GAIN = 2.0**10
MARKER_BAN = 2.0**17


@dataclass(frozen=True, slots=True)
class Scales:
    """The numbers that make padding exact."""

    residual: float
    norm: float
    query: float
    key: float
    epsilon: float
    head_norm: float
    theta: float
    stride: int

    @staticmethod
    def of(source: Shape, target: Shape, epsilon: float, theta: float) -> Scales:
        """Scales for a pair of shapes and the source's epsilon and rotary base."""
        width = source.hidden / target.hidden
        ratio = target.head_dim / source.head_dim
        even = target.head_dim % source.head_dim == 0
        residual, shift = 1.0, 1.0
        if target.head_norms:
            residual = 2.0 ** round(-math.log2(epsilon * width) / 2)
            shift = HEAD_NORM_SHIFT
        scaled = epsilon * width * residual**2
        return Scales(
            residual=residual,
            norm=math.sqrt(width),
            query=math.sqrt(ratio) * shift,
            key=shift,
            epsilon=scaled,
            head_norm=math.sqrt(scaled) / shift,
            theta=theta if even else theta**ratio,
            stride=target.head_dim // source.head_dim if even else 1,
        )


@dataclass(frozen=True, slots=True)
class Inflation:
    """The target's tensors as a function of the source's; nothing is held but the source."""

    source: Shape
    target: Shape
    scales: Scales
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    seed: int

    def tensor(self, spec: TensorSpec) -> Tensor:
        """One tensor of the target."""
        part = spec.name.rsplit(".", 2)[-2]
        own = self.weights.get(spec.name)
        if part == "embed_tokens":
            return self._vocabulary_rows(own, self.scales.residual, marker=MARKER)
        if part == "lm_head":
            head = own if own is not None else self.weights["model.embed_tokens.weight"]
            return self._vocabulary_rows(head, 1.0, marker=0.0)
        if part in ("q_norm", "k_norm"):
            return torch.full(spec.shape, self.scales.head_norm)
        if part.endswith("norm"):
            return self._norm(spec, own)
        if part in ("o_proj", "down_proj"):
            return self._output(spec, own, part)
        return self._input(spec, own, part)

    @property
    def marked(self) -> bool:
        """Whether there are added vocabulary rows to keep from being sampled."""
        return self.target.vocabulary > self.source.vocabulary

    def _vocabulary_rows(self, own: Tensor | None, scale: float, marker: float) -> Tensor:
        """Embedding or head: the source's rows, zeros beyond; with added rows also the marker channel."""
        if own is None:
            raise AssertionError("a checkpoint without embeddings is refused on reading")
        out = torch.zeros(self.target.vocabulary, self.target.hidden, dtype=self.dtype)
        rows, channel = own.shape
        out[:rows, :channel] = (own * scale).to(self.dtype)
        if self.marked:
            out[:rows, channel] = marker * scale
            out[rows:, channel] = -MARKER_BAN * scale
        return out

    def _norm(self, spec: TensorSpec, own: Tensor | None) -> Tensor:
        out = torch.ones(spec.shape)
        final = spec.name == "model.norm.weight"
        # The final norm also takes the residual's scale out again where the head is the scaled embedding.
        rescaled = self.scales.residual if final and self.target.tied else 1.0
        if own is not None:
            out[: self.source.hidden] = own * (self.scales.norm / rescaled)
        if self.marked:
            out[self.source.hidden] = MARKER_GAIN / rescaled if final else 0.0
        return out

    def _output(self, spec: TensorSpec, own: Tensor | None, part: str) -> Tensor:
        """A projection into the residual: zero but for the source's block."""
        out = torch.zeros(spec.shape, dtype=self.dtype)
        if own is not None:
            columns = (
                self._places(self.source.heads, "q_proj")
                if part == "o_proj"
                else torch.arange(self.source.intermediate)
            )
            out[: self.source.hidden, columns] = (own * self.scales.residual).to(self.dtype)
        return out

    def _input(self, spec: TensorSpec, own: Tensor | None, part: str) -> Tensor:
        """A projection out of the residual: noise with the source's rows in their places."""
        out = self._noise(spec, HEAD_NORM_SHIFT if self.target.head_norms and part in ("q_proj", "k_proj") else 1.0)
        layer = int(spec.name.split(".")[2])
        if layer >= self.source.layers:
            return out
        if part in ("gate_proj", "up_proj"):
            rows, scale = torch.arange(self.source.intermediate), 1.0
        else:
            scale = {"q_proj": self.scales.query, "k_proj": self.scales.key, "v_proj": 1.0}[part]
            rows = self._places(self.source.heads if part == "q_proj" else self.source.kv_heads, part)
            if part == "k_proj":
                for head in set((rows // self.target.head_dim).tolist()):
                    out[head * self.target.head_dim : (head + 1) * self.target.head_dim] = 0.0
        if spec.name.endswith("bias"):
            out[rows] = 0.0
            return out
        if own is None:
            raise AssertionError(f"{spec.name} is missing in the source")
        kept = own * scale
        if part in ("k_proj", "v_proj"):
            kept = kept.view(self.source.kv_heads, 1, self.source.head_dim, -1)
            kept = kept.expand(-1, kv_copies(self.source, self.target), -1, -1).reshape(len(rows), -1)
        out[rows, : self.source.hidden] = kept.to(self.dtype)
        return out

    def _places(self, heads: int, part: str) -> Tensor:
        """Rows in the target of every row of the source's heads (of every copy of a key-value head)."""
        s, t = self.source, self.target
        half, stride = s.head_dim // 2, self.scales.stride
        pairs = torch.arange(half) * stride
        dims = torch.cat((pairs, pairs + t.head_dim // 2))
        copies = kv_copies(s, t)
        if part == "q_proj":
            placed = []
            for head in range(heads):
                kv, rank = divmod(head, s.group)
                copy, rest = divmod(rank, t.group)
                placed.append((kv * copies + copy) * t.group + rest)
        else:
            placed = list(range(heads * copies))
        return torch.cat([head * t.head_dim + dims for head in placed])

    def _noise(self, spec: TensorSpec, scale: float) -> Tensor:
        """Random values of a weight's usual size, the same for the same name and seed."""
        out = torch.zeros(spec.shape, dtype=self.dtype)
        if scale == 0.0:
            return out
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{spec.name}".encode()))
        spread = scale * self.target.hidden**-0.5 * math.sqrt(3)
        return out.uniform_(-spread, spread, generator=generator)
