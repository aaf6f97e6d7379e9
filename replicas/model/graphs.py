"""CUDA graphs of the decoder's forward and draws, for steps of few tokens: decode, verify, a turn's first chunks. There
launching would cost more than computing.

A graph replays the same launches over the same memory. So inputs lie in one static buffer, filled by the step's one
copy. A forward is captured for each `Bucket`, and a step runs in the smallest that holds it. What differs from step to
step is data: a fixed number of programs share attention's items (`GpuPlan.counts`). Tokens that only fill the bucket
are written to a scratch cell that nothing attends to, and their logits are dropped.

    | ids, positions, drawn, draws, cells, states | counts, order, positions, merges, wide | extra | narrow |

Cells are those of each kind of layers. What stands behind the states is that of each kind and window.

A step's copy ends with its own part of the last field, its narrow items. `extra` carries what the step needs outside of
the forward. A graph ends with greedy draws and the verification of drafts; other draws use its logits. Steps with more
tokens, draws or items than there is room for run without a graph. The capture is an argument: on a CPU it calls the
forward again over the same buffers, which is how this is tested.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.attention_plan import AttentionWork, GpuPlan, plan_key
from holdfast.kernels.kv import ALIGNED, Array, PagedBatch, Sender, packed, view, views
from holdfast.kernels.linear_state import NO_STATE, StateBatch
from holdfast.replicas.model.decoder import AttentionShape, BatchLayout, Decoder, ForwardBatch, Model, PageTable
from holdfast.replicas.model.sampler import counts_begin

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures the launches of a call. Returns the call that replays them."""

_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
MOST_DRAWS = 256  # rows of logits; a step of more tokens has chunks, and of these only the last token draws
_AT_ONCE = 3  # programs of narrow items that fit a multiprocessor's registers
_FEW = 8  # tokens whose items about fill the device
_ROUNDS = 4  # with more tokens so many times the programs that run at once: the last round's rest is small then
_TILES = (16, 32, 64)  # query rows of narrow items; the step's longest window decides


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The steps that a graph covers: most tokens, rows of a narrow tile, and whether it has wide items.

    Wide items are shared prefixes and chunks too long for a narrow tile. Steps of more than `MOST_DRAWS` tokens nearly
    always have one, so no graph of that size is without.
    """

    tokens: int
    tile: int
    wide: bool

    @property
    def draws(self) -> int:
        """Rows that are drawn from at most."""
        return min(self.tokens, MOST_DRAWS)


@dataclass(frozen=True, slots=True)
class GraphRoom:
    """Sizes of the static buffers. `partials`: results of split sequences, each [heads, head_dim] float32."""

    tokens: int = 1024
    items: int = 8192
    wide_items: int = 1024
    partials: int = 8192
    extra: int = 1 << 16  # bytes
    marks: int = 64  # of recurrent states
    programs: int = 16  # of one KV head, so that every multiprocessor has one

    @property
    def draws(self) -> int:
        return min(self.tokens, MOST_DRAWS)

    def buckets(self, group: int) -> list[Bucket]:
        """Every bucket, the largest first: the others reuse its memory."""
        buckets: list[Bucket] = []
        for tokens in (n for n in _TOKENS if n <= self.tokens):
            for before, tile in zip((0, *_TILES), _TILES, strict=False):
                # A tile of more rows than the one before needs a window of at least so many tokens.
                if tile == _TILES[0] or tokens * group > before:
                    kinds = (False,) if tokens == 1 else (True,) if tokens > MOST_DRAWS else (False, True)
                    buckets += [Bucket(tokens, tile, wide) for wide in kinds]
        return sorted(buckets, reverse=True)


def room_for(
    tokens: int, shapes: Sequence[AttentionShape], multiprocessors: int, partial_bytes: int = 256 << 20
) -> GraphRoom:
    """Room for steps of up to `tokens` tokens on a device with so many multiprocessors."""
    partials = partial_bytes // (4 * max(shape.heads * shape.head_dim for shape in shapes))
    programs = -(-multiprocessors // min(shape.kv_heads for shape in shapes))
    most = max(n for n in _TOKENS if n <= max(tokens, 1))
    return replace(GraphRoom(), tokens=most, items=min(partials, 1 << 15), partials=partials, programs=programs)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A step whose inputs are on their way to the static buffer: its bucket, and views of the buffer.

    `draws`: first rows [S + 1] and drafts [R], int32. `extra`: what was sent besides.
    """

    bucket: Bucket
    draws: tuple[Tensor, Tensor]
    extra: list[Tensor]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The results of a step in a graph; the next step overwrites them.

    `logits` [R, vocabulary]. `greedy` int32: the greedy draw of each row, and from `accepted` on each sequence's count
    of accepted drafts. `batch`: the bucket's tokens. `hidden`: `Decoder.hidden` of these, where there is any.
    """

    logits: Tensor
    greedy: Tensor
    accepted: int
    batch: ForwardBatch
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class _Field:
    """A part of the static buffer."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, buffer: Tensor, length: int | None = None) -> Tensor:
        shape = self.shape if length is None else (length, *self.shape[1:])
        return view(buffer, self.offset, self.dtype, shape)


