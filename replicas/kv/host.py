"""The host tier: which evicted tokens are in host memory, and in which pages.

It has a radix tree and a page pool of its own, with the rules of the device's. Evicted cells are kept with the path
above them, so a prefix is found whole or not at all, and no page is copied twice. A reloaded copy stays.

KV data is in `tensors`; `cache.Reloads` brings cells back. An error here costs the time to compute, and no request.
"""

import logging
import math
from typing import Any

import numpy as np

from holdfast.replicas.kv.pages import NO_MOVES, NO_PAGES, PageIds, PageMoves, PagePool
from holdfast.replicas.kv.radix import Node, Pin, Prefix, RadixTree
from holdfast.replicas.kv.states import CheckpointStore
from holdfast.replicas.kv.tags import Label
from holdfast.replicas.types import TokenIds

log = logging.getLogger(__name__)


class HostTier:
    """`n_pages` pages of host memory, each as large as a page of the device. No sequence writes to one.

    `state_slots` or `window_pages`: room for checkpoints. Here they share no pages.
    """

    def __init__(self, n_pages: int, page_size: int, state_slots: int = 0, window_pages: int = 0) -> None:
        self.page_size = page_size
        self._time = 0.0  # of the last use: a count
        self._n_pages = n_pages
        self._checkpoints = (window_pages, page_size) if window_pages else (state_slots, 1)
        self.clear()

    def clear(self) -> None:
        """Forget everything: the contents of the host's pages are unknown. Earlier pins are void."""
        self.pool = PagePool(self._n_pages, self.page_size)
        self.tree = RadixTree(self.pool)
        self._pins: set[Pin] = set()
        self._saves: dict[int, int] = {}  # host page -> device page, of the step in the making
        has_checkpoints = self._checkpoints[0] > 0
        self._states = CheckpointStore[Any](self.tree, PagePool(*self._checkpoints)) if has_checkpoints else None
        self._checkpoint_saves: dict[int, int] = {}  # of slots or window pages: host -> device

    # ---- out ----

    def save(self, leaf: Node) -> None:
        """A leaf of the device's tree is about to be cut or evicted: keep the path to its end, and its checkpoint.

        The same for any node whose checkpoint alone is about to be evicted. The oldest paths make room. Of a path
        larger than the tier the beginning is kept. Never fails: after an error the tier is emptied.
        """
        try:
            self._save(leaf)
        except Exception:
            log.exception("the host tier failed and is emptied")
            self.clear()

    def saves(self) -> PageMoves:
        """The copies for everything saved since the last call. A step has to begin with them."""
        moves = _moves(self._saves)
        self._saves.clear()
        return moves

    def checkpoint_saves(self) -> PageMoves:
        """The copies of state slots, or window pages, saved since the last call."""
        moves = _moves(self._checkpoint_saves)
        self._checkpoint_saves.clear()
        return moves

    # ---- in ----

    def pin(self, scope: str, tokens: TokenIds) -> Pin:
        """Protect the longest prefix of `tokens` in host memory, possibly empty, or up to a checkpoint."""
        prefix = self.tree.walk(self.tree.root(scope), tokens)
        if self._states is not None:
            prefix = self._states.usable(scope, prefix, tokens)
            if prefix.checkpoint is not None:
                self._states.pool.retain(prefix.checkpoint.checkpoint)
                self._states.checkpoints.use(prefix.checkpoint)
        pin = Pin(self.tree.lease_at(prefix, self._tick()), prefix.length, checkpoint=prefix.checkpoint)
        self._pins.add(pin)
        return pin

    def checkpoint(self, pin: Pin) -> PageIds:
        """The host slot, or window pages, of the checkpoint at a pin's end."""
        return pin.checkpoint.checkpoint if pin.checkpoint is not None else NO_PAGES

    def pages(self, pin: Pin) -> PageIds:
        """The host pages that a pin protects, by page slot."""
        return self._row(pin.node)

    def protects(self, pin: Pin) -> bool:
        """Whether a pin is valid: not given back, and not void."""
        return pin in self._pins

    def unpin(self, pin: Pin) -> None:
        """Give a pin back, unless it is void."""
        if pin in self._pins:
            self._pins.remove(pin)
            if self._states is not None and pin.checkpoint is not None:
                self._states.pool.release(pin.checkpoint.checkpoint)
            self.tree.release(pin.node)

    # ---- parts ----

    def _save(self, leaf: Node) -> None:
        tokens = leaf.path_tokens()
        prefix = self.tree.walk(self.tree.root(leaf.root.tag), tokens)
        if prefix.length == len(tokens):
            node = prefix.node  # as it is, and not cut at a leaf's end that may come nearer page by page
            self.tree.lease(node, self._tick())
        else:
            node = self._add(leaf, tokens, prefix)
        if self._states is not None and len(leaf.checkpoint) and node.end >= len(tokens):
            self._save_checkpoint(self._states, leaf, Prefix(node, len(tokens)))
        self.tree.release(node)

    def _save_checkpoint(self, states: CheckpointStore[Any], leaf: Node, prefix: Prefix) -> None:
        """Keep the checkpoint of `leaf` at the end of its path, unless it is there, or there is no room beside those
        that are being read.
        """
        if not len((node := self.tree.node_at(prefix)).checkpoint):
            taken = states.take(len(leaf.checkpoint))
            if taken is None:
                return
            self._checkpoint_saves.update(zip(taken.tolist(), leaf.checkpoint.tolist(), strict=True))
            states.checkpoints.keep(node, taken)

    def _add(self, leaf: Node, tokens: TokenIds, prefix: Prefix) -> Node:
        """Keep what lies beyond `prefix` of the path to `leaf`, as far as there is room; a leased node at its end."""
        node = self.tree.lease_at(prefix, self._tick())
        first = prefix.length // self.page_size
        length = min(len(tokens), (first + self.pool.free + self.tree.evictable) * self.page_size)
        if length <= prefix.length:
            return node
        pages = self._take(self.pool.pages_for(length) - first)
        self.tree.tenants.took(leaf.tenant, len(pages))
        self._saves.update(zip(pages.tolist(), self._row(leaf)[first:].tolist(), strict=False))
        label = Label(leaf.tag, leaf.priority if leaf.lasts == math.inf else 0)  # uses are counted here, not timed
        added = self.tree.add(node, tokens[prefix.length : length], pages, label, held=node)
        self.tree.lease(added, self._tick(), held=node)
        return added

    def _row(self, node: Node) -> PageIds:
        """The pages of the path to `node`, in whichever tree it is."""
        row = np.empty(self.pool.pages_for(node.end), np.int32)
        self.tree.fill(row, node)
        return row

    def _take(self, n: int) -> PageIds:
        while self.pool.free < n:
            freed = self.tree.evict(n - self.pool.free)
            assert freed is not None, "evictable pages were counted that are not there"
        pages = self.pool.alloc(n)
        assert pages is not None
        return pages

    def _tick(self) -> float:
        self._time += 1.0
        return self._time


def _moves(saves: dict[int, int]) -> PageMoves:
    """`saves`: from where on the device, by where to on the host."""
    return PageMoves(np.array([*saves.values()], np.int32), np.array([*saves], np.int32)) if saves else NO_MOVES
