"""Rows of the page table between turns: who has one, who keeps one, and what sessions keep pinned meanwhile.

    between turns    cells                                     row
    program          in the tree; pinned while `pins` says so  parked, first to go when rows are short
    session          pinned until it is closed                 parked, where the region had one

A parked row still shows the pages of its owner's last turn: the next one writes only what differs. A program's row
stands in nobody's way. A session is opened by a client and gives nothing back before it is closed.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.kv.pages import NO_PAGES, PageIds, PagePool
from holdfast.replicas.kv.radix import Node
from holdfast.replicas.sequences import Owner, Region, Sequence, SequencePool
from holdfast.replicas.types import TokenIds

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParkedRow:
    """Where an owner left off: `n_tokens` computed, and shown by `row`, if it kept one.

    `pages` are what the page table shows in the row, from slot 0 on. They may be other tokens' by now: whoever takes
    the row over compares them with the pages it is given. `pin` is a session's.
    """

    n_tokens: int
    row: int | None
    pages: PageIds
    pin: Pin | None = None


class Rows:
    """The only caller of the pool, and of the cache for sessions' pins.

    `park`: programs keep their rows between turns. `share`: sessions' histories are cached in their tenants' scopes,
    where others find them, and not in scopes of their own. `sessions` counts the cells of these histories.
    """

    def __init__(self, cache: KVCache, pool: SequencePool, *, park: bool, share: bool = True) -> None:
        self._cache = cache
        self._pool = pool
        self._park = park
        self._share = share
        self._programs: OrderedDict[Owner, ParkedRow] = OrderedDict()  # least recently used first
        self._sessions: dict[Owner, ParkedRow] = {}
        self.sessions = SessionCells(cache.pool)

    @property
    def total(self) -> int:
        return self._pool.rows

    @property
    def parked(self) -> int:
        """Rows that programs keep between turns: they are to be had by whoever needs one."""
        return len(self._programs)

    @property
    def taken(self) -> int:
        """Rows that are not to be had now."""
        return self._pool.taken - len(self._programs)

    def programs(self) -> Iterable[Owner]:
        """Programs that keep a row, least recently used first."""
        return self._programs.keys()

    def begin(self, owner: Owner | None, spared: Callable[[Owner], bool]) -> tuple[int, ParkedRow | None] | None:
        """A row for a sequence, its own to give back, and where its owner left off, if that is known.

        None when no row is free. Whoever goes on gets the row it had; the pin of a session is given back. Programs that
        are `spared` lose their rows after the others: their cells are still there when they come back.
        """
        last = self._of(owner).get(owner) if owner is not None else None
        row = last.row if last is not None and last.row is not None else self._free_row(owner, spared)
        if row is None:
            return None
        if owner is not None and last is not None:
            del self._of(owner)[owner]
            self._unpin(last.pin)
        return row, last

    def has_row(self, owner: Owner | None) -> bool:
        """Whether `begin` would find a row."""
        if owner is None:
            return self._pool.free() > 0
        last = self._of(owner).get(owner)
        kept = (last is not None and last.row is not None) or len(self._programs) > 0
        return kept or self._pool.free(Region.SESSION) > 0 or self._pool.free() > 0

    def release(self, row: int) -> None:
        give_back(self._pool.release, row)

    def park_program(self, owner: Owner, last: ParkedRow) -> None:
        """A program's turn is over: it keeps its row if it is one that can be kept."""
        if last.row is None or not self._park or last.row < self._pool.first_session_row:
            self._let_go(last)
        else:
            self._let_go(self._programs.pop(owner, None))
            self._programs[owner] = last

    def park_session(self, owner: Owner, history: TokenIds, last: ParkedRow, now: float) -> None:
        """An operation of a session is over: `history` stays pinned, the row with it if it is one that can be kept."""
        row = last.row
        if row is not None and row < self._pool.first_session_row:
            self.release(row)
            row = None
        pin = self._pin(owner, history, now)
        self._let_go(self._sessions.pop(owner, None))
        self._sessions[owner] = ParkedRow(len(history), row, last.pages, pin)
        self.sessions.pinned(owner, pin)

    def fork(self, owner: Owner, history: TokenIds, now: float) -> None:
        """Let `owner`, a session, begin with `history`: what is cached of it is pinned for it, nothing is copied."""
        self.park_session(owner, history, ParkedRow(len(history), None, NO_PAGES), now)

    def forget(self, owner: Owner) -> None:
        """A session has ended: let its cells and its row go."""
        self._let_go(self._of(owner).pop(owner, None))

    # ---- parts ----

    def _of(self, owner: Owner) -> dict[Owner, ParkedRow]:
        return self._sessions if owner.session else self._programs

    def _free_row(self, owner: Owner | None, spared: Callable[[Owner], bool]) -> int | None:
        """Those that come back get a row that can be kept, as long as there are any."""
        if owner is None:
            return self._pool.acquire()
        row = self._pool.acquire(Region.SESSION)
        if row is None and self._programs:
            gives_way = next((each for each in self._programs if not spared(each)), next(iter(self._programs)))
            row = self._programs.pop(gives_way).row
        return row if row is not None else self._pool.acquire()

    def _let_go(self, last: ParkedRow | None) -> None:
        if last is not None:
            self._unpin(last.pin)
            if last.row is not None:
                self.release(last.row)

    def _unpin(self, pin: Pin | None) -> None:
        if pin is not None:
            self.sessions.unpinned(pin)
            give_back(self._cache.unpin, pin)

    def _pin(self, owner: Owner, tokens: TokenIds, now: float) -> Pin | None:
        """A session without its pin may have to compute again, and nothing worse: no reason to fail."""
        try:
            scope = owner.scope if self._share else owner.own_scope
            return self._cache.pin(scope, tokens, now) if len(tokens) else None
        except Exception:
            log.exception("a session's cells could not be pinned")
            return None


