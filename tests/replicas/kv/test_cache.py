"""The cache's verbs, one small scene each. Pages of four cells unless said otherwise."""

from collections.abc import Callable

import numpy as np
import pytest
from pinned_pages import pinned_pages

from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.cache import KVCache, Label, in_use
from holdfast.replicas.kv.holding import Holding
from holdfast.replicas.kv.pages import PageCopy
from holdfast.replicas.kv.radix import PLAIN
from holdfast.replicas.types import TokenIds


def _ids(*tokens: int) -> TokenIds:
    return np.array(tokens, dtype=np.int32)


def _count(start: int, n: int) -> TokenIds:
    return np.arange(start, start + n, dtype=np.int32)


def _begin(cache: KVCache, tokens: TokenIds, now: float = 0.0, scope: str = "") -> Holding:
    """A sequence with cells for all of `tokens`."""
    holding = cache.acquire(scope, tokens, now).holding
    assert cache.grow(holding, len(tokens)) is not None
    cache.check()
    return holding


def _run(cache: KVCache, tokens: TokenIds, now: float = 0.0, scope: str = "", label: Label = PLAIN) -> int:
    """One whole request; returns how many tokens it found cached."""
    holding = _begin(cache, tokens, now, scope)
    cache.finish(holding, tokens, len(tokens), now, label)
    cache.check()
    return holding.n_cached


def test_next_turn_aliases_all_of_the_last_one() -> None:
    cache = KVCache(16, 4)
    turn = _count(0, 8)
    first = _begin(cache, turn)
    pages = first.pages.tolist()
    cache.finish(first, turn, 8, now=1.0)
    acquired = cache.acquire("", _count(0, 11), now=2.0)
    assert acquired.holding.n_cached == 8
    assert acquired.holding.pages.tolist() == pages, "the same pages, nothing copied"
    assert acquired.copies == ()
    assert len(acquired.holding.own) == 0


def test_prefix_that_ends_inside_a_page_is_copied_into_an_own_page() -> None:
    cache = KVCache(16, 4)
    _run(cache, _count(0, 7))
    before = cache.tree.roots[""].children[0].pages.tolist()
    acquired = cache.acquire("", _ids(0, 1, 2, 3, 4, 5, 99, 98), now=2.0)
    holding = acquired.holding
    assert holding.n_cached == 6
    assert holding.pages[0] == before[0]
    assert acquired.copies == (PageCopy(source=before[1], target=int(holding.pages[1]), cells=2),)
    assert holding.own.tolist() == [holding.pages[1]]
    assert holding.pages[1] not in before
    cache.check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_token_is_always_left_to_compute(page_size: int) -> None:
    cache = KVCache(64, page_size)
    prompt = _count(0, 20)
    assert [_run(cache, prompt) for _ in range(3)] == [0, 19, 19]
    assert cache.peek("", prompt) == 19
    assert cache.peek("", prompt[:1]) == 0


def test_peek_changes_nothing() -> None:
    cache = KVCache(16, 4)
    _run(cache, _count(0, 8))
    before = cache.stats
    assert cache.peek("", _count(0, 6)) == 5
    assert cache.peek("unknown", _count(0, 6)) == 0
    assert cache.stats == before
    assert set(cache.tree.roots) == {""}


def test_without_a_page_for_the_copy_the_prefix_is_cut_to_whole_pages() -> None:
    cache = KVCache(3, 4)
    _run(cache, _count(0, 8))
    other = _begin(cache, _count(50, 4))
    acquired = cache.acquire("", _ids(0, 1, 2, 3, 4, 5, 99), now=1.0)
    assert (acquired.holding.n_cached, acquired.copies) == (4, ())
    cache.check()
    cache.drop(other)
    cache.drop(acquired.holding)
    cache.check()


def test_grow_returns_what_it_appended_and_evicts_only_if_that_helps() -> None:
    cache = KVCache(6, 4)
    _run(cache, _count(50, 8))
    holding = _begin(cache, _count(0, 4))
    added = cache.grow(holding, 9)
    assert added is not None
    assert holding.pages[1:].tolist() == added.tolist()
    assert holding.capacity == 12
    again = cache.grow(holding, 12)
    assert again is not None
    assert len(again) == 0
    assert cache.grow(holding, 25) is None
    assert cache.peek("", _count(50, 9)) == 8, "nothing was evicted in vain"
    assert cache.grow(holding, 24) is not None
    assert cache.peek("", _count(50, 9)) == 0
    assert cache.stats.evicted == 8
    cache.check()


