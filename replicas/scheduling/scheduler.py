"""Which tokens the next step computes, and what becomes of its result.

`schedule` plans one step over running sequences and admits waiting ones; `commit` takes the drawn tokens in. No
tensors and no clock: cells and rows come through `running`, time from the caller.
"""

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ErrorInfo, ErrorKind, HoldfastError
from holdfast.replicas.events import Event, FinishReason, Tokens
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.retention.pins import Keeping
from holdfast.replicas.retention.policy import Learned
from holdfast.replicas.retention.rows import Places
from holdfast.replicas.scheduling.admission import Admission
from holdfast.replicas.scheduling.drafts import Speculation, check, fitting
from holdfast.replicas.scheduling.plan import Chunk, Drawn, Step, StepOutput, as_if_over
from holdfast.replicas.scheduling.queue import Order, WaitingQueue
from holdfast.replicas.scheduling.running import Ends, PlanBuilder, Running
from holdfast.replicas.sequences import Sequence, SequencePool, Status, reach
from holdfast.replicas.speculation.drafter import NO_DRAFT, Drafter
from holdfast.replicas.stats import EngineStats, Occupancy

# ---- How many prompt tokens each prefilling sequence computes in a step (stateful inference, section 3.2). Pure.


def chunk_size(remaining: int, active: int, latency_sensitive: bool, config: EngineConfig) -> int:
    """min(remaining, step_tokens // active prefills), at most `latency_chunk` beside a latency-sensitive request.

    Never 0, so that every prefill makes progress however many there are. Without `adaptive_chunks` every prefill may
    fill a step by itself.
    """
    if not config.adaptive_chunks:
        return max(1, min(remaining, config.step_tokens))
    share = config.step_tokens // active
    if latency_sensitive:
        share = min(share, config.latency_chunk)
    return max(1, min(remaining, share))


_NO_ROOM = ErrorInfo(ErrorKind.OVERLOADED, "the KV cache has no room for this request, even alone")


