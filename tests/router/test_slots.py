"""Slots of replicas against a plain count."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.slots import Slots


def slots(control_calls: int = 0, **capacity: int) -> Slots:
    made = Slots(1.0, control_calls)
    made.update(capacity)
    return made


def test_a_replica_takes_as_many_as_it_says():
    made = slots(a=2)
    made.take("a", "r1")
    assert made.room("a", 0.0)
    made.take("a", "r2")
    assert not made.room("a", 0.0)
    made.give_back("a", "r1")
    assert made.room("a", 0.0)


def test_what_took_no_slot_gives_none_back():
    made = slots(a=1)
    made.take("a", "r1")
    made.give_back("a", "broadcast")
    assert not made.room("a", 0.0)


def test_a_replica_that_is_full_with_others_requests_is_asked_again_later():
    made = slots(a=2)
    assert made.told("a", 2, now=5.0) == 6.0
    assert not made.room("a", 5.9)
    assert made.room("a", 6.0)
    assert made.told("a", 1, now=7.0) is None
    assert made.room("a", 7.0)


def test_a_replica_that_is_full_is_asked_again_once_something_ends_there():
    made = slots(a=2)
    made.take("a", "r1")
    made.told("a", 2, now=5.0)
    made.give_back("a", "r1")
    assert not made.room("a", 5.0), "that may be the request which was refused"
    made.ended("a")
    assert made.room("a", 5.0)


def test_control_calls_in_what_a_replica_says_do_not_close_it():
    made = slots(control_calls=2, a=2)
    made.take("a", "r1")
    assert made.told("a", 2, now=5.0) is None
    assert made.room("a", 5.0)
    assert made.told("a", 4, now=5.0) == 6.0, "it takes nothing any more"
    assert not made.room("a", 5.0)


def test_a_replica_that_took_a_request_as_its_last_is_asked_again_later():
    made = slots(control_calls=2, a=2)
    made.take("a", "r1")
    assert made.told("a", 1, now=5.0) is None
    assert made.accepted("a", "r1", now=5.0) is None
    assert made.told("a", 2, now=5.0) is None
    assert made.accepted("a", "r1", now=5.0) == 6.0
    assert not made.room("a", 5.9)


def test_what_a_replica_said_to_requests_that_have_ended_says_nothing():
    """Serve tells it at the end of those that do not stream."""
    made = slots(control_calls=2, a=5)
    requests = [f"r{i}" for i in range(5)]
    for request in requests:
        made.take("a", request)
    for before, request in enumerate(requests, 1):
        made.give_back("a", request)
        made.told("a", before, now=5.0)
        assert made.accepted("a", request, now=5.0) is None
        made.ended("a")
        assert made.room("a", 5.0)


def test_a_replica_that_has_gone_has_no_room():
    made = slots(a=2)
    made.told("a", 1, now=0.0)
    made.update({"b": 1})
    assert not made.room("a", 0.0)
    assert made.room("b", 0.0)


@given(st.lists(st.tuples(st.sampled_from(["take", "end", "late"]), st.sampled_from("ab"), st.sampled_from("rst"))))
def test_any_use_agrees_with_a_count(operations):
    """A request may try a replica twice, and the end of its first try may be told after the second began."""
    made, held = slots(a=3, b=2), []
    for what, replica, request in operations:
        if what == "take" and made.room(replica, 0.0):
            made.take(replica, request)
            held.append((replica, request))
        elif what != "take":
            assert made.give_back(replica, request) == ((replica, request) in held)
            if (replica, request) in held:
                held.remove((replica, request))
        for each, most in (("a", 3), ("b", 2)):
            n = sum(of == each for of, _ in held)
            assert made.room(each, 0.0) == (n < most)
            assert (each in made.free) == (n < most)
