"""Records are plain data: equal by what they hold, small, and the same after a journey to another process."""

import pickle

import pytest

from holdfast.replicas.events import Tokens
from holdfast.replicas.types import record


@record
class Pair:
    first: int
    second: tuple[int, ...] = ()


def test_records_are_made_like_dataclasses_and_have_no_room_for_more() -> None:
    assert Pair(1) == Pair(1, ())
    assert Pair(1) != Pair(2)
    assert repr(Pair(1, (2,))) == "Pair(first=1, second=(2,))"
    with pytest.raises(AttributeError):
        Pair(1).third = 3


def test_records_travel() -> None:
    event = Tokens("a", (1, 2))
    assert pickle.loads(pickle.dumps(event)) == event
