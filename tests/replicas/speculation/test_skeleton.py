"""Skeletons of calls: followed as they are drawn, drafted with their values filled in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.speculation.ngrams import NGramIndex
from holdfast.replicas.speculation.skeletons import HOLE, Place, Skeleton, SkeletonCursor, SkeletonSet

OPEN, NAME, END, QUOTE, STOP = 1, 2, 3, 4, 5
#   two tools: OPEN NAME 10 20 _ QUOTE 21 _ END,  OPEN NAME 11 22 _ END
TOOLS = SkeletonSet(
    [Skeleton(((OPEN, NAME, 10, 20), (QUOTE, 21), (END,))), Skeleton(((OPEN, NAME, 11, 22), (END,)))],
    closers=[QUOTE],
    breaks=[STOP],
)


def place_after(drawn: list[int], tools: SkeletonSet = TOOLS) -> Place | None:
    index = NGramIndex(np.array([7, 8, 9], np.int32))
    cursor = SkeletonCursor(tools, 9)
    for token in drawn:
        cursor.advance([token], index.window)
        index.extend([token])
    return cursor.place


def nothing(so_far: list[int]) -> list[int]:
    return []


def test_a_call_is_followed_through_its_values() -> None:
    assert place_after([30, 31]) is None
    assert place_after([30, OPEN, NAME]) == Place(0, 2)
    assert place_after([30, OPEN, NAME, 11]) == Place(1, 3)
    assert place_after([OPEN, NAME, 10, 20, 40, 41]) == Place(0, 4)
    assert place_after([OPEN, NAME, 10, 20, 40, 41, QUOTE]) == Place(0, 6)
    assert place_after([OPEN, NAME, 10, 20, 40, 41, QUOTE, 21, 40, END]) == Place(0, 9)
    assert place_after([OPEN, NAME, 10, 20, 40, 41, QUOTE, 21, 40, END, 30]) is None


def test_what_looks_like_the_fixed_text_may_be_the_value() -> None:
    assert place_after([OPEN, NAME, 10, 20, 40, QUOTE, 50]) == Place(0, 4)


def test_the_middle_of_a_call_alone_is_no_call() -> None:
    assert place_after([10, 20]) is None


def test_another_call_may_follow() -> None:
    call = [OPEN, NAME, 11, 22, 40, END]
    assert place_after([*call, OPEN, NAME, 10]) == Place(0, 3)


def test_a_list_that_goes_on_leads_back_to_its_items() -> None:
    # {"a": [_, _]} with item separator QUOTE: OPEN 2 _ QUOTE _ END
    tools = SkeletonSet([Skeleton(((OPEN, NAME), (QUOTE,), (END,)))], closers=[QUOTE])
    assert place_after([OPEN, NAME, 40, QUOTE, 41, QUOTE, 42, QUOTE], tools) == Place(0, 4)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), max_size=4), max_size=12))
def test_any_text_can_be_followed_at_any_cut(steps: list[list[int]]) -> None:
    index, cursor = NGramIndex(np.zeros(0, np.int32)), SkeletonCursor(TOOLS, 0)
    for drawn in steps:
        cursor.advance(drawn, index.window)
        index.extend(drawn)
        if cursor.place is not None:
            tokens = TOOLS.flat[cursor.place.skeleton]
            draft = TOOLS.compose(cursor.place, cursor.filled, 5, nothing)
            assert 0 <= cursor.place.position <= len(tokens)
            assert len(draft) <= 5
            assert HOLE not in draft
    assert cursor.place == place_after([token for drawn in steps for token in drawn])


def test_a_draft_alternates_between_fixed_text_and_values() -> None:
    values = {4: [50, 51, QUOTE, 99], 8: [60, STOP, 99]}

    def fill(so_far: list[int]) -> list[int]:
        return values[len(so_far)]

    draft = TOOLS.compose(Place(0, 0), 0, 16, fill)
    assert draft == [OPEN, NAME, 10, 20, 50, 51, QUOTE, 21, 60, END]
    assert TOOLS.compose(Place(0, 0), 0, 7, fill) == draft[:7]


def test_a_draft_ends_where_a_value_is_unknown_or_open() -> None:
    assert TOOLS.compose(Place(0, 2), 0, 16, nothing) == [10, 20]
    assert TOOLS.compose(Place(0, 4), 0, 16, lambda so_far: [50, 51]) == [50, 51]


@pytest.mark.parametrize(("filled", "expected"), [(1, [50, QUOTE, 21]), (30, [50, STOP, 52])])
def test_a_full_stop_ends_a_short_value_only(filled: int, expected: list[int]) -> None:
    draft = TOOLS.compose(Place(0, 4), filled, 3, lambda so_far: [50, STOP, 52, 53] if not so_far else [])
    assert draft == expected


def test_the_draft_says_which_tool() -> None:
    assert TOOLS.towards(Place(0, 2), [11, 22]) == Place(1, 2)
    assert TOOLS.towards(Place(0, 2), [30]) == Place(0, 2)
    assert TOOLS.towards(Place(0, 6), [11, 22]) == Place(0, 6)


def test_empty_skeletons_and_empty_values_do_no_harm() -> None:
    tools = SkeletonSet([Skeleton(()), Skeleton(((),)), Skeleton(((), (1,))), Skeleton(((1, 2), (), (3,), ()))])
    assert tools.flat == ((1, 2, HOLE, 3),)