class _Layout:
    """Where everything lies in the static buffer of `size` bytes."""

    def __init__(self, room: GraphRoom, windows: Sequence[int], rows: int) -> None:
        """`windows`: how many there are of each kind. `rows`: sequences with states; 0: the model has none."""
        self.size = 0
        self.token_ids, self.positions, *self.cells = (self.add(torch.int64, room.tokens) for _ in (0, 0, *windows))
        self.drawn = self.add(torch.int64, room.draws)
        self.first_rows = self.add(torch.int32, room.draws + 1)
        self.drafts = self.add(torch.int32, room.draws)
        self.states = [self.add(torch.int32, *size) for size in ((rows + 1,), *[(rows,)] * 4, (room.marks, 3))]
        self.windows = [[_WindowFields(self, room) for _ in range(n)] for n in windows]
        self.extra = self.size
        self.size += room.extra
        self.narrow = [[self.add(torch.int32, room.items, 6) for _ in range(n)] for n in windows]

    def add(self, dtype: torch.dtype, *shape: int) -> _Field:
        """Room for one more array behind the others."""
        field = _Field(self.size, dtype, shape)
        self.size += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNED) * ALIGNED
        return field


class _WindowFields:
    """The inputs of attention with one window, except its narrow items."""

    def __init__(self, layout: _Layout, room: GraphRoom) -> None:
        self.n_narrow, self.n_wide = layout.add(torch.int32, 1), layout.add(torch.int32, 1)
        self.order = layout.add(torch.int32, 2 * room.tokens)  # a token is in one shared prefix at most
        self.positions = layout.add(torch.int32, room.tokens)
        self.merges = layout.add(torch.int32, room.tokens, 7)
        self.wide = layout.add(torch.int32, room.wide_items, 6)


