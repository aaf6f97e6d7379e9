"""What the programs of a GPU's attention do in one forward: worked out on the host once, used by every layer.

An item is one program's work for one KV head: some query tokens against the positions [low, high) of one page table
row. The query heads of a group are rows of one tile, so a KV head is read once for all of them. Three kinds:

    narrow   a chunk of few tokens: a decode, a verification window. Its positions are cut into parts, so that one
             sequence fills the device; the parts are merged by their log-sum-exp. The more positions, the longer the
             parts (`_PARTS`): where there is little to read, few programs cost time; where there is much, many partial
             results do.
    wide     a block of a longer chunk's tokens; cut only where a chunk has too few blocks to fill the device.
    shared   the tokens of several narrow chunks against a prefix whose pages they have in common, read once for all
             (a cascade); each chunk then continues behind the prefix by itself.

How a sequence is cut depends on its own length alone, never on what else is in the batch, with the one exception of a
shared prefix. `attention_work` is numpy in, numpy out and knows no device; `make_plan` puts its result on one, and
`attention_gpu` launches that.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.paging import PagedBatch, PageRuns
from holdfast.kernels.transfer import sent_together

Ints = npt.NDArray[np.int32]

SPLIT = 128  # positions of the shortest narrow part
_PARTS = ((16, 1), (64, 2), (128, 4))  # up to so many times SPLIT positions in parts of so many times SPLIT
_LONGEST = 8  # times SPLIT, beyond
NARROW_ROWS = 64  # query rows (tokens times the group's heads) up to which a chunk is narrow
WIDE_ROWS = 128  # query rows of a wide or shared tile
WIDE_SPLIT = 256  # the least positions of a wide or shared part
PROGRAMS = 128  # programs that about fill a device
SHARED = 512  # the least cells that are worth a tile of their own

FIRST, COUNT, ROW, LOW, HIGH, SLOT = range(6)  # columns of an item


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The items of a batch's attention with one `window` (0: none), and what becomes of their results.

    `narrow`, `wide` [n, 6] int32: first entry, entries, page table row, low, high, and the first of the partial results
    that the entries' outputs go to, one after the other, or -1 for the output itself; wide ones with the most positions
    first, so that none of those is left when the others are done. `narrow_rows`: rows a narrow tile needs.
    `order` [entries] int32: the token of each entry; the first T are the tokens themselves.
    `merges` [m, 7] int32: a token and where its partial results lie, twice (first, stride, count). `partials`: how many
    there are. `positions` [T] int32: of the tokens.
    """

    window: int
    narrow: Ints
    wide: Ints
    narrow_rows: int
    order: Ints
    merges: Ints
    partials: int
    positions: Ints

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """What the device needs, as `plan_over` takes it."""
        return self.narrow, self.wide, self.order, self.merges, self.positions


@dataclass(slots=True)
class _Shared:
    """A prefix that the chunks `members` have in common, and where the partial results of their tokens begin."""

    members: list[int]
    cells: int


