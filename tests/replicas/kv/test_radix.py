"""The radix tree by itself: walking, splitting, leasing, evicting; pages of four cells unless said otherwise.

At the end: the order of eviction, on nodes built by hand.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.kv.pages import PagePool
from holdfast.replicas.kv.radix import EvictionQueue, Node, Prefix, RadixTree
from holdfast.replicas.kv.tags import PLAIN, Label
from holdfast.replicas.types import TokenIds, common_prefix


def _ids(*tokens: int) -> TokenIds:
    return np.array(tokens, dtype=np.int32)


class _Grove:
    """A tree that is fed whole token lists, with fresh pages for whatever is new."""

    def __init__(self, n_pages: int = 32, page_size: int = 4) -> None:
        self.pool = PagePool(n_pages, page_size)
        self.tree = RadixTree(self.pool)
        self.now = 0.0

    def put(self, tokens: TokenIds, scope: str = "", label: Label = PLAIN) -> Node:
        prefix = self.tree.walk(self.tree.root(scope), tokens)
        node = self.tree.node_at(prefix)
        if prefix.length < len(tokens):
            first = prefix.length // self.pool.page_size
            pages = self.pool.alloc(self.pool.pages_for(len(tokens)) - first)
            assert pages is not None
            node = self.tree.add(node, tokens[prefix.length :], pages, label)
        self.use(node)
        return node

    def use(self, node: Node) -> None:
        self.now += 1
        self.tree.lease(node, self.now)
        self.tree.release(node)

    def known(self, tokens: TokenIds, scope: str = "") -> int:
        return self.tree.walk(self.tree.root(scope), tokens).length


tokens_lists = st.lists(st.integers(0, 2), max_size=12).map(lambda t: np.array(t, dtype=np.int32))


@given(st.lists(tokens_lists.filter(len), max_size=8), tokens_lists)
def test_walk_finds_the_longest_prefix_of_anything_put_in(put: list[TokenIds], query: TokenIds) -> None:
    grove = _Grove(n_pages=128, page_size=1)
    for tokens in put:
        grove.put(tokens)
    assert grove.known(query) == max((common_prefix(query, tokens) for tokens in put), default=0)
    assert grove.tree.pages == len({tuple(t[: i + 1]) for t in put for i in range(len(t))}), (
        "one cell a distinct prefix"
    )


@given(st.integers(1, 100_000), st.data())
@settings(max_examples=50, deadline=None)
def test_walk_of_a_long_edge_finds_where_a_text_leaves_it(length: int, data: st.DataObject) -> None:
    """Cut in two and shortened at its end like others: neither what was below nor what was cut off is found by it."""
    grove = _Grove(n_pages=25_000)
    text = np.arange(length, dtype=np.int32)
    leaf = grove.put(text)
    known = length
    if length > 1 and data.draw(st.booleans()):
        grove.use(grove.tree.node_at(Prefix(leaf, data.draw(st.integers(1, length - 1)))))
    if data.draw(st.booleans()):
        grove.tree.evict(data.draw(st.integers(1, 25_000)))
        known = leaf.end if leaf in grove.tree.queue else leaf.start
    query = np.concatenate((text, text))[: data.draw(st.integers(0, 2 * length))]
    at = data.draw(st.integers(0, 2 * length))
    query[at : at + 1] = -1
    assert grove.known(query) == min(known, at, len(query))
    assert leaf.raw.startswith(leaf.tokens)


def test_a_node_keeps_its_tokens_though_whoever_brought_them_writes_others() -> None:
    grove = _Grove()
    text = _ids(1, 2, 3, 4, 5, 6)
    leaf = grove.put(text)
    text[:] = 9
    assert leaf.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (grove.known(_ids(1, 2, 3, 4, 5, 6)), grove.known(text)) == (6, 0)


def test_split_inside_a_page_shares_that_page() -> None:
    grove = _Grove()
    lower = grove.put(_ids(1, 2, 3, 4, 5, 6))
    pages = lower.pages.tolist()
    upper = grove.tree.node_at(Prefix(lower, 5))
    assert (upper.tokens.tolist(), upper.pages.tolist(), upper.owned) == ([1, 2, 3, 4, 5], pages, 2)
    assert (lower.tokens.tolist(), lower.pages.tolist(), lower.owned) == ([6], pages[1:], 0)
    assert grove.pool.owners[pages].tolist() == [1, 2]
    # A third part in the same page.
    grove.tree.node_at(Prefix(upper, 4))
    assert (upper.tokens.tolist(), upper.pages.tolist(), upper.owned) == ([5], pages[1:], 1)
    assert grove.tree.pages == 2


def test_halves_of_a_split_keep_tag_priority_and_leases() -> None:
    grove = _Grove()
    lower = grove.put(_ids(1, 2, 3, 4), label=Label("system", 2))
    grove.tree.lease(lower, now=5.0)
    upper = grove.tree.node_at(Prefix(lower, 2))
    assert (upper.tag, upper.priority, upper.leases, upper.touched) == ("system", 2, 1, 5.0)
    grove.tree.release(lower)
    assert (upper.leases, lower.leases) == (0, 0)


def test_first_child_replaces_the_last_page_that_it_holds_a_fuller_copy_of() -> None:
    grove = _Grove()
    upper = grove.put(_ids(1, 2, 3, 4, 5, 6))
    lower = grove.put(_ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert (upper.pages[1], lower.owned) == (lower.pages[0], 1)
    assert (grove.tree.pages, grove.pool.used) == (3, 3)
    grove.tree.evict(99)
    assert (grove.tree.pages, grove.pool.used) == (2, 2)


def test_lease_protects_the_whole_path_and_counts_what_is_left() -> None:
    grove = _Grove()
    upper = grove.put(_ids(1, 2, 3, 4))
    lower = grove.put(_ids(1, 2, 3, 4, 5))
    grove.put(_ids(1, 2, 3, 4, 6))
    assert grove.tree.evictable == 3
    grove.tree.lease(lower, now=9.0)
    assert grove.tree.evictable == 1
    assert grove.tree.evict(99) == 1
    assert grove.tree.evict(99) is None
    grove.tree.lease(upper, now=9.0)
    grove.tree.release(lower)
    assert grove.tree.evictable == 1
    assert grove.tree.evict(99) == 1
    assert grove.tree.evict(99) is None
    grove.tree.release(upper)
    assert grove.tree.evict(99) == 1


def test_evicting_half_of_a_cut_page_frees_nothing_yet() -> None:
    grove = _Grove()
    lower = grove.put(_ids(1, 2, 3))
    upper = grove.tree.node_at(Prefix(lower, 2))
    grove.use(upper)
    assert grove.tree.evictable == 1
    assert [grove.tree.evict(99), grove.tree.evict(99)] == [0, 1]


def test_higher_tier_stays_and_keeps_the_path_to_it() -> None:
    grove = _Grove()
    grove.put(_ids(1, 2))
    grove.put(_ids(1, 2, 3), label=Label(priority=1))
    grove.put(_ids(5))
    grove.tree.evict(99)
    assert (grove.known(_ids(5)), grove.known(_ids(1, 2, 3))) == (0, 3)
    grove.tree.evict(99)
    assert grove.known(_ids(1, 2, 3)) == 2
    grove.tree.evict(99)
    assert grove.known(_ids(1, 2, 3)) == 0


def test_a_leaf_is_shortened_from_its_end_and_keeps_its_place() -> None:
    grove = _Grove()
    old = grove.put(np.arange(18, dtype=np.int32))
    grove.put(_ids(90, 91, 92, 93))
    told: list[int] = []
    assert grove.tree.evict(2, lambda leaf: told.append(len(leaf.tokens))) == 2
    assert told == [18], "whoever is told finds the leaf whole"
    assert (old.end, len(old.pages), old.owned, grove.known(np.arange(18, dtype=np.int32))) == (12, 3, 3, 12)
    assert (grove.tree.pages, grove.tree.evictable, grove.pool.used) == (4, 4, 4)
    assert [grove.tree.evict(1) for _ in range(4)] == [1, 1, 1, 1]
    assert grove.tree.evict(1) is None
    assert grove.tree.nodes == 0


def test_a_leaf_that_begins_inside_a_page_is_shortened_to_whole_pages() -> None:
    grove = _Grove()
    upper = grove.put(_ids(1, 2, 3, 4, 5, 6))
    text = _ids(*range(1, 14))
    lower = grove.put(text)  # pages of slots 1, 2, 3, the first of them the upper node's as well
    assert (lower.start, len(lower.pages), lower.owned) == (6, 3, 2)
    assert grove.tree.evict(1) == 1
    assert grove.known(text) == 12
    assert grove.tree.evict(1) == 1
    assert (grove.known(text), upper.children) == (6, {})


def test_what_was_cut_off_a_long_leaf_is_not_held_on_to() -> None:
    grove = _Grove(n_pages=4096, page_size=1)
    leaf = grove.put(np.arange(4096, dtype=np.int32))
    for left in range(4095, 0, -1):
        assert grove.tree.evict(1) == 1
        assert len(leaf.tokens) == len(leaf.pages) == left
        assert len(leaf.raw) <= 2 * leaf.tokens.nbytes
        assert len(leaf.pages if leaf.pages.base is None else leaf.pages.base) <= 2 * left


@given(
    st.lists(
        st.one_of(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), st.integers(1, 7)),
        min_size=2,
        max_size=20,
    )
)
def test_cells_are_evicted_from_the_ends_of_the_paths_used_longest_ago(steps: list[tuple[int, ...] | int]) -> None:
    """A step puts a text in or evicts so many cells. The model knows for each cell, its path, when it was last used."""
    grove = _Grove(n_pages=256, page_size=1)
    used: dict[tuple[int, ...], int] = {}
    for now, step in enumerate(steps):
        if isinstance(step, tuple):
            grove.put(_ids(*step))
            used |= {step[: i + 1]: now for i in range(len(step))}
            continue
        wanted = min(step, len(used))
        for _ in range(wanted):
            inner = {path[:-1] for path in used}
            del used[min((path for path in used if path not in inner), key=lambda path: used[path])]
        while wanted:
            freed = grove.tree.evict(wanted)
            assert freed is not None
            assert 0 < freed <= wanted
            wanted -= freed
        assert grove.tree.pages == grove.pool.used == len(used)
        for text in (step for step in steps if isinstance(step, tuple)):
            assert grove.known(_ids(*text)) == max((n for n in range(1, len(text) + 1) if text[:n] in used), default=0)


# ---- the order of eviction ----


def _node(priority: int = 0, parent: Node | None = None) -> Node:
    empty = np.empty(0, dtype=np.int32)
    node = Node(empty, 0, empty, owned=0, parent=parent, priority=priority)
    if parent is not None:
        parent.children[len(parent.children)] = node
    return node


def _pop(queue: EvictionQueue) -> Node | None:
    node = queue.head()
    if node is not None:
        queue.discard(node)
    return node


def _cut(queue: EvictionQueue, node: Node | None) -> Node | None:
    """What the tree does with a node that is evicted."""
    if node is not None and node.parent is not None:
        node.parent.children.clear()
        queue.lost_last_child(node.parent)
    return node


def test_parent_follows_its_child_and_waits_for_one_in_a_higher_tier() -> None:
    parent, other = _node(), _node()
    child = _node(priority=1, parent=parent)
    queue = EvictionQueue(most=32)
    for node in (child, parent, other):
        queue.append(node)
    assert _pop(queue) is other, "the parent is older, but no leaf"
    queue.append(other)
    assert _cut(queue, _pop(queue)) is other
    assert _cut(queue, _pop(queue)) is child
    assert _cut(queue, _pop(queue)) is parent


def test_parent_passed_over_goes_first_once_it_is_a_leaf() -> None:
    parent, other = _node(), _node()
    child = _node(priority=1, parent=parent)
    queue = EvictionQueue(most=32)
    for node in (child, parent, other):
        queue.append(node)
    assert _pop(queue) is other
    assert _cut(queue, _pop(queue)) is child
    queue.append(other)
    assert _pop(queue) is parent
