"""The sequences that run: each has a row of the pool and cells of the cache, and gives both back however it leaves."""

import logging
from bisect import insort
from collections.abc import Iterator
from enum import Enum

from holdfast.replicas.kv.cache import Holding, KVCache, Pin
from holdfast.replicas.kv.pages import NO_PAGES
from holdfast.replicas.kv.radix import Match, common_prefix
from holdfast.replicas.kv.reloads import Reloads
from holdfast.replicas.scheduling.builder import Load, PlanBuilder
from holdfast.replicas.scheduling.keeping import Keeping
from holdfast.replicas.scheduling.order import Order
from holdfast.replicas.scheduling.places import Places, surely
from holdfast.replicas.sequences.ahead import closing
from holdfast.replicas.sequences.histories import Histories
from holdfast.replicas.sequences.parking import Owner, Place
from holdfast.replicas.sequences.sequence import Sequence, Status
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.tokens import TokenIds

log = logging.getLogger(__name__)


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
                sequence.submit.scope,
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
