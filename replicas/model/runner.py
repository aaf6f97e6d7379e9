"""Running step plans on a model: page copies, page table writes, one forward, sampling. Knows no requests.

`ModelRunner` waits for what it computes: on a CPU, or where logits cross to the host before tokens are drawn. On a GPU
`runner_gpu` begins steps without waiting. `startup` makes either from a configuration.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.tensors import HostPages, KVTensors
from holdfast.replicas.model.decoder import (
    STEP_ERRORS,
    Decoder,
    ForwardBatch,
    Model,
    PageTable,
    build_batch,
    following_tokens,
)
from holdfast.replicas.model.sampler import sample, with_predictions
from holdfast.replicas.plan import Chunk, Drawn, Flight, Landed, StepOutput, StepPlan
from holdfast.replicas.types import record


class ModelRunner:
    """Runs steps of a model over a KV store. Owns the page table. Not thread-safe.

    A step is computed in `begin`. With `overlap` a thread computes it, and the next step is planned meanwhile: torch
    releases the interpreter while it computes. That pays where a core is to spare.

    A failed step leaves the page table and the store usable: its writes are done, and the cells that it was to fill
    hold nothing that anyone may read.
    """

    replayed = 0  # steps that ran in a CUDA graph

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        max_rows: int,
        context_length: int,
        host: HostPages | None = None,
        device_sampling: bool = True,
        overlap: bool = False,
    ) -> None:
        self.model = model
        self.kv = kv
        self.table = PageTable.of(kv, max_rows, context_length)
        self._host = host
        self._device_sampling = device_sampling
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps") if overlap else None
        self._drawn: tuple[Drawn | None, ...] = ()  # by the last step; nothing if it failed

    def begin(self, plan: StepPlan) -> Flight:
        """Run a step. The step that fails raises EngineError, here or when it lands."""
        if self._thread is not None:
            return _ThreadFlight(self._thread.submit(self._step, plan))
        return Landed(self._step(plan))

    def _step(self, plan: StepPlan) -> StepOutput:
        before, self._drawn = self._drawn, ()
        plan = plan.after(before)
        try:
            output = self._move_and_compute(plan) if plan.moves else self._compute(plan)
        except STEP_ERRORS as error:
            raise EngineError(f"a step of {len(plan.chunks)} chunks failed: {error}") from error
        self._drawn = output.drawn
        return output

    def _move_and_compute(self, plan: StepPlan) -> StepOutput:
        if self._host is None:
            raise EngineError("the plan moves pages to or from a host tier, and there is none")
        self._host.save(plan.saves, plan.checkpoint_saves)
        self._write(plan)
        self._host.load(plan.loads, plan.checkpoint_loads)
        try:
            output = self._compute(StepPlan(plan.chunks))
        finally:  # nothing is written once the step is over, however it ends
            moved = self._host.wait()
        return replace(output, moved=moved.ok, load_s=moved.load_s)

    def _compute(self, plan: StepPlan) -> StepOutput:
        begin = time.perf_counter()
        self._write(plan)
        if not plan.chunks:
            return StepOutput(())
        batch = build_batch(plan.chunks, self.table)
        logits = self.model.forward(batch)
        forwarded = self._clock()
        drawn = sample(logits if self._device_sampling else logits.cpu(), plan.chunks)
        if isinstance(self.model, Decoder) and self.model.hidden is not None:
            drawn = self._predict(self.model, self.model.hidden, batch, plan.chunks, drawn)
        return StepOutput(drawn, forward_s=forwarded - begin, sample_s=self._clock() - forwarded)

    def _predict(
        self,
        model: Decoder,
        hidden: Tensor,
        batch: ForwardBatch,
        chunks: Sequence[Chunk],
        drawn: tuple[Drawn | None, ...],
    ) -> tuple[Drawn | None, ...]:
        """`drawn` with the token after those of each chunk, by the model's layer that predicts one token further."""
        rows, end = [], 0
        for chunk, result in zip(chunks, drawn, strict=True):
            end += len(chunk.tokens)
            if result is not None and chunk.draw is not None:
                rows.append(end - chunk.draw.drafts - 2 + len(result.tokens))
        device = self.table.device
        following = torch.from_numpy(following_tokens(chunks, drawn)).to(device)
        logits = model.predict(batch, hidden, following, torch.tensor(rows, dtype=torch.int64, device=device))
        return with_predictions(logits if self._device_sampling else logits.cpu(), chunks, drawn)

    def _write(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self.kv.kinds[copy.kind].copy_page(copy.source, copy.target, copy.cells)
        for write in plan.writes:
            self.table.write(write)

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.table.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@record
class _ThreadFlight:
    """A step that the thread runs, or will run."""

    future: "Future[StepOutput]"

    def land(self) -> StepOutput:
        return self.future.result()
