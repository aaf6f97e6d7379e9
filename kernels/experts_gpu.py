"""A layer of experts on a GPU, over weights in 16 or 32 bits, FP8, MXFP4 or NVFP4. Maths and references: `experts`.

The pairs of a token and one of its experts are sorted by expert. Each program takes some outputs of one expert for a
block of its pairs, so only chosen experts are read. A layer is four launches:

    sort       pairs by expert, and blocks of pairs of one expert
    gate, up   inner [P, I] in sorted order, with the activation
    down       y [P, D] in the order of the tokens, times the routing weight
    sum        of each token's y in the order of its experts, in float32

All sizes follow from the number of tokens, and nothing waits for the device, so graphs can capture a layer. A token's
sums are in the same order in any company: the number of tokens decides how many pairs a program takes, and not how many
inputs. A pair without an expert (a negative number) costs nothing and adds nothing. Tokens that only fill a graph up
should have such pairs.

Weights become numbers of x's dtype in registers. FP8: 128 inputs are summed before the block's scale multiplies.
MXFP4, NVFP4: the scale multiplies each number, which is exact in bfloat16. A word of 16 bits holds four numbers in an
order from which a shift and a mask make bfloat16, for two words at once (`_packed`).

Many tokens may go through torch's grouped product instead where weights are in bfloat16 (`choose_experts`). With
quantised weights it is slower: they would have to be written in bfloat16 first.

Shapes: T tokens of width D, E experts of inner width I, k chosen by each token, P = T k pairs.
"""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from holdfast.kernels.attention_gpu import INTERPRETED
from holdfast.kernels.experts import Routing, route
from holdfast.kernels.linear import ALPHA, LIMIT, Activation, activate
from holdfast.kernels.quantized import E8M0, FP8, QuantizedWeight, Weight

log = logging.getLogger(__name__)

Form: TypeAlias = Literal["plain", "fp8", "fp4"]
Seconds: TypeAlias = Callable[[Callable[[], object]], float]
"""Times a call on the device."""

_NEVER: Final = sys.maxsize
_TIMED = (256, 1024, 4096)  # tokens with which both ways are timed
_GAIN = 1.02  # least speed-up at which torch's replaces ours
_CLOSE = 0.03  # largest relative error between them
_SCANNED = 1024  # pairs, or values of a token, that a program takes at once
_RAISED = 62  # MXFP4's exponents are raised by it: bfloat16 then holds scales from 2^-61 to 2^65, times 2^-64
_MOST_CHOSEN, _MOST_EXPERTS = 16, 1024  # that `route_gpu` takes


@dataclass(frozen=True, slots=True)
class _ExpertTile:
    """A program's share: pairs, rows of weights (a gate's and an up's in turn), and inputs at a time; tiles in flight,
    as far as there is room.
    """

    pairs: int
    rows: int
    depth: int
    warps: int
    stages: int = 4


_MANY = _ExpertTile(128, 128, 64, 8)
_TILES = ((8, _ExpertTile(16, 64, 128, 4)), (96, _ExpertTile(64, 128, 64, 8)), (_NEVER, _MANY))
"""By up to how many pairs an expert has in the mean."""
_DEPTH = 128  # of weights in 8 and 4 bits: the same in every tile, for it has a part in the order of the sum
_PACKED_TILES = (
    (8, _ExpertTile(16, 64, _DEPTH, 4)),
    (32, _ExpertTile(32, 128, _DEPTH, 4)),
    (_NEVER, _ExpertTile(64, 256, _DEPTH, 8, 3)),
)
"""The fastest on an H100, of weights in 8 and 4 bits."""
_ROOM = 160 << 10  # bytes of shared memory for tiles in flight

# ---- routing


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits,
    correction,
    experts,
    weights,
    row_stride,
    scale,
    softcap,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CORRECTION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at, place = tl.arange(0, TILE), tl.arange(0, WIDTH)
    real = at < EXPERTS
    z = tl.load(logits + token * row_stride + at, mask=real, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
    if SIGMOID:
        scores = tl.sigmoid(z)
    else:
        scores = tl.exp(z - tl.max(z, 0))
        scores = scores / tl.sum(tl.where(real, scores, 0.0), 0)
    ranked = scores
    if CORRECTION:
        ranked += tl.load(correction + at, mask=real, other=0.0)
    ranked = tl.where(real & (ranked == ranked), ranked, float("-inf"))  # whatever the logits, an expert that exists
    chosen, shares = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.float32)
    for j in tl.static_range(CHOSEN):
        best = tl.argmax(ranked, 0)
        share = tl.sum(tl.where(at == best, scores, 0.0), 0)
        chosen, shares = tl.where(place == j, best, chosen), tl.where(place == j, share, shares)
        ranked = tl.where(at == best, float("-inf"), ranked)
    if NORMALISED:
        shares = shares / (tl.sum(shares, 0) + 1e-20)
    there = token * CHOSEN + place
    tl.store(experts + there, chosen, mask=place < CHOSEN)
    tl.store(weights + there, shares * scale, mask=place < CHOSEN)


