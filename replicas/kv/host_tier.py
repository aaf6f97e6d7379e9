"""The books of the second tier: which evicted tokens are in host memory, and in which of its pages.

A tree of its own over pages of its own, by the same rules as the device's: a path from the root, nodes with their
tokens, oldest use evicted first. Whatever leaves the device is kept here with the path above it, so a prefix is found
here whole or not at all, and a page that is here already is never copied twice. A copy that was brought back stays.

Here: what is where. Not here: the numbers (`host_pages`), when something is brought back (`scheduling`). No sequence
writes to a host page, so free + tree == total.
"""

import logging

import numpy as np

from holdfast.replicas.kv.audit import audit
from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.kv.node import Node
from holdfast.replicas.kv.pages import PagePool
from holdfast.replicas.kv.radix import Label, RadixTree
from holdfast.replicas.scheduling.plan import NO_MOVES, PageIds, PageMoves
from holdfast.replicas.tokens import TokenIds

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
