"""How the attention work of a GPU is cut in one forward: worked out once on the host, used by every layer.

An item is one program's work for one KV head: some query tokens against the positions [low, high) of one page table
row. The query heads of a group are rows of one tile, so a KV head is read once for all of them. Three kinds:

    narrow   a chunk of few tokens: a decode, a verification window. Its positions are cut into parts, so that one
             sequence fills the device; the parts are merged by their log-sum-exp. The more positions, the longer the
             parts (`_PARTS`): with little to read, many programs cost time; with much to read, many partial results do.
    wide     a block of a longer chunk's tokens; cut only where a chunk has too few blocks to fill the device.
    shared   the tokens of several narrow chunks against a prefix whose pages they have in common, read once for all
             (a cascade); each chunk then continues behind the prefix by itself.

The cut of a sequence depends on its own length, never on the rest of the batch, except for a shared prefix. With
`invariant` it depends on a token's own position alone, without exception. `attention_work` is numpy in, numpy out and
knows no device; `make_plan` copies its result to one, and `attention_gpu` launches it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.kv import PagedBatch, sent_together

Ints = npt.NDArray[np.int32]

SPLIT = 128  # positions of the shortest narrow part
# The length of a sequence's parts by the sequence's own, both in SPLITs: 1 up to 16, 2 up to 64, 4 up to 128, then 8.
_PARTS = np.repeat(np.array([1, 2, 4, 8], np.int32), [16, 48, 64, 1])
_CHANGES = (16 * SPLIT, 64 * SPLIT, 128 * SPLIT)  # from these positions on parts are longer
NARROW_ROWS = 64  # query rows (tokens times the group's heads) up to which a chunk is narrow
WIDE_ROWS = 128  # query rows of a wide or shared tile
WIDE_SPLIT = 256  # the least positions of a wide or shared part
PROGRAMS = 128  # about as many fill a device
SHARED = 512  # the fewest shared cells that are worth a tile of their own

_NOWHERE = 1 << 31  # behind every page slot

FIRST, COUNT, ROW, LOW, HIGH, SLOT = range(6)  # columns of an item


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The items of a batch's attention with one `window` (0: none), and where their results go.

    `narrow`, `wide` [n, 6] int32: first entry, entries, page table row, low, high, and the slot of the first partial
    result (the entries' follow one another), or -1 for the output itself. Wide items are sorted by their positions, the
    most first, so that no long item starts last. `narrow_rows`: rows of a narrow tile. `order` [entries] int32: the
    token of each entry; the first T are the tokens themselves. `merges` [m, 7] int32: a token and two runs of its
    partial results (first, stride, count). `partials`: their number. `positions` [T] int32: of the tokens.
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
        """The arrays for the device, in the order of `plan_over`."""
        return self.narrow, self.wide, self.order, self.merges, self.positions


@dataclass(slots=True)
class _Shared:
    """A prefix that the chunks `members` have in common."""

    members: list[int]
    cells: int


def attention_work(
    batch: PagedBatch, group: int, kv_heads: int, window: int = 0, cascade: bool = True, invariant: bool = False
) -> AttentionWork:
    """The items of a batch for `group` query heads to each of `kv_heads`; `window` 0 means none.

    `invariant`: a token's sums are cut by its own position alone, so that its bits depend neither on other chunks nor
    on the cut of its prompt or drafts. Then no prefix is shared, and parts of prompts are neither narrow nor cut.
    """
    few = NARROW_ROWS // group  # the most tokens of a narrow chunk
    chunks = (
        _own_chunks(batch, few)
        if invariant
        else _Chunks(batch.rows, batch.starts, batch.lengths, [n for n, size in enumerate(batch.lengths) if size > few])
    )
    starts, lengths = np.array(chunks.starts, np.int32), np.array(chunks.lengths, np.int32)
    rows, long = np.array(chunks.rows, np.int32), chunks.long
    firsts = _sums_before(lengths)
    tokens = np.arange(sum(batch.lengths), dtype=np.int32)
    groups = _shared_prefixes(batch, few) if cascade and not window and not invariant else []
    low = np.maximum(starts - window + 1, 0) if window else np.zeros(len(starts), np.int32)
    if invariant:
        low = low // SPLIT * SPLIT
    for shared in groups:
        low[shared.members] = shared.cells
    high = starts + lengths
    cut = np.array((firsts, lengths, rows, low, high, _part_sizes(high if invariant else high - low)))
    count = len(starts) - len(long)
    if long:
        is_narrow = np.ones(len(starts), np.bool_)
        is_narrow[long] = False
        blocks = _blocks(cut.take(long, axis=1).T.tolist(), group, kv_heads, window, whole=invariant)
        cut = np.concatenate((cut.compress(is_narrow, axis=1), np.array(blocks, np.int32).T), axis=1)
    items, merges, partials, n_narrow = _items(cut, count, bool(groups))
    narrow, wide = items[:n_narrow], items[n_narrow:]
    order = [tokens]
    entries = len(tokens)
    if groups:
        place = np.empty(entries, np.int32)
        place[merges[:, 0]] = np.arange(len(merges))
    for shared in groups:
        members = np.array(shared.members)
        sizes = lengths[members]
        own = (firsts[members] - _sums_before(sizes)).repeat(sizes)
        own += tokens[: len(own)]
        row = batch.rows[shared.members[0]]
        programs = max(1, PROGRAMS // (-(-len(own) * group // WIDE_ROWS) * kv_heads))
        more, cuts = _shared_items(shared, row, len(own), entries, group, programs, partials)
        wide = np.concatenate((wide, more))
        merges[place[own], 4] = np.arange(partials, partials + len(own))
        merges[place[own], 5:] = len(own), cuts
        partials += cuts * len(own)
        order.append(own)
        entries += len(own)
    if len(wide):
        wide = wide.take((wide[:, LOW] - wide[:, HIGH]).argsort(kind="stable"), axis=0)
    most = max(cut[COUNT, :count].tolist(), default=1)
    return AttentionWork(
        window=window,
        narrow=narrow,
        wide=wide,
        narrow_rows=max(16, 1 << (most * group - 1).bit_length()),
        order=np.concatenate(order) if groups else tokens,
        merges=merges,
        partials=partials,
        positions=(starts - firsts).repeat(lengths) + tokens,
    )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Page table rows, starts and lengths of a batch's chunks, and the indices of those that are not narrow."""

    rows: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    long: list[int]


