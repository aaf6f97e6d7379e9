"""What a cached prefix would take from the cells that are to be had, told before it is acquired."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.kv.cache import KVCache, claimed, found, to_be_had


@given(
    st.sampled_from([1, 4, 16]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 110),
)
def test_what_a_prefix_claims_is_what_acquiring_it_protects(
    page_size: int, known: list[tuple[int, int, bool]], shared: int
) -> None:
    """Each known text shares its first tokens with one line of numbers and goes on alone; some are still held."""
    cache = KVCache(4096 // page_size, page_size)
    for i, (common, alone, held) in enumerate(known):
        text = np.concatenate((np.arange(common, dtype=np.int32), 1000 * (i + 1) + np.arange(alone, dtype=np.int32)))
        holding = cache.acquire("", text, 0.0).holding
        assert cache.grow(holding, len(text)) is not None
        if not held:
            cache.finish(holding, text, len(text), 0.0)
    asked = np.concatenate((np.arange(shared, dtype=np.int32), [np.int32(9)]))
    match = found(cache, "", asked)
    told, before = claimed(cache, match), to_be_had(cache)
    holding = cache.acquire("", asked, 1.0, match=match).holding
    assert before - to_be_had(cache) == told + len(holding.own) * page_size
    cache.drop(holding)
    cache.check()
