"""Rows between turns: programs give way in the order of their last use, sessions do not."""

from dataclasses import replace

import numpy as np

from holdfast.replicas.events import Submit
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.pages import NO_PAGES
from holdfast.replicas.requests import PartialPrefill, SessionTurn
from holdfast.replicas.retention.rows import ParkedRow, Rows
from holdfast.replicas.sequences import Owner, SequencePool
from holdfast.replicas.types import NO_TOKENS

NOBODY = np.empty(0, np.int32)


def program(name: str) -> Owner:
    return Owner("", name, session=False)


def nobody(owner: Owner) -> bool:
    return False


def rows_of(n: int, *, park: bool = True) -> Rows:
    """`n` rows that can be kept, and one that cannot."""
    return Rows(KVCache(16, 4), SequencePool(n + 1, n), park=park)


def turn(rows: Rows, owner: Owner, spared=nobody) -> int | None:
    """A turn of a program from its beginning to its end; the row it had."""
    begun = rows.begin(owner, spared)
    if begun is None:
        return None
    rows.park_program(owner, ParkedRow(1, begun[0], NO_PAGES))
    return begun[0]


def test_the_least_recently_seen_program_gives_way_and_a_session_never_does():
    rows = rows_of(4)
    session = Owner("", "s", session=True)
    rows.park_session(session, NOBODY, ParkedRow(0, rows.begin(session, nobody)[0], NO_PAGES), 0.0)
    of = {name: turn(rows, program(name)) for name in "abc"}
    assert len(set(of.values())) == 3
    assert turn(rows, program("a")) == of["a"], "who goes on gets the row it had"
    assert (rows.parked, rows.taken) == (3, 1)
    assert [turn(rows, program(name)) for name in "de"] == [of["b"], of["c"]]
    assert list(rows.programs()) == [program("a"), program("d"), program("e")]
    assert rows.begin(session, nobody)[1] is not None


def test_a_spared_program_gives_way_after_the_others():
    rows = rows_of(2)
    of = {name: turn(rows, program(name)) for name in "ab"}
    assert turn(rows, program("c"), spared=lambda owner: owner.name == "a") == of["b"]
    assert turn(rows, program("d"), spared=lambda owner: True) == of["a"]


def test_a_row_is_taken_once_and_a_program_is_no_session():
    rows = rows_of(2)
    row = turn(rows, program("x"))
    for other in (Owner("", "x", session=True), Owner("tenant", "x", session=False), None):
        taken, last = rows.begin(other, nobody)
        assert last is None
        assert taken != row
        rows.release(taken)
    assert rows.begin(program("x"), nobody)[0] == row
    assert rows.begin(program("x"), nobody)[1] is None


def test_programs_keep_nothing_where_they_are_not_to():
    rows = rows_of(2, park=False)
    assert turn(rows, program("x")) is not None
    assert (rows.parked, rows.taken) == (0, 0)


def test_an_owner_is_the_session_before_the_program():
    request = Submit("r", tokens=NO_TOKENS)
    assert Owner.of(replace(request, session=SessionTurn("s"), program_id="p")) == Owner("", "s", session=True)
    assert Owner.of(replace(request, program_id="p")) == program("p")
    assert Owner.of(request) is None


def test_what_is_computed_ahead_is_its_handles_or_its_programs():
    request = Submit("r", tokens=NO_TOKENS, program_id="p", background=PartialPrefill("h"))
    assert Owner.of(request) == Owner.handle("", "h") != Owner("", "h", session=False)
    assert Owner.of(replace(request, background=PartialPrefill())) == program("p")