def route_gpu(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`experts.route` in one launch: equal scores choose the lower expert. By torch where experts form groups."""
    tokens, experts = logits.shape
    if routing.groups > 1 or routing.chosen > _MOST_CHOSEN or experts > _MOST_EXPERTS or logits.stride(1) != 1:
        return route(logits, routing, correction)
    chosen = torch.empty(tokens, routing.chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.chosen, dtype=torch.float32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits,
            logits if correction is None else correction,
            chosen,
            weights,
            logits.stride(0),
            routing.scale,
            routing.softcap,
            EXPERTS=experts,
            CHOSEN=routing.chosen,
            TILE=triton.next_power_of_2(experts),
            WIDTH=triton.next_power_of_2(routing.chosen),
            SIGMOID=routing.score == "sigmoid",
            NORMALISED=routing.normalised,
            SOFTCAP=routing.softcap != 0,
            CORRECTION=correction is not None,
            num_warps=1 if experts <= 128 else 4,
        )
    return chosen, weights


# ---- pairs by expert


@triton.jit(do_not_specialize=["pairs"])
def _sort(  # type: ignore[no-untyped-def]
    chosen,
    order,  # [P]: pairs by expert, those without one at the end
    ends,  # [E + 1]: where each expert's pairs end in `order`
    blocks,  # [2 N + 1]: how many there are; then of each its expert, and where it begins in `order`
    pairs,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    expert, lane, bins = tl.program_id(0), tl.arange(0, TILE), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in tl.range(0, pairs, TILE):
        counts += tl.histogram(_expert_of(chosen, start + lane, pairs, EXPERTS, BINS), BINS)
    before = bins < expert
    begin, own = tl.sum(tl.where(before, counts, 0), 0), tl.sum(tl.where(bins == expert, counts, 0), 0)
    block = tl.sum(tl.where(before, (counts + PAIRS - 1) // PAIRS, 0), 0)
    tl.store(ends + expert, begin + own)
    if expert < EXPERTS:
        for i in tl.range(0, tl.cdiv(own, PAIRS)):
            tl.store(blocks + 2 * (block + i) + 1, expert)
            tl.store(blocks + 2 * (block + i) + 2, begin + i * PAIRS)
    else:
        tl.store(blocks, block)
    place = begin
    for start in tl.range(0, pairs, TILE):
        found = (_expert_of(chosen, start + lane, pairs, EXPERTS, BINS) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(found, 0) - 1, start + lane, mask=found > 0)
        place += tl.sum(found, 0)


@triton.jit
def _expert_of(chosen, pair, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin of a pair: its expert's, EXPERTS for none, and the last one beyond the pairs."""
    expert = tl.load(chosen + pair, mask=pair < pairs, other=0).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)
    return tl.where(pair < pairs, expert, BINS - 1)


@dataclass(frozen=True, slots=True)
class _Sorted:
    """What `_sort` writes, and the most blocks that there can be."""

    order: Tensor
    ends: Tensor
    blocks: Tensor
    most: int


def _sorted(chosen: Tensor, experts: int, tile: _ExpertTile) -> _Sorted:
    pairs = chosen.numel()
    used = min(pairs, experts)
    most = used + (pairs - used) // tile.pairs
    room = torch.empty(pairs + experts + 1 + 2 * most + 1, dtype=torch.int32, device=chosen.device)
    order, ends, blocks = torch.split(room, [pairs, experts + 1, 2 * most + 1])
    _sort[(experts + 1,)](
        chosen,
        order,
        ends,
        blocks,
        pairs,
        EXPERTS=experts,
        PAIRS=tile.pairs,
        BINS=max(32, triton.next_power_of_2(experts + 2)),
        TILE=max(32, min(_SCANNED, triton.next_power_of_2(pairs))),
        num_warps=4,
    )
    return _Sorted(order, ends, blocks, most)


