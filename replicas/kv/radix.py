"""The radix tree over cached tokens: token-granular, edges compressed, one root per cache scope.

It finds prefixes, and splits, adds, leases and evicts nodes in the order of eviction. Sequences and their rows are in
`cache`; checkpoints, which a node may have at its end, in `states`.

Each holder of a path has a *lease* on it, and each node counts its own leases and those below. So it is known without
a search whether a node may be evicted, and how many pages are evictable. A walk compares whole edges: about 0.4 us a
node, plus reading the tokens once on each side: 131,072 tokens take 8 us in a core's cache, 23 us from memory.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.replicas.kv.pages import NO_PAGES, PageIds, PagePool, TenantPages
from holdfast.replicas.kv.tags import AHEAD, OTHER, RELEASED, SYSTEM, Label, Labels
from holdfast.replicas.types import NO_TOKENS, CellLimits, TokenIds, common_prefix, record, tenant_of

_GROWN = 512  # tokens up to which a leaf grows in place: growing copies it
_EMPTY_ROOTS = 64  # scopes without cells that are remembered, beyond as many as there are nodes
_SLACK = 64  # entries of nodes in use, or gone, that may stay in a heap of any size


@dataclass(slots=True, eq=False)
class Node:
    """Tokens at absolute positions [start, end), below the parent that ends at `start`. Data only.

    `pages[i]` is the page of page slot `start // page_size + i`; together they cover [start, end):

        page slot   |    0    |    1    |    2    |    3    |
        parent      |--------------|                          pages for slots 0 1
        node                       |-------------------|      pages for slots 1 2 3

    If `start` lies inside a page, the first page also holds the path's cells before `start` in that slot, so the
    deeper node's page counts for the slot. It is the parent's last page, or a copy that a writer continued. No page of
    a node is written again.

    `tokens` is a view of `raw`, the node's own copy. A walk compares `raw`: `bytes` are compared at the speed of
    memory, without a temporary.
    """

    tokens: TokenIds
    start: int
    pages: PageIds
    owned: int  # pages counted for this node: all, minus the first if the parent refers to it as well
    parent: Node | None = field(default=None, repr=False)
    tenant: str = ""
    alias: bool = False  # its pages belong to a shared preamble: none is counted for it
    touched: float = 0.0
    tag: str = ""
    priority: int = 0  # tier of eviction: lower goes first
    lasts: float = math.inf  # seconds after its last use for which a tier above 0 counts
    by: str = ""  # the program that computed it; "": none, or others have used it since
    leases: int = 0  # holders of this node or one below it
    soft: int = 0  # of these, soft pins
    checkpoint: PageIds = field(default_factory=lambda: NO_PAGES, repr=False)  # at its end, if one is kept (`states`)
    children: dict[int, Node] = field(default_factory=dict, repr=False)  # by first token
    raw: bytes = field(init=False, repr=False)  # begins with the bytes of `tokens`; see `cut`

    def __post_init__(self) -> None:
        self.put(self.tokens)

    def put(self, tokens: TokenIds) -> None:
        """Replace its tokens by a read-only copy of these."""
        self.raw = tokens.tobytes()
        self.tokens = np.frombuffer(self.raw, tokens.dtype)

    def cut(self, n: int) -> None:
        """Keep the first `n` tokens, copied only once less than half is left; see `_head`."""
        kept = self.tokens[:n]
        if 2 * kept.nbytes > len(self.raw):
            self.tokens = kept
        else:
            self.put(kept)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def root(self) -> Node:
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def path(self) -> list[Node]:
        """The nodes from below the root down to this one."""
        path, node = [], self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def path_tokens(self) -> TokenIds:
        """All tokens from the root to `end`; do not change them."""
        parts = [node.tokens for node in self.path()]
        return parts[0] if len(parts) == 1 else np.concatenate((NO_TOKENS, *parts))

    def owned_before(self, at: int, page_size: int) -> int:
        """Pages counted for the part before the absolute position `at`, which is past `start`."""
        if self.alias:
            return 0
        shared_above = len(self.pages) - self.owned
        return -(-at // page_size) - self.start // page_size - shared_above


@record
class Prefix:
    """The longest cached prefix of some tokens: `length` tokens, which end at the end of `node` or inside its edge.

    Where sequences go on from checkpoints alone, a prefix to continue ends where `checkpoint` does.
    """

    node: Node
    length: int
    checkpoint: Node | None = None


@dataclass(slots=True, eq=False)
class Pin:
    """Protects `length` cached tokens from eviction until it is given back. It owns no pages.

    A `soft` pin may be dropped when others need the cells. Cells that soft pins alone protect are counted apart.
    """

    node: Node = field(repr=False)  # leased; ends at `length`
    length: int
    soft: bool = False
    checkpoint: Node | None = None  # the deepest one that it protects


class RadixTree:
    """Trees of all scopes, over pages of one pool.

    `pages` counts the pages that any node refers to, `evictable` those of nodes without leases. Pages of soft pins are
    counted as the pins come and go, each page once:

        soft   = 0           none of a node's pages is counted
        leases > soft > 0    protected by soft pins and others:  `soft_pages`, `soft_pages_of` its tenant
        leases = soft > 0    protected by soft pins alone:       `soft_only` as well

    A node with a soft pin gets and loses no pages. It can be split; then both halves have the pin.

    `share`: the part of all pages that nodes without leases may have in tiers above 0. `evicted`: cells by tag, added
    to the given counts.
    """

    def __init__(
        self,
        pool: PagePool,
        share: float = 0.5,
        evicted: dict[str, int] | None = None,
    ) -> None:
        self.roots: dict[str, Node] = {}
        self.queue = EvictionQueue(int(pool.total * share))
        self.tenants = TenantPages(pool.total)
        self.nodes = 0  # without roots
        self.pages = 0
        self.evictable = 0
        self.soft_pages = 0
        self.soft_pages_of: dict[str, int] = {}
        self.soft_only = 0
        self._pool = pool
        self._evicted = {} if evicted is None else evicted
        self.lost: Callable[[Node], None] = lambda node: None  # called before a node is cut or removed

    def root(self, scope: str) -> Node:
        """The root of `scope`, made on first use. It has no tokens, is never evicted, and its tag is the scope."""
        root = self.roots.get(scope)
        if root is None:
            if len(self.roots) > 2 * self.nodes + _EMPTY_ROOTS:  # most of them have been emptied since
                self.roots = {name: each for name, each in self.roots.items() if each.children or each.leases}
            root = self.roots[scope] = Node(NO_TOKENS, 0, NO_PAGES, owned=0, tenant=tenant_of(scope), tag=scope)
        return root

    def walk(self, node: Node, tokens: TokenIds) -> Prefix:
        """The longest prefix of `tokens` (contiguous) in the tree; the path to `node` is known to be one.

        Changes nothing.
        """
        length, n = node.end, len(tokens)
        while length < n:
            child = node.children.get(tokens.item(length))
            if child is None:
                break
            end = child.end
            part = tokens[length:end]
            if not child.raw.startswith(part.data) and (common := common_prefix(child.tokens, part)) < len(part):
                return Prefix(child, length + common)
            if end > n:
                return Prefix(child, n)
            node, length = child, end
        return Prefix(node, length)

    def node_at(self, prefix: Prefix) -> Node:
        """A node that ends exactly where `prefix` does, split if needed. The caller leases it, or a node below."""
        return prefix.node if prefix.node.end == prefix.length else self._split(prefix.node, prefix.length)

    def add(
        self, parent: Node, tokens: TokenIds, pages: PageIds, label: Label, held: Node | None = None, by: str = ""
    ) -> Node:
        """A leaf with `tokens` below `parent`, which takes `pages` over from their owner. The caller leases it.

        `held`: the node that the caller leases, if any. A short leaf that nobody else holds grows in place, so that a
        history that comes in small pieces does not become a long path. `by`: the program that computed the tokens.
        """
        if parent is held and self._may_grow(parent, len(tokens), label):
            parent.put(np.concatenate((parent.tokens, tokens)))
            parent.pages = np.concatenate((parent.pages, pages))
            parent.owned += len(pages)
            self.pages += len(pages)
            return parent
        others = parent.leases - (1 if parent is held else 0)
        leaf = Node(tokens, parent.end, pages.copy(), len(pages), parent, parent.tenant, tag=label.tag, by=by)
        leaf.priority, leaf.lasts = 0 if label.learns else label.priority, label.lasts
        if parent.end % self._pool.page_size and not others:
            self._replace_last_page(parent, leaf)
        parent.children[int(tokens[0])] = leaf
        self.nodes += 1
        self.pages += leaf.owned
        self._evictable(leaf.tenant, leaf.owned)
        return leaf

    def alias(self, prefix: Prefix, tokens: TokenIds, pages: PageIds) -> Node:
        """A leaf with the rest of `tokens` below `prefix`, over pages of another scope, which get one more owner.

        `pages` are those of all `tokens`, by page slot; the tokens fill the last one. The caller leases the leaf.
        """
        parent = self.node_at(prefix)
        mine = pages[parent.end // self._pool.page_size :].copy()
        self._pool.retain(mine)
        leaf = Node(tokens[parent.end :], parent.end, mine, 0, parent, parent.tenant, alias=True, tag=SYSTEM)
        parent.children[int(leaf.tokens[0])] = leaf
        self.nodes += 1
        return leaf

    def lease(self, node: Node, now: float, held: Node | None = None) -> None:
        """Protect the path to `node` from eviction and touch it.

        `held`: a node on that path whose lease the caller has; that lease moves down to `node`.
        """
        step: Node | None = node
        protected = 0
        while step is not None and step is not held:
            step.leases += 1
            if step.leases == 1:
                protected += step.owned
                self.queue.discard(step)
            elif step.leases == step.soft + 1:
                self.soft_only -= step.owned
            step = step.parent
        self._evictable(node.tenant, -protected)
        self.queue.now = now
        step = node
        while step is not None:
            step.touched = now
            step = step.parent

    def lease_at(self, prefix: Prefix, now: float) -> Node:
        """Lease exactly `prefix`. Returns the node that ends there."""
        node = self.node_at(prefix)
        self.lease(node, now)
        return node

    def release(self, node: Node) -> None:
        """Give one lease on the path to `node` back."""
        released, step = 0, node
        while step.parent is not None:
            step.leases -= 1
            if step.leases == 0:
                released += step.owned
                self.queue.append(step)
            elif step.leases == step.soft:
                self.soft_only += step.owned
            step = step.parent
        step.leases -= 1
        self._evictable(node.tenant, released)

    def pin_soft(self, node: Node) -> None:
        """Turn the caller's lease on the path to `node` into a soft pin's."""
        gained, step = 0, node
        while step.parent is not None:
            step.soft += 1
            if step.soft == 1:
                gained += step.owned
            if step.soft == step.leases:
                self.soft_only += step.owned
            step = step.parent
        _count_soft(self, gained, step.tenant)

    def unpin_soft(self, node: Node) -> None:
        """Turn a soft pin's lease on the path to `node` into an ordinary one, to be given back."""
        lost, step = 0, node
        while step.parent is not None:
            if step.soft == step.leases:
                self.soft_only -= step.owned
            step.soft -= 1
            if step.soft == 0:
                lost += step.owned
            step = step.parent
        _count_soft(self, -lost, step.tenant)

    def fill(self, row: PageIds, node: Node) -> None:
        """Write the pages of the path to `node` into `row`, each at its page slot."""
        path, size = [], self._pool.page_size
        while node.parent is not None:
            path.append(node)
            node = node.parent
        for step in reversed(path):  # top down: a deeper node's page stands for a slot they share
            slot, pages = step.start // size, step.pages
            row[slot : slot + len(pages)] = pages

    def evict(
        self, n: int, leaving: Callable[[Node], None] | None = None, to: str | None = None, *, own: bool = False
    ) -> int | None:
        """Evict up to `n` pages from the end of the leaf that is next in order; None if nothing may be evicted.

        `to`: the tenant that needs them, so that floors of others stay; `own`: only its own pages.

            leaf     |---- stays, and is next in order ----|--- n pages ---|

        A leaf with fewer pages is evicted whole. Returns how many pages became free: 0 if the leaf had only half of a
        page cut in two. `leaving` is called with the leaf before it is cut.
        """
        lanes = None
        if to is not None and self.tenants.any:
            lanes = (to,) if own else (None, *self.tenants.spared(to))
        leaf = self.queue.head(lanes)
        if leaf is None or leaf.parent is None:
            return None
        if lanes is not None and leaf.tenant != to:
            n = min(n, max(1, self.tenants.spare(leaf.tenant)))
        if leaving is not None and not leaf.alias:
            leaving(leaf)
        if n < leaf.owned:
            gone = self._shorten(leaf, n)
        else:
            gone = leaf.pages
            self._detach(leaf, leaf.parent)
        freed = self._pool.release(gone)
        self.tenants.took(leaf.tenant, 0 if leaf.alias else -freed)
        tag = leaf.tag or OTHER
        self._evicted[tag] = self._evicted.get(tag, 0) + freed * self._pool.page_size
        return freed

    def take_last_page(self, prefix: Prefix) -> tuple[Node, PageIds] | None:
        """Take the last, partly filled page of `prefix` out of the tree, for a writer that continues it.

        Returns the node that now ends the path, and the page, owned by the caller alone. Returns None and changes
        nothing if someone else holds, extends or refers to the page: the caller must copy its cells.
        """
        node, size = prefix.node, self._pool.page_size
        if prefix.length % size == 0 or node.end != prefix.length or node.parent is None:
            return None
        if node.children or node.leases:
            return None
        if self._pool.owners[node.pages[-1]] != 1:
            return None
        start = prefix.length - prefix.length % size
        if node.start < start:
            self._split(node, start)
        parent = node.parent
        self._detach(node, parent)
        return parent, node.pages

    def _detach(self, leaf: Node, parent: Node) -> None:
        """Remove a leaf without leases; its pages keep their owner."""
        self.queue.discard(leaf)
        self.lost(leaf)
        del parent.children[int(leaf.tokens[0])]
        if not parent.children and parent.leases == 0 and parent.parent is not None:
            self.queue.lost_last_child(parent)
        self.nodes -= 1
        self.pages -= leaf.owned
        self._evictable(leaf.tenant, -leaf.owned)

    def limit(self, tenant: str, limits: CellLimits, now: float) -> None:
        """Set a tenant's limits, and forget those of tenants that sent no request for long."""
        for each in (tenant, *self.tenants.forgotten(now, besides=tenant)):
            apart = self.tenants.limit(each, limits if each == tenant else CellLimits(), now)
            if apart is not None:
                self.queue.set_apart(each, apart=apart)

    def _evictable(self, tenant: str, pages: int) -> None:
        self.evictable += pages
        self.tenants.evictable_changed(tenant, pages)

    def _shorten(self, leaf: Node, n: int) -> PageIds:
        """Cut `n` of the owned pages, but not all, from the end of a leaf without leases; they keep their owner."""
        self.lost(leaf)
        size, kept = self._pool.page_size, len(leaf.pages) - n
        gone = leaf.pages[kept:]
        leaf.cut((leaf.start // size + kept) * size - leaf.start)
        leaf.pages = _head(leaf.pages, kept)
        leaf.owned -= n
        self.pages -= n
        self._evictable(leaf.tenant, -n)
        self.queue.recount(leaf)
        return gone

    def _replace_last_page(self, parent: Node, leaf: Node) -> None:
        """Let `parent` refer to the first page of `leaf`, which has all cells of the parent's last page and more.

        Otherwise a conversation would keep one page twice at every turn. Done only if no other lease may copy from the
        old page and no other owner refers to it.
        """
        old, new = parent.pages[-1:].copy(), leaf.pages[:1]
        if self._pool.owners[old[0]] == 1:
            parent.pages[-1:] = new
            self._pool.retain(new)
            self.tenants.took(parent.tenant, -self._pool.release(old))
            leaf.owned -= 1

    def _may_grow(self, leaf: Node, more: int, label: Label) -> bool:
        """Whether a leased leaf may grow in place: it has one holder, ends with a full page, and is short enough."""
        return (
            leaf.parent is not None
            and not leaf.alias
            and not len(leaf.checkpoint)
            and not leaf.children
            and leaf.leases == 1
            and leaf.end % self._pool.page_size == 0
            and len(leaf.tokens) + more <= _GROWN
            and not label.learns
            and (leaf.priority, leaf.lasts) == (label.priority, label.lasts)
        )

    def _split(self, node: Node, at: int) -> Node:
        """Cut the edge of `node` at absolute position `at`; returns the new upper half.

        `node` stays the lower half, so its leases protect what they did. Both halves refer to a page cut in two; it is
        counted for the upper half, which is evicted last.
        """
        if node.parent is None:
            raise ValueError("a root has no edge to cut")
        size, first = self._pool.page_size, node.start // self._pool.page_size
        cut = at - node.start
        lower = node.pages[at // size - first :].copy()
        upper = Node(
            node.tokens[:cut], node.start, node.pages[: self._pool.pages_for(at) - first].copy(), 0, node.parent
        )
        if at % size:
            self._pool.retain(lower[:1])
        upper.owned = node.owned_before(at, size)
        upper.touched, upper.tag, upper.by = node.touched, node.tag, node.by
        upper.tenant, upper.alias = node.tenant, node.alias
        upper.priority, upper.lasts = node.priority, node.lasts
        upper.leases, upper.soft = node.leases, node.soft
        node.parent.children[int(node.tokens[0])] = upper
        upper.children[int(node.tokens[cut])] = node
        node.put(node.tokens[cut:])
        node.start, node.pages, node.parent = at, lower, upper
        node.owned = 0 if node.alias else len(lower) - (1 if at % size else 0)
        self.nodes += 1
        self.queue.recount(node)
        return upper


def _count_soft(tree: RadixTree, pages: int, tenant: str) -> None:
    tree.soft_pages += pages
    left = tree.soft_pages_of.pop(tenant, 0) + pages
    if left:
        tree.soft_pages_of[tenant] = left


def relabel(tree: RadixTree, node: Node, labels: Labels, who: str) -> None:
    """`who` uses the path to `node`, on which it has a lease, with these labels: the latest use sets the priority.

    A label of priority 0 changes nothing, except for tokens that were computed ahead. A label that `learns` counts
    once a program uses tokens that another one computed; these are shared from then on. Where a label with another
    priority begins within a node, the node is split.
    """
    size, path = tree._pool.page_size, node.path()
    for end, (before, after) in zip(labels.ends, pairwise((*labels.parts, labels.rest)), strict=True):
        at = end - end % size
        if before.alike(after) or not any(each.priority and not each.learns for each in (before, after)):
            continue
        cut = next((step for step in path if step.start < at < step.end), None)
        if cut is not None:
            path.insert(path.index(cut), tree._split(cut, at))
    for step in path:
        label = labels.at(step.start, size)
        if label.learns:
            if step.by == who:
                continue
            step.by = ""
        if label.priority or step.tag == AHEAD:
            step.tag, step.priority, step.lasts = label.tag, label.priority, label.lasts


@dataclass(slots=True)
class _Above:
    """A tenant's nodes without leases in tiers above 0, by tier the oldest use first."""

    tiers: dict[int, OrderedDict[Node, int]] = field(default_factory=dict)  # with the pages that are counted
    pages: int = 0


_Entry: TypeAlias = tuple[int, int, Node]
"""Priority and number of the use of a leaf, which order it, and the leaf."""


class EvictionQueue:
    """Nodes without leases in the order of eviction: lower priority first, then oldest use. Only leaves are evicted.

    A use ends when the last lease on a node is released. Each use has a number; nodes are released from a leaf towards
    the root, so a node comes after its descendants.

    At most `most` pages are in tiers above 0, shared evenly by the tenants that have pages there. Beyond its share a
    tenant's nodes lapse, lowest tier and oldest use first: they get priority 0 and keep their age. A node also lapses
    once its label has lasted. `now` is the time of the latest use of any node.

    Tenants with limits have lanes of their own, so that their nodes can be skipped or evicted alone. All others share
    the lane named None. A lane is a heap of leaves; outdated entries are dropped when they reach the top.
    """

    def __init__(self, most: int) -> None:
        self.now = 0.0
        self.most = most
        self._uses: dict[Node, int] = {}  # by node without leases, the number of its last use
        self._lanes: dict[str | None, list[_Entry]] = {None: []}
        self._above: dict[str, _Above] = {}  # by tenant
        self._raised: set[Node] = set()  # the nodes in there
        self.raised = 0  # pages in tiers above 0; other threads read this count
        self._until: list[tuple[float, int, Node]] = []  # a heap of the times at which labels have lasted
        self._numbers = count()

    def __contains__(self, node: Node) -> bool:
        return node in self._uses

    def set_apart(self, tenant: str, *, apart: bool) -> None:
        """Give a tenant's nodes a lane of their own, or take it away."""
        if apart:
            self._lanes[tenant] = []
        else:
            del self._lanes[tenant]
        self._rebuild()

    def append(self, node: Node) -> None:
        """Append `node`, which was just used, behind all of its descendants that have no leases."""
        self._uses[node] = next(self._numbers)
        if not node.children:
            self._push(node)
        if node.priority > 0:
            self._raise(node)

    def discard(self, node: Node) -> None:
        """Remove `node`, which is in use or no longer exists. It may be missing here."""
        self._uses.pop(node, None)
        if node in self._raised:
            self._lower(node)

    def demote(self, node: Node) -> None:
        """No turn will use `node` again, and it has no leases: evict it first, after its descendants."""
        self.discard(node)
        node.priority, node.lasts = RELEASED, math.inf
        self.append(node)

    def recount(self, node: Node) -> None:
        """The number of pages that `node` owns has changed."""
        if node in self._raised:
            above = self._above[node.tenant]
            tier = above.tiers[node.priority]
            self._count(above, node.owned - tier[node])
            tier[node] = node.owned

    def head(self, lanes: Iterable[str | None] | None = None) -> Node | None:
        """The leaf to evict next, which stays in the queue; None: there is none. `lanes`: only these; None: all."""
        while self._until and self._until[0][0] <= self.now:
            _, _, node = heapq.heappop(self._until)
            if node in self._raised and node.touched + node.lasts <= self.now:
                self._lapse(node)
        names = self._lanes if lanes is None else lanes
        heads = [head for name in names if (head := self._head(self._lanes.get(name))) is not None]
        return min(heads)[2] if heads else None

    def lost_last_child(self, node: Node) -> None:
        """`node` is a leaf now."""
        if node in self._uses:
            self._push(node)

    def _lane(self, node: Node) -> list[_Entry]:
        lane = self._lanes.get(node.tenant)
        return self._lanes[None] if lane is None else lane

    def _push(self, node: Node) -> None:
        lane = self._lane(node)
        if len(lane) > 2 * len(self._uses) + _SLACK:  # most entries are outdated
            self._rebuild()
        else:
            heapq.heappush(lane, (node.priority, self._uses[node], node))

    def _head(self, lane: list[_Entry] | None) -> _Entry | None:
        """The first valid entry of a lane. Drops the outdated entries before it."""
        while lane:
            priority, use, node = lane[0]
            if self._uses.get(node) == use and node.priority == priority and not node.children:
                return lane[0]
            heapq.heappop(lane)
        return None

    def _rebuild(self) -> None:
        """Rebuild the lanes from the valid entries."""
        for lane in self._lanes.values():
            lane.clear()
        for node, use in self._uses.items():
            if not node.children:
                self._lane(node).append((node.priority, use, node))
        for lane in self._lanes.values():
            heapq.heapify(lane)

    def _raise(self, node: Node) -> None:
        tenant = node.tenant
        new = tenant not in self._above
        above = self._above.setdefault(tenant, _Above())
        above.tiers.setdefault(node.priority, OrderedDict())[node] = node.owned
        self._count(above, node.owned)
        self._raised.add(node)
        if node.lasts < math.inf:
            heapq.heappush(self._until, (node.touched + node.lasts, next(self._numbers), node))
            if len(self._until) > 2 * len(self._raised) + _SLACK:  # most nodes were used again, or have gone
                live = (each for each in self._raised if each.lasts < math.inf)
                self._until = [(each.touched + each.lasts, next(self._numbers), each) for each in live]
                heapq.heapify(self._until)
        for each in list(self._above) if new else (tenant,):
            self._keep_within_share(each)

    def _count(self, above: _Above, pages: int) -> None:
        above.pages += pages
        self.raised += pages

    def _keep_within_share(self, tenant: str) -> None:
        while (above := self._above.get(tenant)) is not None and above.pages > self.most // len(self._above):
            self._lapse(next(iter(above.tiers[min(above.tiers)])))

    def _lapse(self, node: Node) -> None:
        """Set its priority to 0. Its age stays."""
        self._lower(node)
        node.priority, node.lasts = 0, math.inf
        if not node.children:
            self._push(node)

    def _lower(self, node: Node) -> None:
        self._raised.discard(node)
        tenant = node.tenant
        above = self._above[tenant]
        tier = above.tiers[node.priority]
        self._count(above, -tier.pop(node))
        if not tier:
            del above.tiers[node.priority]
        if not above.tiers:
            del self._above[tenant]


def _head(ids: npt.NDArray[np.int32], n: int) -> npt.NDArray[np.int32]:
    """The first `n` of `ids`, copied only once less than half is left of the memory they are in.

    So cutting piece by piece costs one copy in all, and the memory that was cut off is freed.
    """
    memory: Any = ids if ids.base is None else ids.base
    return ids[:n] if 2 * n > len(memory) else ids[:n].copy()
