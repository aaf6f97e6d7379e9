"""The memory of earlier turns: bounded, the oldest goes first, and scopes do not meet."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.speculation.drafter import TurnMemory
from holdfast.replicas.speculation.ngrams import GAP


def turn(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 600)), max_size=25))
def test_bytes_stay_within_both_bounds(turns: list[tuple[str, int]]) -> None:
    memory = TurnMemory(total_bytes=60_000, scope_bytes=40_000)
    for scope, length in turns:
        memory.add(scope, turn(list(range(length))))
        indices = [index for index in map(memory.find, "abc") if index]
        assert memory.nbytes == sum(index.nbytes for index in indices) <= 60_000
        assert all(index.nbytes <= 40_000 for index in indices)


def test_a_scope_keeps_its_latest_turns_each_behind_a_gap() -> None:
    memory = TurnMemory(total_bytes=1 << 20, scope_bytes=40_000)
    for start in range(0, 10_000, 100):
        memory.add("a", turn(list(range(start, start + 100))))
    index = memory.find("a")
    assert index is not None
    kept = index.tokens().tolist()
    assert kept[-101:] == [*range(9900, 10_000), GAP]
    assert 0 not in kept
    assert kept.count(GAP) >= len(kept) // 101


def test_the_scope_used_least_recently_goes_first() -> None:
    memory = TurnMemory(total_bytes=60_000, scope_bytes=40_000)
    for scope in "aba":
        memory.add(scope, turn(list(range(300))))
    memory.add("c", turn(list(range(900))))
    assert memory.find("b") is None
    assert memory.find("c") is not None


def test_a_share_too_small_for_anything_holds_nothing() -> None:
    memory = TurnMemory(total_bytes=100, scope_bytes=100)
    memory.add("a", turn([1, 2, 3]))
    assert memory.find("a") is None
    assert memory.nbytes == 0
