"""Drawing and verifying on a GPU in two launches: each row's best token by parts of the vocabulary, then all of them.

Maths and noise are those of `sampling`: argmax of z / temperature + g, g a counter-based hash of (row key, token),
temperature 0 meaning no noise. Filters keep what is at or above a row's cutoff, which `cutoffs` finds without a sort:
top_k, top_p and min_p each are a threshold that a function of the values passes once, so it is found by bisection over
the order of float32 bits, 32 passes at most, the same to the bit wherever it runs.

Verification: rows of a sequence with d drafts follow one another; draft i is right when row i drew it. Accepted is how
many are from the first on; the token after them is the sequence's next. Only ids and counts leave the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


@triton.jit
def _noise(token, a, b):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise of `token` under the key (a, b), all uint32; see `sampling`."""
    x = token * 0x9E3779B1 + a
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = (x ^ b) * 0xC2B2AE35
    x = x ^ (x >> 16)
    v = (x >> 1).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10  # 2^-31, 2^-32
    v = tl.minimum(v, 0.99999994)
    # log1p(-v): where v is small, 1 - v loses it; the series' next term is below float32 there.
    inner = tl.where(v < 1e-4, -v - 0.5 * v * v, tl.log(1.0 - v))
    return -tl.log(-inner)


@triton.jit
def _best_of_part(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    keys,
    cutoff,
    best,
    best_token,
    row_stride,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    FILTER: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """The best score of one part of a row and its token, the first of equals."""
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * TILE + tl.arange(0, TILE)
    real = token < VOCABULARY
    score = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=real, other=float("-inf")).to(tl.float32)
    if SAMPLE:
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            score = tl.div_rn(score, temperature)  # to the bit what a cutoff was compared with
            if FILTER:
                score = tl.where(score >= tl.load(cutoff + row), score, float("-inf"))
            a = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
            b = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
            score = tl.where(real, score + _noise(token.to(tl.uint32), a, b), float("-inf"))
    top = tl.max(score, 0)
    tl.store(best + row * PARTS + part, top)
    tl.store(best_token + row * PARTS + part, tl.min(tl.where((score == top) & real, token, VOCABULARY), 0))


@triton.jit
def _verify(  # type: ignore[no-untyped-def]
    best,
    best_token,
    first_rows,
    drafts,
    drawn,
    accepted,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_TILE: tl.constexpr,
):
    """One sequence: its rows' tokens, and how many of its drafts they begin with."""
    sequence = tl.program_id(0)
    first, end = tl.load(first_rows + sequence), tl.load(first_rows + sequence + 1)
    part = tl.arange(0, PARTS_TILE)
    right = 0
    going = True
    for row in tl.range(first, end):
        at = row * PARTS + part
        score = tl.load(best + at, mask=part < PARTS, other=float("-inf"))
        token = tl.load(best_token + at, mask=part < PARTS, other=VOCABULARY)
        chosen = tl.min(tl.where(score == tl.max(score, 0), token, VOCABULARY), 0)
        tl.store(drawn + row, tl.minimum(chosen, VOCABULARY - 1))
        going = going & (row + 1 < end) & (tl.load(drafts + row) == chosen)
        right += going.to(tl.int32)
    tl.store(accepted + sequence, right)


