"""The small operators of a decoder's layer on a GPU, one launch each: RMSNorm with the residual's sum, the gated
activation, rotary embedding with the store of keys and values, and the gates behind a mixer. Maths and references:
`layer`.

Shapes: T tokens. Norm: x, residual [T, D], w [D], r = x + residual written back. Activation: [T, 2 I], the gate's half
first, to [T, I]. Rotation: the fused projection [T, heads + 2 kv_heads, head_dim] of queries, keys, values. Heads may
be normed before (Qwen3), and the first values of a head may turn alone. Queries are turned in place; keys and values go
to their cells of the paged store (`kv`), in its dtype or in FP8. Everything is float32 in between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.kv import FP8

_TILE = 1024  # values of an activation's row in one program
_HEADS_TILE = 8  # heads of a token in one program


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, out, eps, row_stride, WIDTH: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * row_stride
    at = tl.arange(0, TILE)
    real = at < WIDTH
    value = tl.load(x + row + at, mask=real, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + at, mask=real, other=0.0).to(tl.float32)
        # What the next layer adds to is rounded to the residual's dtype, and so is what is normed here.
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row + at, rounded, mask=real)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
    normed = value * scale * tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row + at, normed.to(out.dtype.element_ty), mask=real)


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The norm of `x` + `residual`, a new tensor [T, D]; the sum replaces `residual`. Without one: the norm of `x`.

    Raises ValueError for shapes that differ or rows that are not in one piece.
    """
    if residual is not None and (residual.shape != x.shape or residual.stride() != x.stride()):
        raise ValueError(f"residual {tuple(residual.shape)} and input {tuple(x.shape)} differ")
    if x.ndim != 2 or x.stride(1) != 1 or weight.shape != x.shape[1:] or x.stride(0) != x.shape[1]:
        raise ValueError(f"input {tuple(x.shape)}, strides {x.stride()}, and weight {tuple(weight.shape)} do not fit")
    out = torch.empty_like(x)
    if len(x):
        tile = triton.next_power_of_2(x.shape[1])
        _add_norm[(len(x),)](
            x,
            x if residual is None else residual,
            weight,
            out,
            eps,
            x.stride(0),
            WIDTH=x.shape[1],
            TILE=tile,
            ADD=residual is not None,
            num_warps=max(1, min(16, tile // 512)),
        )
    return out


@triton.jit
def _silu_and_mul(gate_up, out, row_stride, INNER: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = at < INNER
    gate = tl.load(gate_up + row * row_stride + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + INNER + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=real)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) up, a new tensor [T, I]. Raises ValueError for an odd width or rows that are not in one piece."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"a fused projection {tuple(gate_up.shape)} with strides {gate_up.stride()} has no two halves")
    inner = gate_up.shape[1] // 2
    out = torch.empty(len(gate_up), inner, dtype=gate_up.dtype, device=gate_up.device)
    if len(out):
        _silu_and_mul[(len(out), triton.cdiv(inner, _TILE))](gate_up, out, gate_up.stride(0), INNER=inner, TILE=_TILE)
    return out


@triton.jit
def _gated_norm(  # type: ignore[no-untyped-def]
    x,
    gate,
    weight,
    out,
    eps,
    gate_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BEFORE: tl.constexpr,  # the gate comes before the norm, and each head has its own weights
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, TILE)
    real = at < DIM
    row = (token * HEADS + head) * DIM + at
    value = tl.load(x + row, mask=real, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_row + head * DIM + at, mask=real, other=0.0).to(tl.float32)
    silu = z / (1.0 + tl.exp(-z))
    if BEFORE:
        value *= silu
        weight += head * DIM
    normed = value * tl.rsqrt(tl.sum(value * value) / DIM + eps)
    normed *= tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    if not BEFORE:
        normed *= silu
    tl.store(out + row, normed.to(out.dtype.element_ty), mask=real)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm(x) silu(gate) for each head, a new tensor [T, H d]: x [T, H, d] in one piece, gate [T, H d], weight [d].

    Raises ValueError for shapes that do not fit.
    """
    return _gated(x, gate, weight, eps, before=False)


def norm_of_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x silu(gate) for each group, a new tensor [T, G d]: x [T, G, d], gate [T, G d], weight [G d].

    Raises ValueError for shapes that do not fit.
    """
    return _gated(x, gate, weight, eps, before=True)


def _gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, before: bool) -> Tensor:
    tokens, heads, dim = x.shape
    of_weight = heads * dim if before else dim
    if not x.is_contiguous() or gate.shape != (tokens, heads * dim) or gate.stride(1) != 1 or len(weight) != of_weight:
        raise ValueError(f"{tuple(x.shape)}, gate {tuple(gate.shape)} and weight {tuple(weight.shape)} do not fit")
    out = torch.empty(tokens, heads * dim, dtype=x.dtype, device=x.device)
    if tokens:
        tile = triton.next_power_of_2(dim)
        sizes = {"HEADS": heads, "DIM": dim, "TILE": tile, "num_warps": max(1, min(8, tile // 128))}
        _gated_norm[(tokens, heads)](x, gate, weight, out, eps, gate.stride(0), BEFORE=before, **sizes)
    return out


@triton.jit
def _sigmoid_gate(x, gate, x_row, gate_row, WIDTH: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = at < WIDTH
    z = tl.load(gate + token * gate_row + at, mask=real, other=0.0).to(tl.float32)
    place = x + token * x_row + at
    value = tl.load(place, mask=real, other=0.0).to(tl.float32)
    tl.store(place, (value / (1.0 + tl.exp(-z))).to(x.dtype.element_ty), mask=real)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x sigmoid(gate), both [T, D], in place. Raises ValueError for shapes that differ."""
    if x.shape != gate.shape or x.stride(1) != 1 or gate.stride(1) != 1:
        raise ValueError(f"{tuple(x.shape)} and its gate {tuple(gate.shape)} differ")
    if len(x):
        tokens, width = x.shape
        grid = (tokens, triton.cdiv(width, _TILE))
        _sigmoid_gate[grid](x, gate, x.stride(0), gate.stride(0), WIDTH=width, TILE=_TILE)
    return x


@triton.jit
def _as_stored(x, stored, IN_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 as the store `stored` points to holds it; the bits of e4m3, rounded to even, by arithmetic on them: not
    every GPU has the conversion.
    """
    if IN_FP8:
        size = tl.minimum(tl.abs(x), 448.0)
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # the exponents' biases are 127 and 7
        small = (size + 16384.0).to(tl.uint32, bitcast=True) & 15  # whose last bit is 2^-9, the least subnormal
        code = tl.where(size < 0.015625, small, normal) | (x.to(tl.uint32, bitcast=True) >> 31 << 7)
        kept = tl.where(x == x, code, 0x7F).to(tl.uint8)
    else:
        kept = x.to(stored.dtype.element_ty)
    return kept


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
    DIM: tl.constexpr,  # the head size
    HALF: tl.constexpr,  # half of the values that turn
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,  # for the values that do not turn; 0: all of them turn
    HEADS_TILE: tl.constexpr,
    NORM: tl.constexpr,
    IN_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    dims = tl.arange(0, HALF_TILE)
    there = (head < HEADS + 2 * KV_HEADS)[:, None]
    real = there & (dims < HALF)[None, :]
    begin = qkv + token * token_stride + head[:, None] * DIM
    at = begin + dims[None, :]
    low = tl.load(at, mask=real, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    turned_low, turned_high = low, high
    cell = tl.load(cells + token) * cell_stride
    k_head, v_head = head - HEADS, head - HEADS - KV_HEADS
    k_begin = keys + cell + k_head[:, None] * head_stride
    v_begin = values + cell + v_head[:, None] * head_stride
    is_key = (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    if REST_TILE > 0:
        others = 2 * HALF + tl.arange(0, REST_TILE)
        kept = there & (others < DIM)[None, :]
        rest = tl.load(begin + others[None, :], mask=kept, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(rest * rest, 1)
            q_rest = tl.load(q_weight + others, mask=others < DIM, other=0.0).to(tl.float32)[None, :]
            k_rest = tl.load(k_weight + others, mask=others < DIM, other=0.0).to(tl.float32)[None, :]
            normed = rest * tl.rsqrt(squares / DIM + eps)[:, None] * tl.where(is_query, q_rest, k_rest)
            rest = tl.where(is_value, rest, normed)
            tl.store(begin + others[None, :], rest.to(qkv.dtype.element_ty), mask=kept & is_query)
        tl.store(k_begin + others[None, :], _as_stored(rest, keys, IN_FP8), mask=kept & is_key)
        tl.store(v_begin + others[None, :], _as_stored(rest, values, IN_FP8), mask=kept & is_value)
    if NORM:
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
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
    k_at = k_begin + dims[None, :]
    v_at = v_begin + dims[None, :]
    kept_low, kept_high = _as_stored(out_low, keys, IN_FP8), _as_stored(out_high, keys, IN_FP8)
    tl.store(k_at, kept_low, mask=real & is_key)
    tl.store(k_at + HALF, kept_high, mask=real & is_key)
    tl.store(v_at, kept_low, mask=real & is_value)
    tl.store(v_at + HALF, kept_high, mask=real & is_value)


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

    `qkv` [T, heads + 2 kv_heads, head_dim], heads in one piece; `cos`, `sin` [context, half]; `positions`,
    `cells` [T] int64; `kv` the paged store; `norms`: weights [head_dim] of queries and keys. Cells must differ from
    each other and lie in the store; nothing checks that on the device. Raises ValueError for other shapes or strides.
    """
    tokens, total, dim = qkv.shape
    kv_heads, half = kv.shape[4], cos.shape[1]
    if total != heads + 2 * kv_heads or dim != kv.shape[5] or dim % 2 or cos.shape[1] * 2 > dim:
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
            DIM=dim,
            HALF=half,
            HALF_TILE=triton.next_power_of_2(half),
            REST_TILE=triton.next_power_of_2(dim - 2 * half) if dim > 2 * half else 0,
            HEADS_TILE=_HEADS_TILE,
            NORM=norms is not None,
            IN_FP8=kv.dtype == FP8,
            num_warps=4,
        )
    return qkv[:, :heads]