def _own_chunks(batch: PagedBatch, few: int) -> _Chunks:
    """A batch's chunks for sums that depend on a token's own position alone: only chunks that decode are narrow.

    Last tokens and their drafts are cut into pieces of up to `few` tokens with parts of the same length.
    """
    rows: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    long: list[int] = []
    decodes = batch.decodes or [length <= few for length in batch.lengths]
    for row, start, length, decoding in zip(batch.rows, batch.starts, batch.lengths, decodes, strict=True):
        end = start + length
        edges = [start, end]
        if decoding:
            edges = [start, *range(start + few, end, few), *(at for at in _CHANGES if start < at < end), end]
        else:
            long.append(len(rows))
        for low, high in pairwise(sorted(set(edges))):
            rows.append(row)
            starts.append(low)
            lengths.append(high - low)
    return _Chunks(rows, starts, lengths, long)


def _part_sizes(positions: Ints) -> Ints:
    """The length of the parts of chunks that read so many positions."""
    sizes: Ints = _PARTS.take((positions - 1) // SPLIT, mode="clip") * SPLIT
    return sizes


def _items(chunks: Ints, count: int, continued: bool) -> tuple[Ints, Ints, int, int]:
    """Items of chunks, the merges of their partial results, the number of these, and the items of the first `count`.

    `chunks` [6, n]: first tokens, tokens, rows, low, high, and the length of their parts, which end at multiples of it.
    A chunk of one part that does not continue a shared prefix writes its output directly. `continued`: chunks whose low
    is not 0 continue one.
    """
    firsts, lengths, rows, low, high, size = chunks
    before = low // size
    parts = -(-high // size) - before
    merged = (parts > 1) | (low > 0) if continued else parts > 1
    begin = _sums_before(parts)
    kept = parts * merged * lengths
    bases = _sums_before(kept)
    # From item to item of a chunk, low grows by the size and the slot by the tokens. So each column is a chunk's value
    # at the batch's first item, repeated, plus that growth times the item's number. HIGH holds the size until then.
    table = (firsts, lengths, rows, (before - begin) * size, size, bases - begin * lengths)
    items = np.array(table).T.repeat(parts, axis=0)
    number = np.arange(len(items), dtype=np.int32)
    items[:, LOW] += number * items[:, HIGH]
    items[:-1, HIGH] = items[1:, LOW]
    items[:, SLOT] += number * items[:, COUNT]
    items[begin, LOW] = low
    items[begin + parts - 1, HIGH] = high
    partials, of_first = sum(kept.tolist()), sum(parts[:count].tolist())
    if not merged.all():
        items[begin[~merged], SLOT] = -1
        firsts, lengths, bases, parts = firsts[merged], lengths[merged], bases[merged], parts[merged]
    return items, _merges(firsts, lengths, bases, parts), partials, of_first


def _merges(firsts: Ints, lengths: Ints, bases: Ints, parts: Ints) -> Ints:
    """Rows of `merges` for chunks whose partial results are [parts, tokens] from `bases` on."""
    none = np.zeros(len(firsts), np.int32)
    merges = np.array((firsts, bases, lengths, parts, none, none, none)).T.repeat(lengths, axis=0)
    if len(merges) > len(firsts):
        within = np.arange(len(merges), dtype=np.int32) - _sums_before(lengths).repeat(lengths)
        merges[:, 0] += within
        merges[:, 1] += within
    return merges


def _sums_before(values: Ints) -> Ints:
    """The sum of all values before each."""
    sums: Ints = np.add.accumulate(values, dtype=np.int32) - values
    return sums


def _blocks(
    chunks: list[list[int]], group: int, kv_heads: int, window: int, *, whole: bool
) -> list[tuple[int, int, int, int, int, int]]:
    """The blocks of long chunks, each with the columns of a chunk for `_items`.

    `whole`: in one part, whose tiles begin at multiples of `SPLIT`.
    """
    block = max(1, WIDE_ROWS // group)
    blocks = []
    for first, length, row, _, end, _ in chunks:
        cuts = 1 if whole else max(1, min(PROGRAMS // (-(-length // block) * kv_heads), end // WIDE_SPLIT))
        size = -(-end // cuts // SPLIT) * SPLIT
        for at in range(0, length, block):
            low, high = end - length + at, min(end - length + at + block, end)
            count = high - low
            low = max(0, low - window + 1) if window else 0
            blocks.append((first + at, count, row, low // SPLIT * SPLIT if whole else low, high, size))
    return blocks


def _shared_items(
    shared: _Shared, row: int, tokens: int, first: int, group: int, programs: int, partials: int
) -> tuple[Ints, int]:
    """Items of a shared prefix, and the number of its cuts. `partials`: where its partial results begin.

    Its members have `tokens` tokens, which are the entries from `first` on; `programs`: as many cuts fill the device.
    """
    block = WIDE_ROWS // group
    cuts = max(1, min(programs, shared.cells // WIDE_SPLIT))
    size = -(-shared.cells // cuts // SPLIT) * SPLIT
    edges = [*range(0, shared.cells, size), shared.cells]
    items = [
        (first + at, min(block, tokens - at), row, begin, end, partials + part * tokens + at)
        for part, (begin, end) in enumerate(pairwise(edges))
        for at in range(0, tokens, block)
    ]
    return np.array(items, np.int32), len(edges) - 1


def _shared_prefixes(batch: PagedBatch, few: int) -> list[_Shared]:
    """Groups of chunks of up to `few` tokens that begin with the same pages for at least `SHARED` cells.

    Each chunk is in at most one group, and the groups save the most reading. A prefix ends at a multiple of `SPLIT`,
    before every member's first token.
    """
    heads = [runs.pages[0] for runs in batch.runs]
    if len(set(heads)) == len(heads):
        return []
    spans = enumerate(zip(batch.starts, batch.lengths, strict=True))
    chunks = [chunk for chunk, (start, length) in spans if start >= SHARED and length <= few]
    return _best_groups(batch, chunks, [0])[0].groups if len(chunks) > 1 else []


@dataclass(slots=True)
class _Grouping:
    """Chunks in groups, and the `others` in none."""

    groups: list[_Shared]
    others: list[int]

    def saved(self, elsewhere: int) -> int:
        """Cells that need not be read, if each of the others saves `elsewhere` in a group with other chunks."""
        return sum((len(group.members) - 1) * group.cells for group in self.groups) + len(self.others) * elsewhere


def _best_groups(batch: PagedBatch, members: list[int], elsewhere: list[int]) -> list[_Grouping]:
    """The grouping of chunks that saves the most, for each number of cells that one may save `elsewhere`, rising.

    Page table rows form a trie. At each branching, the chunks that are in no group of a branch's own may form a group.
    The best groups inside a branch depend only on what its chunks would save otherwise: nothing, or the cells before a
    branching further up. `elsewhere` lists these.
    """
    common, alone, branches = _branches(batch, members)
    shared = common >= SHARED and common > elsewhere[-1]
    savings = [*elsewhere, common] if shared else elsewhere
    best = [_Grouping([], list(alone)) for _ in savings]
    for branch in branches:
        for grouping, of_branch in zip(best, _best_groups(batch, branch, savings), strict=True):
            grouping.groups += of_branch.groups
            grouping.others += of_branch.others
    if shared:
        rest = best.pop()
        if len(rest.others) > 1:
            here = _Grouping([*rest.groups, _Shared(sorted(rest.others), common)], [])
            pairs = zip(best, elsewhere, strict=True)
            best = [here if here.saved(0) >= each.saved(saving) else each for each, saving in pairs]
    return best


def _branches(batch: PagedBatch, members: list[int]) -> tuple[int, list[int], list[list[int]]]:
    """The number of cells that all `members` have in common, in whole `SPLIT`s, and which of them have more.

    Returns the cells, the chunks that have no more in common with any other, and the rest by the page that follows.
    """
    starts, runs = [batch.starts[chunk] for chunk in members], [batch.runs[chunk] for chunk in members]
    slots, pages = [each.slots for each in runs], [each.pages for each in runs]
    alike = min(_common_length(slots), _common_length(pages))
    # Where the next run begins in each. They branch at the first of these: in all other chunks a run continues there.
    ends = [each[alike] if alike < len(each) else _NOWHERE for each in slots]
    shortest, parting = min(starts), min(ends)
    common = min(shortest, parting * batch.page_size) // SPLIT * SPLIT
    slot = min(shortest // batch.page_size, parting)
    following = [each[alike] if end == slot else -1 for each, end in zip(pages, ends, strict=True)]
    if len(set(following)) == len(members):
        return common, members, []
    by_page: dict[int, list[int]] = defaultdict(list)
    alone = []
    for chunk, start, page in zip(members, starts, following, strict=True):
        if start < common + SPLIT:
            alone.append(chunk)
        else:
            by_page[page].append(chunk)
    for branch in by_page.values():
        if len(branch) == 1:
            alone += branch
    return common, alone, [branch for branch in by_page.values() if len(branch) > 1]


def _common_length(lists: list[list[int]]) -> int:
    """The length of the common prefix of all lists: that of the first and the last of them in order."""
    first, last = min(lists), max(lists)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program walks its positions: `keys` at a time, by `warps`, with loads `stages` tiles ahead.

    `ahead`: a tile's product with its values overlaps the next tile's softmax. `registers`: the most per thread; None:
    the compiler decides. `pieces`: programs that share the rows of an item, each of which reads all its positions.
    """

    keys: int
    warps: int
    stages: int
    ahead: bool = False
    registers: int | None = None
    pieces: int = 1


def tile_of(rows: int, dim_tile: int, exact: bool) -> Tile:
    """The tile for items with this many rows; `exact`: float32, whose products do not use the matrix units.

    These compile for Ampere and Hopper with next to no register spills, except wide ones with heads of 256, and fit
    their shared memory. Pages are looked up a tile before its keys are loaded, so two stages keep one more tile of
    keys in flight; a tile that works ahead looks them up itself, and every stage keeps one. With 168 registers three
    programs of a decode share a multiprocessor of Hopper.
    """
    wide = rows > NARROW_ROWS
    if dim_tile > 256:  # an output of more rows does not fit the registers
        most = 32 if exact else 64
        return Tile(16, 4 if rows == 16 else 8, 1 if exact else 2, pieces=max(1, rows // most))
    if exact and rows > 16:
        return Tile(16, 8, 2) if dim_tile <= 128 or not wide else Tile(16, 16, 1)
    if dim_tile > 128:
        return Tile(32, 4 if rows == 16 else 8, 2 if rows == NARROW_ROWS else 3)
    if wide:
        return Tile(64, 8, 3, ahead=True)
    return Tile(64, 4, 3) if rows == NARROW_ROWS else Tile(64, 4, 5, registers=168 if rows == 16 else None)


@dataclass(slots=True)
class GpuPlan:
    """What every layer of a forward shares, on the device: items, order, merges, positions and room for partials.

    `counts`, two int32 tensors of one element, say how many of the narrow and wide items are real. Then a fixed number
    of `programs` share them for each KV head, so that the launch is always the same, as a graph needs. Without wide
    items none are launched. Rows of `merges` that are zero merge nothing. `tiles`: of narrow and wide items, instead of
    `tile_of`'s.
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
    """The plan of a forward over queries like `q`, on its device, by one copy."""
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
    """The key in `PagedBatch.plans` of the plan for a window; 0: none."""
    return -window - 1
