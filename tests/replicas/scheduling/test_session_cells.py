"""What sessions may keep: a budget of cells that they share, with what their operations in flight may come to leave."""

from engine_world import World, words

from holdfast.replicas.errors import ErrorKind
from holdfast.replicas.requests import Finished


def make(**settings) -> World:
    return World(**({"cells": 256, "context_length": 128, "max_sequences": 8, "session_rows": 5} | settings))


def test_sessions_share_a_budget_of_cells():
    world = make(cells=512, context_length=256, admission_ceiling=0.5)
    for session in ("s", "t"):
        world.open(session)
        world.append(f"most {session}", session, words(ord(session), 120))
    world.run()
    world.append("more", "s", words(3, 60))
    world.fork("t", "child")  # shares its cells, so it costs none
    world.append("a little", "child", words(4, 4))
    world.serve("stranger", words(5, 100))
    assert (world.end("more").error.kind, world.end("more").error.field) == (ErrorKind.OVERLOADED, "session_id")
    assert isinstance(world.end("a little"), Finished)
    world.assert_right("stranger")


def test_operations_in_flight_together_keep_no_more_than_the_ceiling():
    world = make(admission_ceiling=0.5)
    for session in "abcd":
        world.open(session)
    for session in "abcd":
        world.append(f"append {session}", session, words(ord(session), 60))
    for session in "cd":
        world.query(f"of {session}", session, words(ord(session), 4), keep=False)  # keeps nothing, so it costs nothing
    world.run()
    for session in "cd":
        assert world.end(f"append {session}").error.kind is ErrorKind.OVERLOADED
        world.assert_right(f"of {session}")
    assert world.engine.scheduler.rows.session_cells == 120
    world.serve("plain", words(9, 30), 4)


def test_what_a_query_may_draw_counts_until_it_has_ended():
    world = make(admission_ceiling=0.5)
    world.open("s")
    world.open("t")
    world.query("s1", "s", words(1, 8), 100)
    world.append("early", "t", words(2, 40))
    world.run()
    assert world.end("early").error.kind is ErrorKind.OVERLOADED
    assert len(world.out["s1"]) < 60
    world.append("late", "t", words(2, 40))
    world.run()
    assert isinstance(world.end("late"), Finished)


def test_a_history_that_forks_share_is_counted_once_while_they_are_asked():
    world = make(cells=1024, context_length=512, admission_ceiling=0.5)
    world.open("parent")
    world.append("a", "parent", words(1, 300))
    world.run()
    for child in "cde":
        world.fork("parent", child)
    for child in "cde":
        world.query(child, child, words(ord(child), 8), 20)
        world.step()
        assert world.engine.scheduler.rows.session_cells == 300
    world.run()
    world.assert_right(*"cde")
