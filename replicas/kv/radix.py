"""The radix tree over cached tokens: token-granular, edges compressed, one root per cache scope.

Here: finding a prefix, splitting, adding, leasing and evicting nodes. Not here: sequences and their rows (`cache`),
the order of eviction (`order`).

Costs: a walk compares whole edges as bytes, about 0.5 us a node plus a fraction of a nanosecond a token. Leases are
counted along the path to the root, so whether a node may go, and how many pages could be had, is known without
a search.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from holdfast.replicas.kv.pages import NO_PAGES, PageIds, PagePool
from holdfast.replicas.types import TokenIds, record

# ---- A node of the radix tree: a run of tokens and the pages that hold their cells. Data only.


@dataclass(slots=True, eq=False)
class Node:
    """Tokens at absolute positions [start, end), below the parent that ends at `start`.

    `pages[i]` is the page of page slot `start // page_size + i`; together they cover [start, end):

        page slot   |    0    |    1    |    2    |    3    |
        parent      |--------------|                          pages for slots 0 1
        node                       |-------------------|      pages for slots 1 2 3

    Where `start` lies inside a page, the first page also holds the path's cells before `start` in that slot,
    so on a path the deeper node's page stands for the slot. It is either the parent's last page itself or a copy of
    it that a writer went on with. No page of a node is ever written again.
    """

    tokens: TokenIds
    start: int
    pages: PageIds
    owned: int  # pages counted for this node: all, less the first where the parent refers to it too
    parent: "Node | None" = field(default=None, repr=False)
    touched: float = 0.0
    tag: str = ""
    priority: int = 0  # tier of eviction: lower goes first
    leases: int = 0  # holders of this node or one below it
    pins: int = 0  # of these, programs between two turns (`pinned` counts them)
    children: dict[int, "Node"] = field(default_factory=dict, repr=False)  # by first token

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


# ---- The order in which tree nodes are evicted: lower priority tier first, then oldest use first, leaves only.
#
# A use ends when the last lease on a node is released, and releasing goes from a leaf towards the root. So within a
# tier
# every node stands behind all its descendants, the head of the queue is a leaf unless more valuable nodes
# hang from it, and no search is needed.


class EvictionOrder:
    """Nodes without leases, one queue a tier. Every operation takes constant time, amortised."""

    def __init__(self) -> None:
        self._tiers: dict[int, OrderedDict[Node, None]] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._tiers.get(node.priority, ())

    def append(self, node: Node) -> None:
        """`node` was just used, after all its descendants in the order were."""
        tier = self._tiers.setdefault(node.priority, OrderedDict())
        tier[node] = None
        tier.move_to_end(node)

    def discard(self, node: Node) -> None:
        """`node` is in use; it may have been missing here (see `pop`)."""
        if (tier := self._tiers.get(node.priority)) is not None:
            tier.pop(node, None)

    def pop(self) -> Node | None:
        """Take out the leaf to evict next; None when there is none.

        Inner nodes met on the way wait for descendants in a higher tier. They leave the queue as well, so that
        they are met only once, and `leaf` brings them back.
        """
        for priority in sorted(self._tiers):
            tier = self._tiers[priority]
            while tier:
                node, _ = tier.popitem(last=False)
                if not node.children:
                    return node
        return None

    def leaf(self, node: Node) -> None:
        """`node` lost its last child. If `pop` had passed it over it goes to the head, where it was then."""
        tier = self._tiers.setdefault(node.priority, OrderedDict())
        if node not in tier:
            tier[node] = None
            tier.move_to_end(node, last=False)


_GROWN = 512  # tokens up to which a leaf grows in place: a leaf is evicted whole
_SPARE_ROOTS = 64  # empty scopes that are remembered, beyond as many as there are nodes
NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Label:
    """What a holder says of the tokens it saves: `tag` is for people and policies, `priority` is the eviction tier."""

    tag: str = ""
    priority: int = 0


PLAIN = Label()


@record
class Match:
    """The longest known prefix: its first `length` tokens end in `node`, at its end or inside its edge."""

    node: Node
    length: int


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many leading tokens `a` and `b` have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def owned_to(node: Node, at: int, pool: PagePool) -> int:
    """Pages counted for the part of `node` before the absolute position `at`: those of a cut's upper half."""
    shared_above = len(node.pages) - node.owned
    return pool.pages_for(at) - node.start // pool.page_size - shared_above


