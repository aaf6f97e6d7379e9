"""Paged attention on a CPU in torch: long runs of pages are read in place, scattered pages are gathered.

Three ways, chosen per chunk once a forward (the plan is kept on the batch and shared by the layers):

    decode   one token. The group's query heads fold into the query rows, `[1, kv_heads, group, head_dim]`, so one KV
             head is read once; a window only shortens the run. All decodes of the batch merge together.
    chunk    several tokens. The past needs no mask; the chunk's own keys and values are at hand, causal. Merged.
    dense    several tokens under a window that cuts, or any with a softcap: gathered, with an explicit mask.

The work is done by torch's CPU flash attention, which returns the log-sum-exp beside the output and takes strided
views. What is not here: the maths (attention.py) and devices.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.paging import PagedBatch

flash = torch._scaled_dot_product_flash_attention_for_cpu  # (q, k, v, dropout, causal, *, attn_mask, scale) -> out, lse

# A run shorter than this many cells is gathered: one more call costs about 8 us, as much as copying such a run.
SHORT_RUN = 64
# Up to this many query tokens a group is folded into the query rows; beyond it the copy outweighs reading KV once.
FOLDED = 16

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
class LongChunk:
    """A chunk of several tokens: `whole` with a mask where one run holds everything, else past parts and itself."""

    first: int
    length: int
    placed: list[Views]
    gather: Tensor | None
    whole_mask: Tensor | None


@dataclass(slots=True)
class DenseChunk:
    """A chunk attended with a mask `hidden` [length, positions], over gathered `cells` [positions]."""

    first: int
    length: int
    cells: Tensor
    hidden: Tensor


@dataclass(slots=True)
class CpuPlan:
    decodes: Decodes
    chunks: list[LongChunk]
    dense: list[DenseChunk]


def attend_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    layer: int,
    batch: PagedBatch,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """See `attention.paged_attention`; `window` 0 and `softcap` 0 mean none. Shapes are checked there."""
    group = q.shape[1] // kv.shape[4]
    key = -window - 1 if softcap else window
    plan: CpuPlan | None = batch.plans.get(key)
    if plan is None:
        plan = batch.plans[key] = make_plan(kv, batch, group, window, all_dense=bool(softcap))
    if not plan.chunks and not plan.dense:
        return _attend_decodes(plan.decodes, q, kv, layer, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.decodes.tokens:
        out[plan.decodes.index] = _attend_decodes(plan.decodes, q, kv, layer, scale)
    for chunk in plan.chunks:
        _attend_chunk(chunk, q, k, v, kv, layer, scale, out)
    for dense in plan.dense:
        _attend_dense(dense, q, kv, layer, scale, softcap, out)
    return out


# ---- planning, once a forward ----


def make_plan(kv: Tensor, batch: PagedBatch, group: int, window: int, all_dense: bool) -> CpuPlan:
    """Sort the chunks into the three ways and build what every layer shares."""
    plan = CpuPlan(Decodes(), [], [])
    first = 0
    for chunk, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        end = start + length
        if all_dense or (length > 1 and 0 < window < end):
            plan.dense.append(_plan_dense(batch, chunk, first, window))
        elif length == 1:
            low = max(0, end - window) if window else 0
            _plan_decode(plan.decodes, kv, batch.runs[chunk].between(low, end, batch.page_size), first)
        else:
            plan.chunks.append(_plan_chunk(kv, batch, chunk, first, group))
        first += length
    _finish_decodes(plan.decodes)
    return plan


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


def _plan_chunk(kv: Tensor, batch: PagedBatch, chunk: int, first: int, group: int) -> LongChunk:
    start, length = batch.starts[chunk], batch.lengths[chunk]
    end = start + length
    if length <= FOLDED and start:
        pieces = batch.runs[chunk].between(0, end, batch.page_size)
        if len(pieces) == 1:
            hidden = torch.arange(end) > torch.arange(start, end)[:, None]  # [length, positions]
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).repeat(group, 1)
            return LongChunk(first, length, [_run_views(kv, *pieces[0])], None, mask)
    placed, short = _split_runs(kv, batch.runs[chunk].between(0, start, batch.page_size)) if start else ([], [])
    return LongChunk(first, length, placed, _cells_of(short) if short else None, None)


def _plan_dense(batch: PagedBatch, chunk: int, first: int, window: int) -> DenseChunk:
    start, length = batch.starts[chunk], batch.lengths[chunk]
    end = start + length
    low = max(0, start - window + 1) if window else 0
    seen, asking = torch.arange(low, end), torch.arange(start, end)[:, None]
    hidden = (seen > asking) | (seen <= asking - window) if window else seen > asking
    return DenseChunk(first, length, batch.cells_of(chunk, low, end), hidden)


# ---- attending, in every layer ----


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


def _attend_chunk(
    chunk: LongChunk, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, layer: int, scale: float, out: Tensor
) -> None:
    """One chunk of several tokens, into its rows of `out`."""
    span = slice(chunk.first, chunk.first + chunk.length)
    kv_heads, dim = kv.shape[4], kv.shape[5]
    shape = (chunk.length, kv_heads, q.shape[1] // kv_heads, dim)
    asked, target = q[span].view(shape), out[span].view(shape)
    if chunk.whole_mask is not None:
        folded = asked.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)  # [1, kv_heads, group * length, dim]
        keys, values = chunk.placed[0][2 * layer : 2 * layer + 2]
        result = flash(folded, keys, values, 0.0, False, attn_mask=chunk.whole_mask, scale=scale)[0]
        target.copy_(result.view(kv_heads, -1, chunk.length, dim).permute(2, 0, 1, 3))
        return
    grouped = asked.permute(2, 1, 0, 3)  # [group, kv_heads, length, dim]: the group as batch, its KV expanded
    expanded = (grouped.shape[0], -1, -1, -1)
    pairs = [(views[2 * layer], views[2 * layer + 1]) for views in chunk.placed]
    if chunk.gather is not None:
        gathered = _gather(kv, layer, chunk.gather).unsqueeze(1)
        pairs.append((gathered[0], gathered[1]))
    own_k, own_v = k[span].transpose(0, 1)[None].expand(expanded), v[span].transpose(0, 1)[None].expand(expanded)
    parts = [flash(grouped, own_k, own_v, 0.0, True, scale=scale)]
    parts += [flash(grouped, k.expand(expanded), v.expand(expanded), 0.0, False, scale=scale) for k, v in pairs]
    if len(parts) == 1:
        merged = parts[0][0]
    else:
        weights = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
        merged = sum((part * weight for (part, _), weight in zip(parts, weights, strict=True)), start=torch.zeros(()))
    target.copy_(merged.permute(2, 1, 0, 3))


def _attend_dense(
    chunk: DenseChunk, q: Tensor, kv: Tensor, layer: int, scale: float, softcap: float, out: Tensor
) -> None:
    """One chunk under a window or a softcap, into its rows of `out`. Scores and softmax in float32."""
    span = slice(chunk.first, chunk.first + chunk.length)
    gathered = _gather(kv, layer, chunk.cells).float()
    keys, values = gathered.unsqueeze(2).unbind(0)  # [kv_heads, 1, positions, dim]
    shape = (chunk.length, kv.shape[4], q.shape[1] // kv.shape[4], kv.shape[5])
    asked = q[span].view(shape).permute(1, 2, 0, 3).float()  # [kv_heads, group, length, dim]
    scores = torch.matmul(asked, keys.transpose(-1, -2)).mul_(scale)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    weights = scores.masked_fill_(chunk.hidden, -torch.inf).softmax(-1)
    out[span].view(shape).copy_(torch.matmul(weights, values).permute(2, 0, 1, 3))
