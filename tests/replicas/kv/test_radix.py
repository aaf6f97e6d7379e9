"""The radix tree by itself: walking, splitting, leasing, evicting; pages of four cells unless said otherwise."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.kv.pages import PagePool
from holdfast.replicas.kv.radix import Node, Prefix, RadixTree
from holdfast.replicas.kv.tags import PLAIN
from holdfast.replicas.types import TokenIds, common_prefix


def _ids(*tokens: int) -> TokenIds:
    return np.array(tokens, dtype=np.int32)


class _Grove:
    """A tree that is fed whole token lists, with fresh pages for whatever is new."""

    def __init__(self, n_pages: int = 32, page_size: int = 4) -> None:
        self.pool = PagePool(n_pages, page_size)
        self.tree = RadixTree(self.pool)
        self.now = 0.0

    def put(self, tokens: TokenIds) -> Node:
        prefix = self.tree.walk(self.tree.root(""), tokens)
        node = self.tree.node_at(prefix)
        if prefix.length < len(tokens):
            first = prefix.length // self.pool.page_size
            pages = self.pool.alloc(self.pool.pages_for(len(tokens)) - first)
            assert pages is not None
            node = self.tree.add(node, tokens[prefix.length :], pages, PLAIN)
        self.use(node)
        return node

    def use(self, node: Node) -> None:
        self.now += 1
        self.tree.lease(node, self.now)
        self.tree.release(node)

    def known(self, tokens: TokenIds) -> int:
        return self.tree.walk(self.tree.root(""), tokens).length


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
@settings(max_examples=50)
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
