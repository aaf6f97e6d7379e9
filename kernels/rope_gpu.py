"""Rotary position embedding of queries and keys, fused with the store of keys and values: one launch a layer on a GPU.

The input is the fused projection of T tokens, [T, heads + 2 kv_heads, head_dim]: queries, keys, values. For queries and
keys x of position p, halves paired as in the checkpoints (x1, x2 the halves, c and s the table's row of p):

    y1 = x1 c - x2 s        y2 = x2 c + x1 s

and before that, for models that norm their heads (Qwen3), x = w x / sqrt(mean(x^2) + eps). Queries are turned where
they lie; keys and values go to their cells of the paged store (`kv`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS_TILE = 8


@triton.jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    positions,
    cells,
    keys,
    values,
    q_weight,
    k_weight,
    eps,
    token_stride,
    table_stride,
    cell_stride,
    head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half of the head size
    HALF_TILE: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    dims = tl.arange(0, HALF_TILE)
    real = (head < HEADS + 2 * KV_HEADS)[:, None] & (dims < HALF)[None, :]
    at = qkv + token * token_stride + head[:, None] * (2 * HALF) + dims[None, :]
    low = tl.load(at, mask=real, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    turned_low, turned_high = low, high
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        inside = dims < HALF
        q_low = tl.load(q_weight + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_weight + HALF + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_weight + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_weight + HALF + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        turned_low = low * scale * tl.where(is_query, q_low, k_low)
        turned_high = high * scale * tl.where(is_query, q_high, k_high)
    position = tl.load(positions + token)
    c = tl.load(cos + position * table_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + position * table_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    out_low = tl.where(is_value, low, turned_low * c - turned_high * s)
    out_high = tl.where(is_value, high, turned_high * c + turned_low * s)
    tl.store(at, out_low.to(qkv.dtype.element_ty), mask=real & is_query)
    tl.store(at + HALF, out_high.to(qkv.dtype.element_ty), mask=real & is_query)
    cell = tl.load(cells + token) * cell_stride
    k_head, v_head = head - HEADS, head - HEADS - KV_HEADS
    k_at = keys + cell + k_head[:, None] * head_stride + dims[None, :]
    v_at = values + cell + v_head[:, None] * head_stride + dims[None, :]
    is_key = (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
    tl.store(k_at, out_low.to(keys.dtype.element_ty), mask=real & is_key)
    tl.store(k_at + HALF, out_high.to(keys.dtype.element_ty), mask=real & is_key)
    tl.store(v_at, out_low.to(values.dtype.element_ty), mask=real & is_value)
    tl.store(v_at + HALF, out_high.to(values.dtype.element_ty), mask=real & is_value)


def rotate_and_store(
    qkv: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    layer: int,
    cells: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Turn queries in place and store keys and values; returns the queries, a view [T, heads, head_dim] of `qkv`.

    `qkv` [T, heads + 2 kv_heads, head_dim], heads in one piece; `cos`, `sin` [context, head_dim / 2]; `positions`,
    `cells` [T] int64; `kv` the paged store; `norms`: weights [head_dim] of queries and keys. Cells must differ from
    each other and lie in the store; nothing checks that on the device. Raises ValueError for other shapes or strides.
    """
    tokens, total, dim = qkv.shape
    kv_heads = kv.shape[4]
    if total != heads + 2 * kv_heads or dim != kv.shape[5] or dim % 2 or cos.shape[1] * 2 != dim:
        raise ValueError(f"{tuple(qkv.shape)} with {heads} heads does not fit the store {tuple(kv.shape)}")
    if qkv.stride()[1:] != (dim, 1) or kv.stride(5) != 1 or kv.stride(2) != kv.shape[3] * kv.stride(3):
        raise ValueError(f"strides {qkv.stride()} of the tokens or {kv.stride()} of the store cannot be used in place")
    if cells.shape != (tokens,) or positions.shape != (tokens,) or cos.stride() != sin.stride():
        raise ValueError(f"{tokens} tokens, but {len(cells)} cells and {len(positions)} positions")
    if tokens:
        weights = norms or (qkv, qkv)
        _rotate_and_store[(tokens, triton.cdiv(total, _HEADS_TILE))](
            qkv,
            cos,
            sin,
            positions,
            cells,
            kv[layer, 0],
            kv[layer, 1],
            *weights,
            eps,
            qkv.stride(0),
            cos.stride(0),
            kv.stride(3),
            kv.stride(4),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            HALF_TILE=triton.next_power_of_2(dim // 2),
            HEADS_TILE=_HEADS_TILE,
            NORM=norms is not None,
            num_warps=4,
        )
    return qkv[:, :heads]


def rotate_and_store_reference(
    qkv: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    layer: int,
    cells: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`rotate_and_store` in torch, in float64; queries are a new tensor."""
    kv_heads = kv.shape[4]
    q, k, v = torch.split(qkv.double(), [heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.double()
            for x, w in zip((q, k), norms, strict=True)
        )
    c, s = (table[positions].double()[:, None] for table in (cos, sin))
    q, k = (torch.cat((low * c - high * s, high * c + low * s), -1) for low, high in (x.chunk(2, -1) for x in (q, k)))
    stored = kv[layer].flatten(1, 2)
    stored[0, cells], stored[1, cells] = k.to(kv.dtype), v.to(kv.dtype)
    return q.to(qkv.dtype)
