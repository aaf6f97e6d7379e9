"""Steps on a GPU, begun without waiting: everything that a step needs crosses in one copy, only ids come back.

The device works in the order of the calls. A token that follows from the step before is taken from where that step left
it (`Chunk.follows`). A step of few tokens replays a graph where one was captured; a longer one launches its forward.
Neither is waited for before it lands. On a CPU the same runs through Triton's interpreter, which is how it is tested.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.attention_plan import LIBRARY, AttentionWork, plan_key, plan_over
from holdfast.kernels.kv import Array, Sender
from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.tensors import HostPages, KVTensors, Moved
from holdfast.replicas.model import sampler
from holdfast.replicas.model.decoder import (
    LONG,
    STEP_ERRORS,
    AttentionShape,
    BatchLayout,
    Decoder,
    ForwardBatch,
    Model,
    PageTable,
    following_tokens,
    lay_out,
    plan_attention,
)
from holdfast.replicas.model.graphs import Capture, CudaGraphs, GraphRoom, Replayed
from holdfast.replicas.model.runner import ModelRunner
from holdfast.replicas.plan import Chunk, StepOutput, StepPlan
from holdfast.replicas.types import record

log = logging.getLogger(__name__)


class GpuRunner(ModelRunner):
    """Runs steps on one device. Not thread-safe. `graphs`: what steps of few tokens replay, once they are captured."""

    def __init__(
        self, model: Model, kv: KVTensors, max_rows: int, context_length: int, host: HostPages | None = None
    ) -> None:
        super().__init__(model, kv, max_rows, context_length, host)
        self._sender = Sender(self.table.device)
        self._before: _Before | None = None
        self.graphs: CudaGraphs | None = None
        if LIBRARY.missing:
            log.warning("attention is planned in Python, which is slower: %s", LIBRARY.missing)

    def capture(self, capture: Capture, room: GraphRoom, say: Callable[[str], None]) -> bool:
        """Capture the forwards of short steps as graphs. False where this model or store has none."""
        shapes = self.model.attention
        scratch = [cell for kv in self.kv.kinds if (cell := kv.scratch_cell) is not None]
        if not shapes or not scratch:
            return False
        stateful = isinstance(self.model, Decoder) and self.model.states is not None
        graphs = CudaGraphs(self.model, shapes, self.table, scratch, self.kv.dtype, room, stateful)
        graphs.capture(capture, say)
        self.graphs = graphs
        return True

    def begin(self, plan: StepPlan) -> "GpuFlight":
        """Give a step to the device. Raises EngineError for one that cannot be begun."""
        before, self._before = self._before, None
        host = self._host if plan.moves else None
        if plan.moves and host is None:
            raise EngineError("the plan moves pages to or from a host tier, and there is none")
        try:
            return self._begin(plan, before, host)
        except STEP_ERRORS as error:
            if host is not None:
                host.wait()
            raise EngineError(f"a step of {len(plan.chunks)} chunks failed: {error}") from error

    @torch.inference_mode()
    def _begin(self, plan: StepPlan, before: "_Before | None", host: HostPages | None) -> "GpuFlight":
        stream = self._sender.stream
        if host is not None:
            host.save(plan.saves, plan.checkpoint_saves)
        begin = _Mark(stream)
        for copy in plan.copies:
            self.kv.kinds[copy.kind].copy_page(copy.source, copy.target, copy.cells)
        if host is not None:
            host.load(plan.loads, plan.checkpoint_loads)  # while the forward runs: nothing in this step reads them
        if not plan.chunks:
            beside = _Updates(self.table, plan, before)
            beside.apply(None, self._sender.send(beside.arrays))
            return GpuFlight((), (begin, _Mark(stream), _Mark(stream)), None, host)
        step = lay_out_step(plan, self.table, self.model.attention, self.model.vocabulary, before)
        settings = step.settings
        setting_arrays = settings.arrays if settings is not None else ()
        further = self._further(plan.chunks, settings)
        logits, views, batch, replayed = self._forward(step, setting_arrays, further)
        views, left = views[: len(setting_arrays)], views[len(setting_arrays) :]
        drawing, drawn = _Mark(stream), None
        if settings is not None:
            greedy = (replayed.greedy, replayed.accepted) if replayed is not None else None
            drawn = sampler.begin(logits, settings, views, greedy)
            self._before = _Before(drawn.drawn, _first_rows(plan.chunks))
        if left and isinstance(self.model, Decoder):
            hidden = replayed.hidden if replayed is not None else self.model.hidden
            self._begin_prediction(self.model, batch, hidden, left, views, drawn)
        return GpuFlight(plan.chunks, (begin, drawing, _Mark(stream)), drawn, host)

    def _further(self, chunks: tuple[Chunk, ...], settings: sampler.Settings | None) -> tuple[Array, ...]:
        """Further inputs of the layer that predicts one token further; empty if the model has none."""
        if not isinstance(self.model, Decoder) or self.model.next_token is None:
            return ()
        return following_tokens(chunks), *(settings.keys_after() if settings is not None else ())

    def _begin_prediction(
        self,
        model: Decoder,
        batch: ForwardBatch,
        hidden: Tensor | None,
        further: Sequence[Tensor],
        settings: Sequence[Tensor],
        drawn: sampler.Draws | None,
    ) -> None:
        """Store the KV of the layer that predicts one token further, and begin to draw what it predicts after `drawn`.

        `further`: as `_further` has it, on the device; `settings`: those of the draws.
        """
        assert hidden is not None
        known, *keys = further
        following = known.new_zeros(len(hidden))  # a graph's tokens may be more than the step's
        following[: len(known)] = known
        if drawn is None:
            model.predict(batch, hidden, following, known[:0])
            return
        # What is drawn behind a draft that was refused goes to cells that the next step writes again.
        following.index_copy_(0, batch.drawn[: len(drawn.drawn)], drawn.drawn.long())
        rows = (settings[0][:-1] + drawn.counts).long()
        logits = model.predict(batch, hidden, following, batch.drawn[rows])
        drawn.predicted = sampler.predict(logits, rows, settings, keys)

    def _forward(
        self, step: "StepInputs", settings: Sequence[Array], further: Sequence[Array]
    ) -> tuple[Tensor, Sequence[Tensor], ForwardBatch, Replayed | None]:
        """Logits of the drawn tokens, the draws' `settings` and `further` on the device, the batch, and what a graph
        computed, if one fits.
        """
        graphs, layout, works, beside = self.graphs, step.layout, step.works, step.beside
        if graphs is not None:
            extra = [*beside.arrays, *settings[2:], *further]
            loaded = graphs.load(layout, works, settings[:2], extra, self._sender)
            if loaded is not None:
                rest = beside.apply(graphs.token_ids, loaded.extra)
                self.replayed += 1
                replayed = graphs.replay(loaded.bucket, len(layout.drawn))
                draws = loaded.draws if settings else ()
                return replayed.logits, [*draws, *rest], replayed.batch, replayed
        return *self._launch(step, [*settings, *further]), None

    def _launch(self, step: "StepInputs", settings: Sequence[Array]) -> tuple[Tensor, Sequence[Tensor], ForwardBatch]:
        """Run a forward without a graph."""
        layout, works, beside = step.layout, step.works, step.beside
        views = self._sender.send([*step.arrays, *settings])
        inputs = len(layout.arrays)
        batch, rest = layout.batch(self.table, views[:inputs]), views[inputs:]
        for pages, shape, of_kind in zip(batch.pages, self.model.attention, works, strict=False):
            for work in of_kind:
                own, rest = rest[: len(work.arrays)], rest[len(work.arrays) :]
                pages.plans[plan_key(work.window)] = plan_over(work, own, shape.heads, shape.head_dim)
        left = beside.apply(views[0], rest)
        return self.model.forward(batch), left, batch


@record
class StepInputs:
    """A step laid out on the host. `settings`: those of its rows; None if it draws nothing."""

    layout: BatchLayout
    works: Sequence[Sequence[AttentionWork]]
    beside: "_Updates"
    settings: sampler.Settings | None

    @property
    def arrays(self) -> list[Array]:
        """The arrays that a forward without a graph needs on the device, except those of the draws."""
        works = [array for of_kind in self.works for work in of_kind for array in work.arrays]
        return [*self.layout.arrays, *works, *self.beside.arrays]


def lay_out_step(
    plan: StepPlan,
    table: PageTable,
    attention: Sequence[AttentionShape],
    vocabulary: int,
    before: "_Before | None" = None,
) -> StepInputs:
    """The host's part of a step with chunks, up to the copy to the device. Notes its row writes in the table."""
    beside = _Updates(table, plan, before)
    layout = lay_out(plan.chunks, table)
    settings = None
    if len(layout.drawn):
        settings = sampler.settings(plan.chunks, vocabulary, layout.token_ids[layout.drawn])
    works = plan_attention(attention, layout.paged(table))
    return StepInputs(layout, works, beside, settings)