def test_row_outgrows_its_first_buffer() -> None:
    cache = KVCache(200, 1)
    holding = _begin(cache, _ids(1))
    first = int(holding.pages[0])
    for n in range(2, 150):
        assert cache.grow(holding, n) is not None
    assert len(set(holding.pages.tolist())) == 149
    assert holding.pages[0] == first
    cache.check()


def test_cells_in_use_are_never_evicted() -> None:
    cache = KVCache(4, 4)
    _run(cache, _count(0, 8))
    reader = cache.acquire("", _count(0, 9), now=1.0).holding
    other = _begin(cache, _count(50, 8), now=2.0)
    assert (cache.stats.free, cache.stats.evictable, in_use(cache)) == (0, 0, 16)
    assert cache.grow(other, 9) is None
    cache.drop(reader)
    assert cache.stats.evictable == 8
    assert cache.grow(other, 9) is not None


def test_finish_frees_pages_that_hold_nothing_computed() -> None:
    cache = KVCache(16, 4)
    tokens = _count(0, 30)
    holding = _begin(cache, tokens)
    cache.finish(holding, tokens, 5, now=1.0)
    cache.check()
    assert (cache.stats.tree, cache.stats.held, cache.stats.free) == (8, 0, 56)
    assert cache.peek("", tokens) == 5


def test_twins_that_finish_leave_one_copy() -> None:
    cache = KVCache(16, 4)
    a, b, c = _count(0, 10), _count(0, 10), np.concatenate([_count(0, 6), _count(60, 6)])
    holdings = [_begin(cache, tokens) for tokens in (a, b, c)]
    for holding, tokens in zip(holdings, (a, b, c), strict=True):
        cache.finish(holding, tokens, len(tokens), now=1.0)
        cache.check()
    # Three pages of a, and of c the page it diverges in and the one after.
    assert cache.stats.tree == 5 * 4
    assert cache.peek("", np.append(a, 1)) == 10
    assert cache.peek("", np.append(c, 1)) == 12


def test_many_turns_keep_no_page_twice() -> None:
    cache = KVCache(16, 4)
    for n in range(1, 60, 3):
        _run(cache, _count(0, n), now=float(n))
    assert cache.stats.tree == 60, "58 tokens in 15 pages"
    assert _run(cache, _count(0, 60), now=99.0) == 58, "one page more is enough to go on"


def test_followers_alias_what_a_running_leader_published() -> None:
    cache = KVCache(16, 4)
    prompt = _count(0, 14)
    leader = _begin(cache, prompt)
    row = leader.pages.tolist()
    cache.publish(leader, prompt, 10, now=1.0)
    cache.check()
    assert leader.pages.tolist() == row
    assert leader.n_shared == 8, "the page that is still being filled stays with its writer"
    follower = cache.acquire("", np.append(prompt, 7), now=2.0).holding
    assert (follower.n_cached, follower.pages.tolist()) == (8, row[:2])
    cache.drop(leader)
    cache.check()
    assert cache.peek("", prompt) == 8, "what was published outlives its leader"


def test_publish_without_a_new_full_page_does_nothing() -> None:
    cache = KVCache(16, 4)
    prompt = _count(0, 9)
    _run(cache, prompt[:6])
    holding = _begin(cache, prompt)
    cache.publish(holding, prompt, 7, now=1.0)
    assert (holding.n_shared, cache.tree.nodes) == (6, 1)


def test_late_publisher_keeps_reading_its_own_copy_until_it_ends() -> None:
    cache = KVCache(16, 4)
    first, second = _count(0, 8), np.concatenate([_count(0, 6), _count(60, 6)])
    one, two = _begin(cache, first), _begin(cache, second)
    cache.publish(one, first, 8, now=1.0)
    row = two.pages.tolist()
    cache.publish(two, second, 12, now=2.0)
    cache.check()
    assert two.pages.tolist() == row
    assert two.spare.tolist() == row[:1]
    assert (two.n_shared, cache.stats.tree, cache.stats.held) == (12, 16, 4)
    follower = cache.acquire("", np.append(second, 1), now=3.0).holding
    assert follower.pages.tolist() == [one.pages[0], *row[1:]]
    for holding in (one, two, follower):
        cache.drop(holding)
    cache.check()
    assert cache.stats.held == 0


