"""Recounts of the KV cache's books, and whole sequences in a cache.

An AssertionError says which count is wrong. A recount visits every node.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from holdfast.replicas.kv.cache import Holding, KVCache
from holdfast.replicas.kv.pages import NO_SLOT, PagePool
from holdfast.replicas.kv.radix import Node, Pin, RadixTree
from holdfast.replicas.kv.states import CheckpointStore, States
from holdfast.replicas.kv.windows import Windows
from holdfast.replicas.types import TokenIds, tenant_of


def begin(cache: KVCache, tokens: TokenIds, now: float = 0.0, scope: str = "", **more: Any) -> Holding:
    """A sequence with cells for all of `tokens`."""
    holding = cache.acquire(scope, tokens, now, **more).holding
    assert cache.grow(holding, len(tokens)) is not None
    check_cache(cache)
    return holding


def run(cache: KVCache, tokens: TokenIds, now: float = 0.0, scope: str = "", **more: Any) -> int:
    """A sequence from its first token to its last. Returns how many tokens it found cached."""
    holding = begin(cache, tokens, now, scope, **more)
    cache.finish(holding, tokens, len(tokens), now)
    check_cache(cache)
    return holding.n_cached


def check_cache(cache: KVCache) -> None:
    """Recount the cache, and its host tier."""
    audit(cache.pool, cache.tree, cache._live, cache._pins)
    if isinstance(cache.states, States):
        audit_states(cache.states, cache.tree, cache._live, cache._pins)
    if cache.windows is not None:
        audit_windows(cache.windows, cache.tree, cache._live, cache._pins)
    if (host := cache.host) is not None:
        audit(host.pool, host.tree, (), host._pins)
        assert host.pool.used == host.tree.pages, "free + tree != total"
        if host._states is not None:
            audit_checkpoints(host._states, host.tree, Counter(), (), host._pins)


def audit(pool: PagePool, tree: RadixTree, holdings: Collection[Holding], pins: Collection[Pin]) -> None:
    """Recount from nothing: free + in tree + own pages of holdings == total. Raises AssertionError with what is wrong.

    Every page is counted once, no page has two writers, and each counter that is kept along the way is what a recount
    gives. For tests, and for an engine that has gone idle: it visits every node.
    """
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
    _audit_tenants(tree, nodes, holdings)
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


def audit_states(
    states: States,
    tree: RadixTree,
    holdings: Collection[Holding],
    pins: Collection[Pin],
) -> None:
    """Recount the state slots: each is free, or has as many owners as there are."""
    owned: Counter[int] = Counter()
    written: Counter[int] = Counter()
    for state in [each.state for each in holdings if each.state is not None]:
        written.update([state.slot, *(slot.item() for _, slot in state.kept)])
        owned.update([state.source] if state.source not in (NO_SLOT, state.slot) else [])
    assert set(written.values()) <= {1}, "a slot has two writers"
    kept = [slot for node in _with_checkpoints(tree) for slot in node.checkpoint.tolist()]
    assert len(kept) == len(set(kept)), "a slot is the checkpoint of two nodes"
    assert not set(written) & set(kept), "a checkpoint has a writer"
    owned.update(written)
    owned.update(states.slots._read)
    audit_checkpoints(states, tree, owned, pins)


def audit_windows(windows: Windows, tree: RadixTree, holdings: Collection[Holding], pins: Collection[Pin]) -> None:
    """Recount the window pages: each is free, or has as many owners as there are, and one writer at most."""
    running = [each.state for each in holdings]
    assert set(running) == windows.running, "a running sequence is not counted, or one that has ended"
    owned: Counter[int] = Counter()
    written: list[int] = []
    for state in running:
        own = state.row[state.first : state.end].tolist()
        assert len(own) == len(set(own))
        owned.update([*own, *state.landing.tolist(), *(page for _, pages in state.kept for page in pages.tolist())])
        written += [*own[max(0, state.at // windows._size - state.first) :], *state.landing.tolist()]
    assert len(set(written)) == len(written), "a window page has two writers"
    kept = {page for node in _with_checkpoints(tree) for page in node.checkpoint.tolist()}
    assert not kept.intersection(written), "a window page of a checkpoint has a writer"
    users = [owned[page] for page in range(windows.pool.total)]
    assert windows._users.tolist() == users, "users of window pages are miscounted"
    assert windows.unclaimed >= 0 or len(running) == 1, "more window pages are claimed than there are"
    audit_checkpoints(windows, tree, owned, pins)


def _with_checkpoints(tree: RadixTree) -> list[Node]:
    return [node for root in tree.roots.values() for node in _below(root) if len(node.checkpoint)]


def audit_checkpoints(
    store: CheckpointStore,
    tree: RadixTree,
    owned: Counter[int],
    pins: Collection[Pin],
    loads: Collection[Pin] = (),
) -> None:
    """Recount checkpoints, and slots or pages `owned` by running sequences as well. `loads`: pins that will be read."""
    kept = _with_checkpoints(tree)
    owned.update(page for node in kept for page in node.checkpoint.tolist())
    owned.update(page for pin in loads if pin.checkpoint is not None for page in pin.checkpoint.checkpoint.tolist())
    pool = store.pool
    assert pool.owners.tolist() == [owned[page] for page in range(pool.total)], "owners are miscounted"
    assert pool.free_pages.tolist() == [page for page in range(pool.total) if not owned[page]]
    assert pool.free == len(pool.free_pages)
    assert set(store.checkpoints._values) == set(kept), "checkpoints are miscounted"
    pinned = Counter(pin.checkpoint for pin in pins if pin.checkpoint is not None)
    assert store.checkpoints._pinned == pinned, "pins of checkpoints are miscounted"


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
    assert node.raw.startswith(node.tokens.data), "a node is found by other tokens than it has"
    assert node.start == parent.end, "a gap between parent and child"
    assert len(node.pages) == pool.pages_for(node.end) - node.start // pool.page_size, "pages do not cover the tokens"
    inside = node.start % pool.page_size != 0
    shared = inside and len(parent.pages) > 0 and parent.pages[-1] == node.pages[0]
    owned = 0 if node.alias else len(node.pages) - shared
    assert node.owned == owned, "a shared page is not counted for the upper node"
    assert node.tenant == parent.tenant == tenant_of(node.root.tag), "a node of another tenant"
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


def _audit_tenants(tree: RadixTree, nodes: Collection[Node], holdings: Collection[Holding]) -> None:
    used: Counter[str] = Counter()
    evictable: Counter[str] = Counter()
    for node in nodes:
        used[node.tenant] += node.owned
        evictable[node.tenant] += node.owned if node.leases == 0 else 0
    for holding in holdings:
        used[holding.tenant] += len(holding.own) + len(holding.duplicates)
    assert tree.tenants.used == {tenant: n for tenant, n in used.items() if n}, "a tenant's pages are miscounted"
    for tenant in used:
        assert tree.tenants.evictable(tenant) == evictable[tenant], "a tenant's evictable pages are miscounted"
    kept = {each: max(0, tree.tenants.floor(each) - tree.tenants.active(each)) for each in tree.tenants.known_limits}
    for tenant in (*kept, "nobody"):
        others = sum(n for other, n in kept.items() if other != tenant)
        assert tree.tenants.kept(tenant) == others, "what floors keep is miscounted"


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


def pinned_pages(pins: Iterable[Pin]) -> int:
    """Pages that `pins` keep in the tree, those that several of them keep counted once."""
    seen: set[Node] = set()
    for pin in pins:
        node: Node | None = pin.node
        while node is not None and node not in seen:
            seen.add(node)
            node = node.parent
    return sum(node.owned for node in seen)