class Scheduler:
    """Joins admission, the running sequences and speculation into steps.

    What raises while one sequence is planned or committed fails that sequence. Only `BooksError` comes out of here:
    then the caller needs a new scheduler over new books. Events are added to `events`, so none is lost even then.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        pool: SequencePool,
        drafter: Drafter,
        order: Order,
        stats: EngineStats,
        events: list[Event],
        learned: Learned,
    ) -> None:
        self._config = config
        self._cache = cache
        self._order = order
        self._over = 0.0  # when the last step was
        self._high_water = int(config.cells * config.high_water)
        self.stats = stats
        self._learned = learned
        waiting = WaitingQueue(order)
        self.keeping = Keeping(config, cache, waiting, order, learned, stats, idle=lambda: self.places.cells_pinned)
        self.places = Places(cache, pool, parks=config.sessions, shares=config.prefix_cache, spared=self.keeping.holds)
        self._running = Running(cache, self.places, order, self.stats, self.keeping)
        self._speculation = Speculation(drafter)
        self.ends = Ends(self._running, waiting, self._speculation, stats, events)
        self.admission = Admission(config, cache, self._running, waiting, self.ends, self.stats)

    # ---- requests come and go ----

    @property
    def busy(self) -> bool:
        return len(self._running) > 0 or len(self.admission) > 0

    def add(self, sequence: Sequence) -> None:
        self.keeping.arrived(sequence)
        self.admission.push(sequence)

    def everything(self) -> list[Sequence]:
        return [*self._running, *self.admission]

    def occupancy(self) -> Occupancy:
        cells = self._cache.stats
        return Occupancy(
            running=len(self._running),
            waiting=len(self.admission),
            rows_taken=self.places.rows_taken,
            cells_total=cells.total,
            cells_free=cells.free,
            cells_tree=cells.tree,
            cells_held=cells.held,
            rows_parked=self.places.rows_parked,
            cells_host=cells.host_used,
            reload_cells_per_s=self._running.reloads.speed.cells_per_s,
            pins=len(self.keeping.kept),
            cells_pinned=self.keeping.kept.cells,
        )

    # ---- one step ----

    def schedule(self, now: float, flying: Step | None = None, times: int = 1) -> Step:
        """Plan the next step; admit what there is room for; end what waited too long or can never go on.

        With a step `flying`, which must be `open`, the plan is for when that is over; there may be nothing to do then.
        Where nothing but decoding is to be done it is for `times` steps at once, if there are cells for that.
        """
        if flying is None:
            builder = self._build(now, times, waits=True)
        else:
            with as_if_over(flying):
                builder = self._build(now, times, waits=False)
        plan = builder.plan(self._running.reloads.saves())
        unasked = self._speculation.silent or all(chunk.draw is None for chunk in plan.chunks)
        held = tuple([sequence.holding for sequence in builder.sequences])
        return Step(plan, tuple(builder.sequences), tuple(builder.loads), held, now, plan.plain and unasked)

    def _build(self, now: float, times: int, *, waits: bool) -> PlanBuilder:
        """The parts of a plan. `waits`: no step is in flight, so something must get on."""
        builder = PlanBuilder(times=times)
        self.ends.events += self.admission.expire(now)
        self.keeping.expire(now)
        if not self._decode(builder, now):
            # Not in a step that had to preempt: the cells it freed are for those that run.
            self.admission.admit(builder, now)
        self._prefill(builder, now)
        while waits and not builder.busy and len(self._running):
            # All are short of cells. What is kept for programs that pause goes first, then the last in order makes room
            # for the others. One that is alone starts again without its cached prefix: the ends of pages it shares
            # with others may be what is missing.
            if self.keeping.give_way(to=None):
                self._prefill(builder, now)
                continue
            victim = self._running.in_order()[-1]
            if len(self._running) == 1 and not victim.reuse:
                self.ends.fail(victim, _NO_ROOM, now)
                continue
            victim.reuse = len(self._running) > 1
            self.ends.preempt(builder, victim, now)
            if not len(self._running):
                self.admission.admit(builder, now)
            self._prefill(builder, now)
        return builder

    def commit(self, step: Step, output: StepOutput, now: float) -> None:
        """Take in what a step drew; finished sequences hand their cells to the tree.

        What was drawn for a sequence that left while the step was in flight is nobody's.
        """
        seconds = now - max(step.begun, self._over)
        self._over = now
        if step.plan.moves:
            self._bring_back(step, output, now)
        if step.plan.chunks and not step.loads:  # beside a load a step may take longer than its forward
            self._speculation.measured(step.plan, seconds)
            self._learned.measured(step.plan, seconds)
        self._order.serve(step.sequences, step.plan.chunks, seconds)
        for sequence, held, chunk, drawn in zip(step.sequences, step.held, step.plan.chunks, output.drawn, strict=True):
            if sequence.holding is not held:
                continue
            try:
                self._advance(sequence, chunk, drawn, now)
                # A prompt that was only to be computed is over with its last cell.
                reason: FinishReason | None = "length" if sequence.n_computed == len(sequence.buffer) else None
                if drawn is not None:
                    reason = self._take_in(sequence, chunk, drawn, now)
            except Exception as failure:
                self.ends.fault(None, sequence, failure, now)
                continue
            if reason is not None:
                self.ends.finish(sequence, reason, now)

    def fail(self, step: Step, error: HoldfastError, now: float) -> None:
        """A step went wrong: its sequences fail and what they computed is dropped; the others go on.

        Those that were given pages in it without a chunk start again: nobody knows whether their rows were written.
        """
        self.stats.failed_steps += 1
        if step.plan.moves:
            self._running.reloads.lose()
        for _, sequence in step.present():
            self.ends.fail(sequence, error.info, now)
        written = {write.row for write in step.plan.writes}
        for sequence in [s for s in self._running if s.row in written]:
            self.ends.preempt(None, sequence, now)

    # ---- the parts of a step ----

    def _decode(self, builder: PlanBuilder, now: float) -> bool:
        """The last token of each decoding sequence and drafts after it, in order.

        True if some sequences had to be preempted for lack of cells.
        """
        preempted = False
        decoding = self._running.part(decoding=True)
        self._speculation.prepare(decoding)
        for sequence in decoding:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one before it
            try:
                preempted |= self._decode_one(builder, sequence, now)
            except Exception as failure:
                self.ends.fault(builder, sequence, failure, now)
        return preempted

    def _decode_one(self, builder: PlanBuilder, sequence: Sequence, now: float) -> bool:
        drafts, end = NO_DRAFT, reach(sequence)
        if self._speculation.active or sequence.matcher is not None:
            drafts = fitting(sequence, self._speculation.propose(sequence), self._config.forced_drafts)
        more = len(drafts) or builder.times - 1
        if self._running.grow(builder, sequence, end + more):
            builder.compute(sequence, 1, drafts)
            return False
        builder.times, preempted = 1, False
        while sequence.status is Status.RUNNING and not self._running.grow(builder, sequence, end):
            # Who arrived last gives way, whether its program runs or pauses.
            alone, last = len(self._running) == 1, self._running.in_order()[-1]
            if self.keeping.give_way(to=None if alone else last):
                continue
            if alone:
                return preempted
            self.ends.preempt(builder, last, now)
            preempted = True
        if sequence.status is Status.RUNNING:
            builder.compute(sequence, 1)
        return preempted

    def _prefill(self, builder: PlanBuilder, now: float) -> None:
        """A chunk for each prefilling sequence, smaller the more there are; deferred above the high-water mark.

        Beside others, a prompt that nobody waits for an answer to is computed in narrow chunks as well.
        """
        if len(builder.sequences) == len(self._running):
            return  # all of them decode
        prefilling = self._running.part(decoding=False)
        if not prefilling:
            return
        company = len(self._running) > 1
        hurried = company and any(0 < s.sampling.max_tokens <= self._config.latency_max_tokens for s in self._running)
        for sequence in prefilling:
            if builder.chunks and not self.keeping.makes_room(self._high_water, sequence):
                self.stats.chunks_deferred += 1
                continue
            narrow = hurried or (company and sequence.sampling.max_tokens == 0)
            size = chunk_size(sequence.pending, len(prefilling), narrow, self._config)
            try:
                if self._running.load(builder, sequence, self._config.step_tokens):
                    continue
                # What a grammar forces after the prompt is computed with the prompt's end.
                whole = size == sequence.pending
                drafts = fitting(sequence, NO_DRAFT, self._config.forced_drafts) if whole else NO_DRAFT
                end = sequence.n_computed + sequence.ahead + size
                if self._running.grow_over_pins(builder, sequence, end + len(drafts)):
                    builder.times = 1
                    builder.compute(sequence, size, drafts)
            except Exception as failure:
                self.ends.fault(builder, sequence, failure, now)

    def _bring_back(self, step: Step, output: StepOutput, now: float) -> None:
        """What was loaded counts as computed, and as cached. Where copies failed it is computed after all."""
        reloads, stats = self._running.reloads, self.stats
        if not output.moved:
            stats.failed_moves += 1
            reloads.lose()
            return
        stats.pages_out += len(step.plan.saves)
        stats.pages_in += len(step.plan.loads)
        reloads.speed = reloads.speed.measured(len(step.plan.loads) * self._config.page_size, output.load_s)
        self._learned.reload = reloads.speed.cell_s
        for load in step.loads:
            sequence = load.sequence
            try:
                stats.tokens_reloaded += load.end - sequence.n_computed
                sequence.n_computed = load.end
                if not sequence.preempted:
                    more = min(load.end, sequence.n_prompt) - sequence.n_cached
                    sequence.n_cached += more
                    stats.prompt_cached += more
                reloads.loaded(sequence.held, load.end)
                if sequence.reuse:
                    self._running.publish(sequence, now)
            except Exception as failure:
                self.ends.fault(None, sequence, failure, now)

    def _advance(self, sequence: Sequence, chunk: Chunk, drawn: Drawn | None, now: float) -> None:
        """Count what a chunk computed. Others may alias a prompt once it is complete, or sooner if they wait for it."""
        end = chunk.start + len(chunk.tokens)
        drafts = chunk.draw.drafts if chunk.draw else 0
        more = len(drawn.tokens) - 1 if drawn else 0  # accepted drafts, or what came of further steps
        sequence.n_computed = end - drafts
        if drafts:
            self.stats.drafted += drafts
            self.stats.accepted += more
        if chunk.start < sequence.n_prompt:
            self.stats.prompt_computed += min(end, sequence.n_prompt) - chunk.start
            # Not without reuse: what the tree has of it would be held twice, where there is no room for it once.
            if sequence.reuse and (drawn or self.admission.leads(sequence)):
                self._running.publish(sequence, now)
        sequence.n_computed += more  # these are not among its tokens yet

    def _take_in(self, sequence: Sequence, chunk: Chunk, drawn: Drawn, now: float) -> FinishReason | None:
        """Append what was drawn; why the sequence ends, if it does."""
        kept, reason = sequence.append(drawn.tokens, now)
        if reason is not None:  # not all of them, it may be
            sequence.n_computed = min(sequence.n_computed, sequence.length - 1)
        if self._speculation.active:
            drafts = chunk.draw.drafts if chunk.draw else 0
            self._speculation.learn(sequence, kept, chunk.tokens[len(chunk.tokens) - drafts :].tolist())
        n = len(kept)
        self.stats.completion += n
        self.ends.events.append(Tokens(sequence.request_id, kept, drawn.logprobs[:n]))
        check(sequence)
        return reason
