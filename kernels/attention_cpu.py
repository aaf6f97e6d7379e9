"""Paged attention on a CPU in torch: a run of pages is read in place, scattered pages are gathered.

Three ways, chosen per chunk once a forward (the plan is kept on the batch and shared by the layers):

    decode   one token: flash attention over each run, merged; a window only shortens the runs. All decodes together.
    span     several tokens, block by block, over one run or a copy. In bfloat16 and with many tokens a block is two
             products around a softmax, else flash attention with a mask.
    dense    several tokens under a window that cuts, or any with a softcap or sinks or over a store in int8: with an
             explicit mask, in float32.

In all of them the query heads of a group are query rows of their KV head, so that it is read once. torch's flash
attention takes strided views and returns the log-sum-exp beside the output; its tiles are good in float32, while in
bfloat16 whole products are up to twice as fast. What is not here: the maths (attention.py) and devices.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.kv import in_numbers
from holdfast.kernels.paging import PagedBatch

flash = torch._scaled_dot_product_flash_attention_for_cpu  # (q, k, v, dropout, causal, *, attn_mask, scale) -> out, lse

# A run of a decode shorter than this many cells is gathered: a call more costs about 8 us, as much as copying the run.
SHORT_RUN = 64
FEW = 16  # up to so many tokens flash attention is as fast as products, whose calls cost more
BLOCK_ROWS = 128  # query rows, the heads of a group counted, that are multiplied at a time
SCORES_BYTES = 1 << 20  # so much of scores is written at a time, to stay in a core's cache
SAMPLED = 16  # every so many keys one is looked at for where a query's scores lie

Pieces = list[tuple[int, int]]  # runs as (first cell, cells)
Views = tuple[Tensor, ...]  # of 2 * layers tensors [1, kv_heads, cells, head_dim]: key and value of each layer


@dataclass(slots=True)
class Decodes:
    """The one-token chunks. Parts are first the runs in place, then the gathered ones, all `[1, kv_heads, n, dim]`."""

    tokens: list[int] = field(default_factory=list)  # index of each decode's token in the batch
    placed: list[tuple[int, Views]] = field(default_factory=list)  # (token, run)
    gathered: list[tuple[int, Pieces]] = field(default_factory=list)  # (token, short runs)
    index: Tensor | None = None  # `tokens` as a tensor
    owner: Tensor | None = None  # [parts] which decode a part belongs to; None: part i to decode i
    gather_cells: Tensor | None = None
    gather_sizes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Span:
    """A chunk of several tokens and where the positions [low, end) of its sequence lie: in one run, or scattered."""

    first: int  # index of its first token in the batch
    length: int
    low: int
    end: int
    products: bool  # rather than flash attention
    views: Views | None  # of the run
    pages: Tensor | None  # to gather otherwise, from the one with position `low` on


@dataclass(slots=True)
class CpuPlan:
    """The chunks by the way they are attended.

    `masks[n]` [group * n, positions]: added to the scores of a block of n tokens and the positions up to its own, which
    are the mask's last. `corner` [n, 1, n]: which keys of a block's own tokens its queries do not see.
    `room` [2, n]: where scores and weights of a block are written, again and again; memory asked of the system for
    each would cost as much as the products. `dense`: with what is `hidden` [length, end - low].
    """

    decodes: Decodes = field(default_factory=Decodes)
    spans: list[Span] = field(default_factory=list)
    masks: dict[int, Tensor] = field(default_factory=dict)
    corner: Tensor | None = None
    room: Tensor | None = None
    dense: list[tuple[Span, Tensor]] = field(default_factory=list)


def attend_cpu(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `attention.paged_attention`; `window` 0 and `softcap` 0 mean none. Shapes are checked there."""
    group = q.shape[1] // kv.shape[4]
    all_dense = bool(softcap) or sinks is not None or kv.dtype == torch.int8
    plan: CpuPlan | None = batch.plans.get((window, all_dense))
    if plan is None:
        plan = batch.plans[window, all_dense] = make_plan(kv, batch, group, window, all_dense)
    if len(plan.decodes.tokens) == len(batch.lengths):
        return _attend_decodes(plan.decodes, q, kv, layer, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.decodes.tokens:
        out[plan.decodes.index] = _attend_decodes(plan.decodes, q, kv, layer, scale)
    for span in plan.spans:
        _attend_span(span, plan, q, kv, layer, scale, out)
    for span, hidden in plan.dense:
        _attend_dense(span, hidden, q, kv, layer, scale, softcap, sinks, out)
    return out


def make_plan(kv: Tensor, batch: PagedBatch, group: int, window: int, all_dense: bool) -> CpuPlan:
    """Sort the chunks into the three ways and build what every layer shares."""
    plan = CpuPlan()
    first = 0
    for chunk, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        end = start + length
        if all_dense or (length > 1 and 0 < window < end):
            low = max(0, start - window + 1) if window else 0
            plan.dense.append((_plan_span(kv, batch, chunk, first, low), _hidden(start, end, low, window)))
        elif length == 1:
            low = max(0, end - window) if window else 0
            _plan_decode(plan.decodes, kv, batch.runs[chunk].between(low, end, batch.page_size), first)
        else:
            plan.spans.append(_plan_span(kv, batch, chunk, first))
        first += length
    _finish_decodes(plan.decodes)
    _prepare_blocks(plan, kv, group)
    return plan


def _prepare_blocks(plan: CpuPlan, kv: Tensor, group: int) -> None:
    """What the blocks of the spans need."""
    size = _block_tokens(group)
    multiplied = [span.end for span in plan.spans if span.products]
    if multiplied:
        plan.corner = torch.ones(size, size, dtype=torch.bool).tril_(-1)[:, None]
        one_head = max(multiplied) * size * group
        plan.room = kv.new_empty(2, max(SCORES_BYTES // kv.itemsize, one_head))
    masked = [span for span in plan.spans if not span.products]
    widest = max((span.end for span in masked), default=0)
    for tokens in {n for span in masked for n in (min(size, span.length), span.length % size) if n}:
        hidden = _hidden(widest - tokens, widest, 0, 0)
        plan.masks[tokens] = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).repeat(group, 1)


def _block_tokens(group: int) -> int:
    """How many tokens of a long chunk are multiplied at a time."""
    return max(1, BLOCK_ROWS // group)


def _hidden(start: int, end: int, low: int, window: int) -> Tensor:
    """Which of the positions [low, end) the tokens at [start, end) do not see: [end - start, end - low]."""
    seen, asking = torch.arange(low, end), torch.arange(start, end)[:, None]
    return (seen > asking) | (seen <= asking - window) if window else seen > asking


def _plan_span(kv: Tensor, batch: PagedBatch, chunk: int, first: int, low: int = 0) -> Span:
    length, size = batch.lengths[chunk], batch.page_size
    end = batch.starts[chunk] + length
    pieces = batch.runs[chunk].between(low, end, size)
    products = kv.dtype == torch.bfloat16 and length > FEW
    if len(pieces) == 1:
        return Span(first, length, low, end, products, _run_views(kv, *pieces[0]), None)
    pages = batch.page_table[batch.rows[chunk], low // size : -(-end // size)]
    return Span(first, length, low, end, products, None, pages)


def _run_views(kv: Tensor, cell: int, cells: int) -> Views:
    """Keys and values of a run in every layer, in place: one view call and one unbind for all layers."""
    layers, _, _, _, heads, dim = kv.shape
    stride = kv.stride()
    shape, strides = (layers * 2, 1, heads, cells, dim), (stride[1], 0, stride[4], stride[3], 1)
    return kv.as_strided(shape, strides, cell * stride[3] + kv.storage_offset()).unbind(0)


def _split_runs(kv: Tensor, pieces: Pieces) -> tuple[list[Views], Pieces]:
    """Runs worth reading in place, as views, and the others."""
    if len(pieces) == 1:
        return [_run_views(kv, *pieces[0])], []
    placed = [_run_views(kv, cell, size) for cell, size in pieces if size >= SHORT_RUN]
    return placed, [piece for piece in pieces if piece[1] < SHORT_RUN]


def _cells_of(pieces: Pieces) -> Tensor:
    """Every cell of some runs, in order, int64."""
    first, sizes = np.array(pieces, dtype=np.int64).T
    ends = sizes.cumsum()
    return torch.from_numpy(np.repeat(first - ends + sizes, sizes) + np.arange(ends[-1]))


def _plan_decode(decodes: Decodes, kv: Tensor, pieces: Pieces, token: int) -> None:
    placed, short = _split_runs(kv, pieces)
    decodes.tokens.append(token)
    decodes.placed += [(token, views) for views in placed]
    if short:
        decodes.gathered.append((token, short))


def _finish_decodes(decodes: Decodes) -> None:
    decodes.index = torch.tensor(decodes.tokens)
    parts = [token for token, _ in decodes.placed] + [token for token, _ in decodes.gathered]
    if parts != decodes.tokens:
        place = {token: index for index, token in enumerate(decodes.tokens)}
        decodes.owner = torch.tensor([place[token] for token in parts])
    if decodes.gathered:
        decodes.gather_cells = _cells_of([piece for _, short in decodes.gathered for piece in short])
        decodes.gather_sizes = [sum(size for _, size in short) for _, short in decodes.gathered]


def _gather(kv: Tensor, layer: int, cells: Tensor) -> Tensor:
    """Copies of one layer's cells, heads first: [2, kv_heads, cells, head_dim]."""
    return kv[layer].flatten(1, 2).transpose(1, 2).index_select(2, cells)


def _attend_decodes(decodes: Decodes, q: Tensor, kv: Tensor, layer: int, scale: float) -> Tensor:
    """All one-token chunks: [decodes, heads, head_dim]."""
    tokens, heads, dim = q.shape
    kv_heads = kv.shape[4]
    queries = q.view(tokens, 1, kv_heads, heads // kv_heads, dim).unbind(0)  # each [1, kv_heads, group, dim]
    parts = [
        flash(queries[token], views[2 * layer], views[2 * layer + 1], 0.0, False, scale=scale)
        for token, views in decodes.placed
    ]
    if decodes.gather_cells is not None:
        gathered = _gather(kv, layer, decodes.gather_cells)
        pieces = gathered.unsqueeze(1).split_with_sizes(decodes.gather_sizes, dim=3)  # each [2, 1, kv_heads, n, dim]
        for (token, _), piece in zip(decodes.gathered, pieces, strict=True):
            parts.append(flash(queries[token], piece[0], piece[1], 0.0, False, scale=scale))
    out = torch.cat([part[0] for part in parts]) if len(parts) > 1 else parts[0][0]
    if decodes.owner is not None:
        lse = torch.cat([part[1] for part in parts])  # [parts, kv_heads, group]
        out = _merge_parts(out, lse, decodes.owner, len(decodes.tokens)).to(q.dtype)
    return out.reshape(-1, heads, dim)


def _merge_parts(out: Tensor, lse: Tensor, owner: Tensor, count: int) -> Tensor:
    """Merge parts by their log-sum-exp: out [parts, kv_heads, group, dim] -> [count, kv_heads, group, dim]."""
    top = lse.new_full((count, *lse.shape[1:]), -torch.inf)
    top.scatter_reduce_(0, owner[:, None, None].expand_as(lse), lse, "amax")
    weight = torch.exp(lse - top[owner])
    total = torch.zeros_like(top).index_add_(0, owner, weight)
    weighted = torch.zeros(count, *out.shape[1:]).index_add_(0, owner, out * weight[..., None])
    return weighted / total[..., None]


def _keys_values(span: Span, kv: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """One layer's keys and values of a span's sequence, each [kv_heads, end - low, head_dim]."""
    if span.views is not None:
        return span.views[2 * layer][0], span.views[2 * layer + 1][0]
    assert span.pages is not None
    gathered = kv[layer].permute(0, 3, 1, 2, 4).index_select(2, span.pages)  # [2, kv_heads, pages, page_size, dim]
    skip = span.low % kv.shape[3]
    keys, values = gathered.flatten(2, 3)[:, :, skip : skip + span.end - span.low].unbind(0)
    return keys, values


def _grouped(x: Tensor, span: Span, kv_heads: int) -> Tensor:
    """A span's rows of [T, heads, dim] as [length, kv_heads, group, dim], in place."""
    return x[span.first : span.first + span.length].view(span.length, kv_heads, -1, x.shape[2])


def _attend_span(span: Span, plan: CpuPlan, q: Tensor, kv: Tensor, layer: int, scale: float, out: Tensor) -> None:
    """One chunk of several tokens, into its rows of `out`: each block of queries sees the keys up to its own last."""
    keys, values = _keys_values(span, kv, layer)
    heads, _, dim = keys.shape
    asked, target = _grouped(q, span, heads), _grouped(out, span, heads)
    size, start = _block_tokens(asked.shape[2]), span.end - span.length
    for low in range(0, span.length, size):
        high = min(span.length, low + size)
        tokens, seen = high - low, start + high
        queries = asked[low:high].permute(1, 2, 0, 3).reshape(heads, -1, dim)  # [kv_heads, rows, dim]
        if span.products:
            assert plan.corner is not None
            assert plan.room is not None
            hidden = plan.corner[:tokens, :, :tokens]
            result = _multiply(queries, keys[:, :seen], values[:, :seen], hidden, scale, plan.room)
        else:
            mask = plan.masks[tokens][:, -seen:]
            pair = keys[None, :, :seen], values[None, :, :seen]
            result = flash(queries[None], *pair, 0.0, False, attn_mask=mask, scale=scale)[0]
        target[low:high] = result.view(heads, -1, tokens, dim).permute(2, 0, 1, 3)


def _multiply(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float, room: Tensor) -> Tensor:
    """A block by two products, some heads at a time: queries [kv_heads, rows, dim] to outputs of the same shape."""
    heads, rows, _ = queries.shape
    result = torch.empty_like(queries)
    together = min(heads, room.shape[1] // (keys.shape[1] * rows))
    for head in range(0, heads, together):
        some = slice(head, head + together)
        torch.bmm(_weights(queries[some], keys[some], hidden, scale, room), values[some], out=result[some])
    return result


def _weights(queries: Tensor, keys: Tensor, hidden: Tensor, scale: float, room: Tensor) -> Tensor:
    """The softmax of a block's scores, in `room`: queries [heads, rows, dim], keys [heads, seen, dim] ->
    [heads, rows, seen].

    Keys times queries is twice as fast as queries times keys. The product is rounded to q's dtype; to keep the
    greatest scores exact it is taken less about the greatest, which a sample of the keys tells, and softmax does not
    mind. Scores far below it may round: they hardly weigh.
    """
    (heads, seen, _), rows, tokens = keys.shape, queries.shape[1], len(hidden)
    asked, size = queries.transpose(1, 2), heads * seen * rows
    shift = torch.bmm(keys[:, ::SAMPLED], asked).amax(1, keepdim=True).mul_(-scale)
    scores, other = (part[:size].view(heads, seen, rows) for part in room)
    torch.baddbmm(shift, keys, asked, alpha=scale, out=scores)
    scores.view(heads, seen, -1, tokens)[:, seen - tokens :].masked_fill_(hidden, -torch.inf)
    lanes = 64 // queries.itemsize
    if rows % lanes * 8 > rows:  # softmax over keys takes as many rows at once as a register holds, and the rest singly
        turned = other.view(heads, rows, seen).copy_(scores.transpose(1, 2))
        return torch.softmax(turned, 2, out=scores.view(heads, rows, seen))
    return torch.softmax(scores, 1, out=other).transpose(1, 2)


def _attend_dense(
    span: Span,
    hidden: Tensor,
    q: Tensor,
    kv: Tensor,
    layer: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """One chunk that is masked, bent or has sinks, into its rows of `out`. Scores and softmax in float32."""
    keys, values = (in_numbers(part[:, None], torch.float32) for part in _keys_values(span, kv, layer))
    # keys, values [kv_heads, 1, n, dim], asked [kv_heads, group, length, dim]
    asked = _grouped(q, span, len(keys)).permute(1, 2, 0, 3).float()
    scores = torch.matmul(asked, keys.transpose(-1, -2)).mul_(scale)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    weights = _softmax_with(sinks, scores.masked_fill_(hidden, -torch.inf).flatten(0, 1)).view_as(scores)
    _grouped(out, span, len(keys)).copy_(torch.matmul(weights, values).permute(2, 0, 1, 3))


def _softmax_with(sinks: Tensor | None, scores: Tensor) -> Tensor:
    """The softmax of scores [heads, rows, keys] over keys, with the heads' `sinks` in its sum."""
    if sinks is None:
        return scores.softmax(-1)
    of_rows = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat((scores, of_rows), -1).softmax(-1)[..., :-1]
