"""The KV cache for running sequences: acquire, grow, publish, finish, drop; pin, unpin; reload; report.

It decides which page belongs to whom, and keeps its counts balanced. KV data is in `tensors`. No clock and no I/O. Not
thread-safe: the engine's thread is the only caller.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.host import HostTier
from holdfast.replicas.kv.pages import NO_MOVES, NO_PAGES, SHARED, PageCopy, PageIds, PageMoves, PagePool
from holdfast.replicas.kv.radix import Node, Pin, Prefix, RadixTree, relabel
from holdfast.replicas.kv.states import CheckpointStore, RunningState, States, deepest
from holdfast.replicas.kv.tags import SYSTEM, UNLABELLED, Labels
from holdfast.replicas.kv.windows import RunningWindow, Windows
from holdfast.replicas.types import CellLimits, TokenIds, common_prefix, tenant_of

log = logging.getLogger(__name__)

_RELOAD_WEIGHT = 0.2  # of the latest reload in the average speed
_REPORTED = 64  # digests in a prefix report: the latest used
REPORT_S = 0.5  # between two reports
_WHOLE = 0.5  # a prefix of which the cache has a smaller part is not reported

Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Holding:
    """The cells of one running sequence.

    tokens       |<------ shared ------>|<------- own ------->|
                 0                   n_shared              capacity
    page slots   | tree | tree | tree | own | own | own | own |

    Cells below `n_shared` belong to the tree: a lease protects them, the sequence reads them through the row, and
    nobody writes them. The sequence alone writes the rest. If `n_shared` lies inside a page, that slot has a page of
    the sequence's own, into which the shared cells before it were copied.
    """

    scope: str | None  # cache scope; None: it finds no cached cells, and none of its cells are kept
    node: Node = field(repr=False)  # leased; ends at `n_shared`
    n_cached: int  # tokens found at `acquire`: the first token to compute
    n_shared: int  # tokens whose cells belong to the tree; grows with `publish`
    page_size: int
    row: PageIds = field(repr=False)  # valid up to `n_pages`
    n_pages: int
    tenant: str = ""  # owner of the pages that it writes
    # Own pages below `n_shared` whose tokens the tree already had when they were published. The row still reads them;
    # they are freed at the end.
    duplicates: PageIds = field(default_factory=lambda: NO_PAGES, repr=False)
    labels: Labels = UNLABELLED  # of its tokens, including the reply
    who: str = ""  # the program it computes for
    state: RunningState | RunningWindow | None = None  # of a model with recurrent states, or with window pages

    @property
    def pages(self) -> PageIds:
        """The row so far, int32 `[n_pages]`: a view. Its entries never change, so it may be kept."""
        return self.row[: self.n_pages]

    @property
    def own(self) -> PageIds:
        """The part of the row that this sequence writes; a view."""
        return self.row[self.n_shared // self.page_size : self.n_pages]

    def contains(self, pin: Pin) -> bool:
        """Whether its shared cells include those of the pin."""
        node: Node | None = self.node
        while node is not None and node is not pin.node:
            node = node.parent
        return node is not None

    def mark(self, position: int) -> None:
        """Leave a checkpoint, if the model has them, at the last end of a page up to `position`."""
        if self.state is not None and self.scope is not None:
            self.state.mark(position - position % self.page_size)

    @property
    def capacity(self) -> int:
        """Tokens that the row has cells for."""
        return self.n_pages * self.page_size

    @property
    def window(self) -> RunningWindow | None:
        """Its window pages."""
        return self.state if isinstance(self.state, RunningWindow) else None

    def covers(self, n_tokens: int) -> bool:
        """Whether its rows have pages up to that position."""
        end = self.n_pages
        if self.state is not None and isinstance(self.state, RunningWindow):
            end = min(end, self.state.end)
        return n_tokens <= end * self.page_size


@dataclass(frozen=True, slots=True)
class Acquired:
    """A new holding, and the copies to make before its first forward, in the same step."""

    holding: Holding
    copies: tuple[PageCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts in cells. free + tree + held == total."""

    total: int
    free: int
    tree: int
    held: int  # written by sequences, not in the tree yet
    evictable: int  # of `tree`: without leases
    evicted: int  # since the start
    host_used: int = 0  # of the host tier


