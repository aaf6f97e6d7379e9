"""Gated DeltaNet and Mamba-2 on a GPU, over states in slots, in Triton. Formulas, shapes, reference: `linear_state`.

Sequences of up to `SHORT` tokens (decode, windows of drafts) go token by token: a program holds some columns of one
head's state in registers, and a token costs one or two sums over them. Longer ones go in chunks of C tokens. The
delta rule takes the WY form (Yang et al., arXiv 2406.06484 section 3 and 2412.06464 section 3.3). With G_i the sum of g
up to token i of a chunk:

    A_ij = beta_i exp(G_i - G_j) k_i k_j^T for j < i,  else 0          X = (1 + A)^-1 diag(beta)
    W = X diag(exp G) K,  U = X V                                      P_ij = exp(G_i - G_j) q_i k_j^T for j <= i
    D = U - W S                                                        what the tokens write, given the state before
    o = exp(G) (Q S) + P D                                             their outputs
    S_n = exp(G_n) S + sum_{i <= n} exp(G_n - G_i) k_i D_i^T           the state after the first n of them

Mamba-2 is the same with D = U = diag(dt) V (Dao and Gu, arXiv 2405.21060 section 6). What the model's own D adds to the
outputs takes the place of W.

`_prepare` computes all that does not depend on the state, every chunk at once; `_scan` goes through a sequence's chunks
and writes the states. The inverse is built from blocks twice as large each time: of [[L, 0], [A, M]] it is
[[L^-1, 0], [-M^-1 A L^-1, M^-1]]. That is as exact as substitution. A product of powers of A is not: keys that are
alike make them grow.

A launch never reads a slot that it writes, except a program the part that it alone reads. So `_keep_inputs` writes the
convolution's inputs and the windows in a launch of its own. Nothing here waits for the device, and what differs from
step to step is data: the launches can be captured in a CUDA graph. What only fills a captured batch: sequences without
tokens whose target is `NO_STATE`, and marks of a sequence that is not there, behind the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.attention_gpu import INTERPRETED
from holdfast.kernels.linear_state import LinearShape, LinearStates, LinearWeights, StateBatch, check_inputs

SHORT = 32  # tokens that go one by one at most
_CHUNK = 32  # C; tiles of 64 rows take Hopper's wide instructions, with which Triton 3.6 compiles `_scan` wrongly
# Of a state, in one program that goes token by token. Mamba-2 was timed with 16 only.
_COLUMNS = {"delta": 32, "mamba2": 16}
_SCANNED = 32  # the same in chunks
_CHANNELS = 512  # of the convolution's inputs in one program
_LANES = 256  # sequences or marks that a program looks through at a time


# ---- sequences, marks, inputs


@triton.jit
def _sequence(batch, number):  # type: ignore[no-untyped-def]
    """First token, tokens, slot, drafts applied before them, and how many of drafts and tokens change the state."""
    starts, source, _, applied, held, _ = batch
    first = tl.load(starts + number)
    tokens = tl.load(starts + number + 1) - first
    before = tl.load(applied + number)
    return first, tokens, tl.load(source + number).to(tl.int64), before, before + tokens - tl.load(held + number)


@triton.jit
def _marks_of(batch, count, number, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """A sequence's marks: the first, and the one behind the last."""
    low, high = 0, 0
    for start in tl.range(0, count, LANES):
        lane = start + tl.arange(0, LANES)
        of = tl.load(batch[5] + lane * 3, mask=lane < count, other=2147483647)
        low += tl.sum((of < number).to(tl.int32), 0)
        high += tl.sum((of <= number).to(tl.int32), 0)
    return low, high


