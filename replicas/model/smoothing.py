"""Even out columns before weights, or keys, become int8: a value far larger than the rest leaves the rest no precision.

Some channels of a trained model's activations are 20 to 100 times the others, the same ones for every token, and a row
in int8 has one step for all. So a sample of text is run through the layers before they are quantised, and the columns
of each product are divided by powers of two that go into its weight (`kernels.linear.even_out`). No operation is added:
the division goes into what makes a column, which is a norm's weight, the rows of a value or the rows of `up`. The float
model stays the same to the last bit. Heads that share a key and value share factors.

Channels of a key differ as well, most of all in models with a bias, and a store in int8 has one step for a token's key.
They are divided by powers of two that go into the queries: q_d f_d . k_d / f_d. Both channels of a rotated pair have
the same factor. Queries stay in float, so keys are evened out wholly. Source: QServe (Lin et al. 2024), section 4.2,
with alpha = 1.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedTokenizerBase

from holdfast.kernels.layer import rotated
from holdfast.kernels.linear import even_out
from holdfast.replicas.model.description import Attention, Description
from holdfast.replicas.model.weights import DecoderWeights, LayerWeights

_SAMPLE = """You can call functions. Answer in the user's language, and be brief.
{"name": "find_flights", "description": "Direct flights on a day", "parameters": {"type": "object", "properties":
{"from": {"type": "string"}, "to": {"type": "string"}, "date": {"type": "string"}}, "required": ["from", "to"]}}
user: Is there a flight from Oslo to Porto on 2024-03-17? I can pay up to 245.50 EUR, and my number is QX-83120.
assistant: <tool_call>
{"name": "find_flights", "arguments": {"from": "Oslo", "to": "Porto", "date": "2024-03-17"}}
</tool_call>
tool: [{"flight": "TP 759", "departs": "06:25", "price": 231.9},
{"flight": "DY 1790", "departs": "14:40", "price": 198}]
assistant: There are two: TP 759 leaves at 06:25 and costs 231.90 EUR, DY 1790 leaves at 14:40 and costs 198 EUR.
user: def mean(xs): return sum(xs) / len(xs)  # why does this raise ZeroDivisionError? Et en français, s'il vous plaît.
assistant: Parce que la liste est vide : `len(xs)` vaut alors 0. Return 0.0 there, or raise a ValueError that says so.
"""
_TOKENS = 256  # of it, at most: a large model takes a minute for many more


def sample_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Tensor:
    """Ids [n] of the sample text; one arbitrary id where a tokenizer makes nothing of it."""
    ids = [each for each in tokenizer.encode(_SAMPLE, add_special_tokens=True)[:_TOKENS] if each < vocabulary]
    return torch.tensor(ids or [0])


@torch.inference_mode()
def smooth(
    weights: DecoderWeights,
    description: Description,
    rotary: tuple[Tensor, Tensor],
    sample: Tensor,
    dtype: torch.dtype,
    products: bool = True,
    keys: bool = False,
) -> None:
    """Even out, in place, the columns of all `products` but the head's, and the channels of `keys`.

    `sample` [n]: token ids, computed in `dtype`.
    """
    positions = torch.arange(len(sample)).clamp_max(len(rotary[0]) - 1)
    cos, sin = (table[positions].to(dtype)[:, None] for table in rotary)  # [n, 1, d / 2]
    x = weights.embedding[sample].to(dtype)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), weight.to(dtype), description.eps)

    for layer, described in zip(weights.layers, description.layers, strict=True):
        mixer = described.mixer
        first = normed(x, layer.input_norm)
        bias = None if layer.qkv_bias is None else layer.qkv_bias.to(dtype)
        qkv = linear(first, layer.qkv.to(dtype), bias).view(len(x), -1, mixer.head_dim)
        q, k, v = torch.split(qkv, [mixer.heads, mixer.kv_heads, mixer.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = normed(q, layer.q_norm), normed(k, layer.k_norm)
        turned = rotated(k, cos, sin)
        attended = _attend(rotated(q, cos, sin), turned, v, mixer.window).flatten(1)  # [n, heads * d]
        x = x + linear(attended, layer.out.to(dtype))
        second = normed(x, layer.post_norm)
        gate, up = linear(second, layer.gate_up.to(dtype)).chunk(2, dim=-1)
        inner = silu(gate) * up
        x = x + linear(inner, layer.down.to(dtype))
        if keys:
            _move_keys(layer, mixer, _columns(turned))
        if products:
            _move(even_out(_columns(first), layer.qkv), layer.input_norm, layer.qkv)
            _move(even_out(_columns(second), layer.gate_up), layer.post_norm, layer.gate_up)
            factors = even_out(_columns(inner), layer.down)
            layer.gate_up[described.feed_forward.inner :] /= factors.to(layer.gate_up.dtype)[:, None]
            layer.down *= factors.to(layer.down.dtype)
            _move_heads(layer, mixer, _columns(attended))


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of q [n, heads, d] over k, v [n, kv_heads, d]."""
    at = torch.arange(len(q))
    seen = at[:, None] >= at
    if window is not None:
        seen &= at[:, None] - at < window
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)


def _columns(x: Tensor) -> Tensor:
    """The largest magnitude of each column."""
    return x.abs().amax(0)


def _move(factors: Tensor, norm: Tensor, weight: Tensor) -> None:
    norm /= factors.to(norm.dtype)
    weight *= factors.to(weight.dtype)


def _move_keys(layer: LayerWeights, mixer: Attention, columns: Tensor) -> None:
    """Move factors from keys, the largest of whose channels are `columns` [kv_heads, d], to their queries."""
    pairs = columns.view(mixer.kv_heads, 2, -1).amax(1)  # [kv_heads, d / 2]
    if layer.k_norm is not None and layer.q_norm is not None:  # one for all heads
        factors = _even(pairs.amax(0)).repeat(2)
        layer.k_norm /= factors.to(layer.k_norm.dtype)
        layer.q_norm *= factors.to(layer.q_norm.dtype)
        return
    factors = torch.stack([_even(each).repeat(2) for each in pairs])  # [kv_heads, d]
    of_queries = factors.repeat_interleave(mixer.heads // mixer.kv_heads, 0).flatten()
    both = torch.cat((of_queries, 1 / factors.flatten())).to(layer.qkv.dtype)  # powers of two: exact
    layer.qkv[: len(both)] *= both[:, None]
    if layer.qkv_bias is not None:
        layer.qkv_bias[: len(both)] *= both


def _even(columns: Tensor) -> Tensor:
    """Factors that even columns out wholly: the root in `even_out` is of their squares."""
    return even_out(columns.float().square(), torch.ones(1, len(columns)))


def _move_heads(layer: LayerWeights, mixer: Attention, columns: Tensor) -> None:
    """Move factors from the values to the output projection [hidden, heads * d]. Columns of a group share a value's."""
    grouped = (mixer.kv_heads, mixer.heads // mixer.kv_heads, mixer.head_dim)
    largest = layer.out.abs().amax(0).view(grouped).amax(1).flatten()[None]  # [1, kv_heads * d]
    factors = even_out(columns.view(grouped).amax(1).flatten(), largest).to(layer.out.dtype)
    layer.qkv[-mixer.kv_width :] /= factors[:, None]
    if layer.qkv_bias is not None:
        layer.qkv_bias[-mixer.kv_width :] /= factors
    spread = factors.view(mixer.kv_heads, 1, mixer.head_dim).expand(grouped)
    layer.out *= spread.reshape(-1)
