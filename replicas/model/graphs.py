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
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.attention_plan import (
    AttentionWork,
    GpuPlan,
    Ints,
    attention_work,
    plan_arrays,
    plan_key,
    plan_over,
)
from holdfast.kernels.paging import PagedBatch
from holdfast.replicas.model.batch import AttentionShape, Model, PageTable, StepBatch, StepLayout

# ---- Arrays of a step to the device in one copy: packed behind each other in one buffer, and looked at as what they
# are.
#
# What lies where is said by `packed`, which knows no device. `Mailer` owns the host's buffers, pinned for a GPU:
# several,
# because a copy may still be reading one when the next step is packed.


Array = npt.NDArray[Any]

_ALIGNED = 64  # bytes; what kernels read begins at multiples of 16
_DEPTH = 3  # steps whose copies may be on their way: one in flight, one being begun, one in reserve
_LEAST = 1 << 16


def packed(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins, in bytes, and the bytes of all."""
    offsets, at = [], 0
    for array in arrays:
        offsets.append(at)
        at += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return offsets, at


def write(buffer: npt.NDArray[np.uint8], offset: int, array: Array) -> None:
    """Put an array into a buffer of bytes."""
    if array.size:
        buffer[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()


def view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A part of a buffer of bytes as a tensor."""
    size = prod(shape) * dtype.itemsize
    return buffer[offset : offset + size].view(dtype).view(*shape)


class Mailer:
    """Sends arrays to a device. On a CPU it copies as well, so that what is sent is nobody else's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = [_Slot(device.type == "cuda") for _ in range(_DEPTH)]
        self._sent = 0

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays on the device, each with its dtype and shape: one copy, in the order of the current stream."""
        offsets, size = packed(arrays)
        buffer = self.send_into(None, arrays, offsets, size)
        dtypes = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
        return [
            view(buffer, offset, dtype, array.shape)
            for offset, dtype, array in zip(offsets, dtypes, arrays, strict=True)
        ]

    def send_into(self, target: Tensor | None, arrays: Sequence[Array], offsets: Sequence[int], size: int) -> Tensor:
        """The first `size` bytes of `target`, or of a new buffer, with the arrays at `offsets`. What lies between is
        whatever was sent before."""
        slot = self._slots[self._sent % _DEPTH]
        self._sent += 1
        host = slot.room(max(size, 1))
        for array, offset in zip(arrays, offsets, strict=True):
            write(slot.bytes, offset, array)
        if target is None:
            target = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
        target[:size].copy_(host[:size], non_blocking=True)
        slot.used()
        return target


class _Slot:
    """One of the host's buffers, and the copy that reads it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._host = torch.empty(0, dtype=torch.uint8)
        self._read: torch.cuda.Event | None = None
        self.bytes: npt.NDArray[np.uint8] = self._host.numpy()

    def room(self, size: int) -> Tensor:
        """The buffer, once nobody reads it any more."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None
        if len(self._host) < size:
            room = max(_LEAST, 1 << (size - 1).bit_length())
            self._host = torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)
            self.bytes = self._host.numpy()
        return self._host

    def used(self) -> None:
        """A copy that reads the buffer has begun."""
        if self._pinned:
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record()


# ---- The attention of a step worked out beside its other inputs, for models that say what their attention looks like.


@dataclass(frozen=True, slots=True)
class WindowWork:
    """What attention with one window does in a step, and the arrays of it that go to the device."""

    window: int
    work: AttentionWork
    arrays: tuple[Ints, Ints, Ints, Ints, Ints]  # narrow, wide, order, merges, positions


def window_works(shape: AttentionShape, pages: PagedBatch) -> list[WindowWork]:
    """The work of a step, for every window that some layer has."""
    works = []
    for window in shape.windows:
        work = attention_work(pages, shape.group, shape.kv_heads, window)
        works.append(WindowWork(window, work, plan_arrays(work, pages)))
    return works


def put_plans(pages: PagedBatch, shape: AttentionShape, works: Sequence[WindowWork], views: Sequence[Tensor]) -> None:
    """Give a batch its plans. `views`: the arrays of all `works` one after the other, on the device."""
    at = 0
    for each in works:
        plan = plan_over(each.work, views[at : at + len(each.arrays)], shape.heads, shape.head_dim)
        pages.plans[plan_key(each.window)] = plan
        at += len(each.arrays)


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


