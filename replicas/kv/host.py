"""The books of the second tier: which evicted tokens are in host memory, and in which of its pages.

A tree of its own over pages of its own, by the same rules as the device's: a path from the root, nodes with their
tokens, oldest use evicted first. Whatever leaves the device is kept here with the path above it, so a prefix is found
here whole or not at all, and a page that is here already is never copied twice. A copy that was brought back stays.

Here: what is where. Not here: the numbers (`host_pages`), when something is brought back (`scheduling`). No sequence
writes to a host page, so free + tree == total.
"""

import logging
from dataclasses import dataclass

import numpy as np

from holdfast.replicas.kv.audit import audit
from holdfast.replicas.kv.holding import Holding, Pin
from holdfast.replicas.kv.pages import NO_MOVES, PageIds, PageMoves, PagePool
from holdfast.replicas.kv.radix import Label, Node, RadixTree
from holdfast.replicas.types import TokenIds

log = logging.getLogger(__name__)


class HostTier:
    """`n_pages` pages of host memory, each as large as a page of the device."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._time = 0.0  # of the last use: a count
        self._n_pages = n_pages
        self.clear()

    def clear(self) -> None:
        """Forget everything: what the host's pages hold is not sure any more. Leases from before are void."""
        self.pool = PagePool(self._n_pages, self.page_size)
        self.tree = RadixTree(self.pool)
        self._leases: set[Pin] = set()
        self._saves: dict[int, int] = {}  # host page -> device page, of the step in the making

    def check(self) -> None:
        """Recount everything; AssertionError where the books do not balance."""
        audit(self.pool, self.tree, (), self._leases)
        assert self.pool.used == self.tree.pages, "free + tree != total"

    # ---- out ----

    def save(self, leaf: Node) -> None:
        """A leaf of the device's tree is about to be evicted: keep it, with as much of its path as is not here yet.

        Oldest paths make room. Of one that is larger than the tier the beginning is kept. Never fails: where these
        books break off they begin anew, and the device's know nothing of it.
        """
        try:
            self._save(leaf)
        except Exception:
            log.exception("the host tier is emptied: its books broke off")
            self.clear()

    def saves(self) -> PageMoves:
        """The copies that make true what was saved since the last call. They come before all else in a step."""
        if not self._saves:
            return NO_MOVES
        moves = PageMoves(np.array([*self._saves.values()], np.int32), np.array([*self._saves], np.int32))
        self._saves.clear()
        return moves

    # ---- in ----

    def find(self, scope: str, tokens: TokenIds) -> Pin:
        """The longest prefix of `tokens` that is here, protected until `let_go`. It may be empty."""
        match = self.tree.walk(self.tree.root(scope), tokens)
        lease = Pin(self.tree.lease_at(match, self._tick()), match.length)
        self._leases.add(lease)
        return lease

    def pages(self, lease: Pin) -> PageIds:
        """The host's pages of what a lease protects, by page slot."""
        return self._row(lease.node, lease.length)

    def protects(self, lease: Pin) -> bool:
        """Whether a lease is in force: not given back, and not void."""
        return lease in self._leases

    def let_go(self, lease: Pin) -> None:
        """Give a lease back; nothing, if it is void."""
        if lease in self._leases:
            self._leases.remove(lease)
            self.tree.release(lease.node)

    # ---- parts ----

    def _save(self, leaf: Node) -> None:
        tokens, above = _tokens(leaf), _root(leaf)
        match = self.tree.walk(self.tree.root(above.tag), tokens)
        node = self.tree.lease_at(match, self._tick())
        first = match.length // self.page_size
        length = min(len(tokens), (first + self.pool.free + self.tree.evictable) * self.page_size)
        if length > match.length:
            pages = self._take(self.pool.pages_for(length) - first)
            row = self._row(leaf, len(tokens))[first:]
            self._saves.update(zip(pages.tolist(), row.tolist(), strict=False))
            label = Label(leaf.tag, leaf.priority)
            added = self.tree.add(node, tokens[match.length : length], pages, label, held=node)
            self.tree.lease(added, self._tick(), held=node)
            node = added
        self.tree.release(node)

    def _row(self, node: Node, length: int) -> PageIds:
        """The pages of the path to `node`, in whichever tree it is."""
        row = np.empty(self.pool.pages_for(length), np.int32)
        self.tree.fill(row, node, above=_root(node))
        return row

    def _take(self, n: int) -> PageIds:
        while self.pool.free < n:
            freed = self.tree.evict()
            assert freed is not None, "evictable pages were counted that are not there"
        pages = self.pool.alloc(n)
        assert pages is not None
        return pages

    def _tick(self) -> float:
        self._time += 1.0
        return self._time


