"""Token ids, and records: plain data, equal by what they hold, small, the same after a journey to another process."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.requests import Tokens
from holdfast.replicas.types import TokenIds, common_prefix, record


@record
class Pair:
    first: int
    second: tuple[int, ...] = ()


def test_records_are_made_like_dataclasses_and_have_no_room_for_more() -> None:
    assert Pair(1) == Pair(1, ())
    assert Pair(1) != Pair(2)
    assert repr(Pair(1, (2,))) == "Pair(first=1, second=(2,))"
    with pytest.raises(AttributeError):
        Pair(1).third = 3


def test_records_travel() -> None:
    event = Tokens("a", (1, 2))
    assert pickle.loads(pickle.dumps(event)) == event


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