class StepGraphs:
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
        self._lay_fields()
        device = table.device
        heads, dim = self._shape.heads, self._shape.head_dim
        self._static = torch.zeros(self._size, dtype=torch.uint8, device=device)
        self._cells.view(self._static).fill_(scratch_cell)  # while graphs are captured, too
        self._partial = torch.zeros(room.partials, heads, dim, dtype=torch.float32, device=device)
        self._lse = torch.zeros(room.partials, heads, dtype=torch.float32, device=device)
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

    def bucket_for(self, layout: StepLayout, works: Sequence[WindowWork]) -> Bucket | None:
        """The graph for a step; None where it has to run without one."""
        tokens, room = len(layout.token_ids), self.room
        if not 0 < tokens <= room.tokens:
            return None
        for each in works:
            work = each.work
            if len(work.narrow) > room.items or len(work.wide) > room.wide_items or work.partials > room.partials:
                return None
        wide = any(len(each.work.wide) for each in works)
        size = self._sizes[bisect_left(self._sizes, tokens)]
        bucket = Bucket(size, max(each.work.narrow_rows for each in works), wide)
        return bucket if bucket in self._replays else None

    def load(
        self, layout: StepLayout, works: Sequence[WindowWork], extra: Sequence[Array], mailer: Mailer
    ) -> Loaded | None:
        """Send a step's inputs to the static buffer, with `extra` beside them; None where no graph fits."""
        bucket = self.bucket_for(layout, works)
        offsets, size = packed(extra)
        if bucket is None or size > self.room.extra:
            return None
        arrays, places = self._arrays(bucket, layout, works)
        arrays += extra
        places += [self._extra + offset for offset in offsets]
        end = self._narrow[-1].offset + works[-1].work.narrow.nbytes
        mailer.send_into(self._static, arrays, places, end)
        dtypes = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in extra]
        views = [
            view(self._static, self._extra + at, dtype, array.shape)
            for at, dtype, array in zip(offsets, dtypes, extra, strict=True)
        ]
        return Loaded(bucket, views)

    @property
    def token_ids(self) -> Tensor:
        """The static token ids, [most tokens] int64."""
        return self._token_ids.view(self._static)

    def replay(self, bucket: Bucket, drawn: int) -> Tensor:
        """Logits [drawn, vocabulary] of the step that was loaded last; overwritten by the next replay."""
        self._replays[bucket]()
        return self._logits[:drawn]

    # ---- parts ----

    def _lay_fields(self) -> None:
        room, at = self.room, 0

        def field(dtype: torch.dtype, *shape: int) -> _Field:
            nonlocal at
            offset, at = at, at + -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64
            return _Field(offset, dtype, shape)

        fields = (field(torch.int64, room.tokens) for _ in range(4))
        self._token_ids, self._positions, self._cells, self._drawn = fields
        self._windows = [
            (
                (field(torch.int32, 1), field(torch.int32, 1)),  # how many narrow items, how many wide ones
                field(torch.int32, 2 * room.tokens),  # order: a token is in one shared prefix at most
                field(torch.int32, room.tokens),
                field(torch.int32, room.tokens, 7),
                field(torch.int32, room.wide_items, 6),
            )
            for _ in self._shape.windows
        ]
        self._extra = at
        at += room.extra
        self._narrow = [field(torch.int32, room.items, 6) for _ in self._shape.windows]
        self._size = at

    def _arrays(self, bucket: Bucket, layout: StepLayout, works: Sequence[WindowWork]) -> tuple[list[Array], list[int]]:
        """A step's arrays, filled up to the bucket's tokens, and where each goes."""
        arrays: list[Array] = [
            _filled(layout.token_ids, bucket.tokens),
            _filled(layout.positions, bucket.tokens),
            _filled(layout.cells, bucket.tokens, self._scratch),
            _filled(layout.drawn, bucket.tokens),
        ]
        places = [field.offset for field in (self._token_ids, self._positions, self._cells, self._drawn)]
        for each, fields, narrow_field in zip(works, self._windows, self._narrow, strict=True):
            narrow, wide, order, merges, positions = each.arrays
            (n_narrow, n_wide), *others = fields
            arrays += [np.array([len(narrow)], np.int32), np.array([len(wide)], np.int32)]
            # Rows of zeros merge nothing; those of a larger step before would.
            arrays += [order, positions, _filled(merges, bucket.tokens), wide, narrow]
            places += [n_narrow.offset, n_wide.offset, *(field.offset for field in others), narrow_field.offset]
        return arrays, places

    def _forward(self, bucket: Bucket) -> Callable[[], None]:
        """The model's forward over the static buffers, as one bucket sees them."""
        size, static = bucket.tokens, self._static
        table = self._table
        pages = PagedBatch(table.page_size, table.tensor, (), (), (), self._cells.view(static, size), ())
        for window, fields, narrow in zip(self._shape.windows, self._windows, self._narrow, strict=True):
            counts, order, positions, merges, wide = fields
            plan = GpuPlan(
                narrow=narrow.view(static),
                wide=wide.view(static, None if bucket.wide else 0),
                narrow_rows=bucket.tile,
                order=order.view(static),
                merges=merges.view(static, size),
                positions=positions.view(static),
                partial=self._partial,
                partial_lse=self._lse,
                counts=(counts[0].view(static), counts[1].view(static)),
                programs=(self.room.programs * _AT_ONCE * (1 if size <= _FEW else _ROUNDS), self.room.programs),
            )
            pages.plans[plan_key(window)] = plan
        ids, positions_of = self._token_ids.view(static, size), self._positions.view(static, size)
        batch = StepBatch(ids[None], positions_of[None], self._drawn.view(static, size), pages)

        def forward() -> None:
            with torch.inference_mode():
                self._logits[:size].copy_(self._model.forward(batch))

        return forward


def _filled(array: Array, length: int, value: int = 0) -> Array:
    """The array and `value` behind it, up to `length`."""
    filled = np.full((length, *array.shape[1:]), value, array.dtype)
    filled[: len(array)] = array
    return filled


def room_for(tokens: int, shape: AttentionShape, multiprocessors: int, partial_bytes: int = 256 << 20) -> GraphRoom:
    """Room for steps of up to `tokens` tokens on a device with so many multiprocessors."""
    partials = partial_bytes // (4 * shape.heads * shape.head_dim)
    programs = -(-multiprocessors // shape.kv_heads)
    most = max(n for n in _TOKENS if n <= max(tokens, 1))
    return replace(GraphRoom(), tokens=most, items=min(partials, 1 << 15), partials=partials, programs=programs)


def gpu_capture() -> Capture:
    """Captures CUDA graphs that share one pool of memory: nothing in it outlives a replay, and no two run at once.

    All on one stream beside the others: the libraries keep memory of their own for each stream they were called on.
    """
    pool, beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            call()  # compiles, and lets the libraries choose and allocate
            call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=beside):
            call()
        replay: Callable[[], None] = graph.replay
        return replay

    return capture