def _root(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _tokens(node: Node) -> TokenIds:
    """The tokens of the path to `node`."""
    path = [node.tokens]
    while node.parent is not None:
        node = node.parent
        path.append(node.tokens)
    return np.concatenate(path[::-1])


# ---- What running sequences bring back from host memory, instead of computing it again.
#
#     tokens     |<-- aliased on the device -->|<-- brought back -->|<-- computed -->|
#                0                          n_cached              reach            length
#
# The cells are brought back into the sequence's own pages, like cells that it computes: to the device's books a load
# is
# a prefill chunk without a forward. Whatever goes wrong with the host tier costs the time to compute, and no request.


_WEIGHT = 0.2  # of the latest load in what is known of the speed


@dataclass(frozen=True, slots=True)
class ReloadSpeed:
    """How fast cells come back, as measured: a moving average of seconds a cell. None: nothing has come back yet."""

    cell_s: float | None = None

    @property
    def cells_per_s(self) -> float:
        return 1.0 / self.cell_s if self.cell_s else 0.0

    def measured(self, cells: int, seconds: float) -> "ReloadSpeed":
        if not cells or seconds <= 0.0:
            return self
        latest = seconds / cells
        return ReloadSpeed(latest if self.cell_s is None else self.cell_s + _WEIGHT * (latest - self.cell_s))


class Reloads:
    """Leases on the host tier, by holding. Without a `host` nothing is ever found."""

    def __init__(self, host: HostTier | None) -> None:
        self._host = host
        self._leases: dict[Holding, Pin] = {}
        self.speed = ReloadSpeed()

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, holding: Holding, tokens: TokenIds) -> int:
        """How far the host has the tokens of a holding that has just begun; 0 where that is not worth a step.

        From then on that is protected there, until all of it has come or the holding ends.
        """
        if self._host is None:
            return 0
        try:
            lease = self._host.find(holding.scope, tokens[:-1])
            if lease.length >= holding.n_cached + 2 * holding.page_size:
                self._leases[holding] = lease
                return lease.length
            self._host.let_go(lease)
        except Exception:
            log.exception("the host tier is emptied: its books broke off")
            self.lose()
        return 0

    def reach(self, holding: Holding) -> int:
        """How far this holding is to be brought back; 0: it is not, or not any more."""
        lease = self._leases.get(holding)
        return lease.length if lease is not None and self._host is not None and self._host.protects(lease) else 0

    def load(self, holding: Holding, start: int, end: int) -> PageMoves:
        """The copies that bring cells [start, end) back, within `reach`, into own pages that the holding has already.

        The page that `start` lies in is copied whole: the host has its cells before `start` as well.
        """
        assert self._host is not None
        slots = slice(start // holding.page_size, -(-end // holding.page_size))
        return PageMoves(holding.pages[slots].copy(), self._host.pages(self._leases[holding])[slots])

    def loaded(self, holding: Holding, end: int) -> None:
        """The cells up to `end` have come."""
        if end >= self.reach(holding):
            self.end(holding)

    def end(self, holding: Holding) -> None:
        """Nothing more is to come: all has, or the holding ends."""
        lease = self._leases.pop(holding, None)
        if lease is not None and self._host is not None:
            self._host.let_go(lease)

    def saves(self) -> PageMoves:
        """The copies of what was evicted since the last call: the step that is being planned has to begin with them."""
        return self._host.saves() if self._host is not None else NO_MOVES

    def lose(self) -> None:
        """Copies between the tiers went wrong: nothing in host memory is believed any more."""
        if self._host is not None:
            self._host.clear()
