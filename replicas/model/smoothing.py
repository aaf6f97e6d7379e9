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

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.kernels.linear import Activation, GatedMatrix, Matrix, even_out
from holdfast.kernels.linear_state import LinearStates
from holdfast.kernels.quantized import Weight
from holdfast.replicas.kv.pages import NO_SLOT, StateUse
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.decoder import (
    AttentionLayer,
    Decoder,
    FeedForwardLayer,
    LinearAttentionLayer,
    PageTable,
    Rotary,
    build_batch,
)
from holdfast.replicas.model.description import Attention, Description
from holdfast.replicas.model.weights import (
    AttentionWeights,
    DecoderWeights,
    FeedForwardWeights,
    LinearAttentionWeights,
)
from holdfast.replicas.plan import Chunk, RowWrite

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
_PAGE = 16


def sample_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Tensor:
    """Ids [n] of the sample text; one arbitrary id where a tokenizer makes nothing of it."""
    ids = [each for each in tokenizer.encode(_SAMPLE, add_special_tokens=True)[:_TOKENS] if each < vocabulary]
    return torch.tensor(ids or [0])


@torch.inference_mode()
def smooth(
    weights: DecoderWeights,
    description: Description,
    rotary: Mapping[str | None, Rotary],
    sample: Tensor,
    dtype: torch.dtype,
    products: bool = True,
    keys: bool = False,
) -> DecoderWeights:
    """The weights with the columns of `products` and the channels of `keys` evened out, in place.

    `sample` [n]: token ids, computed in `dtype`. The products of experts and the head stay as they are.
    """
    weights = replace(weights, blocks=list(weights.blocks))
    seen = _Seen(replace(weights), description, rotary, sample, dtype)  # a decoder takes over what it is given
    # The layer that predicts one token further stays as it is: it only drafts.
    for block, of, layer in zip(description.blocks, weights.blocks, seen.blocks, strict=False):
        op = of.op
        if isinstance(op, AttentionWeights):
            assert isinstance(block.op, Attention)
            assert isinstance(layer.op, AttentionLayer)
            if keys:
                half = rotary[block.op.rotary][0].shape[1]
                _move_keys(op, block.op, seen.keys(layer.op), half)
            if products:
                _move_inputs(of.norm, seen.columns(layer.op.qkv), op.qkv)
                if not block.op.v_norm:
                    _move_heads(op, block.op, seen.columns(layer.op.out))
        elif isinstance(op, LinearAttentionWeights) and products:
            assert isinstance(layer.op, LinearAttentionLayer)
            _move_inputs(of.norm, seen.columns(layer.op.qkvz), op.qkvz, op.gates)
            size, out = len(op.norm), _dense(op.out)
            largest = out.abs().amax(0).view(-1, size).amax(0)[None]  # [1, size]
            factors = even_out(seen.columns(layer.op.out).view(-1, size).amax(0), largest)
            _move(factors, op.norm)
            out *= factors.repeat(out.shape[1] // size).to(out.dtype)
        elif isinstance(op, FeedForwardWeights) and products:
            assert isinstance(layer.op, FeedForwardLayer)
            _move_inputs(of.norm, seen.columns(layer.op.first), op.first)
            if layer.op.op.activation != "relu2":  # the others are linear in `up`
                down, up = _dense(op.down), _dense(op.first).chunk(2)[1]
                factors = even_out(seen.columns(layer.op.down), down)
                up /= factors.to(up.dtype)[:, None]
                down *= factors.to(down.dtype)
    return weights


def _dense(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor)  # a CPU keeps no other
    return weight


class _Seen(Decoder):
    """A decoder over the weights as they are, which has computed a sample and remembers what its products read."""

    leave = True

    def __init__(
        self,
        weights: DecoderWeights,
        description: Description,
        rotary: Mapping[str | None, Rotary],
        sample: Tensor,
        dtype: torch.dtype,
    ) -> None:
        pages = -(-len(sample) // _PAGE)
        kinds = description.kinds(len(sample))
        kv = KVTensors.of(kinds, [pages] * len(kinds), _PAGE, dtype)
        states = None
        if description.state is not None:
            states = LinearStates(description.state, description.linear_layers, 1, 0, dtype, "cpu")
        super().__init__(description, weights, rotary, kv, states=states)
        table = PageTable.of(kv, 1, len(sample))
        for kind in table.kinds:
            table.write(RowWrite(0, 0, np.arange(pages, dtype=np.int32), kind))
        use = StateUse(NO_SLOT, 0) if states is not None else None
        self._read: dict[int, Tensor] = {}
        self._tokens = min(len(sample), len(next(iter(rotary.values()))[0]))
        self.forward(build_batch((Chunk(0, 0, sample[: self._tokens].int().numpy(), state=use),), table))

    def _matrix(self, weight: Weight, bias: Tensor | None = None) -> Matrix:
        return _Watched(self, _dense(weight), bias)

    def _gated_matrix(self, weight: Weight, activation: Activation) -> GatedMatrix:
        return _WatchedGated(self, _dense(weight), activation)

    def saw(self, matrix: object, x: Tensor) -> None:
        self._read[id(matrix)] = x.abs().amax(0)

    def columns(self, matrix: object) -> Tensor:
        """The largest magnitude of each column that a matrix has read."""
        return self._read[id(matrix)]

    def keys(self, layer: AttentionLayer) -> Tensor:
        """The largest magnitude of each channel of the turned keys, [kv_heads, head_dim]."""
        return self._kv.kinds[layer.kind].data[layer.index, 0].flatten(0, 1)[: self._tokens].abs().amax(0)


class _Watched(Matrix):
    __slots__ = ("_seen",)

    def __init__(self, seen: _Seen, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias, leave=True)
        self._seen = seen

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        self._seen.saw(self, x)
        return super().__call__(x, plus)


class _WatchedGated(GatedMatrix):
    __slots__ = ("_seen",)

    def __init__(self, seen: _Seen, weight: Tensor, activation: Activation) -> None:
        super().__init__(weight, leave=True, activation=activation)
        self._seen = seen

    def __call__(self, x: Tensor) -> Tensor:
        self._seen.saw(self, x)
        return super().__call__(x)


def _move_inputs(norm: Tensor | None, columns: Tensor, *weights: Weight) -> None:
    """Move factors from what a norm makes to the weights that read it."""
    if norm is not None:
        dense = [_dense(each) for each in weights]
        _move(even_out(columns, torch.cat(dense)), norm, *dense)


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
    if mixer.qk_norm == "row":  # a norm over all heads: its factors would change the others'
        return
    if weights.k_norm is not None and weights.q_norm is not None:  # one for all heads
        factors = _even(channels.amax(0))
        weights.k_norm /= factors
        weights.q_norm *= factors
        return
    factors = torch.stack([_even(each) for each in channels])  # [kv_heads, d]
    of_queries = factors.repeat_interleave(mixer.heads // mixer.kv_heads, 0).flatten()
    first, qkv = mixer.gate_width, _dense(weights.qkv)
    both = torch.cat((of_queries, 1 / factors.flatten())).to(qkv.dtype)  # powers of two: exact
    qkv[first : first + len(both)] *= both[:, None]
    if weights.qkv_bias is not None:
        weights.qkv_bias[first : first + len(both)] *= both


def _even(columns: Tensor) -> Tensor:
    """Factors that even columns out wholly: the root in `even_out` is of their squares."""
    return even_out(columns.float().square(), torch.ones(1, len(columns)))


def _move_heads(weights: AttentionWeights, mixer: Attention, columns: Tensor) -> None:
    """Move factors from the values to the output projection [hidden, heads * d]. Columns of a group share a value's."""
    grouped = (mixer.kv_heads, mixer.heads // mixer.kv_heads, mixer.head_dim)
    out, qkv = _dense(weights.out), _dense(weights.qkv)
    largest = out.abs().amax(0).view(grouped).amax(1).flatten()[None]  # [1, kv_heads * d]
    factors = even_out(columns.view(grouped).amax(1).flatten(), largest).to(out.dtype)
    qkv[-mixer.kv_width :] /= factors[:, None]
    if weights.qkv_bias is not None:
        weights.qkv_bias[-mixer.kv_width :] /= factors
    spread = factors.view(mixer.kv_heads, 1, mixer.head_dim).expand(grouped)
    out *= spread.reshape(-1)
