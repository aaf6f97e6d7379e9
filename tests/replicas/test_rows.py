"""Rows between turns: programs give them up in the order of their last use, sessions do not."""

import numpy as np

from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.pages import NO_PAGES
from holdfast.replicas.programs import KeptRow, Kind, Program, ProgramKey, ProgramPin, Programs, Rows, SequencePool
from holdfast.replicas.stats import EngineStats

NO_HISTORY = np.empty(0, np.int32)


def program(name: str, kind: Kind = Kind.PROGRAM) -> Program:
    return Program(ProgramKey("", name, kind))


def rows_of(n: int, *, keep: bool = True) -> Rows:
    """`n` rows that can be kept, and one that cannot."""
    programs = Programs(EngineStats(), tokens=100)
    return Rows(KVCache(16, 4), SequencePool(n + 1, n), programs, keep=keep, share=True)


def turn(rows: Rows, program: Program) -> int | None:
    """A turn of a program from its beginning to its end; the row it had."""
    begun = rows.begin(program)
    if begun is None:
        return None
    rows.keep_row(program, KeptRow(1, begun[0], NO_PAGES))
    return begun[0]


def test_the_least_recently_seen_program_gives_way_and_a_session_never_does():
    rows, session = rows_of(4), program("s", Kind.SESSION)
    rows.keep_history(session, NO_HISTORY, KeptRow(0, rows.begin(session)[0], NO_PAGES), 0.0)
    those = {name: program(name) for name in "abcde"}
    of = {name: turn(rows, those[name]) for name in "abc"}
    assert len(set(of.values())) == 3
    assert turn(rows, those["a"]) == of["a"], "a program that goes on gets the row it had"
    assert (rows.kept, rows.taken) == (3, 1)
    assert [turn(rows, those[name]) for name in "de"] == [of["b"], of["c"]]
    assert {name for name, each in those.items() if each.row is not None} == {"a", "d", "e"}
    assert rows.begin(session)[1] is not None


def test_a_program_with_pinned_cells_gives_way_after_the_others():
    rows, a, b = rows_of(2), program("a"), program("b")
    of_a, of_b = turn(rows, a), turn(rows, b)
    a.pin = object.__new__(ProgramPin)
    c = program("c")
    assert turn(rows, c) == of_b
    c.pin = object.__new__(ProgramPin)
    assert turn(rows, program("d")) == of_a


def test_a_row_is_taken_once():
    rows, x = rows_of(2), program("x")
    row = turn(rows, x)
    for other in (program("x", Kind.SESSION), program("y"), None):
        taken, last = rows.begin(other)
        assert last is None
        assert taken != row
        rows.release(taken)
    assert rows.begin(x)[0] == row
    assert x.row is None
    assert rows.begin(x)[1] is None


def test_programs_keep_nothing_where_they_are_not_to():
    rows = rows_of(2, keep=False)
    assert turn(rows, program("x")) is not None
    assert (rows.kept, rows.taken) == (0, 0)
