"""A sequence that ends and leaves a pin: the same books as ending first and pinning then."""

import numpy as np
import pytest
from pinned_pages import pinned_pages

from holdfast.replicas.kv.cache import KVCache, in_use, to_be_had
from holdfast.replicas.kv.holding import Holding
from holdfast.replicas.types import TokenIds


def _count(start: int, n: int) -> TokenIds:
    return np.arange(start, start + n, dtype=np.int32)


def _begin(cache: KVCache, tokens: TokenIds, now: float = 0.0) -> Holding:
    """A sequence with cells for all of `tokens`."""
    holding = cache.acquire("", tokens, now).holding
    assert cache.grow(holding, len(tokens)) is not None
    cache.check()
    return holding


@pytest.mark.parametrize(
    ("other", "n_computed"),
    [
        ((), 10),
        ((0, 12), 10),  # ends inside what somebody else left
        ((0, 10), 10),
        ((0, 6), 10),
    ],
)
def test_what_is_finished_with_a_pin_is_as_if_it_had_been_pinned_after_that(other: tuple[int, ...], n_computed: int):
    found = []
    for at_once in (False, True):
        cache = KVCache(8, 4)
        holding = _begin(cache, _count(0, 12))
        if other:
            cache.finish(_begin(cache, _count(*other)), _count(*other), other[1], now=0.0)
        pin = cache.finish(holding, _count(0, 12), n_computed, now=1.0, pin=at_once)
        assert (pin is not None) == at_once
        pin = pin or cache.pin("", _count(0, n_computed), now=1.0)
        cache.check()
        kept = _begin(cache, _count(50, to_be_had(cache)), now=2.0)  # all that may go is evicted
        found.append((pin.length, pinned_pages([pin]), cache.stats, cache.peek("", _count(0, 13))))
        cache.drop(kept)
        cache.unpin(pin)
        cache.check()
    assert found[0] == found[1]
    assert found[0][3] >= n_computed


def test_a_sequence_whose_cells_are_the_trees_already_is_finished_with_a_pin() -> None:
    cache = KVCache(8, 4)
    holding = _begin(cache, _count(0, 8))
    cache.publish(holding, _count(0, 8), 8, now=0.0)
    pin = cache.finish(holding, _count(0, 8), 8, now=1.0, pin=True)
    cache.check()
    assert pin is not None
    assert pin.length == 8
    assert in_use(cache) == 8
