"""Attention of any mix of chunks over the paged KV store.

Maths, for query token t of chunk c at position p, head h of KV head h // group, over the positions j of its sequence
that it may see, p - window < j <= p:

    s_j = scale * q_t . k_j                  s_j = softcap * tanh(s_j / softcap) with a softcap
    o_t = sum_j softmax(s)_j v_j

Some models have learnt a sink for each query head: a score of its own, neither scaled nor bent, that joins the
softmax's sum and has no value, so that a token may attend to nothing: with the log-sum-exp l of the s_j it leaves
o_t / (1 + e^(sink - l)).
Source: gpt-oss (OpenAI 2025), after Xiao et al. 2023.

Shapes: q [T, heads, head_dim]; k, v [T, kv_heads, head_dim] of the same tokens; store
[layers, 2, pages, page_size, kv_heads, head_dim], or in int8 as `kv` has it; sinks [heads]; output
[T, heads, head_dim]; group = heads / kv_heads. The tokens' own keys and values must be in the store already
(`kv.store_kv`).

Attention over a split set of positions merges exactly: with o_i, l_i the output and log-sum-exp over part i,
o = sum_i exp(l_i - l) o_i, l = log sum_i exp(l_i). That is how runs of pages are read where they lie.
"""

import torch
from torch import Tensor

from holdfast.kernels.attention_c import attend_c, takes
from holdfast.kernels.attention_cpu import attend_cpu
from holdfast.kernels.kv import head_dim, in_numbers
from holdfast.kernels.paging import PagedBatch


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with `q` of one layer; see the module's maths and shapes. Returns [T, heads, head_dim] in q's dtype.

    `window`: how many positions back a token sees, itself included; None: all. Raises ValueError for shapes that do
    not belong together.
    """
    tokens, heads, dim = q.shape
    if dim != head_dim(kv):
        raise ValueError(f"query {tuple(q.shape)} does not fit the store {tuple(kv.shape)}")
    if heads % kv.shape[4] or tokens != batch.cells.shape[0]:
        raise ValueError(f"{heads} heads over {kv.shape[4]}, {tokens} tokens against {batch.cells.shape[0]} cells")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks {tuple(sinks.shape)} for {heads} heads")
    if q.device.type == "cpu":
        attend = attend_c if takes(q, kv, batch) else attend_cpu
        return attend(q, kv, layer, batch, scale, window or 0, softcap or 0.0, sinks)
    if kv.dtype == torch.int8:
        raise ValueError("a store in int8 is read on a CPU")
    from holdfast.kernels.attention_gpu import attend_gpu  # Triton comes with torch for a GPU and not for a CPU

    return attend_gpu(q, kv, layer, batch, scale, window or 0, softcap or 0.0, sinks)


def paged_attention_reference(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention`, chunk by chunk: gather the sequence's cells, then a plain softmax in `dtype`."""
    out = torch.empty_like(q)
    keys, values = kv[layer].flatten(1, 2).unbind(0)
    group = q.shape[1] // kv.shape[4]
    first = 0
    for chunk, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        cells = batch.cells_of(chunk, 0, start + length)
        k = in_numbers(keys[cells], dtype).repeat_interleave(group, dim=1)  # [positions, heads, head_dim]
        v = in_numbers(values[cells], dtype).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[first : first + length].to(dtype), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        seen = torch.arange(start + length, device=q.device)
        asking = seen[start:, None]
        visible = (seen <= asking) & (seen > asking - window) if window else seen <= asking
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = scores.softmax(-1)
        if sinks is not None:
            weights = weights * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks.to(dtype)[:, None, None])
        out[first : first + length] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        first += length
    return out
