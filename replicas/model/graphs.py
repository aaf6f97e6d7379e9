"""CUDA graphs of the decoder's forward, for steps of few tokens, whose launches would cost more than what they launch:
decoding, verifying, and the short chunks that a turn begins with.

A graph replays the same launches over the same memory. So inputs lie in one static buffer, filled by the step's one
copy; a forward is captured for each `Bucket`, and a step runs in the smallest that holds it. What differs from step to
step is data: attention's items are shared by a fixed number of programs (`GpuPlan.counts`), and tokens that only fill
the bucket are written to a scratch cell, attended to by nobody, and their logits dropped.

    | ids, positions, cells, drawn | per window: counts, order, positions, merges, wide items | extra | narrow items |

The part that a step uses of the last field ends its copy. `extra` carries what the step needs outside of the forward.
Steps with more tokens or items than there is room for run without a graph. What captures and replays is handed
in: a CPU calls the forward again over the same buffers, which is how all this is tested.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.attention_plan import AttentionWork, GpuPlan, plan_key
from holdfast.kernels.paging import PagedBatch
from holdfast.kernels.transfer import ALIGNED, Array, Sender, packed, view, views
from holdfast.replicas.model.batch import AttentionShape, BatchLayout, ForwardBatch, Model, PageTable

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a call whose launches are to be captured, gives what replays them."""

_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_AT_ONCE = 3  # programs of narrow items that a multiprocessor's registers are enough for
_FEW = 8  # tokens, whose items about fill the device at once
_ROUNDS = 4  # as many programs as run at once, of more tokens: what is left of the last round is little of the whole
_TILES = (16, 32, 64)  # query rows of narrow items, which follow from the longest window of the step


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """What a graph was captured for: up to so many tokens, narrow tiles of so many rows, with wide items or without.

    Wide items are prefixes in common and chunks that are too long for a narrow tile.
    """

    tokens: int
    tile: int
    wide: bool


@dataclass(frozen=True, slots=True)
class GraphRoom:
    """Sizes of the static buffers. `partials`: results of parts of sequences, each [heads, head_dim] float32."""

    tokens: int = 256
    items: int = 8192
    wide_items: int = 512
    partials: int = 8192
    extra: int = 1 << 16  # bytes
    programs: int = 16  # of one KV head, so that every multiprocessor has one

    def buckets(self, group: int) -> list[Bucket]:
        """Every bucket, the largest first: what it takes of the device's memory the others use again."""
        found: list[Bucket] = []
        for tokens in (n for n in _TOKENS if n <= self.tokens):
            for before, tile in zip((0, *_TILES), _TILES, strict=False):
                # A tile of more rows than the one before needs a window of at least so many tokens.
                if tile == _TILES[0] or tokens * group > before:
                    found += [Bucket(tokens, tile, wide) for wide in ((False, True) if tokens > 1 else (False,))]
        return sorted(found, reverse=True)


