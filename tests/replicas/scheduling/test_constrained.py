"""Which drafts of a constrained sequence are verified, from a grammar made by hand."""

from copy import copy

import numpy as np
import pytest
from engine_world import World
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Sequence
from holdfast.replicas.requests import Failed, Finished, Submit
from holdfast.replicas.speculation.drafter import MOST_FORCED, NO_DRAFT, Drafter
from holdfast.replicas.stats import EngineStats


class Fixed:
    """Forces `forces`, then lets even tokens through."""

    def __init__(self, *forces: int, failed: bool = False) -> None:
        self.forces, self.failed, self.finished, self.given_up = list(forces), failed, False, False
        self.binding = True

    def forced(self) -> list[int]:
        return list(self.forces)

    def accepts(self, tokens) -> int:
        for n, token in enumerate(tokens):
            if token != self.forces[n] if n < len(self.forces) else token % 2:
                return n
        return len(tokens)

    def advance(self, tokens) -> int:
        return len(tokens)


class Picky:
    """Refuses multiples of `refuses` while it does not bind, binds after one, and is finished after `most` tokens."""

    def __init__(self, refuses: int, most: int, binding: bool) -> None:
        self.refuses, self.left, self.binding = refuses, most, binding
        self.failed = self.given_up = False

    @property
    def finished(self) -> bool:
        return not self.left

    def advance(self, tokens) -> int:
        for n, token in enumerate(tokens):
            if self.finished:
                return n
            if not (self.binding or token % self.refuses):
                self.binding = True
                return n
            self.left -= 1
        return len(tokens)


def sequence_of(matcher, max_tokens: int = 10) -> Sequence:
    submit = Submit("a", tokens=np.array([1, 2], np.int32), sampling=Sampling(max_tokens), matcher=matcher)
    return Sequence.of(submit, 0, 0.0, frozenset(), 0)


def fitting(sequence: Sequence, drafts):
    """What is proposed for a sequence for which `drafts` were prepared."""
    drafter = Drafter(DraftConfig(), EngineStats())
    drafter._drafts[sequence.request_id] = drafts
    return drafter.propose(sequence)


@pytest.mark.parametrize(
    ("forces", "drafts", "expected"),
    [
        ((), [2, 4, 5, 6], [2, 4]),
        ((), [3], []),
        ((), [], []),
        ((7, 9), [], [7, 9]),
        ((7, 9), [2, 4], [7, 9]),
        ((7, 9), [7], [7, 9]),
        ((7, 9), [7, 9, 4, 5], [7, 9, 4]),
    ],
)
def test_what_is_forbidden_is_cut_off_and_what_is_forced_comes_first(forces, drafts, expected):
    got = fitting(sequence_of(Fixed(*forces)), np.array(drafts, np.int32))
    assert got.tolist() == expected
    assert got.dtype == np.int32


def test_forced_drafts_are_limited_and_leave_room_for_the_token_after_them():
    many = list(range(MOST_FORCED + 1))
    assert fitting(sequence_of(Fixed(*many), max_tokens=99), NO_DRAFT).tolist() == many[:-1]
    assert fitting(sequence_of(Fixed(7, 9, 11), max_tokens=2), NO_DRAFT).tolist() == [7]
    assert fitting(sequence_of(Fixed(7, 9, 11), max_tokens=1), NO_DRAFT).tolist() == []


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8).map(tuple),
    st.frozensets(st.integers(1, 12), max_size=2),
    st.none() | st.builds(Picky, st.integers(2, 9), st.integers(1, 9), st.booleans()),
    st.integers(1, 9),
)
def test_what_is_drawn_together_is_kept_as_if_it_were_drawn_one_by_one(drawn, stops, matcher, room):
    def kept(pieces):
        submit = Submit("a", tokens=np.array([1, 2], np.int32), sampling=Sampling(room), matcher=copy(matcher))
        sequence = Sequence.of(submit, 0, 0.0, stops, 0)
        for piece in pieces:
            stand, reason = sequence.append(piece, 0.0)
            if reason or len(stand) < len(piece):
                break
        return sequence.tokens.tolist(), reason, sequence.matcher and vars(sequence.matcher)

    assert kept([drawn]) == kept([(token,) for token in drawn])


def test_a_grammar_beyond_its_limits_is_an_error_of_the_request():
    world = World()
    for name, failed in (("good", False), ("bad", True)):
        matcher = Fixed(7, failed=failed)
        world.give(Submit(name, tokens=np.array([1, 2], np.int32), sampling=Sampling(3), matcher=matcher))
        world.run()
    assert isinstance(world.end("good"), Finished)
    end = world.end("bad")
    assert isinstance(end, Failed)
    assert "limits" in end.error.message
