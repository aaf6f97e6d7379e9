"""Steps on a GPU, begun without waiting for it: everything that a step needs goes over in one copy, only ids come back.

The order on the device is that of the calls. A step whose tokens follow from the step before takes them from where that
left them (`Chunk.follows`). A step of few tokens replays a graph where one was captured; one with more launches its
forward, and neither is waited for before it is landed. On a CPU the same runs through Triton's
interpreter, which is how it is tested.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.tensors import HostPages, KVTensors, Moved
from holdfast.replicas.model import sampler_gpu
from holdfast.replicas.model.batch import Model, PageTable, StepLayout, batch_over, lay_out, pages_of
from holdfast.replicas.model.graphs import Array, Mailer, StepGraphs, WindowWork, put_plans, window_works
from holdfast.replicas.scheduling.plan import Chunk, RowWrite, StepOutput, StepPlan

# ---- What a step may raise that fails it and nothing else.


def _of_triton() -> tuple[type[Exception], ...]:
    """What Triton raises for a kernel that does not compile or fit a device: an exception of its own kind."""
    try:
        from triton.errors import TritonError
    except ImportError:  # a torch for CPUs comes without
        return ()
    return (TritonError,)


STEP_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    IndexError,
    TypeError,
    OverflowError,
    *_of_triton(),
)
"""What torch, numpy and Triton raise for a step that cannot be run: shapes, indices, numbers, memory."""

_LONG = 256  # pages of a row write from which on it is a copy of its own


class _Mark:
    """A moment on the device; on a CPU, where nothing is late, of the clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
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
class DeviceFlight:
    """A step on its way."""

    chunks: tuple[Chunk, ...]
    marks: tuple[_Mark, _Mark, _Mark]  # before the forward, between it and the draws, after them
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


@dataclass(frozen=True, slots=True)
class _Extra:
    """What goes over besides the forward's inputs, in this order: row writes, tokens that follow, draws."""

    long: tuple[RowWrite, ...]  # their pages, one array each
    short: tuple[Array, ...]  # slots of the table [n] int64, pages [n] int32; or nothing
    follow: tuple[Array, ...]  # tokens of this step [n] int64, rows of the draws before [n] int64; or nothing
    asked: sampler_gpu.Settings | None

    @property
    def arrays(self) -> list[Array]:
        asked = self.asked.arrays if self.asked is not None else ()
        return [*(write.pages for write in self.long), *self.short, *self.follow, *asked]


