"""Sampling tokens on the device: argmax, Gumbel-max with counter-based noise, and the filters before it.

Maths. A token is drawn from softmax(z) by argmax_i(z_i + g_i), g_i = -log(-log(1 - v_i)), v_i uniform in (0, 1). Here
v_i is a hash of (row key, token id i), and the row key is a hash of (seed, position). So a draw does not depend on the
batch, the order or the device. In 32-bit arithmetic that wraps, where `>>` fills with zeros:

    x = i * 0x9E3779B1 + a;  x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13
    x ^= b;                  x *= 0xC2B2AE35;  x ^= x >> 16;  v = (x >> 1) * 2^-31 + 2^-32

which is MurmurHash3's finaliser with the second key word mixed in half way. (a, b) are the halves of the 64-bit row key
mix(seed ^ mix(position)), where mix is the finaliser of splitmix64. v keeps its precision near 0, where g is large.

Shapes: logits [R, vocabulary], one row for each token to draw; per-row settings [R].
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Keys = npt.NDArray[np.int32]

_MASK64 = (1 << 64) - 1
_TOKEN, _FIRST, _SECOND = (np.uint32(c).astype(np.int32).item() for c in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1: v = 1 would make g minus infinity

# Sorting a whole vocabulary on a CPU is slow. The filters nearly always keep only some of this many largest values.
_HEADS = (64, 1024)


def mix64(x: int) -> int:
    """The finaliser of splitmix64 on the unsigned 64-bit number `x`."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def row_keys(seeds: list[int], positions: list[int]) -> Keys:
    """Noise keys [R, 2] of rows that draw the token at `positions[r]` under `seeds[r]` (taken modulo 2^64)."""
    keys = [mix64((seed & _MASK64) ^ mix64(position)) for seed, position in zip(seeds, positions, strict=True)]
    return np.array(keys, dtype="<u8").view("<i4").reshape(-1, 2)


