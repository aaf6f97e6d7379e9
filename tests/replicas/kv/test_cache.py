"""The cache's verbs, one small scene each. Pages of four cells unless said otherwise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_audit import begin, check_cache, pinned_pages, run

from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.pages import PageIds
from holdfast.replicas.types import TokenIds


def _ids(*tokens: int) -> TokenIds:
    return np.array(tokens, dtype=np.int32)


def _count(start: int, n: int) -> TokenIds:
    return np.arange(start, start + n, dtype=np.int32)


def test_a_row_that_was_handed_out_stays_as_it_was() -> None:
    """So the row of a long alias can go to the device as it is, while its sequence grows and ends."""
    cache = KVCache(64, 4)
    run(cache, _count(0, 15))
    seen: list[tuple[PageIds, list[int]]] = []
    for now, continues in ((1.0, False), (2.0, True)):
        text = _count(0, 90)
        holding = cache.acquire("", text[:17], now, continues=continues).holding
        for length in range(17, 90, 7):
            assert cache.grow(holding, length) is not None
            seen.append((holding.pages, holding.pages.tolist()))
            cache.publish(holding, text, length - 3, now)
        cache.finish(holding, text, length, now)
        run(cache, _count(500, 60), now)
        for pages, before in seen:
            assert pages.tolist() == before


def test_twins_that_finish_leave_one_copy() -> None:
    cache = KVCache(16, 4)
    a, b, c = _count(0, 10), _count(0, 10), np.concatenate([_count(0, 6), _count(60, 6)])
    holdings = [begin(cache, tokens) for tokens in (a, b, c)]
    for holding, tokens in zip(holdings, (a, b, c), strict=True):
        cache.finish(holding, tokens, len(tokens), now=1.0)
        check_cache(cache)
    # Three pages of a, and of c the page it diverges in and the one after.
    assert cache.stats.tree == 5 * 4
    assert cache.peek("", np.append(a, 1)) == 10
    assert cache.peek("", np.append(c, 1)) == 12


def test_many_turns_keep_no_page_twice() -> None:
    cache = KVCache(16, 4)
    for n in range(1, 60, 3):
        run(cache, _count(0, n), now=float(n))
    assert cache.stats.tree == 60, "58 tokens in 15 pages"
    assert run(cache, _count(0, 60), now=99.0) == 58, "one page more is enough to go on"


def test_who_continues_writes_on_in_the_last_page_without_a_copy() -> None:
    cache = KVCache(16, 4)
    turn = _count(0, 10)
    first = begin(cache, turn)
    pages = first.pages.tolist()
    cache.finish(first, turn, 10, now=1.0)
    acquired = cache.acquire("", _count(0, 13), now=2.0, continues=True)
    holding = acquired.holding
    assert (acquired.copies, holding.n_cached, holding.n_shared) == ((), 10, 8)
    assert holding.pages.tolist() == pages
    assert holding.own.tolist() == pages[2:]
    assert cache.peek("", _count(0, 13)) == 8, "what is written on is not there for others"
    check_cache(cache)
    cache.finish(holding, _count(0, 13), 10, now=3.0)
    assert cache.peek("", _count(0, 13)) == 10
    check_cache(cache)


@pytest.mark.parametrize("other", [0, 6, 10, 12])  # tokens that somebody else left
def test_what_is_finished_with_a_pin_is_as_if_it_had_been_pinned_after_that(other: int) -> None:
    found, n_computed = [], 10
    for at_once in (False, True):
        cache = KVCache(8, 4)
        holding = begin(cache, _count(0, 12))
        if other:
            cache.finish(begin(cache, _count(0, other)), _count(0, other), other, now=0.0)
        pin = cache.finish(holding, _count(0, 12), n_computed, now=1.0, pin=at_once)
        assert (pin is not None) == at_once
        pin = pin or cache.pin("", _count(0, n_computed), now=1.0, soft=True)
        check_cache(cache)
        kept = begin(cache, _count(50, cache.cells.available), now=2.0)  # all that may go is evicted
        pinned = (pin.length, pin.soft, pinned_pages([pin]), cache.cells.soft_pinned)
        found.append((pinned, cache.stats, cache.peek("", _count(0, 13))))
        cache.drop(kept)
        cache.unpin(pin)
        check_cache(cache)
    assert found[0] == found[1]
    assert found[0][-1] >= n_computed


@given(
    st.sampled_from([1, 4, 16]),
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 40), st.sampled_from(["held", "pinned", "ended"])),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 110),
)
def test_what_is_told_of_a_prefix_is_what_acquiring_it_changes(
    page_size: int, known: list[tuple[int, int, str]], shared: int
) -> None:
    """Each known text shares its first tokens with one line of numbers and goes on alone; some are held or pinned."""
    cache = KVCache(4096 // page_size, page_size)
    for i, (common, alone, state) in enumerate(known):
        text = np.concatenate((np.arange(common, dtype=np.int32), 1000 * (i + 1) + np.arange(alone, dtype=np.int32)))
        holding = cache.acquire("", text, 0.0).holding
        assert cache.grow(holding, len(text)) is not None
        if state != "held":
            cache.finish(holding, text, len(text), 0.0, pin=state == "pinned")
    asked = np.concatenate((np.arange(shared, dtype=np.int32), [np.int32(9)]))
    prefix = cache.find("", asked)
    told, available = cache.cells.available_in(prefix), cache.cells.available
    inactive, active = cache.cells.inactive_in(prefix), cache.cells.active
    holding = cache.acquire("", asked, 1.0, prefix=prefix).holding
    own = len(holding.own) * page_size
    assert available - cache.cells.available == told + own
    assert cache.cells.active - active == inactive + own
    cache.drop(holding)
    check_cache(cache)


def test_a_history_that_comes_in_small_pieces_is_a_short_path() -> None:
    cache = KVCache(1024, 4)
    for turn in range(1, 200):
        tokens = _count(0, 7 * turn)
        holding = cache.acquire("", tokens, now=turn, continues=True).holding
        assert cache.grow(holding, len(tokens)) is not None
        cache.finish(holding, tokens, len(tokens), now=turn)
    check_cache(cache)
    assert cache.peek("", _count(0, 2000)) == 7 * 199
    assert cache.tree.nodes <= 7 * 199 // 256 + 2


def test_scopes_whose_cells_have_gone_are_forgotten() -> None:
    cache = KVCache(4, 4)
    for i in range(2000):
        run(cache, _count(0, 9), scope=str(i), now=float(i))
    assert len(cache.tree.roots) < 100
    assert run(cache, _count(0, 9), scope="1999", now=2000.0) == 8
