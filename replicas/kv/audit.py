"""The law of the KV books, recounted from nothing: free + in tree + own pages of holdings == total.

Every page is counted once, no page has two writers, and each counter that is kept along the way is what a recount
gives. For tests, and for an engine that has gone idle: it visits every node.
"""

from collections import Counter
from collections.abc import Collection

import numpy as np

from holdfast.replicas.kv.holding import Holding, Pin
from holdfast.replicas.kv.pages import PagePool
from holdfast.replicas.kv.radix import Node, RadixTree, tenant_of


def audit(pool: PagePool, tree: RadixTree, holdings: Collection[Holding], pins: Collection[Pin]) -> None:
    """Raise AssertionError with the first thing that does not add up."""
    nodes = [node for root in tree.roots.values() for node in _below(root)]
    in_tree = [page for node in nodes for page in node.pages.tolist()]
    written = [page for h in holdings for page in (*h.own.tolist(), *h.duplicates.tolist())]
    free = pool.free_pages.tolist()

    assert len(set(written)) == len(written), "a page has two writers"
    assert not set(written) & set(in_tree), "a page of the tree has a writer"
    assert len(set(free)) == len(free), "a page is free twice"
    assert not set(free) & (set(written) | set(in_tree)), "a free page has an owner"
    assert len(free) + len(set(in_tree)) + len(written) == pool.total, "free + in tree + own pages != total"
    owners = np.zeros(pool.total, dtype=np.int32)
    for page, count in Counter(in_tree + written).items():
        owners[page] = count
    assert np.array_equal(owners, pool.owners), "owners are miscounted"

    for node in nodes:
        _audit_node(node, pool)
    _audit_leases(tree, holdings, pins)
    idle = [node for node in nodes if node.leases == 0]
    assert tree.nodes == len(nodes)
    assert tree.pages == sum(node.owned for node in nodes) == len(set(in_tree)), "pages of the tree are miscounted"
    assert tree.evictable == sum(node.owned for node in idle), "evictable pages are miscounted"
    _audit_soft_pins(tree, nodes, pins)
    leased = {page for node in nodes if node.leases for page in node.pages.tolist()}
    assert tree.evictable == len({page for node in idle for page in node.pages.tolist()} - leased)
    raised = sum(node.owned for node in idle if node.priority > 0)
    assert tree.queue.raised == raised, "pages above the others are miscounted"
    assert raised <= tree.queue.most, "more pages stand above the others than may"
    for node in nodes:
        leaf = not node.children
        assert node.leases == 0 or node not in tree.queue, "a leased node could be evicted"
        assert node.leases > 0 or not leaf or node in tree.queue, "an idle leaf could not be evicted"


def _below(root: Node) -> list[Node]:
    found: list[Node] = []
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        found.append(node)
        todo.extend(node.children.values())
    return found


def _audit_node(node: Node, pool: PagePool) -> None:
    parent = node.parent
    assert parent is not None
    assert len(node.tokens) > 0, "a node without tokens"
    assert parent.children[int(node.tokens[0])] is node, "a node that its parent does not know"
    assert node.start == parent.end, "a gap between parent and child"
    assert len(node.pages) == pool.pages_for(node.end) - node.start // pool.page_size, "pages do not cover the tokens"
    inside = node.start % pool.page_size != 0
    shared = inside and len(parent.pages) > 0 and parent.pages[-1] == node.pages[0]
    assert node.owned == len(node.pages) - shared, "a shared page is not counted for the upper node"
    assert parent.touched >= node.touched, "a node was touched without its path"


def _audit_leases(tree: RadixTree, holdings: Collection[Holding], pins: Collection[Pin]) -> None:
    leases: Counter[Node] = Counter()
    for holding in holdings:
        assert holding.node.end == holding.n_shared, "a lease does not end where the shared cells do"
    for pin in pins:
        assert pin.node.end == pin.length, "a pin does not end where its tokens do"
    for end in [*(holding.node for holding in holdings), *(pin.node for pin in pins)]:
        leases.update((end.root, *end.path()))
    for root in tree.roots.values():
        assert root.parent is None
        for node in (root, *_below(root)):
            assert node.leases == leases[node], "leases are miscounted"


def _audit_soft_pins(tree: RadixTree, nodes: Collection[Node], pins: Collection[Pin]) -> None:
    soft = Counter(node for pin in pins if pin.soft for node in pin.node.path())
    pages: Counter[str] = Counter()
    for node in nodes:
        assert node.soft == soft[node], "soft pins are miscounted"
        if node.soft:
            pages[tenant_of(node.root.tag)] += node.owned
    assert tree.soft_pages_of == {scope: n for scope, n in pages.items() if n}, "pages of soft pins are miscounted"
    assert tree.soft_pages == pages.total()
    alone = sum(node.owned for node in nodes if node.leases == node.soft > 0)
    assert tree.soft_only == alone, "pages that soft pins alone keep are miscounted"