def room_for(tokens: int, shape: AttentionShape, multiprocessors: int, partial_bytes: int = 256 << 20) -> GraphRoom:
    """Room for steps of up to `tokens` tokens on a device with so many multiprocessors."""
    partials = partial_bytes // (4 * shape.heads * shape.head_dim)
    programs = -(-multiprocessors // shape.kv_heads)
    most = max(n for n in _TOKENS if n <= max(tokens, 1))
    return replace(GraphRoom(), tokens=most, items=min(partials, 1 << 15), partials=partials, programs=programs)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A step whose inputs are on their way to the static buffer: its bucket, and the extra arrays on the device."""

    bucket: Bucket
    extra: list[Tensor]


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

    def __init__(self, room: GraphRoom, windows: int) -> None:
        self.size = 0
        tokens = [self.add(torch.int64, room.tokens) for _ in range(4)]
        self.token_ids, self.positions, self.cells, self.drawn = tokens
        self.windows = [_WindowFields(self, room) for _ in range(windows)]
        self.extra = self.size
        self.size += room.extra
        self.narrow = [self.add(torch.int32, room.items, 6) for _ in range(windows)]

    def add(self, dtype: torch.dtype, *shape: int) -> _Field:
        """Room for one more array behind the others."""
        field = _Field(self.size, dtype, shape)
        self.size += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNED) * ALIGNED
        return field


class _WindowFields:
    """What attention with one window reads but for its narrow items."""

    def __init__(self, layout: _Layout, room: GraphRoom) -> None:
        self.n_narrow = layout.add(torch.int32, 1)
        self.n_wide = layout.add(torch.int32, 1)
        self.order = layout.add(torch.int32, 2 * room.tokens)  # a token is in one shared prefix at most
        self.positions = layout.add(torch.int32, room.tokens)
        self.merges = layout.add(torch.int32, room.tokens, 7)
        self.wide = layout.add(torch.int32, room.wide_items, 6)


class CudaGraphs:
    """The graphs of a model over one page table. `scratch_cell`: where tokens without a meaning are stored."""

    def __init__(
        self,
        model: Model,
        shape: AttentionShape,
        table: PageTable,
        scratch_cell: int,
        dtype: torch.dtype,
        room: GraphRoom | None = None,
    ) -> None:
        """`model` takes all that changes from step to step from its batch's tensors; `dtype` is its logits'."""
        self._model = model
        self._shape = shape
        self._table = table
        self._scratch = scratch_cell
        self.room = room = room or GraphRoom()
        self._replays: dict[Bucket, Callable[[], None]] = {}
        self._sizes = [n for n in _TOKENS if n <= room.tokens]
        self._fields = _Layout(room, len(shape.windows))
        device = table.device
        self._static = torch.zeros(self._fields.size, dtype=torch.uint8, device=device)
        self._fields.cells.view(self._static).fill_(scratch_cell)  # while graphs are captured, too
        self._partial = torch.zeros(room.partials, shape.heads, shape.head_dim, dtype=torch.float32, device=device)
        self._lse = torch.zeros(room.partials, shape.heads, dtype=torch.float32, device=device)
        self._logits = torch.zeros(room.tokens, model.vocabulary, dtype=dtype, device=device)

    def capture(self, capture: Capture, say: Callable[[str], None], most: int | None = None) -> None:
        """Capture every bucket, or the `most` largest, and tell of it."""
        buckets = self.room.buckets(self._shape.group)[:most]
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
        self, layout: BatchLayout, works: Sequence[AttentionWork], extra: Sequence[Array], sender: Sender
    ) -> Loaded | None:
        """Send a step's inputs to the static buffer, with `extra` beside them; None where no graph fits."""
        bucket = self._bucket_for(layout, works)
        offsets, size = packed(extra)
        if bucket is None or size > self.room.extra:
            return None
        extra_places = [self._fields.extra + offset for offset in offsets]
        arrays, places = self._inputs(bucket, layout, works)
        end = self._fields.narrow[-1].offset + works[-1].narrow.nbytes
        sender.send_into(self._static, [*arrays, *extra], [*places, *extra_places], end)
        return Loaded(bucket, views(self._static, extra, extra_places))

    def replay(self, bucket: Bucket, drawn: int) -> Tensor:
        """Logits [drawn, vocabulary] of the step that was loaded last; overwritten by the next replay."""
        self._replays[bucket]()
        return self._logits[:drawn]

    def _bucket_for(self, layout: BatchLayout, works: Sequence[AttentionWork]) -> Bucket | None:
        """The graph for a step; None where it has to run without one."""
        tokens, room = len(layout.token_ids), self.room
        if not 0 < tokens <= room.tokens:
            return None
        for work in works:
            if len(work.narrow) > room.items or len(work.wide) > room.wide_items or work.partials > room.partials:
                return None
        wide = any(len(work.wide) for work in works)
        size = self._sizes[bisect_left(self._sizes, tokens)]
        bucket = Bucket(size, max(work.narrow_rows for work in works), wide)
        return bucket if bucket in self._replays else None

    def _inputs(
        self, bucket: Bucket, layout: BatchLayout, works: Sequence[AttentionWork]
    ) -> tuple[list[Array], list[int]]:
        """A step's arrays, filled up to the bucket's tokens, and where each goes."""
        fields, size = self._fields, bucket.tokens
        arrays: list[Array] = [
            _filled(layout.token_ids, size),
            _filled(layout.positions, size),
            _filled(layout.cells, size, self._scratch),
            _filled(layout.drawn, size),
        ]
        places = [fields.token_ids.offset, fields.positions.offset, fields.cells.offset, fields.drawn.offset]
        for work, at, narrow in zip(works, fields.windows, fields.narrow, strict=True):
            arrays += [np.array([len(work.narrow)], np.int32), np.array([len(work.wide)], np.int32)]
            # Rows of zeros merge nothing; those of a larger step before would.
            arrays += [work.order, work.positions, _filled(work.merges, size), work.wide, work.narrow]
            places += [at.n_narrow.offset, at.n_wide.offset, at.order.offset, at.positions.offset]
            places += [at.merges.offset, at.wide.offset, narrow.offset]
        return arrays, places

    def _forward(self, bucket: Bucket) -> Callable[[], None]:
        """The model's forward over the static buffers, as one bucket sees them."""
        size, static, fields, table = bucket.tokens, self._static, self._fields, self._table
        pages = PagedBatch(table.page_size, table.tensor, (), (), (), fields.cells.view(static, size), ())
        for window, at, narrow in zip(self._shape.windows, fields.windows, fields.narrow, strict=True):
            pages.plans[plan_key(window)] = GpuPlan(
                narrow=narrow.view(static),
                wide=at.wide.view(static, None if bucket.wide else 0),
                narrow_rows=bucket.tile,
                order=at.order.view(static),
                merges=at.merges.view(static, size),
                positions=at.positions.view(static),
                partial=self._partial,
                partial_lse=self._lse,
                counts=(at.n_narrow.view(static), at.n_wide.view(static)),
                programs=(self.room.programs * _AT_ONCE * (1 if size <= _FEW else _ROUNDS), self.room.programs),
            )
        ids, positions = fields.token_ids.view(static, size), fields.positions.view(static, size)
        batch = ForwardBatch(ids[None], positions[None], fields.drawn.view(static, size), pages)

        def forward() -> None:
            with torch.inference_mode():
                self._logits[:size].copy_(self._model.forward(batch))

        return forward


def _filled(array: Array, length: int, value: int = 0) -> Array:
    """The array and `value` behind it, up to `length`."""
    filled = np.full((length, *array.shape[1:]), value, array.dtype)
    filled[: len(array)] = array
    return filled


def gpu_capture() -> Capture:
    """Captures CUDA graphs that share one pool of memory: nothing in it outlives a replay, and no two run at once.

    All on one stream of their own: the libraries keep memory for each stream they were called on.
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