class CellCounts:
    """Cells by state. Each cell is in one of these:

    total    |-- free --|-- evictable --|-- kept by soft pins alone --|-- active --|
             |-------- available -------|----------------- in_use -----------------|
    """

    def __init__(self, pool: PagePool, tree: RadixTree) -> None:
        self._pool = pool
        self._tree = tree

    @property
    def available(self) -> int:
        """Cells that are free or evictable."""
        return (self._pool.free + self._tree.evictable) * self._pool.page_size

    @property
    def in_use(self) -> int:
        """Cells that are neither free nor evictable."""
        return self._pool.total * self._pool.page_size - self.available

    @property
    def active(self) -> int:
        """Cells in use by sequences and by pins that are not soft."""
        return self.in_use - self._tree.soft_only * self._pool.page_size

    def active_of(self, tenant: str) -> int:
        """A tenant's cells that are not evictable."""
        return self._tree.tenants.active(tenant) * self._pool.page_size

    @property
    def soft_pinned(self) -> int:
        """Cells protected by soft pins, shared ones counted once. Others may protect them as well."""
        return self._tree.soft_pages * self._pool.page_size

    def soft_pinned_of(self, tenant: str) -> int:
        """Cells of one tenant that soft pins keep from being evicted."""
        return self._tree.soft_pages_of.get(tenant, 0) * self._pool.page_size

    def may_pin(self, tenant: str) -> int:
        """Most cells that a tenant's soft pins and sessions may protect."""
        return self._tree.tenants.pinned(tenant) * self._pool.page_size

    def available_in(self, prefix: Prefix | None) -> int:
        """Cells of a prefix that count as available; acquiring it protects them."""
        return self._unprotected(prefix, but_soft_pins=False)

    def inactive_in(self, prefix: Prefix | None) -> int:
        """Cells of a prefix that do not count as active; acquiring it makes them active."""
        return self._unprotected(prefix, but_soft_pins=True)

    def pages_for(self, tenant: str, freed: "Freed") -> int:
        """Pages that a sequence of this tenant could get once those of `freed` are evictable."""
        available = self._pool.free + self._tree.evictable + freed.total
        tenants = self._tree.tenants
        return tenants.available(tenant, available, freed.pages) if tenants.any else available

    def _unprotected(self, prefix: Prefix | None, *, but_soft_pins: bool) -> int:
        """Cells at the end of `prefix` without leases, or with those of soft pins alone."""
        if prefix is None or prefix.node.parent is None:
            return 0
        size, step, total = self._pool.page_size, prefix.node, 0
        pages = step.owned_before(prefix.length, size)
        while step.parent is not None and step.leases == (step.soft if but_soft_pins else 0):
            total, pages, step = total + pages, step.parent.owned, step.parent
        return total * size


class Freed:
    """The pages that would become evictable, by tenant, if the pins in it were given back. Changes nothing.

    `prefix`: a sequence is about to acquire it, so its pages do not become evictable.
    """

    def __init__(self, page_size: int = 1, prefix: Prefix | None = None) -> None:
        self.pages: Counter[str] = Counter()
        self._pins: set[Pin] = set()
        self._leases: Counter[Node] = Counter()  # of these pins
        self._protected: dict[Node, int] = {}  # pages
        if prefix is not None and (node := prefix.node).parent is not None:
            self._protected = {step: step.owned for step in node.path()}
            self._protected[node] = node.owned_before(prefix.length, page_size)

    @property
    def total(self) -> int:
        return self.pages.total()

    def __contains__(self, pin: Pin) -> bool:
        return pin in self._pins

    def add(self, pin: Pin) -> None:
        self._pins.add(pin)
        self._count(pin, 1)

    def remove(self, pin: Pin) -> None:
        self._pins.remove(pin)
        self._count(pin, -1)

    def _count(self, pin: Pin, n: int) -> None:
        step = pin.node
        while step.parent is not None:
            before = self._leases[step] == step.leases
            self._leases[step] += n
            more = (self._leases[step] == step.leases) - before
            self.pages[step.tenant] += more * (step.owned - self._protected.get(step, 0))
            step = step.parent


