"""The index of a sequence's n-grams: it finds what a search through all positions finds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.speculation.ngrams import CANDIDATES, GAP, WINDOW, NGramIndex, Occurrence

SHORT = CANDIDATES  # so long that no chain is cut off
tokens_of = st.lists(st.integers(0, 3), max_size=SHORT)


def index_of(tokens: list[int]) -> NGramIndex:
    return NGramIndex(np.array(tokens, np.int32))


def ends_alike(tokens: list[int], end: int, context: list[int]) -> int:
    """How many tokens before `end` equal the end of `context`."""
    length = 0
    while length < min(end, len(context), WINDOW) and tokens[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


def naive(tokens: list[int], context: list[int], ends: range) -> tuple[int, int]:
    """Length and end of the longest match, of equals the latest; (0, 0) for none."""
    return max(((ends_alike(tokens, end, context), end) for end in ends), default=(0, 0))


def found(occurrence: Occurrence) -> tuple[int, int]:
    return occurrence.length, occurrence.end - WINDOW


@settings(deadline=None)
@given(tokens_of)
def test_own_end_is_found_as_by_search(tokens: list[int]) -> None:
    index = index_of(tokens)
    length, end = naive(tokens, tokens, range(1, len(tokens)))
    match = index.longest(index.window())
    assert match.length == length
    if length:
        assert found(match) == (length, end)


@settings(deadline=None)
@given(tokens_of, st.lists(st.integers(0, 3), min_size=1, max_size=WINDOW), st.sampled_from([0, 1, 2, 5, 6, 8, WINDOW]))
def test_another_text_is_found_as_by_search(tokens: list[int], text: list[int], above: int) -> None:
    index = index_of(tokens)
    length, end = naive(tokens, text, range(1, len(tokens)))
    match = index.longest(index_of(text).window(), above=above)
    assert match.length == (length if length > above else 0)
    if match.length:
        assert found(match) == (length, end)


@settings(deadline=None)
@given(st.lists(tokens_of, max_size=4), tokens_of)
def test_growing_is_building(pieces: list[list[int]], context: list[int]) -> None:
    whole = [token for piece in pieces for token in piece][:SHORT]
    grown = index_of([])
    for piece in pieces:
        grown.extend(piece)
    built = index_of([token for piece in pieces for token in piece])
    assert grown.tokens().tolist() == built.tokens().tolist()
    assert grown.window() == built.window()
    if len(built) <= len(whole):
        window = index_of(context).window()
        assert grown.longest(window) == built.longest(window)


def test_continuation_stops_at_limit_gap_and_end() -> None:
    index = index_of([1, 2, 3, 4, GAP, 1, 2, 9])
    match = index.longest(index_of([3, 4]).window())
    assert index.after(match, 8).tolist() == []
    match = index.longest(index_of([1, 2]).window())
    assert index.after(match, 8).tolist() == [9]
    match = index.longest(index_of([0, 1, 2, 3]).window())
    assert index.after(match, 8).tolist() == [4]
    assert index.after(match, 0).tolist() == []


def test_a_long_match_is_preferred_to_a_late_one_and_measured_to_the_window() -> None:
    phrase = list(range(100, 100 + WINDOW + 10))
    index = index_of([*phrase, 7, *phrase[-3:], 8])
    match = index.longest(index_of(phrase).window())
    assert match.length == WINDOW
    assert index.after(match, 1).tolist() == [7]
