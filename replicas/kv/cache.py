"""The KV bookkeeping of one replica, as the scheduler sees it: acquire, grow, publish, finish, drop; pin, unpin.

Here: who owns which page, and that the books always balance. Not here: KV data (`tensors`), when to do what
(`scheduling`). No clock, no I/O, not thread-safe: the engine thread is the only caller.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.audit import audit
from holdfast.replicas.kv.holding import Acquired, Holding, Pin
from holdfast.replicas.kv.host import HostTier
from holdfast.replicas.kv.pages import NO_PAGES, PageCopy, PageIds, PagePool
from holdfast.replicas.kv.radix import PLAIN, Label, Match, Node, RadixTree, owned_to
from holdfast.replicas.types import TokenIds

# ---- What is held of the KV cache: by a running sequence, or by a pin. Data only: `cache` alone changes it.
#
#     tokens       |<------ shared ------>|<------- own ------->|
#                  0                   n_shared              capacity
#     page slots   | tree | tree | tree | own | own | own | own |
#
# Cells below `n_shared` are the tree's: read through the row, protected by a lease, never written. The rest of the row
# is
# written by its sequence alone. Where `n_shared` lies inside a page, that slot is the sequence's own page, into which
# the
# shared cells before were copied.


Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts in cells, if not named otherwise. free + tree + held == total."""

    total: int
    free: int
    tree: int
    held: int  # written by sequences, not in the tree yet
    evictable: int  # of `tree`: without leases
    evicted: int  # since the start
    lookups: int  # holdings acquired
    hits: int  # of these, with a cached prefix
    hit_tokens: int
    host_total: int = 0  # of the second tier
    host_used: int = 0