# ---- products

# Two words at once become pairs of bfloat16: sign, exponent and mantissa are moved to their places and nothing else.
_TWO_NUMBERS = tl.constexpr(
    "{ .reg .b32 s, t;"
    " shl.b32 s, $2, 8; and.b32 s, s, 0x80008000; shl.b32 t, $2, 4; lop3.b32 $0, t, 0x07F007F0, s, 0xEA;"
    " and.b32 s, $2, 0x80008000; shr.u32 t, $2, 4; lop3.b32 $1, t, 0x07F007F0, s, 0xEA; }"
)
_FOUR_NUMBERS = tl.constexpr(
    "{ .reg .b32 s, t;"
    " and.b32 $0, $4, 0x81C081C0;"
    " shl.b32 s, $4, 3; and.b32 $1, s, 0x81C081C0;"
    " shl.b32 s, $4, 6; and.b32 $2, s, 0x81C081C0;"
    " shl.b32 s, $4, 1; and.b32 s, s, 0x80008000;"
    " shr.u32 t, $4, 5; lop3.b32 s, t, 0x01000100, s, 0xEA;"
    " shr.u32 t, $4, 4; lop3.b32 $3, t, 0x00C000C0, s, 0xEA; }"
)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _numbers(words, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each word's two numbers of e4m3, times 2^-120, or four of e2m1, times 2^-126. In the interpreter, which has no
    assembly and no products of bfloat16, as float32."""
    w = words.to(tl.int32) & 0xFFFF
    if FORM == "fp8":
        if _INTERPRETED:
            return _widened(w << 8 & 0x8000 | w << 4 & 0x07F0), _widened(w & 0x8000 | w >> 4 & 0x07F0)
        else:
            return tl.inline_asm_elementwise(
                _TWO_NUMBERS, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
    else:
        if _INTERPRETED:
            last = w << 1 & 0x8000 | w >> 5 & 0x0100 | w >> 4 & 0x00C0
            return _widened(w & 0x81C0), _widened(w << 3 & 0x81C0), _widened(w << 6 & 0x81C0), _widened(last)
        else:
            return tl.inline_asm_elementwise(
                _FOUR_NUMBERS,
                "=&r,=&r,=&r,=&r,r",
                [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )


@triton.jit
def _widened(bits):  # type: ignore[no-untyped-def]
    """float32 from bfloat16's bits."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _columns(at, depth, INPUTS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile [rows, depth] of weights or scales."""
    if WHOLE:
        return tl.load(at + depth[None, :])
    else:
        return tl.load(at + depth[None, :], mask=(depth < INPUTS)[None, :], other=0)


@triton.jit
def _inputs(at, real, depth, INPUTS: tl.constexpr, WHOLE: tl.constexpr, OPERAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile [depth, pairs] of x. Pairs that are not `real` are not read: every program would read the same ones."""
    mask = real[None, :] if WHOLE else real[None, :] & (depth < INPUTS)[:, None]
    return tl.load(at + depth[:, None], mask=mask, other=0.0).to(OPERAND)


@triton.jit
def _word_scales(stored, WIDE: tl.constexpr, BFLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of words, times 2^62: [rows, groups] -> [rows, words]. Groups of 32 have e8m0's exponent, raised by
    62, those of 16 have e4m3. `stored` has four scales of which a group's is one."""
    ROWS: tl.constexpr = stored.shape[0]
    GROUPS: tl.constexpr = stored.shape[1]
    scales = stored >> (8 * (tl.arange(0, GROUPS) % 4))[None, :]
    if WIDE == 32:
        bits = (scales & 0xFF) << 7
    else:
        bits = (scales & 0x7F) << 4
    if BFLOAT:
        values = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        values = _widened(bits)
    if WIDE == 16:
        values = values * 1.329227995784916e36 * 4611686018427387904.0  # 2^120 and 2^62
    return tl.reshape(tl.broadcast_to(values[:, :, None], [ROWS, GROUPS, WIDE // 4]), [ROWS, GROUPS * WIDE // 4])


@triton.jit
def _activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh z) / 2 = sigmoid(2 z)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(ACTIVATION == "clamped")
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate * tl.sigmoid(alpha * gate)


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    x,  # with a gate [T, D], behind it [P, I] in sorted order
    weight,
    scale,
    global_scale,
    bias,
    shares,
    order,
    ends,
    blocks,
    out,  # [P, I] in sorted order, or [P, D] in the order of tokens
    x_stride,
    alpha,
    limit,
    CHOSEN: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # rows of an expert's matrix
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    FORM: tl.constexpr,
    HIGH: tl.constexpr,  # outputs and
    WIDE: tl.constexpr,  # inputs of a scale
    GLOBAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "" for the product behind it
    BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    number = tl.program_id(1)
    if number >= tl.load(blocks):
        return
    expert, begin = tl.load(blocks + 2 * number + 1), tl.load(blocks + 2 * number + 2)
    at = begin + tl.arange(0, PAIRS)
    real = at < tl.load(ends + expert)
    pair = tl.load(order + at, mask=real, other=0)
    row = tl.where(real, at, 0) if ACTIVATION == "" else pair // CHOSEN
    x_at = x + (row.to(tl.int64) * x_stride)[None, :]

    GATED: tl.constexpr = ACTIVATION != "" and ACTIVATION != "relu2"
    WIDTH: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    lane = tl.arange(0, ROWS)
    if GATED:
        output = tl.program_id(0) * (ROWS // 2) + lane // 2 + lane % 2 * WIDTH
    else:
        output = tl.program_id(0) * ROWS + lane
    output = tl.minimum(output, OUTPUTS - 1)  # beyond the last one nothing is written
    line = expert.to(tl.int64) * OUTPUTS + output

    WHOLE: tl.constexpr = INPUTS % DEPTH == 0
    total = tl.zeros([ROWS, PAIRS], tl.float32)
    if FORM == "plain":
        for start in tl.range(0, INPUTS, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            w = _columns(weight + line[:, None] * INPUTS, depth, INPUTS, WHOLE).to(OPERAND)
            a = _inputs(x_at, real, depth, INPUTS, WHOLE, OPERAND)
            total = tl.dot(w, a, total, input_precision=PRECISION)
    else:
        BFLOAT: tl.constexpr = tl.bfloat16 == OPERAND
        EACH: tl.constexpr = 2 if FORM == "fp8" else 4  # numbers of a word
        word = tl.arange(0, DEPTH // EACH)
        RUN: tl.constexpr = 8 if FORM == "fp8" else WIDE // 4  # words whose first numbers lie side by side
        first = word // RUN * (RUN * EACH) + word % RUN
        if FORM == "fp8":
            scales = scale + (expert.to(tl.int64) * tl.cdiv(OUTPUTS, HIGH) + output // HIGH) * tl.cdiv(INPUTS, WIDE)
        else:
            FOURS: tl.constexpr = (INPUTS // WIDE + 3) // 4
            scales = scale + line * FOURS
        for start in tl.range(0, INPUTS, DEPTH):
            words = _columns(weight + line[:, None] * (INPUTS // EACH), start // EACH + word, INPUTS // EACH, WHOLE)
            numbers = _numbers(words, FORM)
            if FORM == "fp8":
                factor, part = 1.329227995784916e36, tl.zeros([ROWS, PAIRS], tl.float32)  # 2^120
            else:
                # Every group reads four scales: only copies of at least 4 bytes can run ahead of their use.
                four = start // (4 * WIDE) + tl.arange(0, DEPTH // WIDE) // 4
                stored = _columns(scales[:, None], four, FOURS, WHOLE)
                factor, part = _word_scales(stored, WIDE, BFLOAT), total
            for k in tl.static_range(EACH):
                if BFLOAT:
                    w = numbers[k] * factor
                else:
                    w = numbers[k].to(tl.float32) * factor
                    if FORM == "fp4":
                        w *= 18446744073709551616.0  # 2^64
                a = _inputs(x_at, real, start + RUN * k + first, INPUTS, WHOLE, OPERAND)
                part = tl.dot(w.to(OPERAND), a, part, input_precision=PRECISION)
            total = total + part * tl.load(scales + start // WIDE)[:, None] if FORM == "fp8" else part
        if FORM == "fp4" and BFLOAT:
            total *= 18446744073709551616.0
    if GLOBAL:
        total *= tl.load(global_scale + line)[:, None]
    if BIAS:
        total += tl.load(bias + line).to(tl.float32)[:, None]

    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [ROWS // 2, 2, PAIRS]), (0, 2, 1)))
        y = _activated(gate, up, alpha, limit, ACTIVATION)
        column = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        if ACTIVATION == "relu2":
            y = tl.maximum(total, 0.0) * tl.maximum(total, 0.0)
        else:
            y = total * tl.load(shares + pair).to(tl.float32)[None, :]
        column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (at if ACTIVATION != "" else pair).to(tl.int64) * WIDTH
    tl.store(
        out + there[None, :] + column[:, None],
        y.to(out.dtype.element_ty),
        mask=real[None, :] & (column < WIDTH)[:, None],
    )


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    y,
    chosen,
    plus,
    out,
    plus_stride,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PLUS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = at < WIDTH
    total = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(CHOSEN):
        expert = tl.load(chosen + token * CHOSEN + j)
        some = real & (expert >= 0) & (expert < EXPERTS)
        total += tl.load(y + (token * CHOSEN + j) * WIDTH + at, mask=some, other=0.0).to(tl.float32)
    if PLUS:
        total += tl.load(plus + token * plus_stride + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + at, total.to(out.dtype.element_ty), mask=real)


# ---- a layer


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A matrix [outputs, inputs] of each expert, as `_multiply` reads them."""

    form: Form
    experts: int
    outputs: int
    inputs: int
    weight: Tensor
    scale: Tensor
    block: tuple[int, int] = (1, 1)  # outputs and inputs of a scale
    global_scale: Tensor | None = None  # [E, outputs, 1]

    @staticmethod
    def of(weight: Weight) -> "_Matrices":
        """Formats that the kernel does not read become bfloat16. Raises ValueError for strided weights."""
        experts, outputs, inputs = weight.shape
        if isinstance(weight, QuantizedWeight):
            sizes, (high, wide) = (experts, outputs, inputs), weight.block
            scales = weight.scales.contiguous()
            further = (weight.block, None if weight.global_scale is None else weight.global_scale.contiguous())
            if weight.numbers == "e4m3" and not inputs % 16 and (wide >= inputs or not wide % _DEPTH):
                return _Matrices("fp8", *sizes, _paired(weight.codes), scales.float(), *further)
            if weight.numbers == "e2m1" and high == 1 and not inputs % wide:
                if (wide, scales.dtype) == (32, E8M0):
                    return _Matrices("fp4", *sizes, _packed(weight.codes, wide), _fours(_raised(scales)), *further)
                if (wide, scales.dtype) == (16, FP8):
                    return _Matrices("fp4", *sizes, _packed(weight.codes, wide), _fours(scales), *further)
            log.info("experts with %s in blocks of %s become bfloat16", weight.numbers, weight.block)
            weight = weight.dequantized(torch.bfloat16)
        if not weight.is_contiguous():
            raise ValueError(f"experts with strides {weight.stride()}")
        return _Matrices("plain", experts, outputs, inputs, weight, weight)


def _paired(codes: Tensor) -> Tensor:
    """Bytes [E, out, in] as words of 16 bits [E, out, in / 2]: word j of eight has the numbers j and 8 + j of 16."""
    experts, outputs, inputs = codes.shape
    words = codes.reshape(experts, outputs, inputs // 16, 2, 8).mT.contiguous()
    return words.view(torch.int16).view(experts, outputs, inputs // 2)


def _packed(codes: Tensor, wide: int) -> Tensor:
    """Codes of 4 bits [E, out, in / 2] in words of 16 bits [E, out, in / 4], as `_numbers` takes them apart.

    Word j of n = wide / 4 has the numbers j, n + j, 2n + j and 3n + j of a block, a sign and three bits of each:
    bits 15 and 8-6, 12 and 5-3, 9 and 2-0, 14 and 13, 11, 10.
    """
    experts, outputs, pairs = codes.shape
    words = torch.empty(experts, outputs, pairs // 2, dtype=torch.int16, device=codes.device)
    for each, into in zip(codes, words, strict=True):
        code = torch.stack((each & 15, each >> 4), -1).int().view(outputs, -1, 4, wide // 4)
        (a, b, c, d), sign = (code & 7).unbind(2), (code >> 3).unbind(2)
        word = (a << 6) + (b << 3) + c + ((d & 4) << 11) + ((d & 3) << 10)
        word += (sign[0] << 15) + (sign[1] << 12) + (sign[2] << 9) + (sign[3] << 14)
        into.copy_(word.flatten(1))
    return words


def _fours(scales: Tensor) -> Tensor:
    """Bytes [E, out, groups] as words of four, with zeros at the end."""
    return pad(scales.view(torch.uint8), (0, -scales.shape[-1] % 4)).view(torch.int32)


def _raised(scales: Tensor) -> Tensor:
    """e8m0's exponents, raised. Raises ValueError for scales beyond 2^65, and NaN."""
    exponents = scales.view(torch.uint8)
    if exponents.numel() and int(exponents.max()) + _RAISED >= 255:
        raise ValueError("MXFP4 weights have a scale beyond 2^65")
    return exponents + _RAISED


class GpuExperts:
    """`experts.Experts` on a GPU, over plain or quantised weights. Negative numbers in `chosen` are no expert.

    `grouped_from`: with so many tokens torch's grouped product multiplies (`choose_experts`).
    """

    __slots__ = ("_activation", "_biases", "_clamp", "_down", "_gate_up", "grouped_from")

    def __init__(
        self,
        gate_up: Weight,
        down: Weight,
        activation: Activation,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        int8: bool = False,
        alpha: float = ALPHA,
        limit: float = LIMIT,
    ) -> None:
        """Raises ValueError for `int8`, and for weights that do not belong together."""
        if int8:
            raise ValueError("int8 products are computed on a CPU")
        (experts, width, inner), halves = down.shape, 1 if activation == "relu2" else 2
        if gate_up.shape != (experts, halves * inner, width):
            raise ValueError(f"{tuple(gate_up.shape)} in front of {tuple(down.shape)} with {activation}")
        self._gate_up, self._down = _Matrices.of(gate_up), _Matrices.of(down)
        self._biases = (gate_up_bias, down_bias)
        self._activation, self._clamp = activation, (alpha, limit)
        self.grouped_from = _NEVER

    @property
    def groupable(self) -> bool:
        """Whether torch's grouped product can multiply. On GPUs before Hopper it waits for the device."""
        both, device = (self._gate_up, self._down), self._down.weight.device
        able = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
        return able and all(each.weight.dtype == torch.bfloat16 and not each.inputs % 8 for each in both)

    @property
    def size(self) -> tuple[object, ...]:
        """What products of layers have in common that take the same time."""
        both = (self._gate_up, self._down)
        return (self._activation, *(each.weight.shape for each in both))

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [T, D], chosen and weights [T, k] -> [T, D] in x's dtype; `plus` [T, D] is added.

        Raises ValueError for shapes that do not fit.
        """
        tokens, width = x.shape
        if width != self._gate_up.inputs or len(chosen) != tokens or weights.shape != chosen.shape:
            raise ValueError(f"{tuple(x.shape)}, {tuple(chosen.shape)} chosen, {tuple(weights.shape)} weights")
        if plus is not None and (plus.shape != x.shape or plus.stride(1) != 1):
            raise ValueError(f"{tuple(plus.shape)}, strides {plus.stride()}, are not added to {tuple(x.shape)}")
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
        if not tokens:
            return out
        chosen, weights = chosen.contiguous(), weights.contiguous()
        y = (self._grouped if tokens >= self.grouped_from else self._tiled)(x, chosen, weights)
        _sum[(tokens, triton.cdiv(width, _SCANNED))](
            y,
            chosen,
            y if plus is None else plus,
            out,
            0 if plus is None else plus.stride(0),
            EXPERTS=self._down.experts,
            CHOSEN=chosen.shape[1],
            WIDTH=width,
            TILE=min(_SCANNED, triton.next_power_of_2(width)),
            PLUS=plus is not None,
            num_warps=4,
        )
        return out

    def _tiled(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """y [P, D] of each pair, by our kernel."""
        experts, inner, pairs = self._down.experts, self._down.inputs, chosen.numel()
        exact = x.dtype == torch.float32
        tiles = _TILES if self._down.form == "plain" else _PACKED_TILES
        tile = next(tile for mean, tile in tiles if exact or pairs <= mean * experts)
        order = _sorted(chosen, experts, tile)
        hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
        y = torch.empty(pairs, self._down.outputs, dtype=x.dtype, device=x.device)
        x = x if x.stride(1) == 1 else x.contiguous()
        self._launch(x, self._gate_up, self._biases[0], weights, order, hidden, tile, self._activation)
        self._launch(hidden, self._down, self._biases[1], weights, order, y, tile, "")
        return y

    def _launch(
        self,
        x: Tensor,
        matrices: _Matrices,
        bias: Tensor | None,
        weights: Tensor,
        order: _Sorted,
        out: Tensor,
        tile: _ExpertTile,
        activation: Activation | Literal[""],
    ) -> None:
        exact, plain = x.dtype == torch.float32, matrices.form == "plain"
        in_flight = tile.depth * (tile.rows * (x.itemsize if plain else 1) + tile.pairs * x.itemsize)
        _multiply[(triton.cdiv(matrices.outputs, tile.rows), order.most)](
            x,
            matrices.weight,
            matrices.scale,
            matrices.scale if matrices.global_scale is None else matrices.global_scale,
            matrices.scale if bias is None else bias,
            weights,
            order.order,
            order.ends,
            order.blocks,
            out,
            x.stride(0),
            *self._clamp,
            CHOSEN=weights.shape[1],
            INPUTS=matrices.inputs,
            OUTPUTS=matrices.outputs,
            PAIRS=tile.pairs,
            ROWS=tile.rows,
            DEPTH=tile.depth,
            FORM=matrices.form,
            HIGH=matrices.block[0],
            WIDE=matrices.block[1],
            GLOBAL=matrices.global_scale is not None,
            ACTIVATION=activation,
            BIAS=bias is not None,
            OPERAND=tl.float32 if INTERPRETED or exact else getattr(tl, str(x.dtype).removeprefix("torch.")),
            PRECISION="tf32x3" if exact else "tf32",
            num_warps=tile.warps,
            num_stages=max(2, min(tile.stages, _ROOM // in_flight)),
        )

    def _grouped(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """y [P, D] of each pair, by torch. Pairs without an expert have undefined ones."""
        found = _sorted(chosen, self._down.experts, _MANY)
        order, ends = found.order.long(), found.ends[:-1]
        expert = chosen.flatten()[order]

        def product(rows: Tensor, matrices: _Matrices, bias: Tensor | None) -> Tensor:
            y = grouped_mm(rows, matrices.weight.mT, offs=ends)
            return y if bias is None else y + bias[expert]

        both = product(x[order // chosen.shape[1]], self._gate_up, self._biases[0])
        y = product(activate(both, self._activation, *self._clamp), self._down, self._biases[1])
        out = torch.empty_like(y)
        out[order] = (y * weights.flatten()[order, None]).to(y.dtype)
        return out


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """Mean seconds of a layer of experts by each way."""

    tokens: int
    ours_s: float
    torchs_s: float


@torch.inference_mode()
def choose_experts(layers: Sequence[GpuExperts], chosen: int, seconds: Seconds) -> list[ExpertTimes]:
    """Let layers whose tokens choose so many experts multiply by the faster way where they have many tokens.

    Returns the times. Layers that are not `groupable` are left out.
    """
    timed: list[ExpertTimes] = []
    sizes: dict[tuple[object, ...], list[GpuExperts]] = {}
    for layer in layers:
        if layer.groupable:
            sizes.setdefault(layer.size, []).append(layer)
    for alike in sizes.values():
        timed += (found := [_timed(alike[0], tokens, chosen, seconds) for tokens in _TIMED])
        slow = [each.tokens for each in found if each.torchs_s * _GAIN > each.ours_s]
        begin = next((tokens for tokens in _TIMED if tokens > max(slow, default=0)), _NEVER)
        for layer in alike:
            layer.grouped_from = begin
        log.info("%d layers of experts multiply by torch from %d tokens", len(alike), begin)
    return timed


def _timed(layer: GpuExperts, tokens: int, chosen: int, seconds: Seconds) -> ExpertTimes:
    """The layer by each way, over tokens that choose at random."""
    matrices = layer._gate_up
    device = matrices.weight.device
    x = torch.randn(tokens, matrices.inputs, device=device).to(torch.bfloat16)
    picked = torch.rand(tokens, matrices.experts, device=device).topk(chosen, dim=-1).indices.int()
    weights, results, times = torch.full(picked.shape, 1.0 / chosen, device=device), [], []
    for layer.grouped_from in (_NEVER, 0):
        call = partial(layer, x, picked, weights)
        results.append(call().float())
        times.append(seconds(call))
    layer.grouped_from = _NEVER
    error = float((results[1] - results[0]).norm() / results[0].norm())
    if not error <= _CLOSE:  # nor a NaN
        log.error("experts are left to our kernel: torch's grouped product is off by %.2g", error)
        times[1] = math.inf
    return ExpertTimes(tokens, *times)
