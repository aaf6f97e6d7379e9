"""The common prefix of token ids."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.types import TokenIds, common_prefix

token_ids = st.lists(st.integers(0, 2), max_size=12).map(lambda t: np.array(t, dtype=np.int32))


@given(token_ids, token_ids)
def test_common_prefix_is_what_a_loop_finds(a: TokenIds, b: TokenIds) -> None:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(a, b) == n


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 100_000))
def test_common_prefix_of_long_texts_ends_where_they_differ(one: int, other: int, at: int) -> None:
    a, b = np.ones(one, np.int32), np.ones(other, np.int32)
    a[at : at + 1] = 0
    a[at + 1000 :: 1000] = 0
    assert common_prefix(a, b) == min(one, other, at)