def _change(verb: Callable[Concatenate["KVCache", Args], Result]) -> Callable[Concatenate["KVCache", Args], Result]:
    """A verb that changes the books: the cache is not sound any more once one has broken off."""

    @wraps(verb)
    def whole(cache: "KVCache", /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        sound, cache.sound = cache.sound, False
        result = verb(cache, *args, **kwargs)
        cache.sound = sound
        return result

    return whole


class KVCache:
    """Pages, radix tree and the holdings of all running sequences.

    `sound`: no verb has raised. One that did may have left the books half changed: it is time for new ones.
    `prefix_cache` False: nothing is shared or kept; every holding starts empty and frees all its pages at the end.
    With a `host` tier what is evicted goes there. `reloads` brings it back.
    """

    def __init__(self, n_pages: int, page_size: int, prefix_cache: bool = True, host: HostTier | None = None) -> None:
        if n_pages < 1 or page_size < 1:
            raise ValueError(f"a cache needs pages and cells, not {n_pages} of {page_size}")
        self.pool = PagePool(n_pages, page_size)
        self.tree = RadixTree(self.pool)
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.sound = True
        self.host = host
        self._live: set[Holding] = set()
        self._pins: set[Pin] = set()
        self._evicted_pages = 0
        self._lookups = 0
        self._hits = 0
        self._hit_tokens = 0

    # ---- looking ----

    def peek(self, scope: str, tokens: TokenIds) -> int:
        """How many tokens `acquire` would find cached now, always less than `len(tokens)`. Changes nothing."""
        match = found(self, scope, tokens)
        return match.length if match is not None else 0

    @property
    def stats(self) -> CacheStats:
        size = self.page_size
        return CacheStats(
            total=self.pool.total * size,
            free=self.pool.free * size,
            tree=self.tree.pages * size,
            held=(self.pool.used - self.tree.pages) * size,
            evictable=self.tree.evictable * size,
            evicted=self._evicted_pages * size,
            lookups=self._lookups,
            hits=self._hits,
            hit_tokens=self._hit_tokens,
            host_total=self.host.pool.total * size if self.host is not None else 0,
            host_used=self.host.pool.used * size if self.host is not None else 0,
        )

    def check(self) -> None:
        """Recount everything; AssertionError where the books do not balance. For tests: costs a full scan."""
        audit(self.pool, self.tree, self._live, self._pins)
        if self.host is not None:
            self.host.check()

    # ---- the five verbs ----

    @_change
    def acquire(
        self,
        scope: str | None,
        tokens: TokenIds,
        now: float,
        *,
        reuse: bool = True,
        continues: bool = False,
        match: Match | None = None,
    ) -> Acquired:
        """Begin a sequence of `tokens`, int32, at least one: alias its longest cached prefix and protect it.

        At least one token is left to compute, for its logits. A prefix that ends inside a page needs that page's cells
        copied into a fresh one; with no page to be had the prefix is cut to whole pages instead. Never fails.
        In no scope (None) nothing is found, shared or kept: all its pages are freed at the end.
        Without `reuse` it aliases nothing, so that all of the cache but its own pages can be evicted for it.
        With `continues`, for the next turn of who saved the prefix, that page itself is taken out of the tree and
        written on, if nobody else holds it: no copy, but the cells in it are not there for others meanwhile.
        `match` is what `found` says of these tokens now, where that is known.
        """
        if len(tokens) == 0:
            raise EngineError("a sequence without tokens has nothing to compute")
        kept, root = scope is not None and self.prefix_cache, self.tree.root(scope or "")
        if match is None or not (reuse and kept):
            match = self.tree.walk(root, tokens[: -1 if reuse and kept else 0])
        row = np.empty(self.pool.pages_for(len(tokens)) + 8, dtype=np.int32)  # while nothing has changed yet
        copies: tuple[PageCopy, ...] = ()
        taken = self.tree.take_last_page(match) if continues else None
        if taken is not None:
            node, page = taken
            self.tree.lease(node, now)
            self.tree.fill(row, node, above=root)
            row[match.length // self.page_size] = page[0]
            n_shared = node.end
        else:
            node, match, fresh = self._alias(root, match, tokens, now)
            self.tree.fill(row, node, above=root)
            n_shared = match.length
            if len(fresh):
                slot = n_shared // self.page_size
                copies = (PageCopy(int(row[slot]), int(fresh[0]), cells=n_shared % self.page_size),)
                row[slot] = fresh[0]
        n_pages = self.pool.pages_for(match.length)
        holding = Holding(scope or "", node, match.length, n_shared, self.page_size, row, n_pages, kept)
        self._live.add(holding)
        self._lookups += 1
        self._hits += match.length > 0
        self._hit_tokens += match.length
        return Acquired(holding, copies)

    @_change
    def grow(self, holding: Holding, n_tokens: int) -> PageIds | None:
        """Make sure the row has cells for `n_tokens`; returns the pages appended to it, int32, possibly none.

        Evicts where needed. None, and nothing changed, when even eviction cannot free enough.
        """
        self._expect(holding)
        first = holding.n_pages
        missing = self.pool.pages_for(n_tokens) - first
        if missing <= 0:
            return NO_PAGES
        pages = self._take(missing, after=holding.row.item(first - 1) if first else None)
        if pages is None:
            return None
        end = first + missing
        if end > len(holding.row):
            row = np.empty(max(end, 2 * len(holding.row)), dtype=np.int32)
            row[:first] = holding.pages
            holding.row = row
        holding.row[first:end] = pages
        holding.n_pages = end
        return pages

    @_change
    def publish(self, holding: Holding, tokens: TokenIds, n_computed: int, now: float, label: Label = PLAIN) -> None:
        """Hand the full pages among the first `n_computed` cells to the tree, so that others can alias them now.

        For a sequence that goes on. Its row stays as it is; a page still being filled stays its own. Each call may
        make a tree node, so call it after prefill chunks and not after every decoded token.
        """
        self._expect(holding, tokens, n_computed)
        length = n_computed - n_computed % self.page_size
        if not holding.kept or length <= holding.n_shared:
            return
        match = self.tree.walk(holding.node, tokens[:length])
        first, known = holding.n_shared // self.page_size, match.length // self.page_size
        if known > first:
            holding.spare = np.concatenate([holding.spare, holding.row[first:known]])
        node = self._save(match, tokens[:length], holding, label)
        self.tree.lease(node, now, held=holding.node)
        holding.node, holding.n_shared = node, length

    @_change
    def finish(
        self,
        holding: Holding,
        tokens: TokenIds,
        n_computed: int,
        now: float,
        label: Label = PLAIN,
        *,
        pin: bool = False,
    ) -> Pin | None:
        """End a sequence and keep its first `n_computed` cells: those the tree lacks become a node under `label`.

        For completion and for preemption. Pages that hold nothing new are freed. With `pin` what is kept stays
        protected from eviction by what is returned.
        """
        self._expect(holding, tokens, n_computed)
        if not holding.kept or n_computed <= holding.n_shared:
            self.drop(holding)
            return self.pin(holding.scope, tokens[:n_computed], now) if pin else None
        self._live.remove(holding)
        match = self.tree.walk(holding.node, tokens[:n_computed])
        first, known = holding.n_shared // self.page_size, match.length // self.page_size
        kept = self.pool.pages_for(n_computed) if match.length < n_computed else known
        node = match.node
        if match.length < n_computed:
            node = self._save(match, tokens[:n_computed], holding, label)
        self.tree.lease(node, now, held=holding.node)
        if not (pin and node.end == n_computed):
            self.tree.release(node)
        self.pool.release(holding.row[first:known])
        self.pool.release(holding.row[kept : holding.n_pages])
        self.pool.release(holding.spare)
        if not pin:
            return None
        # The lease of a moment ago is the pin's, but where what is kept ends inside a node.
        held = Pin(node if node.end == n_computed else self.tree.lease_at(Match(node, n_computed), now), n_computed)
        self._pins.add(held)
        return held

    @_change
    def drop(self, holding: Holding) -> None:
        """End a sequence and keep nothing beyond what it published."""
        self._expect(holding)
        self._live.remove(holding)
        self.tree.release(holding.node)
        self.pool.release(holding.own)
        self.pool.release(holding.spare)

    # ---- pins ----

    @_change
    def pin(self, scope: str, tokens: TokenIds, now: float) -> Pin:
        """Protect the longest cached prefix of `tokens` from eviction, for one that comes back for it later."""
        match = self.tree.walk(self.tree.root(scope), tokens)
        pin = Pin(self.tree.lease_at(match, now), match.length)
        self._pins.add(pin)
        return pin

    @_change
    def unpin(self, pin: Pin) -> None:
        """Give a pin back. Raises EngineError for one that was given back before."""
        if pin not in self._pins:
            raise EngineError("this pin has been given back")
        self._pins.remove(pin)
        self.tree.release(pin.node)

    # ---- parts ----

    def _alias(self, root: Node, match: Match, tokens: TokenIds, now: float) -> tuple[Node, Match, PageIds]:
        """Lease the end of `match`, with a fresh page where it lies inside one, or cut it to whole pages."""
        node = self.tree.lease_at(match, now)
        tail = match.length % self.page_size
        fresh = self._take(1 if tail else 0)
        if fresh is not None:
            return node, match, fresh
        self.tree.release(node)
        match = self.tree.walk(root, tokens[: match.length - tail])
        return self.tree.lease_at(match, now), match, NO_PAGES

    def _save(self, match: Match, tokens: TokenIds, holding: Holding, label: Label) -> Node:
        """A node at the end of `tokens`: what lies beyond `match` is added, with the holding's own pages."""
        parent = self.tree.node_at(match)
        if match.length == len(tokens):
            return parent
        slots = slice(match.length // self.page_size, self.pool.pages_for(len(tokens)))
        return self.tree.add(parent, tokens[match.length :], holding.row[slots], label, held=holding.node)

    def _take(self, n: int, after: int | None = None) -> PageIds | None:
        """`n` fresh pages, evicting where needed, those behind page `after` first.

        None, and nothing evicted, when they are not to be had.
        """
        pool = self.pool
        if n > pool.free:
            if n > pool.free + self.tree.evictable:
                return None
            while pool.free < n:
                freed = self.tree.evict(self.host.save if self.host is not None else None)
                assert freed is not None, "evictable pages were counted that are not there"
                self._evicted_pages += freed
        return pool.alloc(n, after)

    def _expect(self, holding: Holding, tokens: TokenIds | None = None, n_computed: int = 0) -> None:
        """Raise EngineError where a caller uses an ended holding, or claims cells it never had."""
        if holding not in self._live:
            raise EngineError("this holding has ended")
        if tokens is not None and n_computed > min(holding.capacity, len(tokens)):
            raise EngineError(f"{n_computed} computed tokens, but cells for {holding.capacity}")


def found(cache: KVCache, scope: str | None, tokens: TokenIds) -> Match | None:
    """Where what `acquire` would find cached now ends; None in a scope that has nothing. Changes nothing."""
    root = cache.tree.roots.get(scope) if scope is not None else None
    return cache.tree.walk(root, tokens[:-1]) if root is not None else None


def to_be_had(cache: KVCache) -> int:
    """Cells that are free, or would be by eviction."""
    return (cache.pool.free + cache.tree.evictable) * cache.page_size


def in_use(cache: KVCache) -> int:
    """Cells that no eviction could free now."""
    return cache.pool.total * cache.page_size - to_be_had(cache)


def running(cache: KVCache) -> int:
    """Cells in use by sequences and sessions: all but those that only programs' pins keep."""
    return in_use(cache) - cache.tree.paused * cache.page_size


def claimed(cache: KVCache, match: Match | None, besides_pins: bool = False) -> int:
    """Cells that `acquire` would protect from then on: those of what was `found` that nobody protects now.

    `besides_pins`: or nobody but programs' pins.
    """
    if match is None or match.node.parent is None:
        return 0
    pages, step = owned_to(match.node, match.length, cache.pool), match.node
    found = 0
    while step.parent is not None and step.leases == (step.pins if besides_pins else 0):
        found, pages, step = found + pages, step.parent.owned, step.parent
    return found * cache.page_size
