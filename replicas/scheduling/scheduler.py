"""Which tokens the next step computes, and what becomes of its result.

`schedule` plans one step over running sequences and admits waiting ones; `commit` takes the drawn tokens in. No
tensors and no clock: cells and rows come through `running`, time from the caller.
"""

from dataclasses import dataclass

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import EngineError, ErrorInfo, ErrorKind
from holdfast.replicas.events import Event, Tokens
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.scheduling.admission import Admission
from holdfast.replicas.scheduling.budget import Budget
from holdfast.replicas.scheduling.builder import PlanBuilder
from holdfast.replicas.scheduling.chunks import chunk_size
from holdfast.replicas.scheduling.order import Order, ProgramOrder
from holdfast.replicas.scheduling.plan import Chunk, Drawn, StepOutput, StepPlan
from holdfast.replicas.scheduling.running import Running
from holdfast.replicas.scheduling.speculation import Speculation
from holdfast.replicas.sequences.pool import SequencePool
from holdfast.replicas.sequences.sequence import Sequence, Status
from holdfast.replicas.speculation.drafter import Drafter
from holdfast.replicas.stats import EngineStats, Occupancy

_NO_ROOM = ErrorInfo(ErrorKind.OVERLOADED, "the KV cache has no room for this request, even alone")


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and the sequences behind it: `sequences[i]` belongs to `plan.chunks[i]`.

    `ended` are terminal events of requests that came to an end while planning. No chunks: nothing to run.
    """

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    ended: tuple[Event, ...] = ()


class Scheduler:
    """Joins admission, the running sequences and speculation into steps."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        pool: SequencePool,
        drafter: Drafter,
        order: Order | None = None,
    ) -> None:
        self._config = config
        self._cache = cache
        order = order or ProgramOrder()
        self._budget = Budget.of(config)
        self.stats = EngineStats()
        self._running = Running(cache, pool, order)
        self._admission = Admission(config, cache, self._running, order, self._budget, self.stats)
        self._speculation = Speculation(drafter)

    # ---- requests come and go ----

    @property
    def n_waiting(self) -> int:
        return len(self._admission)

    @property
    def busy(self) -> bool:
        return len(self._running) > 0 or len(self._admission) > 0

    def add(self, sequence: Sequence) -> None:
        self._admission.push(sequence)

    def end(self, sequence: Sequence, now: float, *, keep: bool = True) -> None:
        """Take a sequence out, wherever it is. `keep` hands its computed cells to the tree, else they are freed."""
        if sequence.status is Status.WAITING:
            self._admission.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._running.leave(sequence, now, keep=keep)
        self._speculation.close(sequence)
        sequence.move(Status.ENDED)

    def everything(self) -> list[Sequence]:
        return [*self._running, *self._admission]

    def occupancy(self) -> Occupancy:
        cells = self._cache.stats
        return Occupancy(
            running=len(self._running),
            waiting=len(self._admission),
            rows_taken=self._running.rows_taken,
            cells_total=cells.total,
            cells_free=cells.free,
            cells_tree=cells.tree,
            cells_held=cells.held,
        )

    # ---- one step ----

    def schedule(self, now: float) -> Step:
        """Plan the next step; admit what there is room for; end what waited too long or can never go on."""
        builder = PlanBuilder()
        ended = self._admission.expire(now)
        if not self._decode(builder, now):
            # Not in a step that had to preempt: the cells it freed are for those that run.
            self._admission.admit(builder, now)
        self._prefill(builder)
        while not builder.chunks and len(self._running):
            # All are short of cells, so the last in order makes room for the others. One that is alone starts again
            # without its cached prefix: the ends of pages it shares with others may be what is missing.
            victim = self._running.last()
            if len(self._running) == 1 and not victim.reuse:
                ended.append(self._failed(victim, _NO_ROOM, now))
                continue
            victim.reuse = len(self._running) > 1
            self._preempt(builder, victim, now)
            if not len(self._running):
                self._admission.admit(builder, now)
            self._prefill(builder)
        return Step(builder.plan(), tuple(builder.sequences), tuple(ended))

    def commit(self, step: Step, output: StepOutput, now: float) -> list[Event]:
        """Take in what a step drew; finished sequences hand their cells to the tree."""
        events: list[Event] = []
        for sequence, chunk, drawn in zip(step.sequences, step.plan.chunks, output.drawn, strict=True):
            self._advance(sequence, chunk, drawn, now)
            if drawn is None:
                continue
            kept, reason = sequence.append(drawn.tokens, now)
            sequence.n_computed = min(sequence.n_computed, sequence.length - 1)
            self._speculation.learn(sequence, kept)
            self.stats.completion += len(kept)
            events.append(Tokens(sequence.request_id, kept, drawn.logprobs[: len(kept)]))
            if reason is not None:
                self.end(sequence, now)
                events.append(sequence.finished(reason, now))
        return events

    def fail(self, step: Step, error: EngineError, now: float) -> list[Event]:
        """A step went wrong: its sequences fail and what they computed is dropped; the others go on."""
        self.stats.failed_steps += 1
        return [self._failed(sequence, error.info, now) for sequence in step.sequences]

    # ---- the parts of a step ----

    def _decode(self, builder: PlanBuilder, now: float) -> bool:
        """The last token of each decoding sequence and drafts after it, in order.

        True if some sequences had to be preempted for lack of cells.
        """
        preempted = False
        decoding = self._running.in_order(decoding=True)
        for sequence in decoding:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one before it
            drafts = self._speculation.propose(sequence, len(decoding))
            if len(drafts) and self._running.grow(builder, sequence, sequence.length + len(drafts)):
                builder.compute(sequence, 1, drafts)
                self.stats.drafted += len(drafts)
                continue
            while sequence.status is Status.RUNNING and not self._running.grow(builder, sequence, sequence.length):
                if len(self._running) == 1:
                    return preempted
                self._preempt(builder, self._running.last(), now)
                preempted = True
            if sequence.status is Status.RUNNING:
                builder.compute(sequence, 1)
        return preempted

    def _prefill(self, builder: PlanBuilder) -> None:
        """A chunk for each prefilling sequence, smaller the more there are; deferred above the high-water mark."""
        prefilling = self._running.in_order(decoding=False)
        hurried = len(self._running) > 1 and any(
            s.sampling.max_tokens <= self._config.latency_max_tokens for s in self._running
        )
        for sequence in prefilling:
            if builder.chunks and self._cache.stats.in_use >= self._budget.high_water:
                return
            size = chunk_size(sequence.pending, len(prefilling), hurried, self._config)
            if self._running.grow(builder, sequence, sequence.n_computed + size):
                builder.compute(sequence, size)

    def _advance(self, sequence: Sequence, chunk: Chunk, drawn: Drawn | None, now: float) -> None:
        """Count what a chunk computed. Others may alias a prompt once it is complete, or sooner if they wait for it."""
        end = chunk.start + len(chunk.tokens)
        n_prefilled = min(end, sequence.n_prompt) - chunk.start
        drafts = chunk.draw.drafts if chunk.draw else 0
        accepted = len(drawn.tokens) - 1 if drawn else 0
        sequence.n_computed = end - drafts + accepted
        self.stats.accepted += accepted
        if n_prefilled > 0:
            self.stats.prompt_computed += n_prefilled
            if drawn or self._admission.leads(sequence):
                self._running.publish(sequence, now)

    # ---- ends ----

    def _preempt(self, builder: PlanBuilder, sequence: Sequence, now: float) -> None:
        """Back to the queue: what it computed goes to the tree, and what is evicted there is computed again.

        Nothing is lost: noise is keyed by position, so the recomputed sequence goes on as it would have.
        """
        self.stats.preemptions += 1
        builder.forget(sequence)
        self._running.leave(sequence, now, keep=True)
        sequence.preempted = True
        sequence.move(Status.WAITING)
        self._admission.push(sequence)

    def _failed(self, sequence: Sequence, error: ErrorInfo, now: float) -> Event:
        self.end(sequence, now, keep=False)
        return sequence.failed(error)
