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
knows no device; `make_plan` copies its result to one, and `attention_gpu` launches it. Items are cut in C
(`attention_plan_c.c`), and in Python where that is not built.
"""

import ctypes
import functools
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels import native
from holdfast.kernels.kv import PagedBatch, sent_together

LIBRARY = native.Library("attention_plan", plain=True)

Ints = npt.NDArray[np.int32]

SPLIT = 128  # positions of the shortest narrow part
# The length of a sequence's parts by the sequence's own, both in SPLITs: 1 up to 16, 2 up to 64, 4 up to 128, then 8.
_PARTS = np.repeat(np.array([1, 2, 4, 8], np.int32), [16, 48, 64, 1])
_NO_RESULTS = (0,) * 8  # addresses, then counts
_PARTS_AT: int = _PARTS.__array_interface__["data"][0]
_CHANGES = (16 * SPLIT, 64 * SPLIT, 128 * SPLIT)  # from these positions on parts are longer
NARROW_ROWS = 64  # query rows (tokens times the group's heads) up to which a chunk is narrow
WIDE_ROWS = 128  # query rows of a wide or shared tile
WIDE_SPLIT = 256  # the least positions of a wide or shared part
PROGRAMS = 128  # about as many fill a device
SHARED = 512  # the fewest shared cells that are worth a tile of their own

_NOWHERE = 1 << 31  # behind every page slot

LOW, HIGH = 3, 4  # columns of an item


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
    groups = _shared_prefixes(batch, few) if cascade and not window and not invariant else []
    if invariant:
        chunks = _own_chunks(batch, few)
    else:
        long, cells = [length > few for length in batch.lengths], [0] * len(batch.lengths)
        for shared in groups:
            for chunk in shared.members:
                cells[chunk] = shared.cells
        chunks = _Chunks(batch.rows, batch.starts, batch.lengths, long, cells)
    shape = Shape(max(1, WIDE_ROWS // group), SPLIT, WIDE_SPLIT, PROGRAMS // kv_heads, window, invariant)
    cut = (cut_reference if LIBRARY.missing else _cut)(chunks, shape)
    wide, merges, partials = cut.wide, cut.merges, cut.partials
    tokens = np.arange(len(cut.positions), dtype=np.int32)
    order = [tokens]
    entries = len(tokens)
    if groups:
        firsts, place = [0, *accumulate(batch.lengths)], np.empty(entries, np.int32)
        place[merges[:, 0]] = np.arange(len(merges))
    for shared in groups:
        own = np.concatenate([tokens[firsts[chunk] : firsts[chunk + 1]] for chunk in shared.members])
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
    return AttentionWork(
        window=window,
        narrow=cut.narrow,
        wide=wide,
        narrow_rows=max(16, 1 << (cut.most * group - 1).bit_length()),
        order=np.concatenate(order) if groups else tokens,
        merges=merges,
        partials=partials,
        positions=cut.positions,
    )


@dataclass(slots=True)
class _Chunks:
    """Of a batch's chunks: page table rows, starts, lengths, whether each is long, and its cells in a shared prefix."""

    rows: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    long: list[bool]
    shared: list[int]


class Shape(NamedTuple):
    """How chunks are cut: the tokens of a long one's block, the unit of narrow parts, the least positions of wide ones,
    the blocks that fill the device, and the window (0: none). `whole`: a token is cut by its own position alone.
    """

    block: int
    split: int
    wide_split: int
    programs: int
    window: int
    whole: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    """Items and merges as in `AttentionWork`, without those of shared prefixes; the most tokens of a narrow chunk."""

    narrow: Ints
    wide: Ints
    merges: Ints
    partials: int
    positions: Ints
    most: int