def test_drop_keeps_nothing_that_was_not_published() -> None:
    cache = KVCache(16, 4)
    cache.drop(_begin(cache, _count(0, 30)))
    assert cache.stats.free == cache.stats.total
    assert cache.peek("", _count(0, 30)) == 0


def test_scopes_share_nothing() -> None:
    cache = KVCache(16, 4)
    assert [_run(cache, _count(0, 9), scope=scope) for scope in ("a", "b", "a")] == [0, 0, 8]


def test_without_prefix_cache_nothing_is_found_or_kept() -> None:
    cache = KVCache(16, 4, prefix_cache=False)
    tokens = _count(0, 9)
    holding = _begin(cache, tokens)
    cache.publish(holding, tokens, 9, now=0.0)
    cache.finish(holding, tokens, 9, now=0.0)
    assert _run(cache, tokens) == 0
    assert cache.stats.free == cache.stats.total


def test_lower_tier_is_evicted_first_through_the_cache() -> None:
    cache = KVCache(6, 4)
    _run(cache, _count(0, 8), now=1.0, label=Label("system", 1))
    _run(cache, _count(50, 8), now=2.0)
    _run(cache, _count(80, 16), now=3.0)
    assert cache.peek("", _count(0, 9)) == 8
    assert cache.peek("", _count(50, 9)) == 0


def test_counters_of_hits() -> None:
    cache = KVCache(16, 4)
    for tokens in (_count(0, 9), _count(0, 9), _count(50, 3)):
        _run(cache, tokens)
    assert (cache.stats.lookups, cache.stats.hits, cache.stats.hit_tokens) == (3, 1, 8)


@pytest.mark.parametrize(
    "use",
    [
        lambda cache, h: cache.drop(h),
        lambda cache, h: cache.grow(h, 9),
        lambda cache, h: cache.publish(h, _count(0, 9), 8, 1.0),
        lambda cache, h: cache.finish(h, _count(0, 9), 9, 1.0),
    ],
)
def test_ended_holding_cannot_be_used(use: Callable[[KVCache, Holding], object]) -> None:
    cache = KVCache(16, 4)
    holding = _begin(cache, _count(0, 9))
    cache.drop(holding)
    with pytest.raises(EngineError, match="ended"):
        use(cache, holding)
    cache.check()


def test_more_computed_than_there_are_cells_is_refused() -> None:
    cache = KVCache(16, 4)
    holding = _begin(cache, _count(0, 9))
    with pytest.raises(EngineError, match="cells for 12"):
        cache.finish(holding, _count(0, 13), 13, now=1.0)
    with pytest.raises(EngineError):
        cache.publish(holding, _count(0, 8), 9, now=1.0)
    with pytest.raises(EngineError):
        cache.acquire("", _ids(), now=1.0)
    cache.check()


