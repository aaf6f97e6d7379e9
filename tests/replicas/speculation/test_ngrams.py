"""Look-ups in C find what a search through all positions finds, for many sequences at once as for each alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.speculation.ngrams import (
    CANDIDATES,
    GAP,
    LIBRARY,
    WINDOW,
    Acceptance,
    DraftTable,
    NGramIndex,
    common_prefix,
)

SHORT = CANDIDATES  # so long that no chain is cut off
MOST = 5
ACCEPTANCE = Acceptance(by_match=(0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9), unknown=0.6, weight=0.1)
tokens_of = st.lists(st.integers(0, 3), max_size=SHORT)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def index_of(tokens: list[int]) -> NGramIndex:
    return NGramIndex(ids(tokens))


class Table:
    """Sequences in one table, each with its own text."""

    def __init__(self, *texts: list[int]) -> None:
        self.table = DraftTable(MOST, ACCEPTANCE)
        self.slots = [self.table.add(NGramIndex(ids(text), room=len(text) + 200)) for text in texts]

    def draft(
        self, memory: list[int] | None = None, limit: int = MOST, least: int = 2
    ) -> list[tuple[int, list[int], float]]:
        """For each sequence the length of its match, its draft, and how likely each token of it is."""
        memories = [None if memory is None else index_of(memory)] * len(self.slots)
        offers = self.table.draft(self.slots, [limit] * len(self.slots), memories, least)
        each = zip(self.slots, offers.lengths, offers.tokens, offers.chances, strict=True)
        return [
            (int(self.table._matched[slot]), tokens[:length].tolist(), chance) for slot, length, tokens, chance in each
        ]


def look_up(text: list[int], memory: list[int] | None = None, limit: int = MOST) -> tuple[int, list[int]]:
    ((length, draft, _),) = Table(text).draft(memory, limit)
    return length, draft


def ends_alike(tokens: list[int], end: int, context: list[int]) -> int:
    """How many tokens before `end` equal the end of `context`."""
    length = 0
    while length < min(end, len(context), WINDOW) and tokens[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


def naive(text: list[int], memory: list[int] | None, least: int) -> tuple[int, list[int]]:
    """The reference: the longest match, of equals the text's own, then the latest; and what follows it."""
    found, where = (0, 0), text
    for tokens in (text, *([memory] if memory else [])):
        match = max(((ends_alike(tokens, end, text), end) for end in range(1, len(tokens))), default=(0, 0))
        if match[0] and (tokens is text or match[0] >= max(least, found[0] + 1)):
            found, where = match, tokens
    length, end = found
    after = where[end : end + MOST] if length else []
    return length, after[: after.index(GAP)] if GAP in after else after


@given(tokens_of, st.none() | st.lists(st.integers(GAP, 3), max_size=SHORT), st.integers(1, 4))
def test_the_longest_match_is_found_as_by_search(text, memory, least) -> None:
    ((length, draft, _),) = Table(text).draft(memory, least=least)
    assert (length, draft) == naive(text, memory, least)


@given(st.lists(tokens_of, min_size=1, max_size=6), st.none() | tokens_of)
def test_sequences_of_one_call_find_what_each_finds_alone(texts, memory) -> None:
    assert Table(*texts).draft(memory) == [Table(text).draft(memory)[0] for text in texts]


@given(st.lists(tokens_of, max_size=4), tokens_of)
def test_growing_is_building(pieces: list[list[int]], memory: list[int]) -> None:
    whole = [token for piece in pieces for token in piece]
    grown, table = index_of([]), Table([])
    for piece in pieces:
        grown.extend(ids(piece))
        table.table.drawn(table.slots[0], piece[:20], None)
        table.table.learn()
        table.table.drawn(table.slots[0], piece[20:40], None)
    table.table.learn()
    assert grown.tokens().tolist() == whole
    assert grown.tokens(len(whole) // 2).tolist() == whole[len(whole) // 2 :]
    learned = [token for piece in pieces for token in piece[:40]][: SHORT // 2]
    if learned == [token for piece in pieces for token in piece]:
        assert table.draft(memory)[0][:2] == look_up(learned, memory)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.none() | st.integers(0, 2)), max_size=12))
def test_acceptance_is_the_moving_average_of_drafts_that_came_true(steps) -> None:
    text = [0, 1, 2, 0, 1, 1, 2]
    table, acceptance, predictions, predicted = Table(text), 0.6, 0.6, None
    for drawn, after in steps:
        ((matched, offered, chance),) = table.draft()
        length, draft = look_up(text)
        expected = (ACCEPTANCE.by_match[length.bit_length()] + acceptance) / 2
        if predicted is not None and draft[:1] == [predicted]:
            expected = max(expected, predictions)
        elif predicted is not None and predictions >= sum(expected**n for n in range(1, len(draft) + 1)):
            offered_too = [predicted]
            assert (matched, offered) == (length, offered_too)
            expected = predictions
        else:
            assert (matched, offered) == (length, draft)
        assert chance == pytest.approx(expected)
        table.table.drawn(table.slots[0], drawn, after)
        table.table.learn()
        if drawn and draft:
            right = common_prefix(draft, drawn)
            compared = min(right + 1, len(draft), len(drawn))
            acceptance += (1 - 0.9**compared) * (right / compared - acceptance)
        if drawn and predicted is not None:
            predictions += 0.1 * ((drawn[0] == predicted) - predictions)
        text, predicted = text + drawn, after


def test_continuation_stops_at_limit_gap_and_end() -> None:
    assert LIBRARY.missing == ""
    memory = [1, 2, 3, 4, GAP, 1, 2, 9]
    assert look_up([3, 4], memory) == (2, [])
    assert look_up([1, 2], memory) == (2, [9])
    assert look_up([0, 1, 2, 3], memory) == (3, [4])
    assert look_up([0, 1, 2, 3], memory, limit=0) == (3, [])


def test_a_long_match_is_preferred_to_a_late_one_and_measured_to_the_window() -> None:
    phrase = list(range(100, 100 + WINDOW + 10))
    assert look_up(phrase, [*phrase, 7, *phrase[-3:], 8], limit=1) == (WINDOW, [7])


def test_slots_are_used_again_and_begin_anew() -> None:
    table = Table(*[[1, 2, 1]] * 70)
    for _ in range(20):
        table.draft()
        for slot in table.slots:
            table.table.drawn(slot, [2, 1], 2)
        table.table.learn()
    used, first = set(table.slots), table.slots[0]
    table.table.remove(first)
    assert table.table.add(index_of([1, 2, 1])) == first
    table.slots = [first]
    assert table.draft() == Table([1, 2, 1]).draft()
    assert len(used) == 70


def test_an_index_without_room_is_left_as_it_is() -> None:
    table = DraftTable(MOST, ACCEPTANCE)
    index = NGramIndex(ids([1, 2]), room=3)
    slot = table.add(index)
    table.drawn(slot, [3, 4], None)
    with pytest.raises(ValueError, match="no room"):
        table.learn()
    assert index.tokens().tolist() == [1, 2]
    table.learn()  # what was noted is gone