class CudaGraphs:
    """The graphs of a model over one page table. `shapes` and `scratch_cells`, where tokens without a meaning are
    stored, are those of each kind of layers.
    """

    def __init__(
        self,
        model: Model,
        shapes: Sequence[AttentionShape],
        table: PageTable,
        scratch_cells: Sequence[int],
        dtype: torch.dtype,
        room: GraphRoom | None = None,
        states: bool = False,
    ) -> None:
        """`model` reads all that changes from step to step from its batch's tensors. `dtype`: of its logits.

        `states`: it has recurrent ones.
        """
        self._model = model
        self._shapes = shapes
        self._table = table
        self._scratch = scratch_cells
        self.room = room = room or GraphRoom()
        self._replays: dict[Bucket, Callable[[], None]] = {}
        self._batches: dict[Bucket, ForwardBatch] = {}
        self._hidden: Tensor | None = None
        if isinstance(model, Decoder) and model.next_token is not None:
            self._hidden = torch.zeros(room.tokens, model.description.hidden, dtype=dtype, device=table.device)
        self._sizes = [n for n in _TOKENS if n <= room.tokens]
        self._rows = len(table.runs) if states else 0
        self._fields = _Layout(room, [len(shape.windows) for shape in shapes], self._rows)
        device = table.device
        self._static = torch.zeros(self._fields.size, dtype=torch.uint8, device=device)
        for cells, scratch in zip(self._fields.cells, scratch_cells, strict=True):
            cells.view(self._static).fill_(scratch)  # while graphs are captured, too
        self._fields.states[2].view(self._static).fill_(NO_STATE)  # nor is a state written
        # Layers run one after the other, so all kinds use one memory for their partial results.
        sizes = [room.partials * each.heads * (each.head_dim + 1) for each in shapes]
        partial = torch.zeros(max(sizes), dtype=torch.float32, device=device)
        self._partials = [_partials(partial, room.partials, shape) for shape in shapes]
        self._logits = torch.zeros(room.draws, model.vocabulary, dtype=dtype, device=device)
        self._greedy = torch.zeros(2 * counts_begin(room.draws), dtype=torch.int32, device=device)

    def capture(self, capture: Capture, say: Callable[[str], None], most: int | None = None) -> None:
        """Capture every bucket, or the `most` largest, and report progress."""
        buckets = self.room.buckets(max(shape.group for shape in self._shapes))[:most]
        began = time.perf_counter()
        for done, bucket in enumerate(buckets):
            if done % 16 == 0:
                say(f"CUDA graphs: {done} of {len(buckets)}")
            self._replays[bucket] = capture(self._forward(bucket))
        say(f"CUDA graphs: {len(buckets)} of {len(buckets)} in {time.perf_counter() - began:.1f} s")

    @property
    def token_ids(self) -> Tensor:
        """The static token ids, [most tokens] int64."""
        return self._fields.token_ids.view(self._static)

    def load(
        self,
        layout: BatchLayout,
        works: Sequence[Sequence[AttentionWork]],
        draws: Sequence[Array],
        extra: Sequence[Array],
        sender: Sender,
    ) -> Loaded | None:
        """Send a step's inputs to the static buffer, with `extra` beside them. None where no graph fits.

        `draws`: first rows [S + 1] and drafts [R] int32 of what is drawn (`sampling_gpu`), or nothing.
        """
        bucket = self._bucket_for(layout, works)
        offsets, size = packed(extra)
        if bucket is None or size > self.room.extra:
            return None
        first, drafts = draws or (_NOBODY, _NOBODY)
        fields, tokens = self._fields, bucket.tokens
        parts: list[tuple[_Field, Array]] = [
            (fields.token_ids, _filled(layout.token_ids, tokens)),
            (fields.positions, _filled(layout.positions, tokens)),
            (fields.drawn, _filled(layout.drawn, bucket.draws)),
            # Sequences that only fill the bucket have no rows.
            (fields.first_rows, _filled(first, bucket.draws + 1, len(layout.drawn))),
            (fields.drafts, drafts),
        ]
        for field, cells, scratch in zip(fields.cells, layout.cells, self._scratch, strict=True):
            parts.append((field, _filled(cells, tokens, scratch)))
        if layout.states:
            # Sequences that only fill the bucket have no tokens, and no state is written for them.
            lengths = [min(tokens, self._rows) + (number == 0) for number in range(5)] + [self.room.marks]
            values = (int(layout.states[0][-1]), NO_STATE, NO_STATE, 0, 0, _NO_MARK)
            for field, array, length, value in zip(fields.states, layout.states, lengths, values, strict=True):
                parts.append((field, _filled(array, length, value)))
        each = zip(chain(*works), chain(*fields.windows), chain(*fields.narrow), strict=True)
        for work, at, narrow in each:
            parts += [
                (at.n_narrow, np.array([len(work.narrow)], np.int32)),
                (at.n_wide, np.array([len(work.wide)], np.int32)),
                (at.order, work.order),
                (at.positions, work.positions),
                (at.merges, _filled(work.merges, tokens)),  # zeros merge nothing; rows of an earlier step would
                (at.wide, work.wide),
                (narrow, work.narrow),
            ]
        extra_places = [fields.extra + offset for offset in offsets]
        places = [*(field.offset for field, _ in parts), *extra_places]
        end = fields.narrow[-1][-1].offset + works[-1][-1].narrow.nbytes
        sender.send_into(self._static, [*(array for _, array in parts), *extra], places, end)
        sent = (fields.first_rows.view(self._static, len(first)), fields.drafts.view(self._static, len(drafts)))
        return Loaded(bucket, sent, views(self._static, extra, extra_places))

    def replay(self, bucket: Bucket, drawn: int) -> Replayed:
        """Compute the step that was loaded last; `drawn` of its rows are drawn from."""
        self._replays[bucket]()
        accepted = counts_begin(bucket.draws)
        greedy, hidden = self._greedy[: accepted + bucket.draws], self._hidden
        kept = None if hidden is None else hidden[: bucket.tokens]
        return Replayed(self._logits[:drawn], greedy, accepted, self._batches[bucket], kept)

    def _bucket_for(self, layout: BatchLayout, of_kinds: Sequence[Sequence[AttentionWork]]) -> Bucket | None:
        """The graph for a step; None where it has to run without one."""
        tokens, room, works = len(layout.token_ids), self.room, list(chain(*of_kinds))
        if not 0 < tokens <= room.tokens or len(layout.drawn) > room.draws:
            return None
        for work in works:
            if len(work.narrow) > room.items or len(work.wide) > room.wide_items or work.partials > room.partials:
                return None
        wide = any(len(work.wide) for work in works)
        size = self._sizes[bisect_left(self._sizes, tokens)]
        bucket = Bucket(size, max(work.narrow_rows for work in works), wide or size > MOST_DRAWS)
        if layout.states and (len(layout.states[-1]) > room.marks or max(layout.lengths) > self._longest(bucket)):
            return None
        return bucket if bucket in self._replays else None

    def _longest(self, bucket: Bucket) -> int:
        """Most tokens of one sequence: without wide items they fit into a narrow tile."""
        return bucket.tokens if bucket.wide else min(bucket.tokens, bucket.tile // self._shapes[0].group)

    def _forward(self, bucket: Bucket) -> Callable[[], None]:
        """The model's forward and greedy draws over the static buffers, as one bucket sees them."""
        from holdfast.kernels.sampling_gpu import draw_and_verify  # Triton comes with torch for a GPU alone

        size, draws, static, fields, table = bucket.tokens, bucket.draws, self._static, self._fields, self._table
        batches = []
        for kind, shape in enumerate(self._shapes):
            cells, (partial, lse) = fields.cells[kind].view(static, size), self._partials[kind]
            pages = PagedBatch(table.page_size, table.tensor, (), (), (), cells, ())
            batches.append(pages)
            for window, at, narrow in zip(shape.windows, fields.windows[kind], fields.narrow[kind], strict=True):
                pages.plans[plan_key(window)] = GpuPlan(
                    narrow=narrow.view(static),
                    wide=at.wide.view(static, None if bucket.wide else 0),
                    narrow_rows=bucket.tile,
                    order=at.order.view(static),
                    merges=at.merges.view(static, size),
                    positions=at.positions.view(static),
                    partial=partial,
                    partial_lse=lse,
                    counts=(at.n_narrow.view(static), at.n_wide.view(static)),
                    programs=(self.room.programs * _AT_ONCE * (1 if size <= _FEW else _ROUNDS), self.room.programs),
                )
        ids, positions = fields.token_ids.view(static, size), fields.positions.view(static, size)
        states = None
        if rows := min(size, self._rows):
            starts, *columns, marks = fields.states
            source, target, applied, held = (each.view(static, rows) for each in columns)
            places = (starts.view(static, rows + 1), source, target, applied, held, marks.view(static))
            states = StateBatch(*places, self._longest(bucket))
        batch = ForwardBatch(ids[None], positions[None], fields.drawn.view(static, draws), tuple(batches), states)
        self._batches[bucket] = batch
        hidden = None if self._hidden is None else self._hidden[:size]
        first, drafts = fields.first_rows.view(static, draws + 1), fields.drafts.view(static, draws)
        logits, out = self._logits[:draws], (self._greedy, self._greedy[counts_begin(draws) :])

        def forward() -> None:
            with torch.inference_mode():
                logits.copy_(self._model.forward(batch))
                if hidden is not None and isinstance(self._model, Decoder) and self._model.hidden is not None:
                    hidden.copy_(self._model.hidden)
                draw_and_verify(logits, first, drafts, out=out)

        return forward


def _partials(memory: Tensor, most: int, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Partial results of split sequences and their log-sum-exps, [most, heads, head_dim] and [most, heads]."""
    values = most * shape.heads * shape.head_dim
    lse = memory[values : values + most * shape.heads]
    return memory[:values].view(most, shape.heads, shape.head_dim), lse.view(most, shape.heads)


_NOBODY = np.zeros(0, np.int32)
_NO_MARK = np.iinfo(np.int32).max  # of a sequence that is not there


def _filled(array: Array, length: int, value: int = 0) -> Array:
    """The array and `value` behind it, up to `length`."""
    filled = np.full((length, *array.shape[1:]), value, array.dtype)
    filled[: len(array)] = array
    return filled


def gpu_capture() -> Capture:
    """Captures CUDA graphs that share one memory pool: nothing in it outlives a replay, and no two run at once.

    All use one stream of their own: the libraries keep memory for each stream that they were called on.
    """
    pool, aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            call()  # compiles, and lets the libraries choose and allocate
            call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=aside):
            call()
        replay: Callable[[], None] = graph.replay
        return replay

    return capture
