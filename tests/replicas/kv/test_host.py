"""The host tier's books: what of the evicted is kept, and for how long. The law of its use is `test_cache_law`'s."""

import numpy as np
from kv_audit import check_cache, run

from holdfast.replicas.kv.cache import KVCache, Reloads
from holdfast.replicas.kv.host import HostTier

SIZE = 4


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def world(pages: int, host_pages: int) -> tuple[KVCache, HostTier, Reloads]:
    host = HostTier(host_pages, SIZE)
    return KVCache(pages, SIZE, host=host), host, Reloads(host)


def found(host: HostTier, tokens: np.ndarray, scope: str = "") -> int:
    pin = host.pin(scope, tokens)
    host.unpin(pin)
    return pin.length


def test_what_is_evicted_is_found_with_its_path_and_copied_once():
    cache, host, reloads = world(pages=6, host_pages=20)
    base = np.arange(12, dtype=np.int32)
    run(cache, np.concatenate((base, ids(50, 51, 52, 53))))
    run(cache, np.concatenate((base, ids(60, 61, 62, 63))))
    assert len(reloads.saves()) == 0
    run(cache, np.arange(100, 108, dtype=np.int32))  # one page is short: the oldest leaf goes
    assert len(reloads.saves()) == 4
    assert found(host, np.concatenate((base, ids(50, 51, 52, 53)))) == 16
    assert found(host, np.concatenate((base, ids(60, 61, 62, 63)))) == 12
    run(cache, np.arange(200, 224, dtype=np.int32))  # everything goes; what they share is there already
    assert len(reloads.saves()) == 1 + 2
    assert host.pool.used == 7
    check_cache(cache)


def test_a_text_that_leaves_page_by_page_is_found_whole_was_copied_once_and_stays_one_node():
    cache, host, reloads = world(pages=40, host_pages=60)
    text = np.arange(160, dtype=np.int32)
    run(cache, text)
    other = cache.acquire("", np.arange(1000, 1200, dtype=np.int32), 1.0).holding
    copied = []
    for n in range(1, 41):
        assert cache.grow(other, n * SIZE) is not None
        copied.append(len(reloads.saves()))
        assert cache.peek("", text) == 160 - n * SIZE
        assert found(host, text) == 160
        assert host.tree.nodes == 1
        check_cache(cache)
    assert copied == [40] + [0] * 39


def test_the_oldest_makes_room_and_what_is_pinned_stays():
    cache, host, _ = world(pages=2, host_pages=4)
    texts = [np.arange(i, i + 8, dtype=np.int32) for i in (0, 100, 200, 300)]
    run(cache, texts[0])
    run(cache, texts[1])
    pin = host.pin("", texts[0])
    run(cache, texts[2])
    run(cache, texts[3])
    assert [found(host, text) for text in texts] == [8, 0, 8, 0]
    host.unpin(pin)
    check_cache(cache)


def test_less_than_two_pages_are_not_worth_a_step():
    cache, _, reloads = world(pages=4, host_pages=20)
    run(cache, np.arange(8, dtype=np.int32))
    run(cache, np.arange(100, 116, dtype=np.int32))
    short = cache.acquire("", np.arange(8, dtype=np.int32), 1.0).holding  # its last token is computed anyway
    assert reloads.begin(short, np.arange(8, dtype=np.int32)) == 0
    cache.drop(short)
    long = cache.acquire("", np.arange(9, dtype=np.int32), 1.0).holding
    assert reloads.begin(long, np.arange(9, dtype=np.int32)) == 8
    assert reloads.reach(long) == 8
    reloads.lose()
    assert reloads.reach(long) == 0
    reloads.end(long)
    cache.drop(long)
    check_cache(cache)


def test_books_that_break_off_are_begun_anew_and_the_device_goes_on():
    cache, host, _ = world(pages=2, host_pages=4)
    run(cache, np.arange(8, dtype=np.int32))
    host.tree.walk = None  # type: ignore[method-assign, assignment]
    run(cache, np.arange(100, 108, dtype=np.int32))
    assert cache.sound
    assert host.pool.used == 0
    run(cache, np.arange(200, 208, dtype=np.int32))
    assert found(host, np.arange(100, 108, dtype=np.int32)) == 8
    check_cache(cache)
