"""Rows of the pool: who gets which, who keeps one until its next turn, and what a session keeps pinned meanwhile."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.kv.pages import NO_PAGES, PageIds, PagePool
from holdfast.replicas.kv.radix import Node, owned_to
from holdfast.replicas.sequences import Owner, Region, Sequence, SequencePool
from holdfast.replicas.types import TokenIds

log = logging.getLogger(__name__)


# ---- Where programs and sessions left off: rows of the pool, kept between two turns of the same owner.
#
# A parked program stands in nobody's way. Its cells are the tree's, evictable like any others, and its row goes to
# whoever needs one. A session is opened by a client and gives nothing back before it is closed: its cells are pinned.
#
#     between turns    cells          row
#     program          in the tree    parked, first to go when rows are short
#     session          pinned         kept, where the region had one
#
# Not here: the pool and the cache themselves; `scheduling/running` is their only caller.


@dataclass(frozen=True, slots=True)
class Place:
    """Where an owner left off: `n_tokens` computed, and shown by a row.

    `pages` are what the page table shows in `row`, from slot 0 on. They may be other tokens' by now: whoever takes
    the row over compares them with the pages it is given.
    """

    n_tokens: int
    row: int | None
    pages: PageIds
    pin: Pin | None = None


def next_to_go(parked: Iterable[Owner], spared: Callable[[Owner], bool]) -> Owner | None:
    """Which of the parked programs, least recently used first, gives its row away next: one that is not spared."""
    first = None
    for owner in parked:
        if not spared(owner):
            return owner
        first = first or owner
    return first


class Parking:
    """Places by owner. Whoever takes one out has to give its row and its pin back, or park them again."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Owner, Place] = OrderedDict()
        self._sessions: dict[Owner, Place] = {}

    @property
    def rows(self) -> int:
        """Parked rows that anybody may have."""
        return len(self._programs)

    @property
    def pins(self) -> list[Pin]:
        return [place.pin for place in self._sessions.values() if place.pin is not None]

    def find(self, owner: Owner | None) -> Place | None:
        if owner is None:
            return None
        return (self._sessions if owner.session else self._programs).get(owner)

    def park(self, owner: Owner, place: Place) -> Place | None:
        """Remember where `owner` left off, as the latest used; returns the place that this one takes the place of."""
        places = self._sessions if owner.session else self._programs
        before = places.pop(owner, None)
        places[owner] = place
        return before

    def take(self, owner: Owner) -> Place | None:
        """Take a place out: its owner goes on, or has gone."""
        return (self._sessions if owner.session else self._programs).pop(owner, None)

    def give_way(self, spared: Callable[[Owner], bool] = lambda owner: False) -> int | None:
        """The row of the parked program that goes next; None when none is parked."""
        owner = next_to_go(self._programs, spared)
        return None if owner is None else self._programs.pop(owner).row


# ---- How many cells the histories of sessions take, those that several of them share counted once.
#
#     between operations    pinned, in the tree
#     in an operation       held by its sequence: in the tree, but for an end that the sequence writes to
#
# Counted again only after something of this has changed. Not here: the pins and the rows (`places` keeps them).


class SessionCells:
    """`parking` has the pins of the sessions between operations; `places` says when one of them comes or goes."""

    def __init__(self, pool: PagePool, parking: Parking) -> None:
        self._pool = pool
        self._parking = parking
        self._going: dict[Owner, Sequence] = {}
        self._pages: tuple[int, int] | None = (0, 0)  # of idle sessions, of all; None: to be counted

    @property
    def idle(self) -> int:
        """Cells that the sessions between operations keep from being evicted."""
        return self._counted()[0] * self._pool.page_size

    @property
    def total(self) -> int:
        """Cells of all histories. What an operation adds is no part of it before the operation has ended."""
        return self._counted()[1] * self._pool.page_size

    def goes_on(self, sequence: Sequence) -> None:
        """A sequence that runs holds its cells now, or has given some of them to the tree."""
        if sequence.n_history and sequence.owner is not None:
            self._going[sequence.owner] = sequence
            self._pages = None

    def parked(self, owner: Owner) -> None:
        """A session has its history pinned again, or the first time."""
        self._going.pop(owner, None)
        self._pages = None

    def unpinned(self) -> None:
        """A session's pin was given back."""
        self._pages = None

    def _counted(self) -> tuple[int, int]:
        if self._pages is None:
            self._pages = self._count()
        return self._pages

    def _count(self) -> tuple[int, int]:
        in_tree: dict[Node, int] = {}
        written = 0
        for pin in self._parking.pins:
            _enter(in_tree, pin.node, pin.length, self._pool)
        idle = sum(in_tree.values())
        for sequence in self._going.values():
            n_shared, n_history = sequence.held.n_shared, sequence.n_history
            _enter(in_tree, sequence.held.node, n_history, self._pool)
            if n_history > n_shared:
                written += self._pool.pages_for(n_history) - n_shared // self._pool.page_size
        return idle, sum(in_tree.values()) + written


def _enter(in_tree: dict[Node, int], node: Node | None, end: int, pool: PagePool) -> None:
    """Count the pages below position `end` on the path to `node`, as far as they are not counted yet."""
    while node is not None:
        before = in_tree.get(node)
        if node.start < end:
            pages = node.owned if node.end <= end else owned_to(node, end, pool)
            in_tree[node] = max(pages, before or 0)
        if before is not None:
            return  # and so are those above
        node = node.parent


class Places:
    """The only caller of the pool. `parks`: programs keep their rows between turns. `shares`: so that others find them,
    histories are cached in their tenants' scopes and not in scopes of their own.

    `spared` says whose row goes after the others': their cells are still there when they come back.
    """

    def __init__(
        self,
        cache: KVCache,
        pool: SequencePool,
        parks: bool,
        shares: bool = True,
        spared: Callable[[Owner], bool] = lambda owner: False,
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._parks = parks
        self._shares = shares
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
            scope = owner.scope if self._shares else owner.own_scope
            return self._cache.pin(scope, tokens, now) if len(tokens) else None
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
