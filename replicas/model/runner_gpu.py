"""Steps on a GPU, begun without waiting for it: everything that a step needs goes over in one copy, only ids come back.

The order on the device is that of the calls. A step whose tokens follow from the step before takes them from where that
left them (`Chunk.follows`). A step of few tokens replays a graph where one was captured; one with more launches its
forward, and neither is waited for before it is landed. On a CPU the same runs through Triton's interpreter, which is
how it is tested.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.attention_plan import AttentionWork, plan_key, plan_over
from holdfast.kernels.kv import Array, Sender
from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.tensors import HostPages, KVTensors, Moved
from holdfast.replicas.model import sampler_gpu
from holdfast.replicas.model.decoder import STEP_ERRORS, BatchLayout, Model, PageTable, lay_out
from holdfast.replicas.model.graphs import Capture, CudaGraphs, GraphRoom, Replayed
from holdfast.replicas.model.runner import ModelRunner
from holdfast.replicas.plan import Chunk, RowWrite, StepOutput, StepPlan

_LONG = 256  # pages of a row write from which on it is a copy of its own


class GpuRunner(ModelRunner):
    """Runs steps on one device. Not thread-safe. `graphs`: what steps of few tokens replay, once they are captured."""

    def __init__(
        self, model: Model, kv: KVTensors, max_rows: int, context_length: int, host: HostPages | None = None
    ) -> None:
        super().__init__(model, kv, max_rows, context_length, host)
        self._sender = Sender(self.table.device)
        self._before: _Before | None = None
        self.graphs: CudaGraphs | None = None

    def capture(self, capture: Capture, room: GraphRoom, say: Callable[[str], None]) -> bool:
        """Capture the forwards of short steps as graphs. False where this model or store has none."""
        shape, scratch = self.model.attention, self.kv.scratch_cell
        if shape is None or scratch is None:
            return False
        graphs = CudaGraphs(self.model, shape, self.table, scratch, self.kv.dtype, room)
        graphs.capture(capture, say)
        self.graphs = graphs
        return True

    def begin(self, plan: StepPlan) -> "GpuFlight":
        """Give a step to the device. Raises EngineError for one that cannot be begun."""
        before, self._before = self._before, None
        host = self._host
        if plan.moves and host is None:
            raise EngineError("the plan moves pages to or from a host tier, and there is none")
        moved: Callable[[], Moved] = host.wait if plan.moves and host is not None else Moved
        try:
            return self._begin(plan, before, moved)
        except STEP_ERRORS as error:
            moved()
            raise EngineError(f"a step of {len(plan.chunks)} chunks failed: {error}") from error

    @torch.inference_mode()
    def _begin(self, plan: StepPlan, before: "_Before | None", moved: Callable[[], Moved]) -> "GpuFlight":
        stream = self._sender.stream
        if self._host is not None and plan.moves:
            self._host.save(plan.saves)
        begin = _Mark(stream)
        for copy in plan.copies:
            self.kv.copy_page(copy.source, copy.target, copy.cells)
        if self._host is not None and plan.moves:
            self._host.load(plan.loads)  # while the forward runs: nothing in this step reads them
        extra = self._extra(plan, before)
        if not plan.chunks:
            extra.apply(self.table, None, self._sender.send(extra.arrays))
            return GpuFlight((), (begin, _Mark(stream), _Mark(stream)), None, moved)
        logits, asked, drawn = self._forward(plan, extra)
        drawing, draws = _Mark(stream), None
        if extra.asked is not None:
            draws = sampler_gpu.begin(logits, extra.asked, asked, drawn)
            self._before = _Before(draws.drawn, _first_rows(plan.chunks))
        return GpuFlight(plan.chunks, (begin, drawing, _Mark(stream)), draws, moved)

    def _extra(self, plan: StepPlan, before: "_Before | None") -> "_Extra":
        """Note the row writes, and work out what goes over besides the forward's inputs."""
        for write in plan.writes:
            self.table.note(write)
        draws = any(chunk.draw is not None for chunk in plan.chunks)
        return _Extra(
            long=tuple(write for write in plan.writes if len(write.pages) >= _LONG),
            short=_scattered([write for write in plan.writes if len(write.pages) < _LONG], self.table.tensor.shape[1]),
            before=before,
            follow=_following(plan.chunks, before) if before is not None else (),
            asked=sampler_gpu.settings(plan.chunks, self.model.vocabulary) if draws else None,
        )

    def _forward(self, plan: StepPlan, extra: "_Extra") -> tuple[Tensor, Sequence[Tensor], Replayed | None]:
        """Logits of the drawn tokens, the draws' settings on the device, and what a graph drew, where one fits."""
        layout = lay_out(plan.chunks, self.table)
        shape, graphs = self.model.attention, self.graphs
        works = shape.works(layout.paged(self.table, self.table.tensor)) if shape is not None else []
        if graphs is not None:
            draws, settings = extra.settings[:2], extra.settings[2:]
            loaded = graphs.load(layout, works, draws, [*extra.arrays, *settings], self._sender)
            if loaded is not None:
                asked = extra.apply(self.table, graphs.token_ids, loaded.extra)
                self.replayed += 1
                replayed = graphs.replay(loaded.bucket, len(layout.drawn))
                return replayed.logits, [*loaded.draws, *asked], replayed
        return *self._launch(layout, works, extra), None

    def _launch(
        self, layout: BatchLayout, works: Sequence[AttentionWork], extra: "_Extra"
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The same without a graph."""
        inputs, work_arrays = layout.arrays, [array for work in works for array in work.arrays]
        views = self._sender.send([*inputs, *work_arrays, *extra.arrays, *extra.settings])
        batch = layout.batch(self.table, views[: len(inputs)])
        rest = views[len(inputs) :]
        if (shape := self.model.attention) is not None:
            for work in works:
                own, rest = rest[: len(work.arrays)], rest[len(work.arrays) :]
                batch.pages.plans[plan_key(work.window)] = plan_over(work, own, shape.heads, shape.head_dim)
        asked = extra.apply(self.table, views[0], rest)
        return self.model.forward(batch), asked


@dataclass(frozen=True, slots=True)
class GpuFlight:
    """A step on its way."""

    chunks: tuple[Chunk, ...]
    marks: tuple["_Mark", "_Mark", "_Mark"]  # before the forward, between it and the draws, after them
    draws: sampler_gpu.Draws | None
    moved: Callable[[], Moved]

    def land(self) -> StepOutput:
        """Wait for the step. Raises EngineError when it failed."""
        begin, drawing, end = self.marks
        try:
            end.wait()
            moved = self.moved()
            drawn = self.draws.finish(self.chunks) if self.draws is not None else (None,) * len(self.chunks)
            return StepOutput(drawn, begin.seconds_to(drawing), drawing.seconds_to(end), moved.ok, moved.load_s)
        except STEP_ERRORS as error:
            raise EngineError(f"a step of {len(self.chunks)} chunks failed: {error}") from error


class _Mark:
    """A moment on the device; on a CPU, where nothing is late, of the clock."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event: torch.cuda.Event | None = None
        if stream is not None:
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(stream)
        self._time = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_to(self, later: "_Mark") -> float:
        """Once both have passed."""
        if self._event is None or later._event is None:
            return later._time - self._time
        return float(self._event.elapsed_time(later._event)) / 1e3


@dataclass(frozen=True, slots=True)
class _Before:
    """What the step before draws: ids on the device, and by the number of a chunk that draws its first row of them."""

    drawn: Tensor
    first_rows: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Extra:
    """What goes over besides the forward's inputs: row writes, tokens that follow, settings of the draws."""

    long: tuple[RowWrite, ...]  # their pages, one array each
    short: tuple[Array, ...]  # slots of the table [n] int64, pages [n] int32; or nothing
    before: _Before | None
    follow: tuple[Array, ...]  # tokens of this step [n] int64, rows of the draws before [n] int64; or nothing
    asked: sampler_gpu.Settings | None

    @property
    def arrays(self) -> list[Array]:
        return [*(write.pages for write in self.long), *self.short, *self.follow]

    @property
    def settings(self) -> tuple[Array, ...]:
        """Of the draws, `sampler_gpu.Settings.arrays`; nothing where none is asked for."""
        return self.asked.arrays if self.asked is not None else ()

    def apply(self, table: PageTable, token_ids: Tensor | None, views: Sequence[Tensor]) -> Sequence[Tensor]:
        """Write rows and tokens where they belong on the device; returns the views that are left.

        `views` begin with `arrays` on the device; `token_ids` are the step's.
        """
        rest = list(views)
        for write in self.long:
            end = write.first + len(write.pages)
            table.tensor[write.row, write.first : end].copy_(rest.pop(0))
        if self.short:
            index, pages = rest.pop(0), rest.pop(0)
            table.tensor.view(-1).index_copy_(0, index, pages)
        if self.follow:
            at, rows = rest.pop(0), rest.pop(0)
            assert token_ids is not None
            assert self.before is not None
            token_ids.index_copy_(0, at, self.before.drawn.index_select(0, rows).long())
        return rest


def _scattered(writes: Sequence[RowWrite], slots: int) -> tuple[Array, ...]:
    """Places in a flat table of `slots` to a row, and the pages that go there; nothing without writes."""
    if not writes:
        return ()
    starts = [write.row * slots + write.first for write in writes]
    index = [np.arange(at, at + len(write.pages)) for at, write in zip(starts, writes, strict=True)]
    return np.concatenate(index), np.concatenate([write.pages for write in writes]).astype(np.int32)


def _following(chunks: Sequence[Chunk], before: _Before) -> tuple[Array, ...]:
    """Tokens that follow one of the step before, and the rows of its draws that they are; nothing without any."""
    pairs, at = [], 0
    for chunk in chunks:
        if chunk.follows is not None and chunk.follows in before.first_rows:
            pairs.append((at, before.first_rows[chunk.follows]))
        at += len(chunk.tokens)
    return tuple(np.array(column, np.int64) for column in zip(*pairs, strict=True))


def _first_rows(chunks: Sequence[Chunk]) -> dict[int, int]:
    """By the number of a chunk that draws, the first row of its draws."""
    rows, at = {}, 0
    for i, chunk in enumerate(chunks):
        if chunk.draw is not None:
            rows[i] = at
            at += chunk.draw.drafts + 1
    return rows
