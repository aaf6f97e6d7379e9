"""Lines of requests against a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import OverloadedError
from holdfast.router.lines import Lines


def test_a_replica_takes_the_first_of_its_line_and_the_line_for_any():
    lines: Lines[str] = Lines(10)
    lines.enter((3.0,), "third", None)
    lines.enter((2.0,), "second", "a")
    lines.enter((1.0,), "elsewhere", "b")
    assert [lines.take("a") for _ in range(3)] == ["second", "third", None]
    assert lines.take("b") == "elsewhere"


def test_equal_keys_are_first_in_first_out():
    lines: Lines[int] = Lines(10)
    for i in range(5):
        lines.enter((1.0,), i, "a" if i % 2 else None)
    assert [lines.take("a") for _ in range(5)] == list(range(5))


def test_one_too_many_is_refused():
    lines: Lines[str] = Lines(1)
    place = lines.enter((1.0,), "only", None)
    with pytest.raises(OverloadedError):
        lines.enter((0.0,), "more", None)
    lines.leave(place)
    lines.leave(place)
    assert len(lines) == 0
    lines.enter((0.0,), "more", None)


def test_who_waits_for_a_replica_that_goes_waits_for_any():
    lines: Lines[str] = Lines(10)
    lines.enter((1.0,), "orphan", "a")
    lines.keep({"b"})
    assert lines.take("b") == "orphan"


def test_what_was_given_up_is_let_go():
    lines: Lines[int] = Lines(10)
    lines.enter((0.0,), -1, "a")
    for i in range(1000):
        lines.leave(lines.enter((1.0,), i, "a"))
    assert sum(len(line) for line in lines._lines.values()) < 200


steps = st.tuples(st.sampled_from(["enter", "take", "leave", "free", "keep"]), st.integers(0, 5), st.sampled_from("ab"))


@given(st.lists(steps, max_size=60))
def test_any_use_agrees_with_a_sorted_list(operations):
    lines: Lines[int] = Lines(1000)
    places, homes = {}, {}  # of those that wait
    for n, (what, value, replica) in enumerate(operations):
        if what == "enter":
            homes[n] = replica if value % 2 else None
            places[n] = lines.enter((value,), n, homes[n])
        elif what == "keep":
            lines.keep({replica})
            homes = {each: home if home == replica else None for each, home in homes.items()}
        elif what == "take":
            waiting = [each for each, home in homes.items() if home in (None, replica)]
            # Of equals the one whose present wait began first; a line that was left for another is a new one.
            first = min((places[each].key for each in waiting), default=None)
            taken = lines.take(replica)
            assert (taken is None) == (first is None)
            if taken is not None:
                assert places[taken].key == first
                assert taken in waiting
                del homes[taken], places[taken]
        elif homes:
            chosen = list(homes)[value % len(homes)]
            if what == "free":
                lines.free(places[chosen])
                homes[chosen] = None
            else:
                lines.leave(places.pop(chosen))
                del homes[chosen]
        assert len(lines) == len(homes)