@triton.jit
def _inputs(tensors, sequence, row, early, channel, real, SHAPE: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The convolution's inputs in these rows, with its drafts from row 0 on and its tokens behind them.

    `early`: some rows may be before the tokens.
    """
    mixed, mixed_row, conv, window = tensors
    first, _, slot, before, _ = sequence
    OLD: tl.constexpr = SHAPE.kernel - 1
    token = (first + row - before).to(tl.int64)
    found = tl.load(mixed + token * mixed_row + channel, mask=real & (row >= before), other=0.0)
    if early:
        held = tl.maximum(slot, 0)
        drafts = window + (held * WINDOW + row) * SHAPE.channels
        found += tl.load(drafts + channel, mask=real & (row >= 0) & (row < before), other=0.0)
        old = conv + (held * OLD + OLD + row) * SHAPE.channels
        found += tl.load(old + channel, mask=real & (row < 0) & (slot >= 0), other=0.0)
    return found


@triton.jit
def _convolved(  # type: ignore[no-untyped-def]
    tensors, weights, sequence, row, early, channel, real, SHAPE: tl.constexpr, WINDOW: tl.constexpr
):
    """silu of the convolution, where `real`; else nothing of use."""
    taps, bias = weights
    TAPS: tl.constexpr = SHAPE.kernel
    x = 0.0
    if bias is not None:
        x += tl.load(bias + channel)
    for tap in tl.static_range(TAPS):
        one = _inputs(tensors, sequence, row + tap - (TAPS - 1), early, channel, real, SHAPE, WINDOW)
        x += one.to(tl.float32) * tl.load(taps + tap * SHAPE.channels + channel)
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gates(tensors, sequence, row, real, head, SHAPE: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """g and beta (Mamba-2: dt) of a head in these rows, where `real`."""
    a, a_row, b, b_row, gates, a_log, dt_bias, _ = tensors
    first, _, slot, before, _ = sequence
    old, new = real & (row < before), real & (row >= before)
    token = (first + row - before).to(tl.int64)
    drafts = gates + (tl.maximum(slot, 0) * WINDOW + row) * (SHAPE.gates * SHAPE.value_heads) + head
    x = tl.load(drafts, mask=old, other=0.0) + tl.load(a + token * a_row + head, mask=new, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head)
    dt = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    beta = dt
    if SHAPE.rule == "delta":
        y = tl.load(drafts + SHAPE.value_heads, mask=old, other=0.0)
        y += tl.load(b + token * b_row + head, mask=new, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-y))
    return -tl.exp(tl.load(a_log + head)) * dt, beta


@triton.jit
def _places(slot, head, dims, columns, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where numbers of a head's state are in a slot."""
    row = (slot * SHAPE.value_heads + head) * SHAPE.key_dim + dims
    return row[:, None] * SHAPE.value_dim + columns[None, :]


# ---- token by token


@triton.jit(do_not_specialize=["n_marks"])
def _recur(  # type: ignore[no-untyped-def]
    inputs,
    weights,
    gates,
    recurrent,
    batch,
    n_marks,
    out,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHORT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Some columns of one head's state, through a sequence."""
    KEY: tl.constexpr = SHAPE.key_dim
    VALUE: tl.constexpr = SHAPE.value_dim
    HEADS: tl.constexpr = SHAPE.value_heads
    tiles: tl.constexpr = VALUE // COLUMNS
    number, head = tl.program_id(1), tl.program_id(0) // tiles
    sequence = _sequence(batch, number)
    first, tokens, slot, before, kept = sequence
    target = tl.load(batch[2] + number).to(tl.int64)
    if (tokens > SHORT) | (target < 0):
        return
    dims, columns = tl.arange(0, KEY), tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    source = recurrent + _places(tl.maximum(slot, 0), head, dims, columns, SHAPE)
    state = tl.load(source, mask=slot >= 0, other=0.0)
    if kept == 0:
        tl.store(recurrent + _places(target, head, dims, columns, SHAPE), state)
    mark, last = _marks_of(batch, n_marks, number, LANES)
    of_key = head // (HEADS // SHAPE.key_heads) * KEY + dims
    query, key, value = SHAPE.queries + of_key, SHAPE.keys + of_key, SHAPE.values + head * VALUE + columns
    for row in tl.range(0, before + tokens):
        early = row - (SHAPE.kernel - 1) < before
        q = _convolved(inputs, weights, sequence, row, early, query, True, SHAPE, WINDOW)
        k = _convolved(inputs, weights, sequence, row, early, key, True, SHAPE, WINDOW)
        v = _convolved(inputs, weights, sequence, row, early, value, True, SHAPE, WINDOW)
        g, beta = _gates(gates, sequence, row, True, head, SHAPE, WINDOW)
        state *= tl.exp(g)
        old, skip = 0.0, 0.0
        if SHAPE.rule == "delta":
            q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * KEY**-0.5
            k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            old = tl.sum(state * k[:, None], 0)
        else:
            skip = v * tl.load(gates[7] + head)
        state += k[:, None] * ((v - old) * beta)[None, :]
        if row >= before:
            at = ((first + row - before).to(tl.int64) * HEADS + head) * VALUE + columns
            tl.store(out + at, (tl.sum(state * q[:, None], 0) + skip).to(out.dtype.element_ty))
        if row + 1 == kept:
            tl.store(recurrent + _places(target, head, dims, columns, SHAPE), state)
        if mark < last:
            entry = batch[5] + mark * 3
            if before + tl.load(entry + 1) == row + 1:
                kept_in = tl.load(entry + 2).to(tl.int64)
                tl.store(recurrent + _places(kept_in, head, dims, columns, SHAPE), state)
                mark += 1


# ---- in chunks


@triton.jit
def _chunks(batch, lane, end, SHORT: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chunks of each of these sequences; none of one that goes token by token, nor of those from `end` on."""
    inside = lane < end
    tokens = tl.load(batch[0] + lane + 1, mask=inside, other=0) - tl.load(batch[0] + lane, mask=inside, other=0)
    rows = tokens + tl.load(batch[3] + lane, mask=inside, other=0)
    return tl.where(tokens > SHORT, (rows + CHUNK - 1) // CHUNK, 0)


@triton.jit
def _chunks_before(batch, number, SHORT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chunks of the sequences before this one: the first of its own, as all are numbered."""
    total = 0
    for start in tl.range(0, number, LANES):
        total += tl.sum(_chunks(batch, start + tl.arange(0, LANES), number, SHORT, CHUNK), 0)
    return total


@triton.jit
def _sequence_of(batch, sequences, chunk, SHORT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence that a chunk is of, and its first chunk; `sequences` for a chunk behind all of them."""
    number, begin, total = 0, 0, 0
    for start in tl.range(0, sequences, LANES):
        lane = start + tl.arange(0, LANES)
        counts = _chunks(batch, lane, sequences, SHORT, CHUNK)
        ends = total + tl.cumsum(counts, 0)
        past = (ends <= chunk) & (lane < sequences)
        number += tl.sum(past.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(past, ends, 0), 0))
        total += tl.sum(counts, 0)
    return number, begin


@triton.jit
def _tile(base, number, rows, columns, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses in matrices of WIDTH columns, of which this is the one with this number."""
    return base + (number.to(tl.int64) * rows.shape[0] + rows[:, None]) * WIDTH + columns[None, :]


@triton.jit
def _inverse(lower, row, column, LEVELS: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(1 + lower)^-1 of a matrix with 2^LEVELS rows and only zeros on and above the diagonal."""
    found = tl.where(row == column, 1.0, tl.where((row // 2 == column // 2) & (row > column), -lower, 0.0))
    for level in tl.static_range(1, LEVELS):
        whole, half = 2 * 2**level, 2**level
        corner = (row // whole == column // whole) & (row // half > column // half)
        right = tl.dot(tl.where(corner, lower, 0.0), found, input_precision=PRECISION)
        found -= tl.dot(found, right, input_precision=PRECISION)
    return found


@triton.jit
def _convolve_head(  # type: ignore[no-untyped-def]
    tensors, weights, sequence, rows, early, channel, to, number, scale, SHAPE: tl.constexpr, WINDOW: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """These rows of a head whose first channel this is, to the matrix with this number. Their lengths become `scale`;
    zero: they stay.
    """
    dims, real = tl.arange(0, DIM), (rows < sequence[3] + sequence[1])[:, None]
    x = _convolved(tensors, weights, sequence, rows[:, None], early, channel + dims[None, :], real, SHAPE, WINDOW)
    if scale > 0.0:
        x *= tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None] * scale
    tl.store(_tile(to, number, tl.arange(0, rows.shape[0]), dims, DIM), x.to(to.dtype.element_ty))


@triton.jit(do_not_specialize=["sequences"])
def _convolve(  # type: ignore[no-untyped-def]
    inputs,
    weights,
    batch,
    sequences,
    chunks,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Q, K or V of one head in one chunk."""
    KEY: tl.constexpr = SHAPE.key_dim
    VALUE: tl.constexpr = SHAPE.value_dim
    KEY_HEADS: tl.constexpr = SHAPE.key_heads
    HEADS: tl.constexpr = 2 * KEY_HEADS + SHAPE.value_heads
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    number, begin = _sequence_of(batch, sequences, chunk, SHORT, CHUNK, LANES)
    if number == sequences:
        return
    sequence = _sequence(batch, number)
    start = (chunk - begin) * CHUNK
    early = start - (SHAPE.kernel - 1) < sequence[3]
    rows = start + tl.arange(0, CHUNK)
    normed: tl.constexpr = 1.0 if SHAPE.rule == "delta" else 0.0
    if head < KEY_HEADS:
        at, place = SHAPE.queries + head * KEY, chunk * KEY_HEADS + head
        scale = normed * KEY**-0.5
        _convolve_head(inputs, weights, sequence, rows, early, at, chunks[0], place, scale, SHAPE, WINDOW, KEY)
    elif head < 2 * KEY_HEADS:
        at, place = SHAPE.keys + (head - KEY_HEADS) * KEY, chunk * KEY_HEADS + head - KEY_HEADS
        _convolve_head(inputs, weights, sequence, rows, early, at, chunks[1], place, normed, SHAPE, WINDOW, KEY)
    else:
        at, place = SHAPE.values + (head - 2 * KEY_HEADS) * VALUE, chunk * SHAPE.value_heads + head - 2 * KEY_HEADS
        _convolve_head(inputs, weights, sequence, rows, early, at, chunks[3], place, 0.0, SHAPE, WINDOW, VALUE)


@triton.jit(do_not_specialize=["sequences"])
def _prepare(  # type: ignore[no-untyped-def]
    gates,
    batch,
    sequences,
    chunks,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    SHORT: tl.constexpr,
    LANES: tl.constexpr,
    OPERAND: tl.constexpr,  # what matrices are multiplied in
    PRECISION: tl.constexpr,
):
    """W (or D V), U, P and G of one head in one chunk. U takes the place of V."""
    KEY: tl.constexpr = SHAPE.key_dim
    VALUE: tl.constexpr = SHAPE.value_dim
    HEADS: tl.constexpr = SHAPE.value_heads
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    number, begin = _sequence_of(batch, sequences, chunk, SHORT, CHUNK, LANES)
    if number == sequences:
        return
    sequence = _sequence(batch, number)
    lane, dims, columns = tl.arange(0, CHUNK), tl.arange(0, KEY), tl.arange(0, VALUE)
    row = (chunk - begin) * CHUNK + lane
    real = row < sequence[3] + sequence[1]
    of_head, of_key = tl.program_id(0), chunk * SHAPE.key_heads + head // (HEADS // SHAPE.key_heads)
    to_q, to_k, to_w, to_u, to_p, to_g = chunks
    stored = to_q.dtype.element_ty

    i, j = lane[:, None], lane[None, :]
    g, beta = _gates(gates, sequence, row, real, head, SHAPE, WINDOW)
    G = tl.cumsum(tl.where(real, g, 0.0), 0)
    decay = tl.exp(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")))
    beta = tl.where(real, beta, 0.0)
    tl.store(to_g + of_head.to(tl.int64) * CHUNK + lane, G)

    k = tl.load(_tile(to_k, of_key, lane, dims, KEY)).to(OPERAND)
    q = tl.load(_tile(to_q, of_key, lane, dims, KEY)).to(OPERAND)
    P = tl.dot(q, k.T, input_precision=PRECISION) * decay
    tl.store(_tile(to_p, of_head, lane, lane, CHUNK), P.to(stored))

    at = _tile(to_u, of_head, lane, columns, VALUE)
    v = tl.load(at)
    if SHAPE.rule == "delta":
        lower = tl.dot(k, k.T, input_precision=PRECISION) * decay * beta[:, None]
        X = (_inverse(tl.where(i > j, lower, 0.0), i, j, LEVELS, PRECISION) * beta[None, :]).to(OPERAND)
        W = tl.dot(X, (k * tl.exp(G)[:, None]).to(OPERAND), input_precision=PRECISION)
        tl.store(_tile(to_w, of_head, lane, dims, KEY), W.to(stored))
        tl.store(at, tl.dot(X, v.to(OPERAND), input_precision=PRECISION).to(stored))
    else:
        tl.store(_tile(to_w, of_head, lane, columns, VALUE), (v * tl.load(gates[7] + head)).to(stored))
        tl.store(at, (v * beta[:, None]).to(stored))


@triton.jit
def _written(  # type: ignore[no-untyped-def]
    chunks, state, chunk, head, columns, SHAPE: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a chunk with this state before it: G, K and D."""
    lane, dims = tl.arange(0, CHUNK), tl.arange(0, SHAPE.key_dim)
    place = chunk * SHAPE.value_heads + head
    of_key = chunk * SHAPE.key_heads + head // (SHAPE.value_heads // SHAPE.key_heads)
    G = tl.load(chunks[5] + place.to(tl.int64) * CHUNK + lane)
    K = tl.load(_tile(chunks[1], of_key, lane, dims, SHAPE.key_dim)).to(OPERAND)
    D = tl.load(_tile(chunks[3], place, lane, columns, SHAPE.value_dim)).to(tl.float32)
    if SHAPE.rule == "delta":
        W = tl.load(_tile(chunks[2], place, lane, dims, SHAPE.key_dim)).to(OPERAND)
        D -= tl.dot(W, state.to(OPERAND), input_precision=PRECISION)
    return G, K, D


@triton.jit
def _state_after(  # type: ignore[no-untyped-def]
    state, written, tokens, CHUNK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr
):
    """The state after so many tokens of a chunk, at least one."""
    G, K, D = written
    lane = tl.arange(0, CHUNK)
    end = tl.sum(tl.where(lane == tokens - 1, G, 0.0), 0)
    share = tl.exp(tl.where(lane < tokens, end - G, float("-inf")))
    return state * tl.exp(end) + tl.dot(K.T, (D * share[:, None]).to(OPERAND), input_precision=PRECISION)


@triton.jit(do_not_specialize=["n_marks"])
def _scan(  # type: ignore[no-untyped-def]
    recurrent,
    batch,
    n_marks,
    chunks,
    out,
    SHAPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    LANES: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some columns of one head's state, through the chunks of a sequence."""
    KEY: tl.constexpr = SHAPE.key_dim
    VALUE: tl.constexpr = SHAPE.value_dim
    HEADS: tl.constexpr = SHAPE.value_heads
    tiles: tl.constexpr = VALUE // COLUMNS
    number, head = tl.program_id(1), tl.program_id(0) // tiles
    first, tokens, slot, before, kept = _sequence(batch, number)
    if tokens <= SHORT:
        return
    target = tl.load(batch[2] + number).to(tl.int64)
    lane, dims = tl.arange(0, CHUNK), tl.arange(0, KEY)
    columns = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    source = recurrent + _places(tl.maximum(slot, 0), head, dims, columns, SHAPE)
    state = tl.load(source, mask=slot >= 0, other=0.0)
    begin, rows = _chunks_before(batch, number, SHORT, CHUNK, LANES), before + tokens
    mark, last = _marks_of(batch, n_marks, number, LANES)
    done = 0
    # Up to each mark, then up to the state that is kept, then to the end.
    for each in tl.range(mark, last + 2):
        marked = batch[5] + each * 3
        at = tl.load(marked + 1, mask=each < last, other=0) + before
        to = tl.load(marked + 2, mask=each < last, other=-1).to(tl.int64)
        if each == last:
            at, to = kept, target
        if each > last:
            at = rows + CHUNK - 1
        for chunk in tl.range(begin + done, begin + at // CHUNK):
            written = _written(chunks, state, chunk, head, columns, SHAPE, CHUNK, OPERAND, PRECISION)
            Q = tl.load(_tile(chunks[0], chunk * SHAPE.key_heads + head // (HEADS // SHAPE.key_heads), lane, dims, KEY))
            P = tl.load(_tile(chunks[4], chunk * HEADS + head, lane, lane, CHUNK))
            o = tl.dot(Q.to(OPERAND), state.to(OPERAND), input_precision=PRECISION) * tl.exp(written[0])[:, None]
            o += tl.dot(P.to(OPERAND), written[2].to(OPERAND), input_precision=PRECISION)
            if SHAPE.rule == "mamba2":
                o += tl.load(_tile(chunks[2], chunk * HEADS + head, lane, columns, VALUE)).to(tl.float32)
            row = (chunk - begin) * CHUNK + lane
            token = first + row - before
            place = (token.to(tl.int64)[:, None] * HEADS + head) * VALUE + columns[None, :]
            tl.store(out + place, o.to(out.dtype.element_ty), mask=((row >= before) & (row < rows))[:, None])
            state = _state_after(state, written, CHUNK, CHUNK, OPERAND, PRECISION)
        done = at // CHUNK
        if to >= 0:
            found = state
            if at % CHUNK > 0:
                written = _written(chunks, state, begin + done, head, columns, SHAPE, CHUNK, OPERAND, PRECISION)
                found = _state_after(state, written, at % CHUNK, CHUNK, OPERAND, PRECISION)
            tl.store(recurrent + _places(to, head, dims, columns, SHAPE), found)


# ---- inputs that the next step reads


@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    inputs, sequence, end, slot, channel, SHAPE: tl.constexpr, WINDOW: tl.constexpr
):
    """The inputs before row `end` become a slot's. A row is written after it was read, by the same thread."""
    OLD: tl.constexpr = SHAPE.kernel - 1
    for n in tl.static_range(OLD):
        one = _inputs(inputs, sequence, end + n - OLD, True, channel, channel < SHAPE.channels, SHAPE, WINDOW)
        tl.store(inputs[2] + (slot * OLD + n) * SHAPE.channels + channel, one, mask=channel < SHAPE.channels)


@triton.jit(do_not_specialize=["n_marks"])
def _keep_inputs(  # type: ignore[no-untyped-def]
    inputs,
    gates,
    batch,
    n_marks,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Some channels of a sequence: the inputs before each mark and at the end, and those of drafts."""
    HEADS: tl.constexpr = SHAPE.value_heads
    number = tl.program_id(1)
    sequence = _sequence(batch, number)
    first, tokens, _, before, kept = sequence
    target = tl.load(batch[2] + number).to(tl.int64)
    if target < 0:
        return
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mark, last = _marks_of(batch, n_marks, number, LANES)
    for each in tl.range(mark, last):
        to = tl.load(batch[5] + each * 3 + 2).to(tl.int64)
        _keep(inputs, sequence, before + tl.load(batch[5] + each * 3 + 1), to, channel, SHAPE, WINDOW)
    _keep(inputs, sequence, kept, target, channel, SHAPE, WINDOW)
    mixed, mixed_row, _, window = inputs
    a, a_row, b, b_row, kept_gates, _, _, _ = gates
    head = tl.arange(0, HEADS_TILE)
    some = (head < HEADS) & (tl.program_id(0) == 0)
    for row in tl.range(kept, before + tokens):
        token, place = (first + row - before).to(tl.int64), target * WINDOW + row - kept
        one = tl.load(mixed + token * mixed_row + channel, mask=channel < SHAPE.channels)
        tl.store(window + place * SHAPE.channels + channel, one, mask=channel < SHAPE.channels)
        to = kept_gates + place * (SHAPE.gates * HEADS) + head
        tl.store(to, tl.load(a + token * a_row + head, mask=some).to(tl.float32), mask=some)
        if SHAPE.rule == "delta":
            tl.store(to + HEADS, tl.load(b + token * b_row + head, mask=some).to(tl.float32), mask=some)


# ---- the launcher


def supported(shape: LinearShape) -> bool:
    """Whether the heads have sizes that the matrix units take: powers of two from 16 to 256."""
    return all(16 <= size <= 256 and not size & (size - 1) for size in (shape.key_dim, shape.value_dim))


def gated_delta_gpu(
    mixed: Tensor, a: Tensor, b: Tensor, weights: LinearWeights, states: LinearStates, layer: int, batch: StateBatch
) -> Tensor:
    """See `linear_state.gated_delta`.

    Matrices are multiplied in the dtype of `mixed` with float32 sums; the state and what goes token by token are
    float32. Raises ValueError for heads that are not `supported`, and for tensors that do not fit the states.
    """
    return _recur_gpu(mixed, (a, b), weights, states, layer, batch)


def mamba2_gpu(
    mixed: Tensor, dt: Tensor, weights: LinearWeights, states: LinearStates, layer: int, batch: StateBatch
) -> Tensor:
    """See `linear_state.mamba2`; the rest is as in `gated_delta_gpu`."""
    return _recur_gpu(mixed, (dt,), weights, states, layer, batch)


def _recur_gpu(
    mixed: Tensor,
    rows: tuple[Tensor, ...],
    weights: LinearWeights,
    states: LinearStates,
    layer: int,
    batch: StateBatch,
) -> Tensor:
    shape, tokens, sequences = states.shape, len(mixed), len(batch.source)
    if not supported(shape):
        raise ValueError(f"heads of {shape.key_dim} and {shape.value_dim} values")
    check_inputs(mixed, rows, weights, shape)
    if mixed.dtype != states.conv.dtype or any(each.stride(1) != 1 for each in (mixed, *rows)):
        raise ValueError(f"{mixed.dtype} inputs, strides {mixed.stride()}, do not fit the states")
    out = torch.empty(tokens, shape.value_heads, shape.value_dim, dtype=mixed.dtype, device=mixed.device)
    if not sequences:
        return out
    window, recurrent = states.window.shape[2], states.recurrent[layer].contiguous()
    inputs = (mixed, mixed.stride(0), states.conv[layer], states.window[layer])
    both = (rows[0], rows[0].stride(0), rows[-1], rows[-1].stride(0))
    gates = (*both, states.gates[layer], weights.a_log, weights.dt_bias, weights.d)
    taps = (weights.conv.T, weights.bias)  # [K, C], as it lies in memory
    order = (batch.starts, batch.source, batch.target, batch.applied, batch.held, batch.marks)
    marks, longest = len(batch.marks), tokens if batch.longest is None else min(batch.longest, tokens)
    columns = min(_COLUMNS[shape.rule], shape.value_dim)
    _recur[(shape.value_heads * (shape.value_dim // columns), sequences)](
        inputs,
        taps,
        gates,
        recurrent,
        order,
        marks,
        out,
        SHAPE=shape,
        WINDOW=window,
        COLUMNS=columns,
        SHORT=SHORT,
        LANES=_LANES,
        num_warps=1,
    )
    if longest > SHORT:
        long = min(sequences, tokens // (SHORT + 1))
        most = (tokens + long * window) // _CHUNK + long  # chunks
        exact = mixed.dtype == torch.float32
        # The interpreter cannot multiply bfloat16, and cuts what it stores instead of rounding it.
        chunks = _room(most, states, mixed.float() if INTERPRETED else mixed)
        precise = {
            "OPERAND": tl.float32 if INTERPRETED or exact else getattr(tl, str(mixed.dtype).removeprefix("torch.")),
            "PRECISION": "tf32x3" if exact else "tf32",
        }
        cut = {"SHAPE": shape, "CHUNK": _CHUNK, "SHORT": SHORT, "LANES": _LANES}
        _convolve[(most * (2 * shape.key_heads + shape.value_heads),)](
            inputs, taps, order, sequences, chunks, WINDOW=window, **cut, num_warps=4
        )
        _prepare[(most * shape.value_heads,)](
            gates,
            order,
            sequences,
            chunks,
            WINDOW=window,
            LEVELS=_CHUNK.bit_length() - 1,
            **cut,
            **precise,
            num_warps=4,
        )
        columns = min(_SCANNED, shape.value_dim)
        _scan[(shape.value_heads * (shape.value_dim // columns), sequences)](
            recurrent,
            order,
            marks,
            chunks,
            out,
            COLUMNS=columns,
            **cut,
            **precise,
            num_warps=4,
            num_stages=2,
        )
    _keep_inputs[(triton.cdiv(shape.channels, _CHANNELS), sequences)](
        inputs,
        gates,
        order,
        marks,
        SHAPE=shape,
        WINDOW=window,
        CHANNELS=_CHANNELS,
        HEADS_TILE=triton.next_power_of_2(shape.value_heads),
        LANES=_LANES,
        num_warps=4,
    )
    if not states.recurrent.is_contiguous():  # those of a CPU, where Triton interprets
        states.recurrent[layer] = recurrent
    return out


def _room(chunks: int, states: LinearStates, like: Tensor) -> tuple[Tensor, ...]:
    """Q, K, W (or D V), U, P and G of so many chunks."""
    shape = states.shape
    widths = [(shape.key_heads, shape.key_dim)] * 2
    third = shape.key_dim if shape.rule == "delta" else shape.value_dim
    widths += [(shape.value_heads, width) for width in (third, shape.value_dim, _CHUNK)]
    matrices = (like.new_empty(chunks, heads, _CHUNK, width) for heads, width in widths)
    return *matrices, like.new_empty(chunks, shape.value_heads, _CHUNK, dtype=torch.float32)
