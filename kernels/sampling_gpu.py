"""Sampling and verification on a GPU in two launches: the best token in each part of the vocabulary, then of each row.

Maths and noise are those of `sampling`: argmax of z / temperature + g, g a counter-based hash of (row key, token),
where temperature 0 means no noise. Filters keep the values at or above a row's cutoff, which `cutoffs` finds without a
sort: each of top_k, top_p and min_p is a threshold on the values. The row's values are counted or weighed in bins, by
their distance below the largest. The bin that contains the threshold is copied out, and the threshold is found in it by
bisection over the order of float32 bits. Weights are whole numbers: their sums are exact in any order, so a cutoff has
the same bits however the programs are scheduled.

Verification: the rows of a sequence with d drafts follow one another; draft i is right if row i drew it. `accepted`
counts the right drafts before the first wrong one; the token drawn after them is the sequence's next. Only ids and
counts leave the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096

# Of `cutoffs`: values that a program reads, bins of a row, and values of a row that can be copied out.
_PART, _BINS, _CANDIDATES = 2048, 2048, 8192


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
    """The best score of one part of a row and its token, on a tie the first."""
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * TILE + tl.arange(0, TILE)
    real = token < VOCABULARY
    score = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=real, other=float("-inf")).to(tl.float32)
    if SAMPLE:
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            score = tl.div_rn(score, temperature)  # the same bits that the cutoff was compared with
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
    """One sequence: its rows' tokens, and the number of accepted drafts."""
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
    logit that a sampled row may draw. `out`: buffers for the results. Raises ValueError for settings of another
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
def _weight(value, top):  # type: ignore[no-untyped-def]
    """The weight of a value relative to the row's largest: exp(value - top) in whole units of 2^-40, int64."""
    return (tl.exp(value - top) * 1099511627776.0).to(tl.int64)