def gumbel_noise(keys: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise [R, vocabulary] in float32 for `keys` [R, 2] int32."""
    # int32 wraps like uint32 in torch; only its right shift brings sign bits in, so they are masked away.
    x = torch.arange(vocabulary, dtype=torch.int32, device=keys.device).mul_(_TOKEN) + keys[:, :1]
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF))
    x.bitwise_xor_(keys[:, 1:]).mul_(_SECOND)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    v = (x >> 1).bitwise_and_(0x7FFFFFFF).float().mul_(2.0**-31).add_(2.0**-32).clamp_(max=_BELOW_ONE)
    return v.neg_().log1p_().neg_().log_().neg_()


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, [R] int64; the first one of equals."""
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """Per-row filters on the device, [R, 1]: top_k int64 (0: all), top_p and min_p float32 (1 and 0: all)."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def filter_logits(logits: Tensor, filters: Filters) -> Tensor:
    """`logits` [R, vocabulary] float32 with every token outside a row's filters at minus infinity; a new tensor.

    In this order: the top_k most likely; of these, renormalised, the fewest that hold top_p of the mass; of these,
    those at least min_p times as likely as the first. Tokens equal to the last one kept stay, so the result depends
    on values alone. At least one token stays.
    """
    vocabulary = logits.shape[-1]
    sizes = [vocabulary]
    if logits.device.type == "cpu":
        most = int(filters.top_k.max())
        sizes = sorted({min(vocabulary, max(size, most)) for size in (*_HEADS, vocabulary)})
    for size in sizes:
        cutoff, enough = _cutoff(logits, filters, size)
        if size == vocabulary or bool(enough.all()):
            break
    return logits.masked_fill(logits < cutoff, -torch.inf)


def _cutoff(logits: Tensor, filters: Filters, size: int) -> tuple[Tensor, Tensor]:
    """The least logit that each row keeps, [R, 1], from its `size` largest; and whether these were enough.

    `size` is at least the largest top_k.
    """
    vocabulary = logits.shape[-1]
    top = logits.topk(size, dim=-1).values if size < vocabulary else logits.sort(dim=-1, descending=True).values
    weight = (top - top[:, :1]).exp()  # probability relative to the most likely token's
    mass = weight.cumsum(-1)
    limit = torch.where(filters.top_k > 0, filters.top_k.clamp(max=vocabulary), vocabulary)
    whole = (logits - top[:, :1]).exp().sum(-1, keepdim=True)
    total = torch.where(limit < vocabulary, mass.gather(1, limit.clamp(max=size) - 1), whole)
    rank = torch.arange(size, device=logits.device)
    # A token is kept while the mass of the more likely ones is below top_p.
    nucleus = (mass - weight < filters.top_p * total) | (filters.top_p >= 1.0)
    kept = (rank < limit) & nucleus & (weight >= filters.min_p)
    kept[:, 0] = True
    cutoff = top.gather(1, kept.sum(-1, keepdim=True) - 1)
    unfiltered = (limit == vocabulary) & (filters.top_p >= 1.0) & (filters.min_p <= 0.0)
    # If the last of these is not kept, no smaller one is.
    return torch.where(unfiltered, -torch.inf, cutoff), ~kept[:, -1:] | (limit <= size) | unfiltered


def gumbel_argmax(logits: Tensor, temperature: Tensor, keys: Tensor, filters: Filters | None = None) -> Tensor:
    """Draw a token for each row, [R] int64.

    `logits` [R, vocabulary] float32; `temperature` [R, 1] float32 above 0; `keys` [R, 2] int32 from `row_keys`.
    Raises ValueError for settings of another number of rows.
    """
    rows = logits.shape[0]
    if temperature.shape != (rows, 1) or keys.shape != (rows, 2):
        raise ValueError(f"{rows} rows, but temperature {tuple(temperature.shape)} and keys {tuple(keys.shape)}")
    scaled = logits / temperature
    if filters is not None:
        scaled = filter_logits(scaled, filters)
    return (scaled + gumbel_noise(keys, logits.shape[-1])).argmax(-1)


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probability [R] of `tokens` [R] under softmax of `logits`, and the `top` largest with ids, [R, top] each."""
    logs = logits.float().log_softmax(-1)
    values, ids = logs.topk(min(top, logs.shape[-1]), dim=-1)
    return logs.gather(1, tokens[:, None]).squeeze(1), values, ids


def gumbel_noise_reference(keys: Keys, vocabulary: int) -> npt.NDArray[np.float64]:
    """`gumbel_noise` in numpy's unsigned 32-bit integers and float64."""
    a, b = keys.view(np.uint32)[:, :1], keys.view(np.uint32)[:, 1:]
    x = np.arange(vocabulary, dtype=np.uint32)[None] * np.uint32(0x9E3779B1) + a
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x = (x ^ b) * np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    v = (x >> np.uint32(1)).astype(np.float64) * 2.0**-31 + 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-v))
    return noise


def gumbel_argmax_reference(
    logits: Tensor, temperature: Tensor, keys: Tensor, filters: Filters | None = None
) -> Tensor:
    """`gumbel_argmax`, row by row over sorted probabilities."""
    tokens = []
    for row in range(logits.shape[0]):
        scaled = (logits[row] / temperature[row]).double()
        if filters is not None:
            top_k, top_p, min_p = (float(f[row]) for f in (filters.top_k, filters.top_p, filters.min_p))
            order = scaled.sort(descending=True)
            kept = int(top_k) or len(scaled)
            probabilities = order.values[:kept].softmax(-1)
            before = probabilities.cumsum(0) - probabilities
            inside = [
                i
                for i in range(len(probabilities))
                if i == 0 or ((before[i] < top_p or top_p >= 1) and probabilities[i] >= min_p * probabilities[0])
            ]
            hidden = torch.ones_like(scaled, dtype=torch.bool)
            hidden[order.indices[inside]] = False
            scaled = scaled.masked_fill(hidden, -torch.inf)
        noise = gumbel_noise_reference(keys[row : row + 1].numpy(), len(scaled))[0]
        tokens.append(int((scaled + torch.from_numpy(noise)).argmax()))
    return torch.tensor(tokens)
