"""Which tokens the next step computes, and what becomes of its result.

`schedule` plans one step over running sequences and admits waiting ones; `commit` takes the drawn tokens in. No
tensors and no clock: pages come from the cache, rows from the pool, time from the caller.
"""

from dataclasses import dataclass, field

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import EngineError, ErrorInfo, ErrorKind
from holdfast.replicas.events import Event, Rejected, Tokens
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.scheduling.admission import Budget
from holdfast.replicas.scheduling.chunks import chunk_size
from holdfast.replicas.scheduling.grouping import Following, find_leader
from holdfast.replicas.scheduling.order import Order, ProgramOrder
from holdfast.replicas.scheduling.plan import Chunk, Draw, PageCopy, RowWrite, StepOutput, StepPlan
from holdfast.replicas.scheduling.waiting import WaitingQueue
from holdfast.replicas.sequences.pool import SequencePool
from holdfast.replicas.sequences.sequence import Sequence, Status
from holdfast.replicas.stats import EngineStats, Occupancy

_TOO_LATE = ErrorInfo(ErrorKind.OVERLOADED, "the request waited too long for a place in the batch")
_NO_ROOM = ErrorInfo(ErrorKind.OVERLOADED, "the KV cache has no room for this request, even alone")


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and the sequences behind it: `sequences[i]` belongs to `plan.chunks[i]`.

    `ended` are terminal events of requests that came to an end while planning. No chunks: nothing to run.
    """

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    ended: tuple[Event, ...] = ()


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    writes: list[RowWrite] = field(default_factory=list)
    copies: dict[int, tuple[PageCopy, ...]] = field(default_factory=dict)  # by row

    def forget(self, sequence: Sequence) -> None:
        """Take everything of a sequence back: it was preempted, and its row and pages may go to another."""
        assert sequence.row is not None
        self.copies.pop(sequence.row, None)
        self.writes = [write for write in self.writes if write.row != sequence.row]
        if sequence in self.sequences:
            i = self.sequences.index(sequence)
            del self.sequences[i], self.chunks[i]

    def plan(self) -> StepPlan:
        copies = tuple(copy for some in self.copies.values() for copy in some)
        return StepPlan(tuple(self.chunks), tuple(self.writes), copies)


class Scheduler:
    """Owns the waiting queue and the running sequences; the only caller of cache and pool."""

    def __init__(self, config: EngineConfig, cache: KVCache, pool: SequencePool, order: Order | None = None) -> None:
        self._config = config
        self._cache = cache
        self._pool = pool
        self._order = order or ProgramOrder()
        self._budget = Budget.of(config)
        self._waiting = WaitingQueue(self._order)
        self._running: list[Sequence] = []
        self._following: list[Following] = []
        self.stats = EngineStats()

    # ---- requests come and go ----

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._running) or len(self._waiting) > 0

    def add(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)

    def end(self, sequence: Sequence, now: float, *, keep: bool = True) -> None:
        """Take a sequence out, wherever it is. `keep` hands its computed cells to the tree, else they are freed."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._return(sequence, now, keep=keep)
        sequence.move(Status.ENDED)

    def everything(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    # ---- one step ----

    def schedule(self, now: float) -> Step:
        """Plan the next step; admit what there is room for; end what waited too long or can never go on."""
        draft = _Draft()
        ended = self._expire(now)
        if not self._decode(draft, now):
            # Not in a step that had to preempt: the cells it freed are for those that run.
            self._admit(draft, now)
        self._prefill(draft)
        while not draft.chunks and self._running:
            # All are short of cells, so the last in order makes room for the others. One that is alone starts again
            # without its cached prefix: the ends of pages it shares with others may be what is missing.
            victim = self._last()
            if len(self._running) == 1 and not victim.reuse:
                ended.append(self._failed(victim, _NO_ROOM, now))
                continue
            victim.reuse = len(self._running) > 1
            self._preempt(draft, victim, now)
            if not self._running:
                self._admit(draft, now)
            self._prefill(draft)
        return Step(draft.plan(), tuple(draft.sequences), tuple(ended))

    def commit(self, step: Step, output: StepOutput, now: float) -> list[Event]:
        """Take in what a step drew; finished sequences hand their cells to the tree."""
        events: list[Event] = []
        for sequence, chunk, drawn in zip(step.sequences, step.plan.chunks, output.drawn, strict=True):
            n_prefilled = min(chunk.start + len(chunk.tokens), sequence.n_prompt) - chunk.start
            self.stats.prompt_computed += max(0, n_prefilled)
            drafts = chunk.draw.drafts if chunk.draw else 0
            accepted = len(drawn.tokens) - 1 if drawn else 0
            sequence.n_computed = chunk.start + len(chunk.tokens) - drafts + accepted
            if n_prefilled > 0 and (drawn or any(f.leader is sequence for f in self._following)):
                self._cache.publish(sequence.held, sequence.tokens, sequence.n_computed, now)
            if drawn is None:
                continue
            kept, reason = sequence.append(drawn.tokens, now)
            sequence.n_computed = min(sequence.n_computed, sequence.length - 1)
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

    def occupancy(self) -> Occupancy:
        cells = self._cache.stats
        return Occupancy(
            running=len(self._running),
            waiting=len(self._waiting),
            rows_taken=self._pool.taken,
            cells_total=cells.total,
            cells_free=cells.free,
            cells_tree=cells.tree,
            cells_held=cells.held,
        )

    # ---- the parts of a step ----

    def _expire(self, now: float) -> list[Event]:
        """End the requests that waited too long without being started."""
        late = self._waiting.expired(now - self._config.queue_timeout_s)
        for sequence in late:
            sequence.move(Status.ENDED)
        return [Rejected(sequence.request_id, _TOO_LATE) for sequence in late]

    def _decode(self, draft: _Draft, now: float) -> bool:
        """One token for each decoding sequence, in order; True if some had to be preempted for lack of cells."""
        preempted = False
        for sequence in sorted((s for s in self._running if s.decoding), key=self._order.key):
            while sequence.status is Status.RUNNING and not self._grow(draft, sequence, sequence.length):
                if len(self._running) == 1:
                    return preempted
                self._preempt(draft, self._last(), now)
                preempted = True
            if sequence.status is Status.RUNNING:
                self._plan(draft, sequence, 1)
        return preempted

    def _admit(self, draft: _Draft, now: float) -> None:
        """Start waiting sequences, in order, while a row and the cell budget are there.

        The head is never overtaken, except by others while it waits for a leader to compute its prefix.
        """
        for done in [f for f in self._following if f.over]:
            self._following.remove(done)
            self._waiting.unhold(done.follower)
        committed = sum(self._budget.need(s, s.n_computed) for s in self._running)
        while (sequence := self._waiting.head()) is not None:
            n_cached = self._cache.peek(sequence.submit.scope, sequence.tokens)
            if (following := self._find_leader(sequence, n_cached)) is not None:
                self._following.append(following)
                self._waiting.hold()
                continue
            need = self._budget.need(sequence, n_cached)
            if not self._budget.admits(committed, need) or not self._start(draft, sequence, now):
                return
            committed += need

    def _find_leader(self, sequence: Sequence, n_cached: int) -> Following | None:
        config = self._config
        if not (config.grouped_prefill and config.prefix_cache) or len(self._following) >= self._pool.rows:
            return None
        # What is shared is aliased in whole pages, so less than two pages would not be worth a step's wait.
        following = find_leader(sequence, self._running, n_cached, least=2 * config.page_size)
        if following is not None:
            self.stats.prompt_grouped += following.gain
        return following

    def _start(self, draft: _Draft, sequence: Sequence, now: float) -> bool:
        """Give a waiting sequence a row and its cached prefix; False when no row is free."""
        row = self._pool.acquire()
        if row is None:
            return False
        with self._pool.guarded(row):
            acquired = self._cache.acquire(sequence.submit.scope, sequence.tokens, now, reuse=sequence.reuse)
        self._waiting.remove(sequence)
        sequence.move(Status.RUNNING)
        sequence.row = row
        sequence.holding = acquired.holding
        sequence.n_computed = acquired.holding.n_cached
        if sequence.scheduled is None:
            sequence.scheduled = now
            sequence.n_cached = min(sequence.n_computed, sequence.n_prompt)
            self.stats.prompt_cached += sequence.n_cached
        draft.copies[row] = acquired.copies
        if len(acquired.holding.pages):
            draft.writes.append(RowWrite(row, 0, acquired.holding.pages.copy()))
        self._running.append(sequence)
        return True

    def _prefill(self, draft: _Draft) -> None:
        """A chunk for each prefilling sequence, smaller the more there are; deferred above the high-water mark."""
        prefilling = sorted((s for s in self._running if not s.decoding), key=self._order.key)
        hurried = len(self._running) > 1 and any(
            s.sampling.max_tokens <= self._config.latency_max_tokens for s in self._running
        )
        for sequence in prefilling:
            used = self._cache.stats.in_use
            if draft.chunks and used >= self._budget.high_water:
                return
            size = chunk_size(sequence.pending, len(prefilling), hurried, self._config)
            if self._grow(draft, sequence, sequence.n_computed + size):
                self._plan(draft, sequence, size)

    def _plan(self, draft: _Draft, sequence: Sequence, size: int) -> None:
        start = sequence.n_computed
        end = start + size
        assert sequence.row is not None
        draw = None
        if end == sequence.length:
            sampling = sequence.sampling
            penalised = sampling.presence_penalty or sampling.frequency_penalty
            draw = Draw(sampling, sequence.seed, history=sequence.completion.copy() if penalised else None)
        draft.chunks.append(Chunk(sequence.row, start, sequence.buffer[start:end].copy(), draw))
        draft.sequences.append(sequence)

    def _grow(self, draft: _Draft, sequence: Sequence, n_tokens: int) -> bool:
        """Make sure that `n_tokens` positions of the sequence have pages."""
        holding = sequence.held
        first = len(holding.pages)
        pages = self._cache.grow(holding, n_tokens)
        if pages is None:
            return False
        if len(pages):
            assert sequence.row is not None
            draft.writes.append(RowWrite(sequence.row, first, pages))
        return True

    # ---- ends ----

    def _last(self) -> Sequence:
        return max(self._running, key=self._order.key)

    def _preempt(self, draft: _Draft, sequence: Sequence, now: float) -> None:
        """Back to the queue: what it computed goes to the tree, and what is evicted there is computed again.

        Nothing is lost: noise is keyed by position, so the recomputed sequence goes on as it would have.
        """
        self.stats.preemptions += 1
        draft.forget(sequence)
        self._running.remove(sequence)
        self._return(sequence, now, keep=True)
        sequence.preempted = True
        sequence.move(Status.WAITING)
        self._waiting.push(sequence)

    def _return(self, sequence: Sequence, now: float, *, keep: bool) -> None:
        """Give row and cells back. The row is returned even if the cache raises."""
        holding, row = sequence.held, sequence.row
        sequence.holding = sequence.row = None
        assert row is not None
        try:
            if keep:
                self._cache.finish(holding, sequence.tokens[: sequence.n_computed], sequence.n_computed, now)
            else:
                self._cache.drop(holding)
        finally:
            self._pool.release(row)
        sequence.n_computed = 0

    def _failed(self, sequence: Sequence, error: ErrorInfo, now: float) -> Event:
        self.end(sequence, now, keep=False)
        return sequence.failed(error)
