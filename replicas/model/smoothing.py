"""Even out columns before weights, or keys, become int8: a value far larger than the rest leaves the rest no precision.

Some channels of a trained model's activations are 20 to 100 times the others, the same ones for every token, and a row
in int8 has one step for all. So a sample of text is run through the layers before they are quantised, and the columns
of each product are divided by powers of two that go into its weight (`kernels.linear.even_out`). No operation is added:
the division goes into what makes a column, which is a norm's weight, the rows of a value or the rows of `up`. The float
model stays the same to the last bit. Heads that share a key and value share factors, and so do all heads of a linear
layer, which share a norm.

Channels of a key differ as well, most of all in models with a bias, and a store in int8 has one step for a token's key.
They are divided by powers of two that go into the queries: q_d f_d . k_d / f_d. Both channels of a rotated pair have
the same factor. Queries stay in float, so keys are evened out wholly. Source: QServe (Lin et al. 2024), section 4.2,
with alpha = 1.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import PreTrainedTokenizerBase

from holdfast.kernels.layer import gated_norm, rms_norm, rotated
from holdfast.kernels.linear import even_out
from holdfast.kernels.linear_state import NO_STATE, LinearStates, StateBatch, gated_delta
from holdfast.replicas.model.description import Attention, Description, GatedDeltaNet
from holdfast.replicas.model.weights import AttentionWeights, DecoderWeights, DeltaWeights

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
    angles = [table[positions].to(dtype)[:, None] for table in rotary]  # [n, 1, half]
    x = weights.embedding[sample].to(dtype)
    eps = description.eps
    for layer, described in zip(weights.layers, description.layers, strict=True):
        first = rms_norm(x, layer.input_norm, eps)
        mixer = layer.mixer
        if isinstance(mixer, AttentionWeights):
            assert isinstance(described.mixer, Attention)
            mixed, turned = _attended(mixer, described.mixer, first, angles, eps)  # [n, heads * d]
            inputs = [mixer.qkv]
            if keys:
                _move_keys(mixer, described.mixer, turned.abs().amax(0), angles[0].shape[-1])
        else:
            assert isinstance(described.mixer, GatedDeltaNet)
            mixed = _recurred(mixer, described.mixer, first, eps)  # [n, heads * value_dim]
            inputs = [mixer.qkvz, mixer.ab]
        x = x + linear(mixed, mixer.out.to(dtype))
        second = rms_norm(x, layer.post_norm, eps)
        gate, up = linear(second, layer.gate_up.to(dtype)).chunk(2, dim=-1)
        inner = silu(gate) * up
        x = x + linear(inner, layer.down.to(dtype))
        if products:
            _move(even_out(_columns(first), torch.cat(inputs)), layer.input_norm, *inputs)
            _move(even_out(_columns(second), layer.gate_up), layer.post_norm, layer.gate_up)
            factors = even_out(_columns(inner), layer.down)
            layer.gate_up[described.feed_forward.inner :] /= factors.to(layer.gate_up.dtype)[:, None]
            layer.down *= factors.to(layer.down.dtype)
            if isinstance(mixer, AttentionWeights):
                assert isinstance(described.mixer, Attention)
                _move_heads(mixer, described.mixer, _columns(mixed))
            else:
                size = len(mixer.norm)
                largest = mixer.out.abs().amax(0).view(-1, size).amax(0)[None]  # [1, value_dim]
                factors = even_out(_columns(mixed).view(-1, size).amax(0), largest)
                _move(factors, mixer.norm)
                mixer.out *= factors.repeat(mixer.out.shape[1] // size).to(mixer.out.dtype)


def _attended(
    weights: AttentionWeights, mixer: Attention, x: Tensor, angles: list[Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """Attention before its output projection, [n, heads d], and the turned keys [n, kv_heads, d]."""
    bias = None if weights.qkv_bias is None else weights.qkv_bias.to(x.dtype)
    gate, qkv = mixer.split(linear(x, weights.qkv.to(x.dtype), bias))
    q, k, v = torch.split(qkv, [mixer.heads, mixer.kv_heads, mixer.kv_heads], dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = (
            rms_norm(part.reshape(-1, mixer.head_dim), norm, eps).view(part.shape)
            for part, norm in ((q, weights.q_norm), (k, weights.k_norm))
        )
    turned = rotated(k, *angles)
    out = _attend(rotated(q, *angles), turned, v, mixer.window).flatten(1)
    return out if gate is None else out * gate.sigmoid(), turned


def _recurred(weights: DeltaWeights, mixer: GatedDeltaNet, x: Tensor, eps: float) -> Tensor:
    """The delta rule before its output projection, [n, value_heads value_dim]."""
    mixed, z = mixer.split(linear(x, weights.qkvz.to(x.dtype)))
    a, b = linear(x, weights.ab.to(x.dtype)).chunk(2, dim=1)
    states = LinearStates(mixer.shape, 1, 1, 0, x.dtype, "cpu")
    one, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32)
    batch = StateBatch(torch.tensor([0, len(x)], dtype=torch.int32), one + NO_STATE, one, one, one, none)
    return gated_norm(gated_delta(mixed, a, b, weights.kernel, states, 0, batch), z, weights.norm, eps)


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


def _move(factors: Tensor, norm: Tensor, *weights: Tensor) -> None:
    norm /= factors.to(norm.dtype)
    for weight in weights:
        weight *= factors.to(weight.dtype)


def _move_keys(weights: AttentionWeights, mixer: Attention, columns: Tensor, half: int) -> None:
    """Move factors from keys, the largest of whose channels are `columns` [kv_heads, d], to their queries. Channels i
    and half + i turn together.
    """
    low, high, rest = torch.split(columns, [half, half, mixer.head_dim - 2 * half], dim=1)
    pairs = torch.maximum(low, high)
    channels = torch.cat((pairs, pairs, rest), dim=1)
    if weights.k_norm is not None and weights.q_norm is not None:  # one for all heads
        factors = _even(channels.amax(0))
        weights.k_norm /= factors
        weights.q_norm *= factors
        return
    factors = torch.stack([_even(each) for each in channels])  # [kv_heads, d]
    of_queries = factors.repeat_interleave(mixer.heads // mixer.kv_heads, 0).flatten()
    both = torch.cat((of_queries, 1 / factors.flatten())).to(weights.qkv.dtype)  # powers of two: exact
    first = mixer.gate * mixer.q_width
    weights.qkv[first : first + len(both)] *= both[:, None]
    if weights.qkv_bias is not None:
        weights.qkv_bias[first : first + len(both)] *= both


def _even(columns: Tensor) -> Tensor:
    """Factors that even columns out wholly: the root in `even_out` is of their squares."""
    return even_out(columns.float().square(), torch.ones(1, len(columns)))


def _move_heads(weights: AttentionWeights, mixer: Attention, columns: Tensor) -> None:
    """Move factors from the values to the output projection [hidden, heads * d]. Columns of a group share a value's."""
    grouped = (mixer.kv_heads, mixer.heads // mixer.kv_heads, mixer.head_dim)
    largest = weights.out.abs().amax(0).view(grouped).amax(1).flatten()[None]  # [1, kv_heads * d]
    factors = even_out(columns.view(grouped).amax(1).flatten(), largest).to(weights.out.dtype)
    weights.qkv[-mixer.kv_width :] /= factors[:, None]
    if weights.qkv_bias is not None:
        weights.qkv_bias[-mixer.kv_width :] /= factors
    spread = factors.view(mixer.kv_heads, 1, mixer.head_dim).expand(grouped)
    weights.out *= spread.reshape(-1)
