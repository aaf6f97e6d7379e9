"""The radix tree over cached tokens: token-granular, edges compressed, one root per cache scope.

Here: finding a prefix; splitting, adding, leasing and evicting nodes, and in which order they are evicted. Not here:
sequences and their rows (`cache`).

Each holder of a path has a *lease* on it, and each node counts those of its holders and of the nodes below. So whether
a node may go, and how many pages could be had, is known without a search. A walk compares whole edges: about 0.5 us a
node plus a fraction of a nanosecond a token.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.replicas.kv.pages import NO_PAGES, PageIds, PagePool
from holdfast.replicas.types import NO_TOKENS, TokenIds, common_prefix, record

_LONG = 8192  # tokens from which on comparing them as arrays is faster than as bytes: 20 and 1,000 us for 131,072
_GROWN = 512  # tokens up to which a leaf grows in place: growing copies it
_EMPTY_ROOTS = 64  # scopes without cells that are remembered, beyond as many as there are nodes


@dataclass(frozen=True, slots=True)
class Label:
    """What a holder says of the tokens it saves: `tag` is for people and policies, `priority` is the eviction tier."""

    tag: str = ""
    priority: int = 0


PLAIN = Label()


@dataclass(slots=True, eq=False)
class Node:
    """Tokens at absolute positions [start, end), below the parent that ends at `start`. Data only.

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
    soft: int = 0  # of these, soft pins
    children: dict[int, "Node"] = field(default_factory=dict, repr=False)  # by first token

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def root(self) -> "Node":
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def path(self) -> list["Node"]:
        """The nodes from below the root down to this one."""
        path, node = [], self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def path_tokens(self) -> TokenIds:
        """All tokens from the root to `end`. Not to be changed."""
        parts = [node.tokens for node in self.path()]
        return parts[0] if len(parts) == 1 else np.concatenate((NO_TOKENS, *parts))

    def owned_before(self, at: int, page_size: int) -> int:
        """Pages counted for the part before the absolute position `at`, which is past `start`."""
        shared_above = len(self.pages) - self.owned
        return -(-at // page_size) - self.start // page_size - shared_above


@record
class Prefix:
    """The longest known prefix of some tokens: its `length` tokens end in `node`, at its end or inside its edge."""

    node: Node
    length: int


def tenant_of(scope: str) -> str:
    """A scope is a tenant's, or a part of it: what stands behind a NUL names the part."""
    return scope.partition("\0")[0]


class RadixTree:
    """Trees of all scopes, over pages of one pool.

    `pages` counts the pages that any node refers to, `evictable` those that would come free if every node
    without leases went. What soft pins keep is counted as they come and go, a page that several of them keep once:

        soft   = 0           none of a node's pages is counted
        leases > soft > 0    kept by soft pins, and by somebody else:  `soft_pages`, `soft_pages_of` its tenant
        leases = soft > 0    kept by soft pins alone:                  `soft_only` as well

    No page comes to a node with a soft pin, and none goes: it is only cut in two, and both halves have the pin then.
    """

    def __init__(self, pool: PagePool) -> None:
        self.roots: dict[str, Node] = {}
        self.queue = EvictionQueue()
        self.nodes = 0  # without roots
        self.pages = 0
        self.evictable = 0
        self.soft_pages = 0
        self.soft_pages_of: dict[str, int] = {}
        self.soft_only = 0
        self._pool = pool

    def root(self, scope: str) -> Node:
        """The root of `scope`, made on first use. It holds no tokens, is never evicted, and its tag is the scope."""
        root = self.roots.get(scope)
        if root is None:
            if len(self.roots) > 2 * self.nodes + _EMPTY_ROOTS:  # most of them have been emptied since
                self.roots = {name: each for name, each in self.roots.items() if each.children or each.leases}
            root = self.roots[scope] = Node(NO_TOKENS, 0, NO_PAGES, owned=0, tag=scope)
        return root

    def walk(self, node: Node, tokens: TokenIds) -> Prefix:
        """The longest prefix of `tokens` in the tree, given that the path to `node` is one. Changes nothing."""
        length, n = node.end, len(tokens)
        while length < n:
            child = node.children.get(tokens.item(length))
            if child is None:
                break
            edge, end = child.tokens, child.end
            part = tokens[length:end]
            differs = len(edge) > _LONG or edge.tobytes() != part.tobytes()  # or may do so
            if differs and (common := common_prefix(edge, part)) < len(edge):
                return Prefix(child, length + common)
            node, length = child, end
        return Prefix(node, length)

    def node_at(self, prefix: Prefix) -> Node:
        """A node that ends exactly where `prefix` does, by a split where needed. The caller leases it, or one below."""
        return prefix.node if prefix.node.end == prefix.length else self._split(prefix.node, prefix.length)

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
                self.queue.discard(step)
            elif step.leases == step.soft + 1:
                self.soft_only -= step.owned
            step = step.parent
        step = node
        while step is not None:
            step.touched = now
            step = step.parent

    def lease_at(self, prefix: Prefix, now: float) -> Node:
        """Lease exactly `prefix`; returns the node that ends there."""
        node = self.node_at(prefix)
        self.lease(node, now)
        return node

    def release(self, node: Node) -> None:
        """Give one lease on the path to `node` back."""
        step = node
        while step.parent is not None:
            step.leases -= 1
            if step.leases == 0:
                self.evictable += step.owned
                self.queue.append(step)
            elif step.leases == step.soft:
                self.soft_only += step.owned
            step = step.parent
        step.leases -= 1

    def soften(self, node: Node) -> None:
        """The lease that the caller has on the path to `node` is a soft pin's from now on."""
        gained, step = 0, node
        while step.parent is not None:
            step.soft += 1
            if step.soft == 1:
                gained += step.owned
            if step.soft == step.leases:
                self.soft_only += step.owned
            step = step.parent
        self._count_soft(gained, tenant_of(step.tag))

    def harden(self, node: Node) -> None:
        """The lease of a soft pin on the path to `node` is one like others again, to be given back."""
        lost, step = 0, node
        while step.parent is not None:
            if step.soft == step.leases:
                self.soft_only -= step.owned
            step.soft -= 1
            if step.soft == 0:
                lost += step.owned
            step = step.parent
        self._count_soft(-lost, tenant_of(step.tag))

    def fill(self, row: PageIds, node: Node) -> None:
        """Write the pages of the path to `node` into `row`, each at its page slot."""
        path, size = [], self._pool.page_size
        while node.parent is not None:
            path.append(node)
            node = node.parent
        for step in reversed(path):  # top down: a deeper node's page stands for a slot they share
            slot, pages = step.start // size, step.pages
            row[slot : slot + len(pages)] = pages

    def evict(self, n: int, leaving: Callable[[Node], None] | None = None) -> int | None:
        """Let up to `n` pages go from the end of the leaf that is next in order; None when nothing may go.

            leaf     |---- stays, and is next in order ----|--- n pages ---|

        A leaf without that many goes whole. Returns how many pages came free: none, where all there was to go is half
        of a page cut in two. `leaving` is told of the leaf while it is whole and in its place.
        """
        leaf = self.queue.head()
        if leaf is None or leaf.parent is None:
            return None
        if leaving is not None:
            leaving(leaf)
        if n < leaf.owned:
            return self._pool.release(self._shorten(leaf, n))
        self._detach(leaf, leaf.parent)
        return self._pool.release(leaf.pages)

    def take_last_page(self, prefix: Prefix) -> tuple[Node, PageIds] | None:
        """Take the last, partly filled page of `prefix` out of the tree, for a writer that goes on from there.

        Returns the node that now ends the path, and the page with one owner, the caller. None, and nothing changed,
        where somebody else holds, extends or refers to it: then its cells have to be copied.
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
        """Take a leaf without leases out; its pages keep their owner."""
        self.queue.discard(leaf)
        del parent.children[int(leaf.tokens[0])]
        if not parent.children and parent.leases == 0 and parent.parent is not None:
            self.queue.lost_last_child(parent)
        self.nodes -= 1
        self.pages -= leaf.owned
        self.evictable -= leaf.owned

    def _shorten(self, leaf: Node, n: int) -> PageIds:
        """Cut `n` of the owned pages, but not all, off the end of a leaf without leases; they keep their owner."""
        size, kept = self._pool.page_size, len(leaf.pages) - n
        gone = leaf.pages[kept:]
        leaf.tokens = _head(leaf.tokens, (leaf.start // size + kept) * size - leaf.start)
        leaf.pages = _head(leaf.pages, kept)
        leaf.owned -= n
        self.pages -= n
        self.evictable -= n
        return gone

    def _count_soft(self, pages: int, tenant: str) -> None:
        self.soft_pages += pages
        left = self.soft_pages_of.pop(tenant, 0) + pages
        if left:
            self.soft_pages_of[tenant] = left

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
        upper.owned = node.owned_before(at, size)
        upper.touched, upper.tag, upper.priority = node.touched, node.tag, node.priority
        upper.leases, upper.soft = node.leases, node.soft
        node.parent.children[int(node.tokens[0])] = upper
        upper.children[int(node.tokens[cut])] = node
        node.tokens, node.start, node.pages, node.parent = node.tokens[cut:].copy(), at, lower, upper
        node.owned = len(lower) - (1 if at % size else 0)
        self.nodes += 1
        return upper


class EvictionQueue:
    """Nodes without leases in the order of eviction: lower priority tier first, then oldest use first, leaves only.

    A use ends when the last lease on a node is released, and releasing goes from a leaf towards the root. So within a
    tier every node stands behind all its descendants, the head of a tier is a leaf unless more valuable nodes hang from
    it, and no search is needed: every operation takes constant time, amortised.
    """

    def __init__(self) -> None:
        self._tiers: dict[int, OrderedDict[Node, None]] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._tiers.get(node.priority, ())

    def append(self, node: Node) -> None:
        """`node` was just used, after all its descendants in the queue were."""
        tier = self._tiers.setdefault(node.priority, OrderedDict())
        tier[node] = None
        tier.move_to_end(node)

    def discard(self, node: Node) -> None:
        """`node` is in use, or gone; it may have been missing here (see `head`)."""
        if (tier := self._tiers.get(node.priority)) is not None:
            tier.pop(node, None)

    def head(self) -> Node | None:
        """The leaf to evict next, which stays where it is; None when there is none.

        Inner nodes met on the way wait for descendants in a higher tier. They leave the queue, so that they are met
        only once, and `lost_last_child` brings them back.
        """
        for priority in sorted(self._tiers):
            tier = self._tiers[priority]
            while tier:
                node = next(iter(tier))
                if not node.children:
                    return node
                del tier[node]
        return None

    def lost_last_child(self, node: Node) -> None:
        """`node` is a leaf now. If `head` had passed it over it goes to the front, where it was then."""
        tier = self._tiers.setdefault(node.priority, OrderedDict())
        if node not in tier:
            tier[node] = None
            tier.move_to_end(node, last=False)


def _head(ids: npt.NDArray[np.int32], n: int) -> npt.NDArray[np.int32]:
    """The first `n` of `ids`, copied only once less than half is left of the memory they are in.

    So that cutting piece by piece costs no more than one copy in all, and what was cut off is not held on to.
    """
    memory: Any = ids if ids.base is None else ids.base
    return ids[:n] if 2 * n > len(memory) else ids[:n].copy()
