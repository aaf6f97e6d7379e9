"""The waiting queue against a sorted list."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.events import Sampling, Submit
from holdfast.replicas.scheduling.order import ProgramOrder, RequestOrder
from holdfast.replicas.scheduling.waiting import WaitingQueue
from holdfast.replicas.sequences.sequence import Sequence

_numbers = count()


def waiting(name: str, arrived: float = 0.0, began: float = 0.0, preempted: bool = False) -> Sequence:
    submit = Submit(name, np.asarray([1], np.int32), Sampling(1), program_arrival=began)
    sequence = Sequence.of(submit, next(_numbers), arrived, frozenset(), 0)
    sequence.preempted = preempted
    return sequence


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while (head := queue.head()) is not None:
        names.append(head.request_id)
        queue.remove(head)
    return names


def test_preempted_then_program_then_arrival():
    queue = WaitingQueue(ProgramOrder())
    for sequence in (
        waiting("young", 1.0, 9.0),
        waiting("old second", 3.0, 5.0),
        waiting("old first", 2.0, 5.0),
        waiting("preempted", 4.0, 20.0, True),
    ):
        queue.push(sequence)
    assert drain(queue) == ["preempted", "old first", "old second", "young"]


def test_request_order_ignores_programs():
    queue = WaitingQueue(RequestOrder())
    queue.push(waiting("second", 2.0, 1.0))
    queue.push(waiting("first", 1.0, 9.0))
    assert drain(queue) == ["first", "second"]


def test_equal_keys_are_first_in_first_out():
    queue = WaitingQueue(ProgramOrder())
    for i in range(20):
        queue.push(waiting(f"r{i}"))
    assert drain(queue) == [f"r{i}" for i in range(20)]


def test_expiry_spares_the_young_the_preempted_and_the_gone():
    queue = WaitingQueue(ProgramOrder())
    gone = waiting("gone", 0.0)
    for sequence in (gone, waiting("late", 1.0), waiting("preempted", 1.0, preempted=True), waiting("young", 5.0)):
        queue.push(sequence)
    queue.remove(gone)
    assert [s.request_id for s in queue.expired(before=3.0)] == ["late"]
    assert sorted(s.request_id for s in queue) == ["preempted", "young"]


def test_a_held_sequence_is_no_head_but_still_waits():
    queue = WaitingQueue(ProgramOrder())
    first, second = waiting("first", 1.0), waiting("second", 2.0)
    queue.push(first)
    queue.push(second)
    assert queue.hold() is first
    assert queue.head() is second
    assert len(queue) == 2
    queue.unhold(first)
    assert drain(queue) == ["first", "second"]
    queue.unhold(first)  # removed meanwhile
    assert queue.head() is None
    with pytest.raises(IndexError):
        queue.hold()


@given(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "remove", "hold", "unhold"]), st.integers(0, 9)), max_size=60)
)
def test_any_use_agrees_with_a_sorted_list(operations):
    queue, model, held, n = WaitingQueue(ProgramOrder()), [], [], 0
    for what, value in operations:
        if what == "push":
            sequence = waiting(f"r{n}", n, float(value))
            n += 1
            queue.push(sequence)
            model.append(sequence)
        elif what == "pop" and (head := queue.head()) is not None:
            queue.remove(head)
            model.remove(head)
        elif what == "remove" and model:
            sequence = model.pop(value % len(model))
            queue.remove(sequence)
        elif what == "hold" and queue.head() is not None:
            held.append(queue.hold())
        elif what == "unhold" and held:
            queue.unhold(held.pop())
        present = [s for s in model if s not in held]
        expected = min(present, key=lambda s: (s.submit.program_arrival, s.arrived, s.number), default=None)
        assert queue.head() is expected
        assert len(queue) == len(model)
        assert set(queue) == set(model)