def attention_work(
    batch: PagedBatch, group: int, kv_heads: int, window: int = 0, cascade: bool = True
) -> AttentionWork:
    """The items of a batch for `group` query heads to each of `kv_heads`; `window` 0 means none."""
    starts, lengths = np.array(batch.starts, np.int32), np.array(batch.lengths, np.int32)
    rows = np.array(batch.rows, np.int32)
    firsts = (np.cumsum(lengths) - lengths).astype(np.int32)
    is_narrow = lengths * group <= NARROW_ROWS
    narrow = np.flatnonzero(is_narrow)
    prefixes = np.zeros(len(lengths), np.int32)
    groups = _shared_prefixes(batch, narrow.tolist()) if cascade and not window else []
    for shared in groups:
        prefixes[shared.members] = shared.cells
    low = np.maximum(starts - window + 1, 0) if window else prefixes
    items, parts, bases, partials = _narrow_items(
        firsts[narrow], lengths[narrow], rows[narrow], low[narrow], (starts + lengths)[narrow], prefixes[narrow] > 0
    )
    wide: list[tuple[int, ...]] = []
    merges = [_merges(firsts[narrow], lengths[narrow], bases, parts)]
    for chunk in np.flatnonzero(~is_narrow).tolist():
        shape = (int(firsts[chunk]), int(lengths[chunk]), int(rows[chunk]), int(starts[chunk]))
        partials = _wide_items(shape, group, kv_heads, window, partials, wide, merges)
    order = [np.arange(int(lengths.sum()), dtype=np.int32)]
    entries = len(order[0])
    for shared in groups:
        tokens = np.concatenate([np.arange(firsts[c], firsts[c] + lengths[c], dtype=np.int32) for c in shared.members])
        row = int(rows[shared.members[0]])
        programs = max(1, PROGRAMS // (-(-len(tokens) * group // WIDE_ROWS) * kv_heads))
        partials = _shared_items(shared, row, tokens, entries, group, programs, partials, wide, merges[0])
        order.append(tokens)
        entries += len(tokens)
    most = int(lengths[narrow].max(initial=1)) * group
    blocks = np.array(wide, np.int32).reshape(-1, 6)
    spans = [np.arange(s, s + n, dtype=np.int32) for s, n in zip(batch.starts, batch.lengths, strict=True)]
    return AttentionWork(
        window=window,
        narrow=items,
        wide=blocks[np.argsort(blocks[:, LOW] - blocks[:, HIGH], kind="stable")],
        narrow_rows=max(16, 1 << (most - 1).bit_length()),
        order=np.concatenate(order),
        merges=np.concatenate(merges),
        partials=partials,
        positions=np.concatenate(spans),
    )


def _narrow_items(
    firsts: Ints, lengths: Ints, rows: Ints, low: Ints, high: Ints, continued: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints, int]:
    """Items of the narrow chunks, how many parts each has, where its partial results begin, and how many there are.

    Parts end at multiples of their length. A chunk of one part that does not continue a shared prefix writes its output
    itself: it has no partial results.
    """
    size = _part_sizes(high - low)
    before = low // size
    parts = (high + size - 1) // size - before
    chunk = np.repeat(np.arange(len(parts), dtype=np.int32), parts)
    part = np.arange(len(chunk), dtype=np.int32) - np.repeat(np.cumsum(parts) - parts, parts).astype(np.int32)
    merged = (parts > 1) | continued
    kept = parts * lengths * merged
    bases = (np.cumsum(kept) - kept).astype(np.int32)
    items = np.empty((len(chunk), 6), np.int32)
    items[:, FIRST], items[:, COUNT], items[:, ROW] = firsts[chunk], lengths[chunk], rows[chunk]
    items[:, LOW] = np.maximum((before[chunk] + part) * size[chunk], low[chunk])
    items[:, HIGH] = np.minimum((before[chunk] + part + 1) * size[chunk], high[chunk])
    items[:, SLOT] = np.where(merged[chunk], bases[chunk] + part * lengths[chunk], -1)
    return items, np.where(merged, parts, 0).astype(np.int32), bases, int(kept.sum())


def _part_sizes(positions: Ints) -> Ints:
    """How long the parts of chunks that read so many positions are."""
    sizes = np.full(len(positions), SPLIT * _LONGEST, np.int32)
    for most, times in reversed(_PARTS):
        sizes[positions <= SPLIT * most] = SPLIT * times
    return sizes


def _merges(firsts: Ints, lengths: Ints, bases: Ints, parts: Ints) -> Ints:
    """Rows of `merges` for chunks whose partial results are [parts, tokens] from `bases` on; none where parts is 0."""
    chunk = np.repeat(np.flatnonzero(parts), lengths[parts > 0])
    sizes = lengths[parts > 0]
    token = np.arange(len(chunk), dtype=np.int32) - np.repeat(np.cumsum(sizes) - sizes, sizes).astype(np.int32)
    merges = np.zeros((len(chunk), 7), np.int32)
    merges[:, 0] = firsts[chunk] + token
    merges[:, 1], merges[:, 2], merges[:, 3] = bases[chunk] + token, lengths[chunk], parts[chunk]
    return merges


def _wide_items(
    shape: tuple[int, int, int, int],
    group: int,
    kv_heads: int,
    window: int,
    partials: int,
    wide: list[tuple[int, ...]],
    merges: list[Ints],
) -> int:
    """Items of one long chunk (first token, tokens, row, start), appended. Returns how many partials there are."""
    first, length, row, start = shape
    block = max(1, WIDE_ROWS // group)
    blocks = -(-length // block)
    cuts = max(1, min(PROGRAMS // (blocks * kv_heads), (start + length) // WIDE_SPLIT))
    size = -(-(start + length) // cuts)
    for at in range(0, length, block):
        count = min(block, length - at)
        low, high = max(0, start + at - window + 1) if window else 0, start + at + count
        edges = [low, *range((low // size + 1) * size, high, size), high]
        base = partials if len(edges) > 2 else -1
        for part, (begin, end) in enumerate(pairwise(edges)):
            slot = base + part * count if base >= 0 else -1
            wide.append((first + at, count, row, begin, end, slot))
        if base >= 0:
            one = np.array([[first + at], [count], [base], [len(edges) - 1]], np.int32)
            merges.append(_merges(one[0], one[1], one[2], one[3]))
            partials += (len(edges) - 1) * count
    return partials


def _shared_items(
    shared: _Shared,
    row: int,
    tokens: Ints,
    entries: int,
    group: int,
    programs: int,
    partials: int,
    wide: list[tuple[int, ...]],
    merges: Ints,
) -> int:
    """Items of a shared prefix, appended; notes in its members' `merges` where the results lie.

    `tokens` are the members' tokens, which are the entries from `entries` on; `programs`: how many cuts fill the
    device. Returns how many partial results there are now.
    """
    block = WIDE_ROWS // group
    cuts = max(1, min(programs, shared.cells // WIDE_SPLIT))
    size = -(-shared.cells // cuts // SPLIT) * SPLIT
    edges = [*range(0, shared.cells, size), shared.cells]
    for part, (begin, end) in enumerate(pairwise(edges)):
        for at in range(0, len(tokens), block):
            count = min(block, len(tokens) - at)
            wide.append((entries + at, count, row, begin, end, partials + part * len(tokens) + at))
    place = np.searchsorted(merges[:, 0], tokens)  # the merges of narrow chunks are in the order of tokens
    merges[place, 4] = partials + np.arange(len(tokens))
    merges[place, 5], merges[place, 6] = len(tokens), len(edges) - 1
    return partials + (len(edges) - 1) * len(tokens)


def _shared_prefixes(batch: PagedBatch, chunks: list[int]) -> list[_Shared]:
    """Groups of chunks that begin with the same pages for at least `SHARED` cells, each chunk in one group.

    One level deep: chunks with the same first page share what all of them have in common. A prefix ends at a multiple
    of `SPLIT`, before every member's first token.
    """
    by_page: dict[int, list[int]] = defaultdict(list)
    for chunk in chunks:
        if batch.starts[chunk] >= SHARED:
            by_page[batch.runs[chunk].pages[0]].append(chunk)
    groups = []
    for members in by_page.values():
        if len(members) < 2:
            continue
        leader = batch.runs[members[0]]
        cells = min(batch.starts[chunk] for chunk in members)
        for chunk in members[1:]:
            cells = min(cells, _common_slots(leader, batch.runs[chunk]) * batch.page_size)
        cells = cells // SPLIT * SPLIT
        if cells >= SHARED:
            groups.append(_Shared(members, cells))
    return groups


def _common_slots(a: PageRuns, b: PageRuns) -> int:
    """How many page slots two rows have in common from the first on."""
    for i, (slot, page) in enumerate(zip(a.slots, a.pages, strict=True)):
        if i >= len(b.slots) or b.slots[i] != slot or b.pages[i] != page:
            # The run before may be longer in one row than in the other.
            return min(slot, b.slots[i] if i < len(b.slots) else b.extent)
    ends = b.slots[len(a.slots)] if len(b.slots) > len(a.slots) else b.extent
    return min(a.extent, ends)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program walks its positions: so many at a time, by so many warps, with loads of so many tiles ahead."""

    keys: int
    warps: int
    stages: int


def tile_of(rows: int, dim_tile: int, exact: bool) -> Tile:
    """The tile for items of so many rows; `exact`: float32, whose products are made number by number.

    Chosen by what compiles for Ampere and Hopper without spilling registers to speak of and fits their shared memory.
    Pages are looked up a tile before its keys are loaded, so every two stages have one more tile of keys on its way.
    """
    wide = rows > NARROW_ROWS
    if exact and rows > 16:
        return Tile(16, 8, 2) if dim_tile <= 128 or not wide else Tile(16, 16, 1)
    deep = not exact and rows != NARROW_ROWS and dim_tile <= 128
    return Tile(32 if dim_tile > 128 else 64, 8 if wide else 4, 5 if deep else 3)


@dataclass(slots=True)
class GpuPlan:
    """What every layer of a forward shares, on the device: items, order, merges, positions and room for partials.

    With `counts`, two int32 tensors of one element, so many of the narrow and wide items are real, and two numbers of
    `programs` share them for each KV head: the launch is the same however many there are, as a graph's has to be.
    No wide items are launched where `wide` is empty. Rows of `merges` that are zero merge nothing. `tiles`: other tiles
    of narrow and wide items than those of `tile_of`.
    """

    narrow: Tensor
    wide: Tensor
    narrow_rows: int
    order: Tensor
    merges: Tensor
    positions: Tensor
    partial: Tensor
    partial_lse: Tensor
    counts: tuple[Tensor, Tensor] | None = None
    programs: tuple[int, int] = (0, 0)
    tiles: tuple[Tile, Tile] | None = None


def make_plan(q: Tensor, batch: PagedBatch, kv_heads: int, window: int, cascade: bool = True) -> GpuPlan:
    """Work out the items of a forward over queries like `q` and copy them to its device, in one copy."""
    _, heads, dim = q.shape
    work = attention_work(batch, heads // kv_heads, kv_heads, window, cascade)
    return plan_over(work, sent_together(work.arrays, q.device), heads, dim)


def plan_over(work: AttentionWork, views: Sequence[Tensor], heads: int, dim: int) -> GpuPlan:
    """A plan over `views`, which are `work.arrays` on the device."""
    narrow, wide, order, merges, positions = views
    partial = torch.empty(max(work.partials, 1), heads, dim, dtype=torch.float32, device=order.device)
    lse = torch.empty(partial.shape[:2], dtype=torch.float32, device=order.device)
    return GpuPlan(narrow, wide, work.narrow_rows, order, merges, positions, partial, lse)


def plan_key(window: int) -> int:
    """Under which key of `PagedBatch.plans` the plan for a window lies; 0: none."""
    return -window - 1
