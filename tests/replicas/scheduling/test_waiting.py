"""The waiting queue against a sorted list."""

from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.loadgen.simulator.policies import Plas
from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Sequence
from holdfast.replicas.requests import Submit
from holdfast.replicas.scheduling.queue import ProgramOrder, WaitingQueue

_numbers = count()


def waiting(
    name: str, arrived: float = 0.0, began: float = 0.0, preempted: bool = False, program: str = "", length: int = 1
) -> Sequence:
    tokens = np.ones(length, np.int32)
    submit = Submit(name, tokens=tokens, sampling=Sampling(1), program_id=program, program_arrival=began)
    sequence = Sequence.of(submit, next(_numbers), arrived, frozenset(), 0)
    sequence.preempted = preempted
    return sequence


def _place(sequence: Sequence) -> tuple[float, ...]:
    request = sequence.submit
    return (not sequence.preempted, not sequence.pinned, request.program_arrival, sequence.arrived, sequence.number)


def test_expiry_spares_the_young_the_preempted_and_the_gone():
    queue = WaitingQueue(ProgramOrder())
    gone = waiting("gone", 0.0)
    for sequence in (gone, waiting("late", 1.0), waiting("preempted", 1.0, preempted=True), waiting("young", 5.0)):
        queue.push(sequence)
    queue.remove(gone)
    assert [s.request_id for s in queue.expired(before=3.0)] == ["late"]
    assert sorted(s.request_id for s in queue) == ["preempted", "young"]


def test_who_was_passed_over_too_long_comes_first_and_only_once():
    order = Plas(levels=2, quantum_s=1.0, patience=2.0)
    served = waiting("served", 0.0, program="p")
    order.serve((served,), (), 3.0)
    queue = WaitingQueue(order)
    again, fresh = waiting("again", 10.0, program="p"), waiting("fresh", 11.0, program="q")
    queue.push(again)
    queue.push(fresh)
    queue.promote(15.9)
    assert queue.head() is fresh
    queue.promote(16.0)
    assert queue.head() is again
    order.serve((again,), (), 1.0)
    queue.reorder(again)
    queue.promote(99.0)
    assert queue.head() is fresh


class CountingOrder(ProgramOrder):
    asked = 0

    def waiting(self, sequence):
        self.asked += 1
        return super().waiting(sequence)


def test_no_operation_looks_at_more_than_one_of_ten_thousand():
    order = CountingOrder()
    queue = WaitingQueue(order)
    sequences = [waiting(f"r{i}", i, float(i % 97)) for i in range(10_000)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[::2]:
        before = order.asked
        queue.reorder(sequence)
        queue.remove(sequence)
        queue.head()
        queue.expired(before=0.0)
        queue.promote(1e9)
        assert order.asked == before + 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "pop", "remove", "set_aside", "put_back", "pin"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_any_use_agrees_with_a_sorted_list(operations):
    queue, model, held, n = WaitingQueue(ProgramOrder()), [], [], 0
    for what, value in operations:
        if what == "pin" and model:
            sequence = model[value % len(model)]
            sequence.pinned = not sequence.pinned
            queue.reorder(sequence)
        elif what == "push":
            sequence = waiting(f"r{n}", n, float(value), preempted=value == 9, length=1 + value)
            n += 1
            queue.push(sequence)
            model.append(sequence)
        elif what == "pop" and (head := queue.head()) is not None:
            queue.remove(head)
            model.remove(head)
        elif what == "remove" and model:
            sequence = model.pop(value % len(model))
            queue.remove(sequence)
        elif what == "set_aside" and queue.head() is not None:
            held.append(queue.set_aside())
        elif what == "put_back" and held:
            queue.put_back(held.pop())
        present = [s for s in model if s not in held]
        expected = min(present, key=_place, default=None)
        assert queue.head() is expected
        assert len(queue) == len(model)
        assert queue.tokens == sum(sequence.length for sequence in model)
        assert set(queue) == set(model)


def test_who_has_left_from_behind_another_is_let_go():
    queue = WaitingQueue(ProgramOrder())
    queue.push(first := waiting("first"))
    for i in range(1000):
        queue.push(sequence := waiting(f"r{i}", began=1.0))
        queue.remove(sequence)
    (line,) = queue._lines.values()
    assert len(line) < 100
    assert queue.head() is first
