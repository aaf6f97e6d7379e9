"""Rows of the pool: who gets which, who keeps one until its next turn, and what a session keeps pinned meanwhile."""

import logging
from collections.abc import Callable

from holdfast.replicas.kv.cache import KVCache, Pin
from holdfast.replicas.kv.pages import NO_PAGES
from holdfast.replicas.scheduling.session_cells import SessionCells
from holdfast.replicas.sequences.parking import Owner, Parking, Place
from holdfast.replicas.sequences.pool import Region, SequencePool
from holdfast.replicas.tokens import TokenIds

log = logging.getLogger(__name__)


class Places:
    """The only caller of the pool. `parks`: programs keep their rows between turns.

    `spared` says whose row goes after the others': their cells are still there when they come back.
    """

    def __init__(
        self, cache: KVCache, pool: SequencePool, parks: bool, spared: Callable[[Owner], bool] = lambda owner: False
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._parks = parks
        self._spared = spared
        self._parking = Parking()
        self.sessions = SessionCells(cache.pool, self._parking)

    @property
    def rows(self) -> int:
        return self._pool.rows

    @property
    def rows_parked(self) -> int:
        """Rows that parked programs would give way with."""
        return self._parking.rows

    @property
    def rows_taken(self) -> int:
        """Rows that are not to be had now."""
        return self._pool.taken - self._parking.rows

    @property
    def cells_pinned(self) -> int:
        """Cells that idle sessions keep from being evicted."""
        return self.sessions.idle

    def begin(self, owner: Owner | None) -> tuple[int, Place | None] | None:
        """A row for a sequence, its own to give back, and the place where its owner left off, if that is known.

        None when no row is free. Whoever goes on gets the row it had; the pin of a session is given back.
        """
        place = self._parking.find(owner)
        row = place.row if place is not None and place.row is not None else self._free_row(owner)
        if row is None:
            return None
        if owner is not None and place is not None:
            self._parking.take(owner)
            self._unpin(place.pin)
        return row, place

    def release(self, row: int) -> None:
        surely(self._pool.release, row)

    def park_program(self, owner: Owner, place: Place) -> None:
        """A program's turn is over: it keeps its row if it is one that can be kept."""
        if place.row is None or not self._parks or place.row < self._pool.first_session_row:
            self._let_go(place)
        else:
            self._let_go(self._parking.park(owner, place))

    def park_session(self, owner: Owner, history: TokenIds, place: Place, now: float) -> None:
        """An operation of a session is over: `history` stays pinned, the row with it if it is one that can be kept."""
        row = place.row
        if row is not None and row < self._pool.first_session_row:
            self.release(row)
            row = None
        pin = self._pin(owner, history, now)
        self._let_go(self._parking.park(owner, Place(len(history), row, place.pages, pin)))
        self.sessions.parked(owner)

    def fork(self, owner: Owner, history: TokenIds, now: float) -> None:
        """Let `owner`, a session, begin with `history`: what is cached of it is pinned for it, nothing is copied."""
        self.park_session(owner, history, Place(len(history), None, NO_PAGES), now)

    def forget(self, owner: Owner) -> None:
        """A session has ended: let its cells and its row go."""
        self._let_go(self._parking.take(owner))

    def _free_row(self, owner: Owner | None) -> int | None:
        """Those that come back get a row that can be kept, as long as there are any."""
        if owner is None:
            return self._pool.acquire()
        row = self._pool.acquire(Region.SESSION)
        if row is None:
            row = self._parking.give_way(self._spared)
        return row if row is not None else self._pool.acquire()

    def _let_go(self, place: Place | None) -> None:
        if place is None:
            return
        self._unpin(place.pin)
        if place.row is not None:
            self.release(place.row)

    def _unpin(self, pin: Pin | None) -> None:
        if pin is not None:
            self.sessions.unpinned()
            surely(self._cache.unpin, pin)

    def _pin(self, owner: Owner, tokens: TokenIds, now: float) -> Pin | None:
        """A session without its pin may have to compute again, and nothing worse: no reason to fail."""
        try:
            return self._cache.pin(owner.scope, tokens, now) if len(tokens) else None
        except Exception:
            log.exception("a session's cells could not be pinned")
            return None


def surely(give_back: Callable[..., None], what: object) -> None:
    """Give something back, and try once more where that fails: what wanted memory may have it by then."""
    try:
        give_back(what)
    except Exception:
        log.exception("giving back failed, trying again")
        give_back(what)