class DeviceSteps:
    """Begins steps of a model over a KV store and a page table on one device. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        table: PageTable,
        host: HostPages | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._table = table
        self._host = host
        self.graphs = graphs
        self._mailer = Mailer(table.device)
        self._before: tuple[Tensor, dict[int, int]] | None = None  # what the last step draws, and each chunk's row
        self.replayed = 0  # steps that ran in a graph

    def run(self, plan: StepPlan) -> StepOutput:
        """Begin a step and wait for it. Raises EngineError when it fails."""
        return self.begin(plan).land()

    def begin(self, plan: StepPlan) -> DeviceFlight:
        """Give a step to the device. Raises EngineError for one that cannot be begun."""
        before, self._before = self._before, None
        host = self._host
        if plan.moves and host is None:
            raise EngineError("a plan moves pages to or from a host tier that there is not")
        moved: Callable[[], Moved] = host.wait if plan.moves and host is not None else Moved
        try:
            return self._begin(plan, before, moved)
        except STEP_ERRORS as error:
            moved()
            raise EngineError(f"a step of {len(plan.chunks)} chunks failed: {error}") from error

    @torch.inference_mode()
    def _begin(
        self, plan: StepPlan, before: tuple[Tensor, dict[int, int]] | None, moved: Callable[[], Moved]
    ) -> DeviceFlight:
        if self._host is not None and plan.moves:
            self._host.save(plan.saves)
        begin = _Mark(self._table.device)
        for copy in plan.copies:
            self._kv.copy_page(copy.source, copy.target, copy.cells)
        if self._host is not None and plan.moves:
            self._host.load(plan.loads)  # beside the forward: nothing in this step reads them
        extra = self._extra(plan, before)
        if plan.chunks:
            logits = self._forward(plan, extra, before)
        else:
            logits = None
            self._apply(extra, self._mailer.send(extra.arrays), None, before)
        drawing, draws = _Mark(self._table.device), None
        if logits is not None and extra.asked is not None:
            draws = sampler_gpu.begin(logits[0], extra.asked, logits[1])
            self._before = (draws.drawn, _first_rows(plan.chunks))
        return DeviceFlight(plan.chunks, (begin, drawing, _Mark(self._table.device)), draws, moved)

    def _forward(
        self, plan: StepPlan, extra: _Extra, before: tuple[Tensor, dict[int, int]] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits of the drawn tokens, and the draws' settings on the device."""
        layout = lay_out(plan.chunks, self._table)
        shape = self._model.attention
        # Whose cells these are is not looked at.
        works = window_works(shape, pages_of(layout, self._table, self._table.tensor)) if shape is not None else []
        loaded = self.graphs.load(layout, works, extra.arrays, self._mailer) if self.graphs is not None else None
        if loaded is not None and self.graphs is not None:
            asked = self._apply(extra, loaded.extra, self.graphs.token_ids, before)
            self.replayed += 1
            return self.graphs.replay(loaded.bucket, len(layout.drawn)), asked
        return self._eager(layout, works, extra, before)

    def _eager(
        self,
        layout: StepLayout,
        works: Sequence[WindowWork],
        extra: _Extra,
        before: tuple[Tensor, dict[int, int]] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The same without a graph."""
        plans = [array for each in works for array in each.arrays]
        views = self._mailer.send([*layout.arrays, *plans, *extra.arrays])
        first = len(layout.arrays)
        batch = batch_over(layout, views[:first], self._table)
        if (shape := self._model.attention) is not None:
            put_plans(batch.pages, shape, works, views[first : first + len(plans)])
        asked = self._apply(extra, views[first + len(plans) :], views[0], before)
        return self._model.forward(batch), asked

    def _extra(self, plan: StepPlan, before: tuple[Tensor, dict[int, int]] | None) -> _Extra:
        """Note the row writes, and work out what goes over for them, for tokens that follow, and for draws."""
        for write in plan.writes:
            self._table.note(write)
        long = tuple(write for write in plan.writes if len(write.pages) >= _LONG)
        short = [write for write in plan.writes if len(write.pages) < _LONG]
        slots = self._table.tensor.shape[1]
        scattered: tuple[Array, ...] = ()
        if short:
            starts = [write.row * slots + write.first for write in short]
            index = [np.arange(at, at + len(write.pages)) for at, write in zip(starts, short, strict=True)]
            scattered = (np.concatenate(index), np.concatenate([write.pages for write in short]).astype(np.int32))
        follow: tuple[Array, ...] = ()
        if before is not None:
            pairs = _following(plan.chunks, before[1])
            if pairs:
                follow = tuple(np.array(column, np.int64) for column in zip(*pairs, strict=True))
        draws = any(chunk.draw is not None for chunk in plan.chunks)
        asked = sampler_gpu.settings(plan.chunks, self._model.vocabulary) if draws else None
        return _Extra(long, scattered, follow, asked)

    def _apply(
        self,
        extra: _Extra,
        views: Sequence[Tensor],
        token_ids: Tensor | None,
        before: tuple[Tensor, dict[int, int]] | None,
    ) -> list[Tensor]:
        """Write rows and tokens where they belong on the device; returns the views of the draws."""
        rest = list(views)
        for write in extra.long:
            end = write.first + len(write.pages)
            self._table.tensor[write.row, write.first : end].copy_(rest.pop(0))
        if extra.short:
            index, pages = rest.pop(0), rest.pop(0)
            self._table.tensor.view(-1).index_copy_(0, index, pages)
        if extra.follow:
            at, rows = rest.pop(0), rest.pop(0)
            assert token_ids is not None
            assert before is not None
            token_ids.index_copy_(0, at, before[0].index_select(0, rows).long())
        return rest


def _first_rows(chunks: Sequence[Chunk]) -> dict[int, int]:
    """By the number of a chunk that draws, the first row of its draws."""
    rows, at = {}, 0
    for i, chunk in enumerate(chunks):
        if chunk.draw is not None:
            rows[i] = at
            at += chunk.draw.drafts + 1
    return rows


def _following(chunks: Sequence[Chunk], rows: dict[int, int]) -> list[tuple[int, int]]:
    """(token, row of the draws before) of every chunk that follows one of the step before."""
    pairs, at = [], 0
    for chunk in chunks:
        if chunk.follows is not None and chunk.follows in rows:
            pairs.append((at, rows[chunk.follows]))
        at += len(chunk.tokens)
    return pairs