@dataclass(frozen=True, slots=True)
class GpuFlight:
    """A step that the device works on."""

    chunks: tuple[Chunk, ...]
    marks: tuple["_Mark", "_Mark", "_Mark"]  # before the forward, between it and the draws, after them
    draws: sampler.Draws | None
    host: HostPages | None  # where pages move

    def land(self) -> StepOutput:
        """Wait for the step. Raises EngineError when it failed."""
        begin, drawing, end = self.marks
        try:
            end.wait()
            moved = self.host.wait() if self.host is not None else Moved()
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
    """The draws of the step before: ids on the device, and the first row of each drawing chunk by its number."""

    drawn: Tensor
    first_rows: dict[int, int]


def _first_rows(chunks: Sequence[Chunk]) -> dict[int, int]:
    rows, at = {}, 0
    for i, chunk in enumerate(chunks):
        if chunk.draw is not None:
            rows[i] = at
            at += chunk.draw.drafts + 1
    return rows


class _Updates:
    """Data that crosses to the device besides the forward's inputs: row writes, and tokens of the step before.

    Notes the writes in the table, from which the step is laid out.

    `arrays`: the pages of long row writes, one array each; slots [n] int64 of the table and pages [n] int32 of the
    short ones; tokens [n] int64 of this step and the rows [n] int64 of the draws before that they are.
    """

    def __init__(self, table: PageTable, plan: StepPlan, before: _Before | None) -> None:
        self._table, self._before = table, before
        places, pages = table.note(plan.writes)
        self._long = [write for write in plan.writes if len(write.pages) >= LONG]
        self._short = (np.array(places, np.int64), np.array(pages, np.int32)) if places else ()
        self._follow = _following(plan.chunks, before) if before is not None else ()
        self.arrays: list[Array] = [*(write.pages for write in self._long), *self._short, *self._follow]

    def apply(self, token_ids: Tensor | None, views: Sequence[Tensor]) -> Sequence[Tensor]:
        """Put rows and tokens in their places on the device. Returns the views that are left.

        `views` begin with `arrays` on the device; `token_ids` are the step's.
        """
        rest, table = list(views), self._table.tensor
        for write in self._long:
            end = write.first + len(write.pages)
            table[self._table.row(write.row, write.kind), write.first : end].copy_(rest.pop(0))
        if self._short:
            index, pages = rest.pop(0), rest.pop(0)
            table.view(-1).index_copy_(0, index, pages)
        if self._follow:
            at, rows = rest.pop(0), rest.pop(0)
            assert token_ids is not None
            assert self._before is not None
            token_ids.index_copy_(0, at, self._before.drawn.index_select(0, rows).long())
        return rest


def _following(chunks: Sequence[Chunk], before: _Before) -> tuple[Array, ...]:
    """Tokens that follow from the step before, and the rows of its draws that they are; nothing without any."""
    pairs, at = [], 0
    for chunk in chunks:
        if chunk.follows is not None and chunk.follows in before.first_rows:
            pairs.append((at, before.first_rows[chunk.follows]))
        at += len(chunk.tokens)
    return tuple(np.array(column, np.int64) for column in zip(*pairs, strict=True))
