"""The radix tree by itself: walking, splitting, leasing, evicting; pages of four cells unless said otherwise."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.kv.pages import PagePool
from holdfast.replicas.kv.radix import PLAIN, Label, Match, Node, RadixTree, common_prefix
from holdfast.replicas.types import TokenIds


def _ids(*tokens: int) -> TokenIds:
    return np.array(tokens, dtype=np.int32)


class _Grove:
    """A tree that is fed whole token lists, with fresh pages for whatever is new."""

    def __init__(self, n_pages: int = 32, page_size: int = 4) -> None:
        self.pool = PagePool(n_pages, page_size)
        self.tree = RadixTree(self.pool)
        self.now = 0.0

    def put(self, tokens: TokenIds, scope: str = "", label: Label = PLAIN) -> Node:
        match = self.tree.walk(self.tree.root(scope), tokens)
        node = self.tree.node_at(match)
        if match.length < len(tokens):
            first = match.length // self.pool.page_size
            pages = self.pool.alloc(self.pool.pages_for(len(tokens)) - first)
            assert pages is not None
            node = self.tree.add(node, tokens[match.length :], pages, label)
        self.use(node)
        return node

    def use(self, node: Node) -> None:
        self.now += 1
        self.tree.lease(node, self.now)
        self.tree.release(node)

    def known(self, tokens: TokenIds, scope: str = "") -> int:
        return self.tree.walk(self.tree.root(scope), tokens).length


tokens_lists = st.lists(st.integers(0, 2), max_size=12).map(lambda t: np.array(t, dtype=np.int32))


@given(tokens_lists, tokens_lists)
def test_common_prefix_is_what_a_loop_finds(a: TokenIds, b: TokenIds) -> None:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(a, b) == n


@given(st.lists(tokens_lists.filter(len), max_size=8), tokens_lists)
def test_walk_finds_the_longest_prefix_of_anything_put_in(put: list[TokenIds], query: TokenIds) -> None:
    grove = _Grove(n_pages=128, page_size=1)
    for tokens in put:
        grove.put(tokens)
    assert grove.known(query) == max((common_prefix(query, tokens) for tokens in put), default=0)
    assert grove.tree.pages == len({tuple(t[: i + 1]) for t in put for i in range(len(t))}), (
        "one cell a distinct prefix"
    )


def test_walk_changes_nothing_and_ends_inside_an_edge() -> None:
    grove = _Grove()
    leaf = grove.put(_ids(1, 2, 3, 4, 5, 6))
    assert grove.tree.walk(grove.tree.root(""), _ids(1, 2, 3, 9)) == Match(leaf, 3)
    assert grove.tree.nodes == 1


def test_split_inside_a_page_shares_that_page() -> None:
    grove = _Grove()
    lower = grove.put(_ids(1, 2, 3, 4, 5, 6))
    pages = lower.pages.tolist()
    upper = grove.tree.node_at(Match(lower, 5))
    assert (upper.tokens.tolist(), upper.pages.tolist(), upper.owned) == ([1, 2, 3, 4, 5], pages, 2)
    assert (lower.tokens.tolist(), lower.pages.tolist(), lower.owned) == ([6], pages[1:], 0)
    assert grove.pool.owners[pages].tolist() == [1, 2]
    # A third part in the same page.
    grove.tree.node_at(Match(upper, 4))
    assert (upper.tokens.tolist(), upper.pages.tolist(), upper.owned) == ([5], pages[1:], 1)
    assert grove.tree.pages == 2


def test_split_between_pages_shares_none() -> None:
    grove = _Grove()
    lower = grove.put(_ids(1, 2, 3, 4, 5, 6))
    pages = lower.pages.tolist()
    upper = grove.tree.node_at(Match(lower, 4))
    assert (upper.pages.tolist(), lower.pages.tolist()) == (pages[:1], pages[1:])
    assert grove.pool.owners[pages].tolist() == [1, 1]


def test_halves_of_a_split_keep_tag_priority_and_leases() -> None:
    grove = _Grove()
    lower = grove.put(_ids(1, 2, 3, 4), label=Label("system", 2))
    grove.tree.lease(lower, now=5.0)
    upper = grove.tree.node_at(Match(lower, 2))
    assert (upper.tag, upper.priority, upper.leases, upper.touched) == ("system", 2, 1, 5.0)
    grove.tree.release(lower)
    assert (upper.leases, lower.leases) == (0, 0)


def test_fill_lets_the_deeper_page_stand_for_a_shared_slot() -> None:
    grove = _Grove()
    upper = grove.put(_ids(1, 2, 3, 4, 5, 6))
    grove.put(_ids(1, 2, 3, 4, 5, 6, 99))
    deeper = grove.put(_ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    row = np.zeros(3, dtype=np.int32)
    grove.tree.fill(row, deeper, above=grove.tree.root(""))
    assert row.tolist() == [upper.pages[0], *deeper.pages.tolist()]
    assert upper.pages[1] != deeper.pages[0]


def test_first_child_replaces_the_last_page_that_it_holds_a_fuller_copy_of() -> None:
    grove = _Grove()
    upper = grove.put(_ids(1, 2, 3, 4, 5, 6))
    lower = grove.put(_ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert (upper.pages[1], lower.owned) == (lower.pages[0], 1)
    assert (grove.tree.pages, grove.pool.used) == (3, 3)
    grove.tree.evict()
    assert (grove.tree.pages, grove.pool.used) == (2, 2)


def test_last_page_stays_where_another_holder_may_copy_from_it() -> None:
    grove = _Grove()
    upper = grove.put(_ids(1, 2, 3, 4, 5, 6))
    pages = upper.pages.tolist()
    grove.tree.lease(upper, now=5.0)
    grove.put(_ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert upper.pages.tolist() == pages
    assert grove.tree.pages == 4


def test_evict_takes_leaves_oldest_use_first() -> None:
    grove = _Grove()
    grove.put(_ids(1, 2, 3, 4))
    grove.put(_ids(1, 2, 3, 4, 5, 6, 7, 8))
    grove.put(_ids(9, 9))
    assert grove.tree.evict() == 1
    assert grove.known(_ids(1, 2, 3, 4, 5)) == 4, "the leaf of the older path went, and not its parent"
    grove.put(_ids(1, 2, 3, 4))
    assert grove.tree.evict() == 1
    assert (grove.known(_ids(9, 9)), grove.known(_ids(1, 2, 3, 4))) == (0, 4)
    assert grove.tree.evict() == 1
    assert grove.tree.evict() is None
    assert (grove.tree.nodes, grove.tree.pages, grove.pool.free) == (0, 0, 32)


def test_lease_protects_the_whole_path_and_counts_what_is_left() -> None:
    grove = _Grove()
    upper = grove.put(_ids(1, 2, 3, 4))
    lower = grove.put(_ids(1, 2, 3, 4, 5))
    grove.put(_ids(1, 2, 3, 4, 6))
    assert grove.tree.evictable == 3
    grove.tree.lease(lower, now=9.0)
    assert grove.tree.evictable == 1
    assert grove.tree.evict() == 1
    assert grove.tree.evict() is None
    grove.tree.lease(upper, now=9.0)
    grove.tree.release(lower)
    assert grove.tree.evictable == 1
    assert grove.tree.evict() == 1
    assert grove.tree.evict() is None
    grove.tree.release(upper)
    assert grove.tree.evict() == 1


def test_lease_moves_down_without_counting_twice() -> None:
    grove = _Grove()
    upper = grove.put(_ids(1, 2, 3, 4))
    lower = grove.put(_ids(1, 2, 3, 4, 5))
    grove.tree.lease(upper, now=7.0)
    grove.tree.lease(lower, now=8.0, held=upper)
    assert (upper.leases, lower.leases, upper.touched) == (1, 1, 8.0)
    grove.tree.release(lower)
    assert (upper.leases, lower.leases, grove.tree.evictable) == (0, 0, 2)


def test_evicting_half_of_a_cut_page_frees_nothing_yet() -> None:
    grove = _Grove()
    lower = grove.put(_ids(1, 2, 3))
    upper = grove.tree.node_at(Match(lower, 2))
    grove.use(upper)
    assert grove.tree.evictable == 1
    assert [grove.tree.evict(), grove.tree.evict()] == [0, 1]


def test_higher_tier_stays_and_keeps_the_path_to_it() -> None:
    grove = _Grove()
    grove.put(_ids(1, 2))
    grove.put(_ids(1, 2, 3), label=Label(priority=1))
    grove.put(_ids(5))
    grove.tree.evict()
    assert (grove.known(_ids(5)), grove.known(_ids(1, 2, 3))) == (0, 3)
    grove.tree.evict()
    assert grove.known(_ids(1, 2, 3)) == 2
    grove.tree.evict()
    assert grove.known(_ids(1, 2, 3)) == 0


def test_scopes_share_nothing() -> None:
    grove = _Grove()
    grove.put(_ids(1, 2, 3), scope="a")
    assert (grove.known(_ids(1, 2, 3), scope="a"), grove.known(_ids(1, 2, 3), scope="b")) == (3, 0)
    grove.put(_ids(1, 2, 3), scope="b")
    assert grove.tree.pages == 2