class SessionCells:
    """How many cells the histories of sessions take, those that several of them share counted once.

        between operations    pinned, in the tree
        in an operation       held by its sequence: in the tree, but for an end that the sequence writes to

    Counted again only after something of this has changed.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pins: dict[Pin, None] = {}
        self._running: dict[Owner, Sequence] = {}
        self._pages: tuple[int, int] | None = (0, 0)  # of idle sessions, of all; None: to be counted

    @property
    def idle(self) -> int:
        """Cells that the sessions between operations keep from being evicted."""
        return self._counted()[0] * self._pool.page_size

    @property
    def total(self) -> int:
        """Cells of all histories. What an operation adds is no part of it before the operation has ended."""
        return self._counted()[1] * self._pool.page_size

    def of(self, tenant: str) -> int:
        """Cells of a tenant's histories. Looks at all sessions."""
        pins = [pin for pin in self._pins if pin.node.tenant == tenant]
        running = [each for owner, each in self._running.items() if owner.scope == tenant]
        return self._count(pins, running)[1] * self._pool.page_size

    def runs(self, sequence: Sequence) -> None:
        """A sequence that runs holds its cells now, or has given some of them to the tree."""
        if sequence.n_history and sequence.owner is not None:
            self._running[sequence.owner] = sequence
            self._pages = None

    def pinned(self, owner: Owner, pin: Pin | None) -> None:
        """A session has its history pinned again, or the first time; without a `pin` that has failed."""
        self._running.pop(owner, None)
        if pin is not None:
            self._pins[pin] = None
        self._pages = None

    def unpinned(self, pin: Pin) -> None:
        """A session's pin is given back."""
        self._pins.pop(pin, None)
        self._pages = None

    def _counted(self) -> tuple[int, int]:
        if self._pages is None:
            self._pages = self._count(self._pins, self._running.values())
        return self._pages

    def _count(self, pins: Iterable[Pin], running: Iterable[Sequence]) -> tuple[int, int]:
        in_tree: dict[Node, int] = {}
        written = 0
        for pin in pins:
            _count_path(in_tree, pin.node, pin.length, self._pool)
        idle = sum(in_tree.values())
        for sequence in running:
            n_shared, n_history = sequence.the_holding.n_shared, sequence.n_history
            _count_path(in_tree, sequence.the_holding.node, n_history, self._pool)
            if n_history > n_shared:
                written += self._pool.pages_for(n_history) - n_shared // self._pool.page_size
        return idle, sum(in_tree.values()) + written


def _count_path(in_tree: dict[Node, int], node: Node | None, end: int, pool: PagePool) -> None:
    """Count the pages below position `end` on the path to `node`, as far as they are not counted yet."""
    while node is not None:
        before = in_tree.get(node)
        if node.start < end:
            pages = node.owned if node.end <= end else node.owned_before(end, pool.page_size)
            in_tree[node] = max(pages, before or 0)
        if before is not None:
            return  # and so are those above
        node = node.parent


def give_back(release: Callable[[T], object], what: T) -> None:
    """Give something back, and try once more where that fails: what wanted memory may have it by then."""
    try:
        release(what)
    except Exception:
        log.exception("giving back failed, trying again")
        release(what)