@triton.jit
def _bin_of(below, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin of a value that lies `below` under its row's largest: 128 to an octave from 2^-8 on, 16 octaves."""
    return tl.minimum(tl.maximum((below.to(tl.int32, bitcast=True) >> 16) - 15232, 0), BINS - 1)


@triton.jit
def _part_tops(  # type: ignore[no-untyped-def]
    scaled, tops, sums, VOCABULARY: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, SUMS: tl.constexpr
):
    """The largest value of one part of a row. Also zeroes the row's sums."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * TILE + tl.arange(0, TILE)
    value = tl.load(scaled + row * VOCABULARY + token, mask=token < VOCABULARY, other=float("-inf"))
    tl.store(tops + row * PARTS + part, tl.max(value, 0))
    if part == 0:
        for first in tl.range(0, SUMS, TILE):
            at = first + tl.arange(0, TILE)
            tl.store(sums + row * SUMS + at, tl.zeros([TILE], tl.int64), mask=at < SUMS)


@triton.jit
def _fill_bins(  # type: ignore[no-untyped-def]
    scaled,
    top_k,
    top_p,
    tops,
    sums,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_TILE: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Count one part's values by bin in a row with a top_k; else sum their weights by bin and in all."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if (k > 0) | (p < 1.0):
        each = tl.arange(0, PARTS_TILE)
        top = tl.max(tl.load(tops + row * PARTS + each, mask=each < PARTS, other=float("-inf")), 0)
        token = part * TILE + tl.arange(0, TILE)
        value = tl.load(scaled + row * VOCABULARY + token, mask=token < VOCABULARY, other=float("-inf"))
        below = top - value
        bins = sums + row * SUMS + _bin_of(below, BINS)
        # Values that are certainly below the cutoff need no bin; in most rows these are nearly all values.
        if k > 0:
            # For k up to the number of parts, the k-th value is not below the least of the parts' largest.
            least = tl.min(tl.load(tops + row * PARTS + each, mask=each < PARTS, other=float("inf")), 0)
            near = (value > float("-inf")) & ((k > PARTS) | (value >= least))
            tl.atomic_add(bins, tl.full([TILE], 1, tl.int64), mask=near, sem="relaxed")
        else:
            weight = _weight(value, top)
            tl.atomic_add(sums + row * SUMS + BINS, tl.sum(weight, 0), sem="relaxed")
            # A whole vocabulary of values further below would weigh less than 1 - p of the largest alone.
            near = below < tl.log(VOCABULARY / (1.0 - p)) + 0.01
            tl.atomic_add(bins, weight, mask=near, sem="relaxed")


@triton.jit
def _mass_of(p, whole):  # type: ignore[no-untyped-def]
    """The least weight that is a share p of the whole."""
    return tl.ceil(p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)


@triton.jit
def _sum_above(values, length, threshold, top, TILE: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of `length` values above `threshold`, or else their weight."""
    found = tl.zeros([TILE], tl.int64)
    for start in tl.range(0, length, TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(values + at, mask=at < length, other=float("-inf"))
        found += tl.where(value > threshold, 1 if COUNT else _weight(value, top), 0)
    return tl.sum(found, 0)


@triton.jit
def _bisect(values, length, low, needed, top, TILE: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least value from `low` to `top` with less than `needed` above it, in number or weight, as an ordered int."""
    high = _ordered(top.to(tl.int32, bitcast=True)).to(tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        threshold = _ordered(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        if _sum_above(values, length, threshold, top, TILE, COUNT) < needed:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _search(values, length, k, p, needed, top, VOCABULARY: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The cutoff of top_k and top_p among `length` values. Without a top_k, `needed` is the mass to keep."""
    low = _ordered(tl.full([], float("-inf"), tl.float32).to(tl.int32, bitcast=True)).to(tl.int64)
    if k > 0:
        low = _bisect(values, length, low, k, top, TILE, True)
        kth = _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)
        # All values equal to the k-th stay, but only as many count as fit into k.
        equal = tl.minimum(k, VOCABULARY) - _sum_above(values, length, kth, top, TILE, True)
        needed = _mass_of(p, _sum_above(values, length, kth, top, TILE, False) + equal * _weight(kth, top))
    if p < 1.0:
        low = _bisect(values, length, low, needed, top, TILE, False)
    return _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _find_cutoff(  # type: ignore[no-untyped-def]
    scaled,
    top_k,
    top_p,
    min_p,
    tops,
    sums,
    candidates,
    cutoff,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_TILE: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    SUMS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Copy out the values of one part that may be the cutoff. The row's last program to do so searches them."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values, apart, own = scaled + row * VOCABULARY, candidates + row * CANDIDATES, sums + row * SUMS
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    each = tl.arange(0, PARTS_TILE)
    top = tl.max(tl.load(tops + row * PARTS + each, mask=each < PARTS, other=float("-inf")), 0)
    needed = _mass_of(p, tl.load(own + BINS)) if k <= 0 else k.to(tl.int64)
    above = tl.full([], 0, tl.int64)
    if (k > 0) | (p < 1.0):
        # The cutoff lies in the first bin that, with those before it, holds k values or p of the mass.
        reached = tl.cumsum(tl.load(own + tl.arange(0, BINS)), 0)
        last = tl.minimum(tl.sum((reached < needed).to(tl.int32), 0), BINS - 1)
        above = tl.max(tl.where(reached < needed, reached, 0), 0)
        token = part * TILE + tl.arange(0, TILE)
        value = tl.load(values + token, mask=token < VOCABULARY, other=float("-inf"))
        bins = _bin_of(top - value, BINS)
        # top_p applies to what top_k leaves, so with a top_k all larger values are needed too.
        taken = ((bins == last) | ((k > 0) & (bins < last))) & (value > float("-inf"))
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
        place += tl.atomic_add(own + BINS + 1, tl.sum(taken.to(tl.int64), 0), sem="relaxed").to(tl.int32)
        tl.store(apart + place, value, mask=taken & (place < CANDIDATES))
    tl.debug_barrier()  # the whole program's candidates are written before it is counted
    if tl.atomic_add(own + BINS + 2, 1, sem="acq_rel") == PARTS - 1:
        floor = tl.full([], float("-inf"), tl.float32)
        if (k > 0) | (p < 1.0):
            length = tl.load(own + BINS + 1).to(tl.int32)
            if length > CANDIDATES:  # a large k, or very many nearly equal: the whole row is searched, which is slow
                apart, length, above = values, tl.full([], VOCABULARY, tl.int32), tl.full([], 0, tl.int64)
            floor = _search(apart, length, k, p, needed - above, top, VOCABULARY, TILE)
        least = tl.load(min_p + row)
        if least > 0.0:
            floor = tl.maximum(floor, tl.minimum(top + tl.log(least), top))
        tl.store(cutoff + row, floor)


def cutoffs(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least value that each row may draw, [R] float32; minus infinity where nothing is filtered.

    `scaled` [R, vocabulary] float32, rows in one piece: logits over temperature. `top_k` [R] int32 (0: all), `top_p`,
    `min_p` [R] float32 (1 and 0: all); applied as `sampling.filter_logits` does. Raises ValueError for other shapes.
    """
    rows, vocabulary = scaled.shape
    if not scaled.is_contiguous() or scaled.dtype != torch.float32:
        raise ValueError(f"scaled logits must be float32 in one piece, not {scaled.dtype}, {scaled.stride()}")
    if any(setting.shape != (rows,) for setting in (top_k, top_p, min_p)):
        raise ValueError(f"{rows} rows, but filters {[tuple(setting.shape) for setting in (top_k, top_p, min_p)]}")
    cutoff = torch.empty(rows, dtype=torch.float32, device=scaled.device)
    if not rows:
        return cutoff
    parts = triton.cdiv(vocabulary, _PART)
    tops = torch.empty(rows, parts, dtype=torch.float32, device=scaled.device)
    # Bins; then the mass of all, the number of candidates, and the number of programs that have copied theirs.
    sums = torch.empty(rows, _BINS + 16, dtype=torch.int64, device=scaled.device)
    candidates = torch.empty(rows, _CANDIDATES, dtype=torch.float32, device=scaled.device)
    grid, shape = (rows, parts), {"VOCABULARY": vocabulary, "PARTS": parts, "TILE": _PART, "SUMS": sums.shape[1]}
    _part_tops[grid](scaled, tops, sums, **shape, num_warps=4)
    shape |= {"PARTS_TILE": triton.next_power_of_2(parts), "BINS": _BINS}
    _fill_bins[grid](scaled, top_k, top_p, tops, sums, **shape, num_warps=4)
    _find_cutoff[grid](
        scaled, top_k, top_p, min_p, tops, sums, candidates, cutoff, **shape, CANDIDATES=_CANDIDATES, num_warps=4
    )
    return cutoff