def _own_chunks(batch: PagedBatch, few: int) -> _Chunks:
    """A batch's chunks for sums that depend on a token's own position alone: only chunks that decode are narrow.

    Last tokens and their drafts are cut into pieces of up to `few` tokens with parts of the same length.
    """
    chunks: list[tuple[int, int, int, bool, int]] = []
    decodes = batch.decodes or [length <= few for length in batch.lengths]
    for row, start, length, decoding in zip(batch.rows, batch.starts, batch.lengths, decodes, strict=True):
        end = start + length
        edges = [start, end]
        if decoding:
            edges = [start, *range(start + few, end, few), *(at for at in _CHANGES if start < at < end), end]
        chunks += [(row, low, high - low, not decoding, 0) for low, high in pairwise(sorted(set(edges)))]
    return _Chunks(*map(list, zip(*chunks, strict=True)))


# ---- the cut


@functools.cache
def _kernel() -> Callable[[int], None]:
    """The function in C. It keeps the interpreter lock: taking it again would cost more than the call."""
    return ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("attention_plan_cut", LIBRARY.loaded))


def _cut(chunks: _Chunks, shape: Shape) -> _Cut:
    """`cut_reference` in C, called twice: for the sizes of the results, and for these."""
    each = [array("i", values) for values in (chunks.rows, chunks.starts, chunks.lengths, chunks.shared, chunks.long)]
    inputs = (*shape, len(_PARTS) - 1, _PARTS_AT, len(chunks.rows), any(chunks.shared))
    call = array("q", (*inputs, *[values.buffer_info()[0] for values in each], *_NO_RESULTS))
    at, kernel = call.buffer_info()[0], _kernel()
    kernel(at)
    n_narrow, n_items, n_merges, partials, most = call[-5:]
    items, merges = np.empty((n_items, 6), np.int32), np.empty((n_merges, 7), np.int32)
    positions: Ints = np.empty(sum(chunks.lengths), np.int32)
    call[-8:-5] = array("q", [results.__array_interface__["data"][0] for results in (items, merges, positions)])
    kernel(at)
    return _Cut(items[:n_narrow], items[n_narrow:], merges, partials, positions, most)


def cut_reference(chunks: _Chunks, shape: Shape) -> _Cut:
    """The narrow chunks, then the blocks of long ones, in parts that end at multiples of their size.

    A part that is alone and continues no shared prefix writes its output directly.
    """
    block, split, wide_split, programs, window, whole = shape
    continued, partials, firsts = any(chunks.shared), 0, [0, *accumulate(chunks.lengths)]
    items: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}  # by whether their chunk is long
    merges: list[tuple[int, ...]] = []
    numbers = range(len(chunks.rows))
    for i in sorted(numbers, key=chunks.long.__getitem__):
        start, length, long = chunks.starts[i], chunks.lengths[i], chunks.long[i]
        cuts = 1 if whole else max(1, min(programs // -(-length // block), (start + length) // wide_split))
        for at in range(0, length, block if long else length):
            count = min(block, length - at) if long else length
            low, high = chunks.shared[i], start + at + count
            low = max(low, start + at - window + 1) if window else low
            low = low // split * split if whole else low
            size = -(-(start + length) // cuts // split) * split
            if not long:
                size = _PARTS.item(min(((high if whole else high - low) - 1) // split, len(_PARTS) - 1)) * split
            edges = [low, *range((low // size + 1) * size, high, size), high]
            first, parts = firsts[i] + at, len(edges) - 1
            merged = parts > 1 or (continued and low > 0)
            for part, (begin, end) in enumerate(pairwise(edges)):
                slot = partials + part * count if merged else -1
                items[long].append((first, count, chunks.rows[i], begin, end, slot))
            if merged:
                merges += [(first + j, partials + j, count, parts, 0, 0, 0) for j in range(count)]
                partials += parts * count
    narrow, wide = (np.array(each, np.int32).reshape(-1, 6) for each in items.values())
    spans = zip(chunks.starts, chunks.lengths, strict=True)
    positions: Ints = np.concatenate([np.arange(start, start + length, dtype=np.int32) for start, length in spans])
    most = max((chunks.lengths[i] for i in numbers if not chunks.long[i]), default=1)
    return _Cut(narrow, wide, np.array(merges, np.int32).reshape(-1, 7), partials, positions, most)


# ---- shared prefixes


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