def draw_and_verify(
    logits: Tensor,
    first_rows: Tensor,
    drafts: Tensor,
    temperatures: Tensor | None = None,
    keys: Tensor | None = None,
    cutoff: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a token for every row and verify every sequence's drafts: (drawn [R] int32, accepted [S] int32).

    `logits` [R, vocabulary]; `first_rows` [S + 1] int32: sequence s has rows first_rows[s] to first_rows[s + 1];
    `drafts` [R] int32: the draft that row r checks, not used in a sequence's last row. `temperatures` [R] float32, 0:
    greedy, with `keys` [R, 2] int32 from `sampling.row_keys`; None: all greedy. `cutoff` [R] float32: the least scaled
    logit that a sampled row may draw. `out`: where the results are put. Raises ValueError for settings of another
    number of rows.
    """
    rows, vocabulary = logits.shape
    _check_rows(logits, drafts, temperatures, keys, cutoff)
    parts = triton.cdiv(vocabulary, _TILE)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    drawn, accepted = out or torch.empty(2, max(rows, 1), dtype=torch.int32, device=logits.device).unbind(0)
    drawn, accepted = drawn[:rows], accepted[: len(first_rows) - 1]
    if not rows:
        return drawn, accepted.zero_()
    unused = best
    _best_of_part[(rows, parts)](
        logits,
        unused if temperatures is None else temperatures,
        unused if keys is None else keys,
        unused if cutoff is None else cutoff,
        best,
        best_token,
        logits.stride(0),
        VOCABULARY=vocabulary,
        PARTS=parts,
        TILE=min(_TILE, triton.next_power_of_2(vocabulary)),
        FILTER=cutoff is not None,
        SAMPLE=keys is not None,
        num_warps=4,
    )
    _verify[(len(accepted),)](
        best,
        best_token,
        first_rows,
        drafts,
        drawn,
        accepted,
        VOCABULARY=vocabulary,
        PARTS=parts,
        PARTS_TILE=triton.next_power_of_2(parts),
        num_warps=1,
    )
    return drawn, accepted


def _check_rows(
    logits: Tensor, drafts: Tensor, temperatures: Tensor | None, keys: Tensor | None, cutoff: Tensor | None
) -> None:
    rows = len(logits)
    if len(drafts) != rows or logits.stride(1) != 1:
        raise ValueError(f"{rows} rows with strides {logits.stride()}, but {len(drafts)} drafts")
    if (temperatures is None) != (keys is None) or (cutoff is not None and keys is None):
        raise ValueError("temperatures, keys and cutoffs belong together")
    if temperatures is not None and keys is not None and (len(temperatures) != rows or keys.shape != (rows, 2)):
        raise ValueError(f"{rows} rows, but {len(temperatures)} temperatures and keys {tuple(keys.shape)}")


def draw_and_verify_reference(
    logits: Tensor, first_rows: Tensor, drafts: Tensor, scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`draw_and_verify` row by row; `scores` [R, vocabulary] stand for the logits of sampled rows, noise included."""
    drawn = (logits if scores is None else scores).argmax(-1).int()
    accepted = []
    for first, end in zip(first_rows.tolist(), first_rows[1:].tolist(), strict=False):
        right = 0
        while first + right + 1 < end and int(drafts[first + right]) == int(drawn[first + right]):
            right += 1
        accepted.append(right)
    return drawn, torch.tensor(accepted, dtype=torch.int32)


@triton.jit
def _ordered(bits):  # type: ignore[no-untyped-def]
    """The bits of a float32 as an int32 that orders as the float does; its own inverse."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _row_sums(scaled, floor, threshold, VOCABULARY: tl.constexpr, TILE: tl.constexpr, top):  # type: ignore[no-untyped-def]
    """How many values of a row lie at or above `floor` and above `threshold`, and what they weigh."""
    count = 0
    mass = 0.0
    for start in tl.range(0, VOCABULARY, TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(scaled + at, mask=at < VOCABULARY, other=float("-inf"))
        kept = (value >= floor) & (value > threshold)
        count += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(value - top), 0.0), 0)
    return count, mass


@triton.jit
def _find_cutoff(  # type: ignore[no-untyped-def]
    scaled, top_k, top_p, min_p, cutoff, VOCABULARY: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0)
    values = scaled + row.to(tl.int64) * VOCABULARY
    best = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, VOCABULARY, TILE):
        at = start + tl.arange(0, TILE)
        best = tl.maximum(best, tl.load(values + at, mask=at < VOCABULARY, other=float("-inf")))
    top = tl.max(best, 0)
    highest = _ordered(top.to(tl.int32, bitcast=True)).to(tl.int64)
    lowest = _ordered(tl.full([], float("-inf"), tl.float32).to(tl.int32, bitcast=True)).to(tl.int64)
    floor = tl.full([], float("-inf"), tl.float32)
    k = tl.load(top_k + row)
    if k > 0:
        low, high = lowest, highest  # the k-th value is the least t with fewer than k values above it
        while low < high:
            middle = low + (high - low) // 2
            threshold = _ordered(middle.to(tl.int32)).to(tl.float32, bitcast=True)
            count, _ = _row_sums(values, floor, threshold, VOCABULARY, TILE, top)
            if count < k:
                high = middle
            else:
                low = middle + 1
        floor = _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)
    p = tl.load(top_p + row)
    if p < 1.0:
        # Of values equal to the k-th only so many count as k leaves room for, though all of them stay.
        above, whole = _row_sums(values, floor, floor if k > 0 else float("-inf"), VOCABULARY, TILE, top)
        if k > 0:
            whole += (tl.minimum(k, VOCABULARY) - above) * tl.exp(floor - top)
        low, high = lowest, highest  # a value is kept while those above it weigh less than p of the whole
        while low < high:
            middle = low + (high - low) // 2
            threshold = _ordered(middle.to(tl.int32)).to(tl.float32, bitcast=True)
            _, mass = _row_sums(values, floor, threshold, VOCABULARY, TILE, top)
            if mass < p * whole:
                high = middle
            else:
                low = middle + 1
        floor = tl.maximum(floor, _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True))
    least = tl.load(min_p + row)
    if least > 0.0:
        floor = tl.maximum(floor, tl.minimum(top + tl.log(least), top))
    tl.store(cutoff + row, floor)


def cutoffs(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least value each row may draw, [R] float32, minus infinity where nothing is filtered.

    `scaled` [R, vocabulary] float32, rows in one piece: logits over temperature. `top_k` [R] int32 (0: all), `top_p`,
    `min_p` [R] float32 (1 and 0: all); applied as `sampling.filter_logits` does. Raises ValueError for other shapes.
    """
    rows, vocabulary = scaled.shape
    if not scaled.is_contiguous() or scaled.dtype != torch.float32:
        raise ValueError(f"scaled logits must be float32 in one piece, not {scaled.dtype}, {scaled.stride()}")
    if any(setting.shape != (rows,) for setting in (top_k, top_p, min_p)):
        raise ValueError(f"{rows} rows, but filters {[tuple(setting.shape) for setting in (top_k, top_p, min_p)]}")
    cutoff = torch.empty(rows, dtype=torch.float32, device=scaled.device)
    if rows:
        tile = min(_TILE, triton.next_power_of_2(vocabulary))
        _find_cutoff[(rows,)](scaled, top_k, top_p, min_p, cutoff, VOCABULARY=vocabulary, TILE=tile, num_warps=8)
    return cutoff
