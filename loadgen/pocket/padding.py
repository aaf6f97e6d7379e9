"""How a small Llama is padded to a large shape without a change of its outputs.

Notation: the source has hidden size d and head dim h, the target D and H.

- Residual: the first d channels are the source's. The others stay zero, because embedding columns and rows of output
  projections beyond d are zero. RMS norm divides by the mean square over D channels, so norm weights are scaled by
  sqrt(d/D) and epsilon by d/D.
- Heads: source head j keeps its group; added dims of its keys are zero and so are the output columns of added value
  dims. Scores are divided by sqrt(H), so queries are scaled by sqrt(H/h).
- Rotary: R of a target head's dimensions have rotary positions, in most families all H. Pair i of h/2 goes to pair
  i*R/h, which turns at the same frequency when theta is kept. Where R/h is no integer, pair i stays at i and theta
  becomes theta^(R/h).
- Head norms (Qwen3, Qwen3.5): q / sqrt(mean(q^2) + eps) is q / sqrt(eps) when eps outweighs q. Queries and keys are
  scaled to 2^-17 of sqrt(eps), and the head norms' weights undo that. Relative error about 1e-9; float16 would
  overflow and is refused. In Qwen3 the residual is scaled by a power of two so that epsilon is near 1.
- Zero-centred norms (Qwen3.5) multiply by 1 + weight. In bfloat16 a factor near 0 would lose its digits, so norms
  multiply by 2^6 more and the matrices behind them divide by it. The embedding, which may be the head, is one of these.
- Output gates (Qwen3.5): their rows are zero, sigmoid(0) is 1/2, and output projections are doubled.
- Hybrids: the source's layers are the first layers with attention. Layers of linear attention compute on random
  numbers, and their output projections are zero.
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
ZERO_CENTRED_GAIN = 2.0**6
MARKER = 2.0**-13
MARKER_GAIN = 2.0**10
MARKER_BAN = 2.0**17


@dataclass(frozen=True, slots=True)
class Scales:
    """The numbers that make padding exact. What a norm multiplies by beyond the source, `read` and `head` undo."""

    residual: float
    norm: float  # of the norms in the layers
    final_norm: float
    read: float  # of the matrices behind the layers' norms
    head: float  # of a head of its own
    query: float
    key: float
    output: float
    epsilon: float
    head_norm: float
    theta: float
    stride: int

    @staticmethod
    def of(source: Shape, target: Shape, epsilon: float, theta: float) -> Scales:
        """Scales for a pair of shapes and the source's epsilon and rotary base."""
        width = source.hidden / target.hidden
        ratio = target.rotary_dim / source.head_dim
        even = target.rotary_dim % source.head_dim == 0
        gain = ZERO_CENTRED_GAIN if target.zero_centred else 1.0
        residual = 1.0 / gain
        if target.head_norms and not target.zero_centred:
            residual = 2.0 ** round(-math.log2(epsilon * width) / 2)
        scaled = epsilon * width * residual**2
        shift = HEAD_NORM_SHIFT * 2.0 ** round(math.log2(scaled) / 2) if target.head_norms else 1.0
        head = residual if target.tied else 1.0 / gain
        return Scales(
            residual=residual,
            norm=math.sqrt(width) * gain,
            final_norm=math.sqrt(width) / head,
            read=1.0 / gain,
            head=head,
            query=math.sqrt(target.head_dim / source.head_dim) * shift,
            key=shift,
            output=residual * (2.0 if target.hybrid else 1.0),
            epsilon=scaled,
            head_norm=math.sqrt(scaled) / shift,
            theta=theta if even else theta**ratio,
            stride=target.rotary_dim // source.head_dim if even else 1,
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
        own = self._own(spec.name)
        if ".linear_attn." in spec.name:
            return self._linear_attention(spec)
        if part == "embed_tokens":
            return self._vocabulary_rows(own, self.scales.residual, marker=MARKER)
        if part == "lm_head":
            head = own if own is not None else self.weights["model.embed_tokens.weight"]
            return self._vocabulary_rows(head, self.scales.head, marker=0.0)
        if part in ("q_norm", "k_norm"):
            return self._norm_weight(torch.full(spec.shape, self.scales.head_norm))
        if part.endswith("norm"):
            return self._norm(spec, own)
        if part in ("o_proj", "down_proj"):
            return self._output(spec, own, part)
        return self._input(spec, own, part)

    @property
    def marked(self) -> bool:
        """Whether there are added vocabulary rows to keep from being sampled."""
        return self.target.vocabulary > self.source.vocabulary

    def _own(self, name: str) -> Tensor | None:
        """The source's tensor that goes into this one of the target; None: there is none."""
        if not name.startswith("model.layers."):
            return self.weights.get(name)
        _, _, layer, rest = name.split(".", 3)
        number, last = divmod(int(layer) + 1, self.target.interval)  # the source's layers have attention
        return None if last or number > self.source.layers else self.weights.get(f"model.layers.{number - 1}.{rest}")

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
        if own is not None:
            out[: self.source.hidden] = own * (self.scales.final_norm if final else self.scales.norm)
        if self.marked:
            out[self.source.hidden] = MARKER_GAIN / self.scales.head if final else 0.0
        return self._norm_weight(out)

    def _norm_weight(self, factor: Tensor) -> Tensor:
        """The weight with which an RMS norm multiplies by `factor`."""
        return factor - 1.0 if self.target.zero_centred else factor

    def _output(self, spec: TensorSpec, own: Tensor | None, part: str) -> Tensor:
        """A projection into the residual: zero but for the source's block."""
        out = torch.zeros(spec.shape, dtype=self.dtype)
        if own is None:
            return out
        if part == "o_proj":
            columns, scale = self._places(self.source.heads, part), self.scales.output
        else:
            columns, scale = torch.arange(self.source.intermediate), self.scales.residual
        out[: self.source.hidden, columns] = (own * scale).to(self.dtype)
        return out

    def _input(self, spec: TensorSpec, own: Tensor | None, part: str) -> Tensor:
        """A projection out of the residual: noise with the source's rows in their places."""
        scales = {"q_proj": self.scales.query, "k_proj": self.scales.key}
        out = self._noise(spec, self.scales.key if part in scales else 1.0)
        if self._own(spec.name.replace(".bias", ".weight")) is None:
            return out
        if part in ("gate_proj", "up_proj"):
            rows = torch.arange(self.source.intermediate)
        else:
            rows = self._places(self.source.heads if part == "q_proj" else self.source.kv_heads, part)
        if part == "k_proj":
            for head in set((rows // self.target.head_dim).tolist()):
                out[head * self.target.head_dim : (head + 1) * self.target.head_dim] = 0.0
        elif part == "q_proj" and self.target.hybrid:
            out.view(self.target.heads, 2, self.target.head_dim, -1)[:, 1] = 0.0  # the gates
        if spec.name.endswith("bias"):
            out[rows] = 0.0
            return out
        if own is None:
            raise AssertionError(f"{spec.name} is missing in the source")
        kept = own * scales.get(part, 1.0) * self.scales.read
        if part in ("k_proj", "v_proj"):
            kept = kept.view(self.source.kv_heads, 1, self.source.head_dim, -1)
            kept = kept.expand(-1, kv_copies(self.source, self.target), -1, -1).reshape(len(rows), -1)
        out[rows, : self.source.hidden] = kept.to(self.dtype)
        return out

    def _linear_attention(self, spec: TensorSpec) -> Tensor:
        """Linear attention that adds nothing: its last projection is zero. Decays are those that training starts from:
        exp(-A dt) a token, A from 1 to 16 and dt from 0.001 to 0.1.
        """
        part = spec.name.split(".linear_attn.")[1]
        if part == "A_log":
            return torch.linspace(1.0, 16.0, *spec.shape).log()
        if part == "dt_bias":
            dt = torch.linspace(math.log(0.1), math.log(0.001), *spec.shape).exp()
            return dt.expm1().log()  # softplus undone
        if part == "norm.weight":
            return torch.ones(spec.shape)
        return self._noise(spec, 0.0 if part == "out_proj.weight" else 1.0)

    def _places(self, heads: int, part: str) -> Tensor:
        """The target's rows (of o_proj: columns) for the source's heads, with all copies of key-value heads."""
        s, t = self.source, self.target
        pairs = torch.arange(s.head_dim // 2) * self.scales.stride
        dims = torch.cat((pairs, pairs + t.rotary_dim // 2))
        copies = kv_copies(s, t)
        if part in ("q_proj", "o_proj"):
            placed = []
            for head in range(heads):
                kv, rank = divmod(head, s.group)
                copy, rest = divmod(rank, t.group)
                placed.append((kv * copies + copy) * t.group + rest)
        else:
            placed = list(range(heads * copies))
        each = t.head_dim * (2 if part == "q_proj" and t.hybrid else 1)  # a gate behind each query
        return torch.cat([head * each + dims for head in placed])

    def _noise(self, spec: TensorSpec, scale: float) -> Tensor:
        """Random values of a weight's usual size, the same for the same name and seed."""
        out = torch.zeros(spec.shape, dtype=self.dtype)
        if scale == 0.0:
            return out
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{spec.name}".encode()))
        inputs = spec.shape[-1] if len(spec.shape) > 2 else self.target.hidden  # of a convolution: its kernel
        spread = scale * inputs**-0.5 * math.sqrt(3)
        return out.uniform_(-spread, spread, generator=generator)