class RadixTree:
    """Trees of all scopes, over pages of one pool.

    `pages` counts the pages that any node refers to, `evictable` those that would come free if every node
    without leases went, `paused` those that programs' pins alone keep from that.
    """

    def __init__(self, pool: PagePool) -> None:
        self.roots: dict[str, Node] = {}
        self.order = EvictionOrder()
        self.nodes = 0  # without roots
        self.pages = 0
        self.evictable = 0
        self.paused = 0
        self._pool = pool

    def root(self, scope: str) -> Node:
        """The root of `scope`, made on first use. It holds no tokens, is never evicted, and its tag is the scope."""
        root = self.roots.get(scope)
        if root is None:
            if len(self.roots) > 2 * self.nodes + _SPARE_ROOTS:  # most of them have been emptied since
                self.roots = {name: each for name, each in self.roots.items() if each.children or each.leases}
            root = self.roots[scope] = Node(NO_TOKENS, 0, NO_PAGES, owned=0, tag=scope)
        return root

    def walk(self, node: Node, tokens: TokenIds) -> Match:
        """The longest prefix of `tokens` in the tree, given that the path to `node` is a prefix. Changes nothing."""
        length, n = node.end, len(tokens)
        while length < n:
            child = node.children.get(tokens.item(length))
            if child is None:
                break
            edge, end = child.tokens, child.end
            part = tokens[length:end]
            if edge.tobytes() != part.tobytes() and (common := common_prefix(edge, part)) < len(edge):
                return Match(child, length + common)
            node, length = child, end
        return Match(node, length)

    def node_at(self, match: Match) -> Node:
        """A node that ends exactly where `match` does, by a split where needed. The caller leases it, or one below."""
        return match.node if match.node.end == match.length else self._split(match.node, match.length)

    def add(self, parent: Node, tokens: TokenIds, pages: PageIds, label: Label, held: Node | None = None) -> Node:
        """A leaf with `tokens` below `parent`; takes `pages` over from their one owner. The caller leases it.

        `held` is the node the caller has a lease on, if any. A short leaf that nobody else holds grows in place
        instead, so that a history which comes in small pieces does not become a long path.
        """
        if parent is held and self._may_grow(parent, len(tokens), label):
            parent.tokens = np.concatenate((parent.tokens, tokens))
            parent.pages = np.concatenate((parent.pages, pages))
            parent.owned += len(pages)
            self.pages += len(pages)
            return parent
        others = parent.leases - (1 if parent is held else 0)
        leaf = Node(tokens.copy(), parent.end, pages.copy(), len(pages), parent, tag=label.tag, priority=label.priority)
        if parent.end % self._pool.page_size and not others:
            self._replace_last_page(parent, leaf)
        parent.children[int(tokens[0])] = leaf
        self.nodes += 1
        self.pages += leaf.owned
        self.evictable += leaf.owned
        return leaf

    def lease(self, node: Node, now: float, held: Node | None = None) -> None:
        """Protect the path to `node` from eviction and touch it.

        With `held`, a node on that path whose lease the caller has, that lease moves down to `node`.
        """
        step: Node | None = node
        while step is not None and step is not held:
            step.leases += 1
            if step.leases == 1:
                self.evictable -= step.owned
                self.order.discard(step)
            elif step.leases == step.pins + 1:
                self.paused -= step.owned
            step = step.parent
        step = node
        while step is not None:
            step.touched = now
            step = step.parent

    def lease_at(self, match: Match, now: float) -> Node:
        """Lease exactly what `match` found; returns the node that ends there."""
        node = self.node_at(match)
        self.lease(node, now)
        return node

    def release(self, node: Node) -> None:
        """Give one lease on the path to `node` back."""
        step = node
        while step.parent is not None:
            step.leases -= 1
            if step.leases == 0:
                self.evictable += step.owned
                self.order.append(step)
            elif step.leases == step.pins:
                self.paused += step.owned
            step = step.parent
        step.leases -= 1

    def fill(self, row: PageIds, node: Node, above: Node) -> None:
        """Write the pages of the path from below `above` to `node` into `row`, each at its page slot."""
        path, size = [], self._pool.page_size
        while node is not above and node.parent is not None:
            path.append(node)
            node = node.parent
        for step in reversed(path):  # top down: a deeper node's page stands for a slot they share
            slot, pages = step.start // size, step.pages
            row[slot : slot + len(pages)] = pages

    def evict(self, leaving: Callable[[Node], None] | None = None) -> int | None:
        """Remove the leaf that is next in order; returns how many pages came free, None when nothing may go.

        `leaving` is told of the leaf while it is still in its place.
        """
        leaf = self.order.pop()
        if leaf is None or leaf.parent is None:
            return None
        if leaving is not None:
            leaving(leaf)
        self._detach(leaf, leaf.parent)
        return self._pool.release(leaf.pages)

    def take_last_page(self, match: Match) -> tuple[Node, PageIds] | None:
        """Take the last, partly filled page of `match` out of the tree, for a writer that goes on from there.

        Returns the node that now ends the path, and the page with one owner, the caller. None, and nothing changed,
        where somebody else holds, extends or refers to it: then its cells have to be copied.
        """
        node, size = match.node, self._pool.page_size
        if match.length % size == 0 or node.end != match.length or node.children or node.leases or node.parent is None:
            return None
        if self._pool.owners[node.pages[-1]] != 1:
            return None
        start = match.length - match.length % size
        if node.start < start:
            self._split(node, start)
        parent = node.parent
        self._detach(node, parent)
        return parent, node.pages

    def _detach(self, leaf: Node, parent: Node) -> None:
        """Take a leaf without leases out; its pages keep their owner."""
        self.order.discard(leaf)
        del parent.children[int(leaf.tokens[0])]
        if not parent.children and parent.leases == 0 and parent.parent is not None:
            self.order.leaf(parent)
        self.nodes -= 1
        self.pages -= leaf.owned
        self.evictable -= leaf.owned

    def _replace_last_page(self, parent: Node, leaf: Node) -> None:
        """Let `parent` refer to the first page of `leaf`, which holds all the cells of its own last page and more.

        So a conversation of many turns does not keep a page twice at every turn. Only where nobody else can be
        about to copy from the old page (another lease) or refers to it (another owner).
        """
        old, new = parent.pages[-1:].copy(), leaf.pages[:1]
        if self._pool.owners[old[0]] == 1:
            parent.pages[-1:] = new
            self._pool.retain(new)
            self._pool.release(old)
            leaf.owned -= 1

    def _may_grow(self, leaf: Node, more: int, label: Label) -> bool:
        """Whether a leased leaf is its holder's alone, ends with a page, and is short enough."""
        return (
            leaf.parent is not None
            and not leaf.children
            and leaf.leases == 1
            and leaf.end % self._pool.page_size == 0
            and len(leaf.tokens) + more <= _GROWN
            and (leaf.tag, leaf.priority) == (label.tag, label.priority)
        )

    def _split(self, node: Node, at: int) -> Node:
        """Cut the edge of `node` at absolute position `at`; returns the new upper half.

        `node` stays the lower half: whoever leases it still protects all that it did. A page cut in two is
        referred to by both halves and counted for the upper, which goes last.
        """
        if node.parent is None:
            raise ValueError("a root has no edge to cut")
        size, first = self._pool.page_size, node.start // self._pool.page_size
        cut = at - node.start
        lower = node.pages[at // size - first :].copy()
        upper = Node(
            node.tokens[:cut].copy(), node.start, node.pages[: self._pool.pages_for(at) - first].copy(), 0, node.parent
        )
        if at % size:
            self._pool.retain(lower[:1])
        upper.owned = owned_to(node, at, self._pool)
        upper.touched, upper.tag, upper.priority, upper.leases = node.touched, node.tag, node.priority, node.leases
        upper.pins = node.pins
        node.parent.children[int(node.tokens[0])] = upper
        upper.children[int(node.tokens[cut])] = node
        node.tokens, node.start, node.pages, node.parent = node.tokens[cut:].copy(), at, lower, upper
        node.owned = len(lower) - (1 if at % size else 0)
        self.nodes += 1
        return upper


# ---- How many pages the programs' pins keep in the tree: counted as pins come and go, so that nobody has to search.
#
#     pins    = 0          none of these pages is counted here
#     leases  > pins > 0   kept by pins, and by sequences or sessions that read them
#     leases == pins > 0   kept by pins alone: `RadixTree.paused`
#
# Pages that several pins keep are counted once. No page of a pinned node comes or goes while the pin is held: a node
# is
# only cut in two, and both halves are pinned then.


class PinnedPages:
    """Pages by scope. `Node.pins` counts the pins at a node or below it; changed here, and where a node is cut."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._pages: dict[str, int] = {}
        self.total = 0

    def of(self, scope: str) -> int:
        return self._pages.get(scope, 0)

    def add(self, scope: str, node: Node) -> None:
        """A pin at the end of `node`, which has its lease."""
        gained, step = 0, node
        while step.parent is not None:
            step.pins += 1
            if step.pins == 1:
                gained += step.owned
            if step.pins == step.leases:
                self._tree.paused += step.owned
            step = step.parent
        self._count(scope, gained)

    def remove(self, scope: str, node: Node) -> None:
        """That pin goes; its lease is given back after it."""
        lost, step = 0, node
        while step.parent is not None:
            if step.pins == step.leases:
                self._tree.paused -= step.owned
            step.pins -= 1
            if step.pins == 0:
                lost += step.owned
            step = step.parent
        self._count(scope, -lost)

    def _count(self, scope: str, pages: int) -> None:
        self.total += pages
        left = self._pages.pop(scope, 0) + pages
        if left:
            self._pages[scope] = left
