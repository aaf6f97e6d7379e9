"""Pads a small Llama to a large shape without a change of its outputs.

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
- Experts: where one is shared by all tokens, it has the source's feed-forward and the others add zeros. Otherwise each
  expert has a copy, and the weights of the chosen ones sum to 1. Routers are random.
- gpt-oss multiplies (up + 1) gate sigmoid(1.702 gate): gates are divided by 1.702 and outputs multiplied by that, and
  the bias of ups is -1. `swiglu_limit` is raised, so that nothing is clamped. Sinks are so low that they weigh nothing.
- Norms behind attention and feed-forwards (Gemma 4), and that of values, are undone as head norms are. Where a layer
  has nothing of the source, their weights are zero, and all matrices are random.
- gelu (Gemma 4): a neuron of silu is five of gelu (`shapes.GELUS`). This is not exact: silu is met within 5e-6.
- Keys that are values (Gemma 4): keys and values lie in dimensions of their own. The weights of the keys' norm are zero
  where values are, queries and output projections where the other ones are.
- Gemma's rotary positions over a part of a head turn as slowly as if they were all of it: theta is raised for that.
- Windows: the source's layers are those that see everything (`Shape.layers_for` has the exception).
- Added vocabulary: every token carries a tiny constant in channel d, which no layer reads. After the final norm it is
  positive in every state; the added rows weigh it with a large negative number, so none of them is ever sampled.
- Added layers, heads and neurons are random where they are read and zero where they are written to the residual.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.loadgen.inflate.shapes import GELUS, Family, Shape, TensorSpec, kv_copies

HEAD_NORM_SHIFT = 2.0**-17
ALPHA = 1.702  # of gpt-oss's activation
LIMIT = 2.0**10
SINK = -(2.0**14)
ZERO_CENTRED_GAIN = 2.0**6
_FILLED = {"shared_expert_gate": 0.0, "per_expert_scale": 1.0, "layer_scalar": 1.0, "sinks": SINK}
MARKER = 2.0**-13
MARKER_GAIN = 2.0**10
MARKER_BAN = 2.0**17


@dataclass(frozen=True, slots=True)
class Scales:
    """The numbers that make padding exact. What a norm multiplies by beyond the source, `read` and `head` undo."""

    residual: float
    embedding: float
    norm: float  # of the norms in the layers
    final_norm: float
    read: float  # of the matrices behind the layers' norms
    head: float  # of a head of its own
    query: float
    key: float
    value: float
    output: float  # of attention
    down: float
    post_norm: float
    epsilon: float
    head_norm: float
    theta: float
    stride: int

    @staticmethod
    def of(source: Shape, target: Shape, epsilon: float, theta: float, dtype: torch.dtype = torch.float32) -> Scales:
        """Scales for a pair of shapes, the source's epsilon and rotary base, and the dtype of weights.

        `target`: as the layer has its heads (`Shape.at`).
        """
        width = source.hidden / target.hidden
        even = target.rotary_dim % source.head_dim == 0
        gain = ZERO_CENTRED_GAIN if target.zero_centred else 1.0
        residual = 1.0 / gain
        if target.head_norms and not target.zero_centred:
            residual = 2.0 ** round(-math.log2(epsilon * width) / 2)
        scaled = epsilon * width * residual**2
        shift = HEAD_NORM_SHIFT * 2.0 ** round(math.log2(scaled) / 2) if target.head_norms else 1.0
        head_norm = math.sqrt(scaled) / shift
        embedding = residual
        if target.around:
            embedding /= float(torch.tensor(target.hidden**0.5, dtype=dtype))
        head = embedding if target.tied else 1.0 / gain
        scores = 1.0 if target.around else target.head_dim
        slow = target.head_dim if target.keys_are_values else target.rotary_dim
        return Scales(
            residual=residual,
            embedding=embedding,
            norm=math.sqrt(width) * gain,
            final_norm=math.sqrt(width) / head,
            read=1.0 / gain,
            head=head,
            query=math.sqrt(scores / source.head_dim) * shift,
            key=shift,
            value=shift if target.around else 1.0,
            output=head_norm * shift if target.around else residual * (2.0 if target.hybrid else 1.0),
            down=shift if target.around else residual * (2.0 if target.experts and target.experts.shared else 1.0),
            post_norm=residual * head_norm,
            epsilon=scaled,
            head_norm=head_norm,
            theta=theta ** (slow / (target.rotary_dim if even else source.head_dim)),
            stride=target.rotary_dim // source.head_dim if even else 1,
        )


@dataclass(frozen=True, slots=True)
class Inflation:
    """The target's tensors as a function of the source's; nothing is held but the source.

    `held`: the target's layers that hold the source's, in order.
    """

    source: Shape
    target: Shape
    epsilon: float
    theta: float
    held: Sequence[int]
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    seed: int

    def scales(self, target: Shape) -> Scales:
        """Scales of a layer with such heads."""
        return Scales.of(self.source, target, self.epsilon, self.theta, self.dtype)

    def tensor(self, spec: TensorSpec) -> Tensor:
        """One tensor of the target."""
        layer = int(spec.name.split(".")[2]) if spec.name.startswith("model.layers.") else None
        target = self.target if layer is None else self.target.at(layer)
        return _Layer(self, target, self.scales(target), None if layer not in self.held else layer).tensor(spec)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The tensors of a layer, or of none. `held`: its number where it holds one of the source."""

    of: Inflation
    target: Shape
    scales: Scales
    held: int | None

    @property
    def source(self) -> Shape:
        return self.of.source

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def tensor(self, spec: TensorSpec) -> Tensor:
        part = spec.name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
        if ".linear_attn." in spec.name:
            return self._linear_attention(spec)
        if part in _FILLED:
            return torch.full(spec.shape, _FILLED[part])
        if part == "scale":
            return torch.full(spec.shape, math.sqrt(self.target.hidden))
        if ".experts." in spec.name and not spec.name.endswith(".weight"):
            return self._experts(spec, part)
        own = self._own(spec.name)
        if part == "embed_tokens":
            return self._vocabulary_rows(own, self.scales.embedding, marker=MARKER)
        if part == "lm_head":
            head = own if own is not None else self.of.weights["model.embed_tokens.weight"]
            return self._vocabulary_rows(head, self.scales.head, marker=0.0)
        if part in ("q_norm", "k_norm"):
            return self._head_norm(spec, part)
        if "norm" in part:
            return self._norm(spec, own, part)
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
            return self.of.weights.get(name)
        if self.held is None:
            return None
        rest = name.split(".", 3)[3]
        if self.target.around and rest.startswith("pre_feedforward_layernorm"):
            rest = "post_attention_layernorm.weight"
        if rest.startswith("mlp."):
            rest = f"mlp.{'.'.join(rest.rsplit('.', 2)[1:])}"  # of an expert, too
        own = self.of.weights.get(f"model.layers.{self.of.held.index(self.held)}.{rest}")
        if own is None or not self.target.around or not rest.startswith("mlp."):
            return own
        if "down_proj" in rest:
            return torch.cat([own * c for _, c in GELUS], dim=1)
        return torch.cat([own * (a if "gate_proj" in rest else 1.0) for a, _ in GELUS])

    def _experts(self, spec: TensorSpec, part: str) -> Tensor:
        """A tensor of all experts. Only gpt-oss's hold the source's feed-forward; others' are noise, and what would add
        to a residual that has no norm before it is zero.
        """
        writes, inner = part.startswith("down_proj"), self.source.intermediate
        out = self._noise(spec, 0.0 if part.endswith("_bias") or (writes and not self.target.around) else 1.0)
        if self.target.family is not Family.GPT_OSS or self.held is None:
            return out
        ups, gates = slice(1, 2 * inner, 2), slice(0, 2 * inner, 2)
        if part == "gate_up_proj_bias":
            out[:, ups] = -1.0
        elif part in ("gate_up_proj", "down_proj"):
            at = f"model.layers.{self.held}.mlp."
            gate, up, down = (self._own(f"{at}{name}_proj.weight") for name in ("gate", "up", "down"))
            if gate is None or up is None or down is None:
                raise AssertionError(f"{at} is missing in the source")
            if writes:
                out[:, :inner, : self.source.hidden] = (down.T * ALPHA * self.scales.down).to(self.dtype)
            else:
                out[:, : self.source.hidden, gates] = (gate.T / ALPHA * self.scales.read).to(self.dtype)
                out[:, : self.source.hidden, ups] = (up.T * self.scales.read).to(self.dtype)
        return out

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

    def _head_norm(self, spec: TensorSpec, part: str) -> Tensor:
        out = torch.full(spec.shape, self.scales.head_norm)
        if part == "k_norm" and self.target.keys_are_values:
            out[self._dims("v_proj")] = 0.0
        return self._norm_weight(out)

    def _norm(self, spec: TensorSpec, own: Tensor | None, part: str) -> Tensor:
        if self.target.around and part.startswith("post_"):
            of_dense = math.sqrt(self.scales.epsilon) if part.endswith("_1") else self.scales.post_norm
            return torch.full(spec.shape, 0.0 if self.held is None or part.endswith("_2") else of_dense)
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
        if own is None:
            return self._noise(spec, 1.0 if self.target.around else 0.0)
        out = torch.zeros(spec.shape, dtype=self.dtype)
        if part == "o_proj":
            columns, scale = self._places(self.source.heads, part), self.scales.output
        else:
            columns, scale = torch.arange(own.shape[1]), self.scales.down
        out[: self.source.hidden, columns] = (own * scale).to(self.dtype)
        return out

    def _input(self, spec: TensorSpec, own: Tensor | None, part: str) -> Tensor:
        """A projection out of the residual: noise with the source's rows in their places."""
        scales = {"q_proj": self.scales.query, "k_proj": self.scales.key, "v_proj": self.scales.value}
        out = self._noise(spec, scales[part] if part == "v_proj" else self.scales.key if part in scales else 1.0)
        weight = self._own(spec.name.replace(".bias", ".weight"))
        if weight is None:
            return out
        if part in ("gate_proj", "up_proj"):
            rows = torch.arange(len(weight))
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
        if part == "k_proj" and self.target.keys_are_values:
            values = self._own(spec.name.replace("k_proj", "v_proj"))
            if values is None:
                raise AssertionError(f"{spec.name} has no values in the source")
            values = values.view(self.source.kv_heads, 1, self.source.head_dim, -1)
            values = values.expand(-1, kv_copies(self.source, self.target), -1, -1).reshape(len(rows), -1)
            places = self._places(self.source.kv_heads, "v_proj")
            out[places, : self.source.hidden] = (values * self.scales.value * self.scales.read).to(self.dtype)
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
        dims = self._dims(part)
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

    def _dims(self, part: str) -> Tensor:
        """The dimensions of a target's head that hold those of the source's."""
        s, t = self.source, self.target
        if t.keys_are_values and part in ("v_proj", "o_proj"):
            return torch.arange(s.head_dim) + t.rotary_dim // 2
        pairs = torch.arange(s.head_dim // 2) * self.scales.stride
        return torch.cat((pairs, pairs + (t.head_dim if t.keys_are_values else t.rotary_dim) // 2))

    def _noise(self, spec: TensorSpec, scale: float) -> Tensor:
        """Random values of a weight's usual size, the same for the same name and seed."""
        out = torch.zeros(spec.shape, dtype=self.dtype)
        if scale == 0.0:
            return out
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.of.seed}/{spec.name}".encode()))
        inputs = spec.shape[-1] if len(spec.shape) > 2 else self.target.hidden  # of a convolution: its kernel
        spread = scale * inputs**-0.5 * math.sqrt(3)
        return out.uniform_(-spread, spread, generator=generator)