def _change(verb: Callable[Concatenate["KVCache", Args], Result]) -> Callable[Concatenate["KVCache", Args], Result]:
    """A method that changes the books. If it raises, the cache is no longer sound."""

    @wraps(verb)
    def whole(cache: "KVCache", /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        sound, cache.sound = cache.sound, False
        result = verb(cache, *args, **kwargs)
        cache.sound = sound
        return result

    return whole


RAISED_SHARE = 0.5  # share of pages that labels may raise above others; the rest is evicted by age alone


class KVCache:
    """Pages and radix tree, with the holdings of running sequences and the pins on them.

    `cells` counts cells by state. `sound`: no method has raised. One that did may have left the books half changed, and
    the cache has to be replaced. With a `host` tier, evicted cells go there, and `Reloads` brings them back.
    `share`: the part of all pages that labels may raise above others. `evicted`: counts by tag to add to.
    `state_slots`: recurrent states beside the pages, of a model that has them; 0: it has none. `window`: tokens that
    layers with window pages see, and the number of these pages; None: the model has none. With either a prefix is
    continued from a checkpoint only.
    """

    def __init__(
        self,
        n_pages: int,
        page_size: int,
        host: HostTier | None = None,
        share: float = RAISED_SHARE,
        evicted: dict[str, int] | None = None,
        state_slots: int = 0,
        window: tuple[int, int] | None = None,
    ) -> None:
        if n_pages < 1 or page_size < 1:
            raise ValueError(f"a cache needs pages and cells, not {n_pages} of {page_size}")
        self.pool = PagePool(n_pages, page_size)
        self.tree = RadixTree(self.pool, share, evicted)
        self.windows = Windows(self.tree, *window, page_size) if window is not None else None
        self.states: CheckpointStore[Any] | None = States(self.tree, state_slots) if state_slots else self.windows
        self.cells = CellCounts(self.pool, self.tree)
        self.page_size = page_size
        self.sound = True
        self.host = host
        if self.states is not None and host is not None:
            self.states.checkpoints.leaving = host.save
        self._live: set[Holding] = set()
        self._pins: set[Pin] = set()
        self._evicted_pages = 0

    # ---- sequences ----

    @_change
    def acquire(
        self,
        scope: str | None,
        tokens: TokenIds,
        now: float,
        *,
        reuse: bool = True,
        continues: bool = False,
        prefix: Prefix | None = None,
        labels: Labels = UNLABELLED,
        who: str = "",
        tenant: str | None = None,
        longest: int = 0,
    ) -> Acquired:
        """Begin a sequence of `tokens`, int32, at least one: alias its longest cached prefix and protect it.

        At least one token is left to compute, for its logits. If the prefix ends inside a page, the cells in that page
        are copied to a fresh one; without a free page the prefix is cut to whole pages. Never fails.
        With checkpoints there is room to begin (`CheckpointStore.can_begin`), and the prefix ends at one. Where more is
        cached than that, others share it: a checkpoint is left there once it is computed.
        Without a scope (None) nothing is found, shared or kept: all pages are freed at the end.
        Without `reuse` nothing is aliased, so that everything but its own pages can be evicted for it.
        `continues`: the program that saved the prefix goes on. Then the last page is taken out of the tree and written
        on, if nobody else holds it: nothing is copied, but others cannot find its cells meanwhile.
        `prefix`: the result of `find` for these tokens, if known. `labels`: the priorities of the tokens for program
        `who`. `tenant`: owner of the new cells; None: the scope's tenant. `longest`: tokens that it may come to have.
        """
        if len(tokens) == 0:
            raise EngineError("a sequence without tokens has nothing to compute")
        root, reuse = self.tree.root(scope or ""), reuse and scope is not None
        tenant = tenant_of(scope or "") if tenant is None else tenant
        if prefix is None or not reuse:
            prefix = _usable(self, scope, tokens[: -1 if reuse else 0])
        row = np.empty(self.pool.pages_for(len(tokens)) + 8, dtype=np.int32)  # before anything has changed
        copies: tuple[PageCopy, ...] = ()
        taken = self.tree.take_last_page(prefix) if continues and self.states is None else None
        state = None
        if taken is not None:
            node, page = taken
            self.tree.lease(node, now)
            self.tree.fill(row, node)
            row[prefix.length // self.page_size] = page[0]
            n_shared = node.end
        else:
            node, prefix, fresh, state = self._alias(scope, prefix, tokens, now, tenant, max(longest, len(tokens)))
            self.tree.fill(row, node)
            n_shared = prefix.length
            if len(fresh):
                slot = n_shared // self.page_size
                copies = (PageCopy(int(row[slot]), int(fresh[0]), cells=n_shared % self.page_size),)
                row[slot] = fresh[0]
        n_pages = self.pool.pages_for(prefix.length)
        if labels is not UNLABELLED:
            relabel(self.tree, node, labels, who)
        holding = Holding(
            scope, node, prefix.length, n_shared, self.page_size, row, n_pages, tenant, labels=labels, who=who
        )
        if state is not None:
            holding.state = state
            if (window := holding.window) is not None:
                copies += window.copies
            if reuse:
                holding.mark(self.tree.walk(root, tokens[:-1]).length)
        self._live.add(holding)
        return Acquired(holding, copies)

    @_change
    def grow(self, holding: Holding, n_tokens: int, *, window: bool = True) -> PageIds | None:
        """Give the row cells for `n_tokens`, evicting where needed. Returns the pages appended, int32, possibly none.

        None if eviction cannot free enough. `window`: the same for its window pages, where the model has them.
        """
        _expect(self, holding)
        first = holding.n_pages
        missing = self.pool.pages_for(n_tokens) - first
        own = holding.window if window and self.windows is not None else None
        if self.windows is not None and own is not None and not self.windows.grow(own, first + max(missing, 0)):
            return None
        if missing <= 0:
            return NO_PAGES
        pages = self._take(missing, holding.tenant, after=holding.row.item(first - 1) if first else None)
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
    def computed(self, holding: Holding, n_computed: int) -> None:
        """A sequence has computed `n_computed` tokens and continues: free the pages behind its window."""
        if self.states is not None and holding.state is not None:
            self.states.computed(holding.state, n_computed)

    @_change
    def publish(self, holding: Holding, tokens: TokenIds, n_computed: int, now: float) -> None:
        """Hand the full pages among the first `n_computed` cells to the tree, so that others can alias them now.

        The sequence keeps its row; a page that is not full stays its own. Each call may make a tree node:
        call it after prefill chunks, not after every decoded token.
        """
        _expect(self, holding, tokens, n_computed)
        length = n_computed - n_computed % self.page_size
        if holding.scope is None or length <= holding.n_shared:
            return
        prefix = self.tree.walk(holding.node, tokens[:length])
        first, known = holding.n_shared // self.page_size, prefix.length // self.page_size
        if known > first:
            holding.duplicates = np.concatenate([holding.duplicates, holding.row[first:known]])
        node = self._save(prefix, tokens[:length], holding)
        self.tree.lease(node, now, held=holding.node)
        holding.node, holding.n_shared = node, length
        if self.states is not None and holding.state is not None:
            self.states.keep(holding.state, holding.node.root, tokens, length)

    @_change
    def finish(
        self, holding: Holding, tokens: TokenIds, n_computed: int, now: float, *, pin: bool = False
    ) -> Pin | None:
        """End a sequence and keep its first `n_computed` cells: the tree gets those that it lacks, with their labels.

        For completion and preemption. All other pages are freed. `pin`: returns a soft pin on the cells kept.
        """
        _expect(self, holding, tokens, n_computed)
        if holding.scope is None or n_computed <= holding.n_shared:
            self._end_state(holding, tokens, n_computed)
            self._drop(holding)
            if not pin or holding.scope is None:
                return None
            prefix = self.tree.walk(self.tree.root(holding.scope), tokens[:n_computed])
            return self._pin(self.tree.lease_at(prefix, now), soft=True)
        self._live.remove(holding)
        prefix = self.tree.walk(holding.node, tokens[:n_computed])
        first, known = holding.n_shared // self.page_size, prefix.length // self.page_size
        kept = self.pool.pages_for(n_computed) if prefix.length < n_computed else known
        node = prefix.node
        if prefix.length < n_computed:
            node = self._save(prefix, tokens[:n_computed], holding)
        self.tree.lease(node, now, held=holding.node)
        if pin and node.end > n_computed:
            upper = self.tree.lease_at(Prefix(node, n_computed), now)
            self.tree.release(node)
            node = upper
        self._end_state(holding, tokens, n_computed)
        if not pin:
            self.tree.release(node)
        _free(self, holding, holding.row[first:known], holding.row[kept : holding.n_pages], holding.duplicates)
        return self._pin(node, soft=True) if pin else None

    @_change
    def drop(self, holding: Holding) -> None:
        """End a sequence and keep nothing beyond what it published."""
        _expect(self, holding)
        self._drop(holding)

    @_change
    def pin(self, scope: str, tokens: TokenIds, now: float, *, soft: bool = False) -> Pin:
        """Protect the longest cached prefix of `tokens` from eviction until `unpin`."""
        return self._pin(self.tree.lease_at(self.tree.walk(self.tree.root(scope), tokens), now), soft)

    @_change
    def unpin(self, pin: Pin) -> None:
        """Give a pin back. Raises EngineError for one that was given back before."""
        if pin not in self._pins:
            raise EngineError("this pin has been given back")
        self._pins.remove(pin)
        if self.states is not None and pin.checkpoint is not None:
            self.states.checkpoints.unpin(pin.checkpoint)
        if pin.soft:
            self.tree.unpin_soft(pin.node)
        self.tree.release(pin.node)

    @_change
    def demote(self, scope: str, tokens: TokenIds, who: str) -> None:
        """Mark cells of `tokens` that only program `who` computed and used for early eviction: the program is over.

        A system prompt is excepted: the next program may begin with it.
        """
        root = self.tree.roots.get(scope)
        if root is None:
            return
        prefix = self.tree.walk(root, tokens)
        node, below = prefix.node, prefix.node.end > prefix.length
        while node.parent is not None and not (node.leases or below or node.by != who or node.tag == SYSTEM):
            self.tree.queue.demote(node)
            if self.states is not None:
                self.states.checkpoints.demote(node)
            node = node.parent
            below = len(node.children) > 1

    @_change
    def alias_shared(self, scope: str, tokens: TokenIds, now: float) -> None:
        """Let a scope find the longest prefix of `tokens` in the scope `SHARED`, in whole pages.

        The pages are aliased: they stay where they are, and are not counted for this tenant.
        """
        root = self.tree.roots.get(SHARED)
        if root is None or scope == SHARED:
            return
        known = self.tree.walk(root, tokens[:-1])
        length = known.length - known.length % self.page_size
        prefix = self.tree.walk(self.tree.root(scope), tokens[:length])
        if prefix.length >= length:
            return
        row = np.empty(self.pool.pages_for(known.node.end), np.int32)
        self.tree.fill(row, known.node)
        node = self.tree.alias(prefix, tokens[:length], row[: length // self.page_size])
        self.tree.lease(node, now)
        self.tree.release(node)

    @_change
    def limit(self, tenant: str, limits: CellLimits, now: float) -> None:
        """Set a tenant's limits. Cells beyond them are evicted as it, or others, need more."""
        self.tree.limit(tenant, limits, now)

    # ---- looking ----

    def find(self, scope: str | None, tokens: TokenIds) -> Prefix | None:
        """The prefix that `acquire` would find now; None in a scope without cells. Changes nothing."""
        return _usable(self, scope, tokens[:-1]) if scope is not None and scope in self.tree.roots else None

    def peek(self, scope: str | None, tokens: TokenIds) -> int:
        """Tokens that `acquire` would find cached now, always less than `len(tokens)`. Changes nothing."""
        prefix = self.find(scope, tokens)
        return prefix.length if prefix is not None else 0

    @property
    def stats(self) -> CacheStats:
        """The current counts. From another thread they may be of slightly different moments, but they add up."""
        size, total = self.page_size, self.pool.total
        free = self.pool.free
        tree = min(self.tree.pages, total - free)
        return CacheStats(
            total=total * size,
            free=free * size,
            tree=tree * size,
            held=(total - free - tree) * size,
            evictable=self.tree.evictable * size,
            evicted=self._evicted_pages * size,
            host_used=self.host.pool.used * size if self.host is not None else 0,
        )

    # ---- parts ----

    def _alias(
        self, scope: str | None, prefix: Prefix, tokens: TokenIds, now: float, tenant: str, longest: int
    ) -> tuple[Node, Prefix, PageIds, RunningState | RunningWindow | None]:
        """Lease `prefix`, with a fresh page if it ends inside one; without a free page, lease its whole pages.

        With checkpoints the prefix ends at one, and the sequence gets its state or window first.
        """
        while True:
            state = self.states.begin(prefix, longest) if self.states is not None else None
            if self.states is not None and state is None:
                prefix = _usable(self, scope, tokens[: prefix.length])
                continue
            node = self.tree.lease_at(prefix, now)
            tail = prefix.length % self.page_size
            fresh = self._take(1, tenant) if tail else NO_PAGES
            if fresh is not None:
                return node, prefix, fresh, state
            self.tree.release(node)
            if self.states is not None and state is not None:
                self.states.end(state)
            prefix = _usable(self, scope, tokens[: prefix.length - tail])

    def _end_state(self, holding: Holding, tokens: TokenIds | None = None, n_computed: int = 0) -> None:
        """Give the checkpoints of a holding that ends to the nodes at their ends among `tokens`, and the rest back."""
        if self.states is not None and (state := holding.state) is not None:
            holding.state = None
            if tokens is not None and holding.scope is not None:
                self.states.keep(state, holding.node.root, tokens, n_computed, last=True)
            self.states.end(state)

    def _drop(self, holding: Holding) -> None:
        self._live.remove(holding)
        self._end_state(holding)
        self.tree.release(holding.node)
        _free(self, holding, holding.own, holding.duplicates)

    def _pin(self, node: Node, soft: bool) -> Pin:
        """A pin with the caller's lease on `node`."""
        pin = Pin(node, node.end, soft)
        if self.states is not None and (checkpoint := deepest(node)) is not None:
            pin.checkpoint = checkpoint
            self.states.checkpoints.pin(checkpoint)
        if soft:
            self.tree.pin_soft(node)
        self._pins.add(pin)
        return pin

    def _save(self, prefix: Prefix, tokens: TokenIds, holding: Holding) -> Node:
        """A node at the end of `tokens`. Tokens beyond `prefix` are added, with the holding's own pages.

        One node for each part with a priority of its own.
        """
        node, begun, size = self.tree.node_at(prefix), prefix.length, self.page_size
        if begun == len(tokens):
            return node
        for end, label in holding.labels.pieces(begun, len(tokens), size):
            pages = holding.row[begun // size : self.pool.pages_for(end)]
            node = self.tree.add(node, tokens[begun:end], pages, label, held=holding.node, by=holding.who)
            begun = end
        return node

    def _take(self, n: int, tenant: str, after: int | None = None) -> PageIds | None:
        """`n` fresh pages for a tenant, preferably those behind page `after`. Evicts as many pages as are missing: the
        tenant's own where its ceiling requires that, else the next in order that no other tenant's floor protects.

        None, and nothing evicted, if there are not enough.
        """
        pool, tree = self.pool, self.tree
        if tree.tenants.any:
            if n > tree.tenants.available(tenant, pool.free + tree.evictable):
                return None
            while (over := tree.tenants.over(tenant, n)) > 0:
                self._evict(over, tenant, own=True)
        if n > pool.free:
            if n > pool.free + tree.evictable:
                return None
            while pool.free < n:
                self._evict(n - pool.free, tenant)
        pages = pool.alloc(n, after)
        if pages is not None:
            tree.tenants.took(tenant, n)
        return pages

    def _evict(self, n: int, to: str, *, own: bool = False) -> None:
        freed = self.tree.evict(n, self.host.save if self.host is not None else None, to, own=own)
        assert freed is not None, "evictable pages were counted that are not there"
        self._evicted_pages += freed


def _usable(cache: KVCache, scope: str | None, tokens: TokenIds) -> Prefix:
    """The cached prefix of `tokens` that a sequence can go on from; where there are checkpoints it ends at one."""
    prefix = cache.tree.walk(cache.tree.root(scope or ""), tokens)
    return prefix if cache.states is None else cache.states.usable(scope, prefix, tokens)


def _expect(cache: KVCache, holding: Holding, tokens: TokenIds | None = None, n_computed: int = 0) -> None:
    """Raises EngineError if the holding has ended, or has no cells for `n_computed` tokens."""
    if holding not in cache._live:
        raise EngineError("this holding has ended")
    if tokens is not None and n_computed > min(holding.capacity, len(tokens)):
        raise EngineError(f"{n_computed} computed tokens, but cells for {holding.capacity}")


def _free(cache: KVCache, holding: Holding, *pages: PageIds) -> None:
    """Release pages of a holding; those that the tree owns as well stay."""
    for each in pages:
        cache.tree.tenants.took(holding.tenant, -cache.pool.release(each))


@dataclass(frozen=True, slots=True)
class ReloadSpeed:
    """Moving average of the seconds to reload a cell from the host; None before the first reload."""

    cell_s: float | None = None

    @property
    def cells_per_s(self) -> float:
        return 1.0 / self.cell_s if self.cell_s else 0.0

    def measured(self, cells: int, seconds: float) -> "ReloadSpeed":
        if not cells or seconds <= 0.0:
            return self
        latest = seconds / cells
        return ReloadSpeed(latest if self.cell_s is None else self.cell_s + _RELOAD_WEIGHT * (latest - self.cell_s))


class Reloads:
    """Cells that running sequences reload from the host tier instead of computing them: pins there, by holding.

    tokens     |<-- aliased on the device -->|<-- brought back -->|<-- computed -->|
               0                          n_cached              reach            length

    Cells are reloaded into the sequence's own pages: for the cache, a load is a prefill chunk without a forward.
    Without a `host` nothing is found.
    """

    def __init__(self, host: HostTier | None) -> None:
        self._host = host
        self._pins: dict[Holding, Pin] = {}
        self.speed = ReloadSpeed()

    def __len__(self) -> int:
        return len(self._pins)

    def begin(self, holding: Holding, tokens: TokenIds) -> int:
        """Tokens of a new holding that the host has; 0 if that is not worth a step.

        They are protected there until all are reloaded or the holding ends.
        """
        if self._host is None or holding.scope is None:
            return 0
        try:
            pin = self._host.pin(holding.scope, tokens[:-1])
            if pin.length >= holding.n_cached + 2 * holding.page_size:
                self._pins[holding] = pin
                return pin.length
            self._host.unpin(pin)
        except Exception:
            log.exception("the host tier is emptied: its books broke off")
            self.lose()
        return 0

    def reach(self, holding: Holding) -> int:
        """Tokens up to which this holding is to be reloaded; 0: none, or no longer."""
        pin = self._pins.get(holding)
        return pin.length if pin is not None and self._host is not None and self._host.protects(pin) else 0

    def load(self, holding: Holding, start: int, end: int) -> PageMoves:
        """The copies that reload cells [start, end), within `reach`, into own pages that the holding already has.

        The page of `start` is copied whole: the host has its cells before `start` as well.
        """
        assert self._host is not None
        slots = slice(start // holding.page_size, -(-end // holding.page_size))
        return PageMoves(holding.pages[slots].copy(), self._host.pages(self._pins[holding])[slots])

    def load_checkpoint(self, holding: Holding, into: PageIds) -> PageMoves:
        """The copies that reload the checkpoint at `reach` into the sequence's own slot or window pages."""
        assert self._host is not None
        return PageMoves(into, self._host.checkpoint(self._pins[holding]))

    def loaded(self, holding: Holding, end: int) -> None:
        """The cells up to `end` were reloaded."""
        if end >= self.reach(holding):
            self.end(holding)

    def end(self, holding: Holding) -> None:
        """Reload nothing more: all is there, or the holding ends."""
        pin = self._pins.pop(holding, None)
        if pin is not None and self._host is not None:
            self._host.unpin(pin)

    def saves(self) -> PageMoves:
        """The copies of cells evicted since the last call. The step that is being planned has to begin with them."""
        return self._host.saves() if self._host is not None else NO_MOVES

    def checkpoint_saves(self) -> PageMoves:
        """The copies of evicted state slots, or window pages, since the last call."""
        return self._host.checkpoint_saves() if self._host is not None else NO_MOVES

    def lose(self) -> None:
        """Copies between the tiers failed: forget everything in host memory."""
        if self._host is not None:
            self._host.clear()


@dataclass(frozen=True, slots=True)
class _SharedPrefix:
    """`tokens` are those that all prompts with a digest share, and one more: a cache never finds a last token.

    `ends`: two prompts were seen that differ after these tokens. Before that, `tokens` are a whole prompt.
    """

    scope: str
    tokens: TokenIds
    ends: bool = False

    def shared_with(self, tokens: TokenIds) -> "_SharedPrefix":
        """The prefix that it shares with another prompt."""
        n = common_prefix(self.tokens, tokens)
        return _SharedPrefix(self.scope, self.tokens[: n + 1], self.ends or n < min(len(self.tokens), len(tokens)))


class PrefixReport:
    """The cached prefixes that a replica reports to routers, by digest.

    A router sees messages and no tokens. With a program's first turn it sends a digest of the part that other programs
    may share: tools and system messages. The tokens of a digest are those that all prompts with it begin with.

    `held`: cached tokens by digest; 0: some, of a prefix whose end is not known yet. Other threads may read it: it is
    replaced, never changed.
    """

    def __init__(self, most: int = _REPORTED) -> None:
        self._most = most
        self._known: OrderedDict[str, _SharedPrefix] = OrderedDict()
        self._looked = float("-inf")
        self._skipped = False
        self.held: Mapping[str, int] = {}

    @property
    def due(self) -> float | None:
        """When the report has to be made anew though no step runs; None: nothing has changed."""
        return self._looked + REPORT_S if self._skipped and self._known else None

    def seen(self, scope: str, digest: str, tokens: TokenIds) -> None:
        """A prompt in this cache scope begins with the prefix of this digest."""
        known = self._known.pop(digest, None)
        same = known is not None and known.scope == scope
        self._known[digest] = known.shared_with(tokens) if known is not None and same else _SharedPrefix(scope, tokens)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def look(self, cache: KVCache, now: float) -> None:
        """Make the report anew if the last one is older than `REPORT_S`."""
        self._skipped = now - self._looked < REPORT_S
        if self._skipped:
            return
        self._looked = now
        held: dict[str, int] = {}
        for digest, each in self._known.items():
            n = cache.peek(each.scope, each.tokens)
            if n and n >= _WHOLE * (len(each.tokens) - 1):
                held[digest] = n if each.ends else 0
        self.held = held
