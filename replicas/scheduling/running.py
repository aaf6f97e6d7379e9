"""The sequences that run: each has a row of the pool and cells of the cache, and gives both back however it leaves."""

import logging
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from holdfast.replicas.constraints.matcher import RowMasks
from holdfast.replicas.errors import EngineError, ErrorInfo, InvalidRequestError
from holdfast.replicas.events import Aborted, Draw, Event, Finished, FinishReason
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.holding import Holding, Pin
from holdfast.replicas.kv.host import Reloads
from holdfast.replicas.kv.pages import NO_MOVES, NO_PAGES, PageCopy, PageIds, PageMoves
from holdfast.replicas.kv.radix import Match, common_prefix
from holdfast.replicas.retention.pins import Keeping
from holdfast.replicas.retention.rows import Place, Places, surely
from holdfast.replicas.scheduling.drafts import Speculation
from holdfast.replicas.scheduling.plan import Chunk, Load, RowWrite, StepPlan
from holdfast.replicas.scheduling.queue import Order, WaitingQueue
from holdfast.replicas.sequences import Histories, Owner, Sequence, Status, closing, reach
from holdfast.replicas.speculation.drafter import NO_DRAFT
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import TokenIds

log = logging.getLogger(__name__)


# ---- A step's plan in the making: what has been planned for which sequence, and how to take it back.


@dataclass(slots=True)
class PlanBuilder:
    """`sequences[i]` belongs to `chunks[i]`."""

    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    writes: list[RowWrite] = field(default_factory=list)
    copies: dict[int, tuple[PageCopy, ...]] = field(default_factory=dict)  # by row
    loads: list[Load] = field(default_factory=list)
    times: int = 1  # steps that it may stand for, as long as all that is planned is to decode

    @property
    def busy(self) -> bool:
        """Whether some sequence gets on."""
        return bool(self.chunks or self.loads)

    def compute(self, sequence: Sequence, size: int, drafts: TokenIds = NO_DRAFT) -> None:
        """Plan the next `size` tokens of a sequence, and `drafts` after its last one."""
        start = sequence.n_computed + sequence.ahead
        end = start + size
        tokens = sequence.buffer[start:end]  # a view: they never change any more
        if end > sequence.length:  # the step in flight draws the last one: whoever runs the plan puts it there
            tokens = np.append(tokens[:-1], np.int32(0))
        draw = None
        if end == reach(sequence) and end < len(sequence.buffer):
            draw = sequence.draw
            if draw is None or len(drafts):
                draw = _draw(sequence, drafts)
                tokens = np.concatenate((tokens, drafts))
        if draw is None or draw is not sequence.draw:
            self.times = 1
        assert sequence.row is not None, sequence.request_id
        self.chunks.append(Chunk(sequence.row, start, tokens, draw, sequence.awaited))
        self.sequences.append(sequence)

    def write(self, sequence: Sequence, first: int, pages: PageIds) -> None:
        if len(pages):
            self.writes.append(RowWrite(sequence.the_row, first, pages))

    def forget(self, sequence: Sequence) -> None:
        """Take everything of a sequence back: it was preempted, and its row and pages may go to another."""
        row = sequence.the_row
        self.copies.pop(row, None)
        self.writes = [write for write in self.writes if write.row != row]
        self.loads = [load for load in self.loads if load.sequence is not sequence]
        if sequence in self.sequences:
            i = self.sequences.index(sequence)
            del self.sequences[i], self.chunks[i]

    def plan(self, saves: PageMoves) -> StepPlan:
        """The step. `saves` are the copies of what was evicted for it."""
        copies = tuple(copy for some in self.copies.values() for copy in some)
        loads = NO_MOVES
        if self.loads:
            device = np.concatenate([load.moves.device for load in self.loads])
            loads = PageMoves(device, np.concatenate([load.moves.host for load in self.loads]))
        times = 1 if len(saves) or self.loads or not self.chunks else self.times
        return StepPlan(tuple(self.chunks), tuple(self.writes), copies, saves, loads, times)


def _draw(sequence: Sequence, drafts: TokenIds) -> Draw:
    """What to draw after a sequence's last token. Where that is the same in every step the sequence keeps it."""
    sampling, matcher = sequence.sampling, sequence.matcher
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    history = sequence.generated.copy() if penalised else None
    masks = RowMasks(matcher, tuple(drafts.tolist())) if matcher is not None else None
    draw = Draw(sampling, sequence.seed, len(drafts), history, masks)
    if draw.plain:
        sequence.draw = draw
    return draw


class BooksError(Exception):
    """Rows or cells could not be given back: nobody knows any more what is free. Only new books help."""


class Leaving(Enum):
    """How a sequence leaves, and with it what stays: its cells in the tree, its row with its owner."""

    FINISHED = "finished"  # cells and row
    ABORTED = "aborted"  # cells and row, but a session's history is as before
    PREEMPTED = "preempted"  # cells
    FAILED = "failed"  # nothing

    @property
    def keeps_row(self) -> bool:
        """The row shows what was computed: every plan that wrote to it has run."""
        return self in (Leaving.FINISHED, Leaving.ABORTED)


