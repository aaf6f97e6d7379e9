"""Pocket as a plain torch module for training: a Llama with transformers' weight names and logits of chosen tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pocket.tokenizer import CONTEXT, VOCABULARY

STRIPE = 256
"""Queries per stripe of CPU attention."""


@dataclass(frozen=True, slots=True)
class PocketShape:
    """The numbers of the architecture, named as in a Llama ``config.json``."""

    vocab_size: int = VOCABULARY
    hidden_size: int = 192
    intermediate_size: int = 384
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100_000.0
    max_position_embeddings: int = CONTEXT

    def as_dict(self) -> dict[str, int | float]:
        """The numbers by name."""
        return asdict(self)


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with grouped keys and values, rotary halves as in transformers."""

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[rows, heads, length, head_dim]``, in position."""
        rows, length, _ = x.shape  # [rows, length, hidden]
        q = self.q_proj(x).view(rows, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v

    def output(self, mixed: Tensor) -> Tensor:
        """The change of the residual by ``mixed`` values ``[rows, heads, length, head_dim]``."""
        joined: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return joined


class Mlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The residual after the layer, and its queries and keys ``[rows, heads, length, head_dim]``."""
        q, k, v = self.before(x, cos, sin)
        return self.after(x, attend(q, k, v)), (q, k)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the residual to queries, keys and values."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """From the mixed values back to the residual, and the feed-forward."""
        x = x + self.self_attn.output(mixed)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: PocketShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The normed output ``[rows, length, hidden]``, and each layer's queries and keys for pointing.

        Queries and keys are ``[rows, heads, length, head_dim]``.
        """
        x: Tensor = self.embed_tokens(ids)
        projections = []
        for layer in self.layers:
            x, queries_and_keys = layer(x, cos, sin)
            projections.append(queries_and_keys)
        out: Tensor = self.norm(x)
        return out, projections


class Pocket(nn.Module):
    """The trainable model; its ``state_dict`` is that of ``LlamaForCausalLM`` with tied embeddings."""

    def __init__(self, shape: PocketShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        generator = torch.Generator().manual_seed(seed)
        outputs = (2 * shape.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = outputs if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(
                    weight,
                    std=0.02 if "embed" in name else scale * weight.shape[1] ** -0.5,
                    generator=generator,
                )

    def forward(self, ids: Tensor, positions: Tensor, where: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits ``[chosen, vocabulary]`` in float32; each layer's queries and keys, for pointing.

        ``ids`` and ``positions`` are ``[rows, length]``; ``where`` are flat indices of the tokens that predict a
        learned one. The head is computed for these alone.
        """
        cos, sin = rotary(positions, self.shape.head_dim, self.shape.rope_theta)
        x, projections = self.model(ids, cos, sin)
        x = x.flatten(0, 1)[where]
        return (x @ self.model.embed_tokens.weight.T.to(x.dtype)).float(), projections

    def logits(self, ids: Tensor, positions: Tensor, where: Tensor) -> Tensor:
        """The logits alone."""
        logits: Tensor = self(ids, positions, where)[0]
        return logits


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of ``q`` ``[rows, heads, length, dim]`` over ``k``, ``v`` ``[rows, kv_heads, length, dim]``."""
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with torch.autocast(q.device.type, enabled=False):
        return _attend_in_stripes(q * q.shape[-1] ** -0.5, k, v)


def _attend_in_stripes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stripes of queries as plain matrix products, twice as fast as torch's fused CPU kernel with its backward."""
    rows, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    q, k, v = q.reshape(rows * kv_heads, group, length, dim), k.flatten(0, 1), v.flatten(0, 1)
    later = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    out = []
    for start in range(0, length, STRIPE):
        end = min(length, start + STRIPE)
        stripe = q[:, :, start:end].flatten(1, 2)
        scores = torch.bmm(stripe, k[:, :end].transpose(1, 2)).view(rows * kv_heads, group, end - start, end)
        weights = (scores + later[start:end, :end]).softmax(-1).flatten(1, 2)
        out.append(torch.bmm(weights, v[:, :end]).view(rows, heads, end - start, dim))
    return torch.cat(out, 2)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[rows, 1, length, head_dim]`` of the rotary angles."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() * theta**-exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves paired."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