def _converse(cache: KVCache, turns: int) -> list[list[int]]:
    """Three agents with one system prompt of 32 tokens take turns of 10; returns the cached tokens of each turn."""
    system = _count(0, 32)
    histories = [np.append(system, 1000 * agent) for agent in (1, 2, 3)]
    found: list[list[int]] = [[], [], []]
    for turn in range(turns):
        for agent, history in enumerate(histories):
            found[agent].append(_run(cache, history, now=float(3 * turn + agent)))
            histories[agent] = np.concatenate([history, _count(1000 * (agent + 1) + 10 * turn + 1, 10)])
    return found


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_interleaved_agents_never_evict_each_other_while_there_is_room(page_size: int) -> None:
    cache = KVCache(640 // page_size, page_size)
    found = _converse(cache, turns=6)
    assert cache.stats.evicted == 0
    assert found == [[first, *(33 + 10 * turn for turn in range(5))] for first in (0, 32, 32)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_with_room_for_two_of_three_the_shared_system_prompt_survives(page_size: int) -> None:
    # The system prompt and six turns are about 92 cells an agent, 60 of them its own.
    cache = KVCache((32 + 2 * 64) // page_size, page_size)
    found = _converse(cache, turns=6)
    assert cache.stats.evicted > 0
    later = [n for cached in found for n in cached][1:]
    assert min(n for n in later if n) >= 32
    assert all(n >= 32 for cached in found for n in cached[1:])


def test_who_continues_writes_on_in_the_last_page_without_a_copy() -> None:
    cache = KVCache(16, 4)
    turn = _count(0, 10)
    first = _begin(cache, turn)
    pages = first.pages.tolist()
    cache.finish(first, turn, 10, now=1.0)
    acquired = cache.acquire("", _count(0, 13), now=2.0, continues=True)
    holding = acquired.holding
    assert (acquired.copies, holding.n_cached, holding.n_shared) == ((), 10, 8)
    assert holding.pages.tolist() == pages
    assert holding.own.tolist() == pages[2:]
    assert cache.peek("", _count(0, 13)) == 8, "what is written on is not there for others"
    cache.check()
    cache.finish(holding, _count(0, 13), 10, now=3.0)
    assert cache.peek("", _count(0, 13)) == 10
    cache.check()


def test_a_last_page_that_somebody_else_holds_or_goes_on_from_is_copied() -> None:
    for hold in ("pin", "acquire", "child"):
        cache = KVCache(16, 4)
        _run(cache, _count(0, 10))
        if hold == "pin":
            assert cache.pin("", _count(0, 10), now=1.0).length == 10
        elif hold == "acquire":
            cache.acquire("", _count(0, 12), now=1.0)
        else:
            _run(cache, _count(0, 14))
        acquired = cache.acquire("", _ids(*range(10), 99), now=2.0, continues=True)
        assert acquired.holding.n_cached == 10
        assert [copy.cells for copy in acquired.copies] == [2]
        cache.check()


def test_what_is_pinned_stays_until_it_is_given_back() -> None:
    cache = KVCache(4, 4)
    _run(cache, _count(0, 7))
    pin = cache.pin("", _count(0, 9), now=1.0)
    assert pin.length == 7
    holding = cache.acquire("", _count(50, 12), now=2.0).holding
    assert cache.grow(holding, 12) is None
    cache.unpin(pin)
    with pytest.raises(EngineError):
        cache.unpin(pin)
    assert cache.grow(holding, 12) is not None
    assert cache.peek("", _count(0, 9)) == 0


def test_pages_that_several_pins_keep_are_counted_once() -> None:
    cache = KVCache(16, 4)
    _run(cache, _count(0, 8))
    _run(cache, _ids(*range(8), 99, 98, 97, 96))
    pins = [cache.pin("", _ids(*range(8), 99, 98, 97, 96), 1.0), cache.pin("", _count(0, 8), 1.0)]
    assert pinned_pages(pins) == 3
    assert pinned_pages(pins[1:]) == 2
    assert pinned_pages([]) == 0


def test_a_history_that_comes_in_small_pieces_is_a_short_path() -> None:
    cache = KVCache(1024, 4)
    for turn in range(1, 200):
        tokens = _count(0, 7 * turn)
        holding = cache.acquire("", tokens, now=turn, continues=True).holding
        assert cache.grow(holding, len(tokens)) is not None
        cache.finish(holding, tokens, len(tokens), now=turn)
    cache.check()
    assert cache.peek("", _count(0, 2000)) == 7 * 199
    assert cache.tree.nodes <= 7 * 199 // 256 + 2


def test_a_verb_that_breaks_off_leaves_the_cache_unsound(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(16, 4)
    holding = _begin(cache, _count(0, 8))
    assert cache.sound
    monkeypatch.setattr(cache.pool, "release", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.drop(holding)
    assert not cache.sound


def test_in_no_scope_nothing_is_found_or_kept() -> None:
    cache = KVCache(16, 4)
    tokens = _count(0, 9)
    assert _run(cache, tokens) == 0
    holding = cache.acquire(None, tokens, 0.0).holding
    assert holding.n_cached == 0
    cache.grow(holding, 9)
    cache.publish(holding, tokens, 9, now=0.0)
    used = cache.stats.tree
    cache.finish(holding, tokens, 9, now=0.0)
    assert cache.stats.tree == used
    assert cache.stats.held == 0
    cache.check()


def test_scopes_whose_cells_have_gone_are_forgotten() -> None:
    cache = KVCache(4, 4)
    for i in range(2000):
        _run(cache, _count(0, 9), scope=str(i), now=float(i))
    assert len(cache.tree.roots) < 100
    assert _run(cache, _count(0, 9), scope="1999", now=2000.0) == 8