class Running:
    """The only caller of the cache for cells; rows come from `places`."""

    def __init__(self, cache: KVCache, places: Places, order: Order, stats: EngineStats, keeping: Keeping) -> None:
        self.places = places
        self.keeping = keeping
        self.reloads = Reloads(cache.host)
        self._cache = cache
        self._order = order
        self._stats = stats
        self._histories = Histories(cache.pool.total * cache.page_size)
        self._sequences: list[Sequence] = []
        self._in_order: list[Sequence] | None = None  # the same, first to be served first; None: not known yet

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def cells_pinned(self) -> int:
        """Cells that sessions keep from being evicted, those with an operation in the batch included."""
        return self.places.sessions.total

    def in_order(self) -> list[Sequence]:
        """All, first to be served first, so the last one is to be preempted next."""
        if self._in_order is None or not self._order.settled:
            self._in_order = sorted(self._sequences, key=self._order.key)
        return self._in_order

    def part(self, *, decoding: bool) -> list[Sequence]:
        """Those that decode, or those that prefill, in order; without those that are about to end."""
        return [s for s in self.in_order() if s.decoding is decoding and not (s.ahead and closing(s))]

    def start(self, builder: PlanBuilder, sequence: Sequence, match: Match | None, now: float) -> bool:
        """Give a waiting sequence a row and its cached prefix, which `match` has found; False when no row is free.

        Where its owner left off the row shows the pages already, and only what differs is written.
        """
        begun = self.places.begin(sequence.owner)
        if begun is None:
            return False
        row, place = begun
        kept = self.keeping.begins(sequence, now)
        try:
            acquired = self._cache.acquire(
                sequence.cache_scope,
                sequence.tokens,
                now,
                reuse=sequence.reuse,
                continues=kept or place is not None,
                match=match,
            )
        except Exception:
            self.places.release(row)
            raise
        holding = sequence.holding = acquired.holding
        sequence.row, sequence.n_computed = row, holding.n_cached
        reach = self.reloads.begin(holding, sequence.tokens) if sequence.reuse else 0
        self._stats.tokens_recomputed += max(sequence.n_before - max(holding.n_cached, reach), 0)
        sequence.n_before = 0
        sequence.move(Status.RUNNING)
        self._sequences.append(sequence)
        self.places.sessions.goes_on(sequence)
        self._order.begin(sequence)
        if self._in_order is not None:
            insort(self._in_order, sequence, key=self._order.key)
        same = common_prefix(place.pages, holding.pages) if place is not None and place.row is not None else 0
        builder.copies[row] = acquired.copies
        builder.write(sequence, same, holding.pages[same:].copy())
        if sequence.scheduled is None:
            self._count(sequence, place)
        return True

    def grow(self, builder: PlanBuilder, sequence: Sequence, n_tokens: int) -> bool:
        """Make sure that `n_tokens` positions of the sequence have cells; False when they are not to be had."""
        holding = sequence.holding
        assert holding is not None, sequence.request_id
        first = holding.n_pages
        if n_tokens <= first * holding.page_size:
            return True
        pages = self._cache.grow(holding, n_tokens)
        if pages is None:
            return False
        builder.write(sequence, first, pages)
        return True

    def grow_over_pins(self, builder: PlanBuilder, sequence: Sequence, n_tokens: int) -> bool:
        """The same; if need be with cells that were kept for programs which come behind it."""
        while not self.grow(builder, sequence, n_tokens):
            if not self.keeping.give_way(to=sequence):
                return False
        return True

    def load(self, builder: PlanBuilder, sequence: Sequence, most: int) -> bool:
        """Plan to bring up to `most` of the sequence's cells back from the host; False where it has none there.

        All but the last end with a page. Nothing is planned where cells are not to be had.
        """
        reach = self.reloads.reach(sequence.held)
        if reach <= sequence.n_computed:
            return False
        size = self._cache.page_size
        end = min(reach, (sequence.n_computed + max(most, size)) // size * size)
        if self.grow_over_pins(builder, sequence, end):
            moves = self.reloads.load(sequence.held, sequence.n_computed, end)
            builder.loads.append(Load(sequence, end, moves))
        return True

    def publish(self, sequence: Sequence, now: float) -> None:
        """Let others alias what the sequence has computed so far."""
        self._cache.publish(sequence.held, sequence.tokens, sequence.n_computed, now)
        self.places.sessions.goes_on(sequence)

    def leave(self, sequence: Sequence, now: float, leaving: Leaving) -> None:
        """Take row and cells back, or park them for its owner's next turn. Raises BooksError when that fails."""
        self._sequences.remove(sequence)
        if self._in_order is not None:
            self._in_order.remove(sequence)
        holding, row, owner = sequence.held, sequence.the_row, sequence.owner
        computed = sequence.tokens[: sequence.n_computed]
        sequence.holding = sequence.row = None
        sequence.n_computed = sequence.ahead = 0
        sequence.awaited = None
        try:
            self.reloads.end(holding)
            pages = holding.pages[: self._cache.pool.pages_for(len(computed))].copy()
            pin = leaving is Leaving.FINISHED and len(computed) > 0 and self.keeping.wants(sequence)
            pinned = self._settle(holding, computed, now, keep=leaving is not Leaving.FAILED, pin=pin)
            if pinned is not None:
                self.keeping.paused(sequence, pinned, now)
            if not leaving.keeps_row or owner is None:
                self.places.release(row)
            if owner is not None:
                place = Place(len(computed), row, pages) if leaving.keeps_row else Place(0, None, NO_PAGES)
                self._park(sequence, owner, place, leaving, now)
        except Exception as failure:
            raise BooksError(f"{sequence.request_id} could not be taken out: {failure}") from failure

    def _park(self, sequence: Sequence, owner: Owner, place: Place, leaving: Leaving, now: float) -> None:
        if owner.session:
            kept = leaving is Leaving.FINISHED and sequence.submit.keep
            history = sequence.buffer[: place.n_tokens if kept else sequence.n_history]
            self.places.park_session(owner, history, place, now)
        elif leaving.keeps_row:
            self._histories.remember(owner, sequence.buffer[: place.n_tokens])
            self.places.park_program(owner, place)

    def _settle(self, holding: Holding, computed: TokenIds, now: float, *, keep: bool, pin: bool) -> Pin | None:
        """Give a holding back, with a `pin` on its cells or without; where keeping them fails they are freed."""
        if keep:
            try:
                return self._cache.finish(holding, computed, len(computed), now, pin=pin)
            except Exception:
                log.exception("cells could not be kept")
        surely(self._cache.drop, holding)
        return None

    def _count(self, sequence: Sequence, place: Place | None) -> None:
        """A turn begins: how much of what its owner had is in place, and how much was in vain."""
        n_cached, owner = sequence.n_computed, sequence.owner
        if place is not None and place.row is not None and n_cached >= place.n_tokens > 0:
            self._stats.turns_continued += 1
            self._stats.tokens_continued += n_cached
        if owner is not None and not owner.session:
            self._stats.tokens_rewritten += self._histories.rewritten(owner, sequence.tokens, n_cached)


# ---- How sequences leave: finished, preempted, or failed; and the events that tell of it.
#
# An event is noted before rows and cells are given back, so a request has its terminal event even where that fails.


class Ends:
    """Takes sequences out, wherever they are. `events` belongs to the engine: it outlives these books."""

    def __init__(
        self,
        running: Running,
        waiting: WaitingQueue,
        speculation: Speculation,
        stats: EngineStats,
        events: list[Event],
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._speculation = speculation
        self._stats = stats
        self.events = events

    def end(self, sequence: Sequence, now: float, leaving: Leaving) -> None:
        """Take a sequence out. Its terminal event has been noted. Raises BooksError."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._running.leave(sequence, now, leaving)
        self._speculation.close(sequence)
        sequence.move(Status.ENDED)

    def abort(self, sequence: Sequence, now: float) -> None:
        self.events.append(Aborted(sequence.request_id, sequence.usage, sequence.timing(now)))
        self.end(sequence, now, Leaving.ABORTED)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self.events.append(Finished(sequence.request_id, reason, sequence.usage, sequence.timing(now)))
        self.end(sequence, now, Leaving.FINISHED)

    def fail(self, sequence: Sequence, error: ErrorInfo, now: float) -> None:
        self.events.append(sequence.failed(error))
        self.end(sequence, now, Leaving.FAILED)

    def preempt(self, builder: PlanBuilder | None, sequence: Sequence, now: float) -> None:
        """Back to the queue: what it computed goes to the tree, and what is evicted there is computed again.

        Nothing is lost: noise is keyed by position, so the recomputed sequence goes on as it would have.
        """
        self._stats.preemptions += 1
        sequence.n_before = sequence.n_computed
        if builder is not None:
            builder.forget(sequence)
        self._running.leave(sequence, now, Leaving.PREEMPTED)
        sequence.preempted = True
        sequence.move(Status.WAITING)
        self._waiting.push(sequence)

    def fault(self, builder: PlanBuilder | None, sequence: Sequence, failure: Exception, now: float) -> None:
        """The supervisor of planning and commit: what was raised for one sequence fails that sequence alone."""
        if isinstance(failure, BooksError) or sequence.status is Status.ENDED:
            raise failure
        log.error("%s failed", sequence.request_id, exc_info=failure)
        if builder is not None and sequence.status is Status.RUNNING:
            builder.forget(sequence)
        known = failure if isinstance(failure, InvalidRequestError) else EngineError(f"the engine failed: {failure}")
        self.fail(sequence, known.info, now)
