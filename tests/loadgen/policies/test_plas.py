"""Autellix's order, without an engine."""

from itertools import count

import numpy as np

from holdfast.loadgen.policies.plas import Plas
from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Sequence
from holdfast.replicas.requests import Submit

_numbers = count()


def request(arrived: float, program: str = "", scope: str = "") -> Sequence:
    tokens = np.asarray([1], np.int32)
    submit = Submit("r", sampling=Sampling(1), scope=scope, program_id=program, tokens=tokens)
    return Sequence.of(submit, next(_numbers), arrived, frozenset(), 0)


def test_a_request_begins_where_its_program_stands() -> None:
    order = Plas(levels=3, quantum_s=1.0, factor=4.0)
    order.serve((request(0.0, program="p"),), (), 1.5)
    later, other = request(1.0, program="p"), request(2.0, program="q")
    order.arrive(later)
    order.arrive(other)
    assert order.key(later)[0] == 1
    assert order.key(other)[0] == 0


def test_it_sinks_as_it_is_served_and_no_further_than_the_last_level() -> None:
    order, one, levels = Plas(levels=3, quantum_s=1.0, factor=2.0), request(0.0), []
    order.arrive(one)
    for _ in range(6):
        levels.append(order.key(one)[0])
        order.serve((one,), (), 0.5)
    assert levels == [0, 0, 1, 1, 2, 2]
    order.serve((one,), (), 1e9)
    assert order.key(one)[0] == 2


def test_the_longer_a_program_was_served_the_longer_it_is_patient() -> None:
    order = Plas(quantum_s=1.0, patience=3.0)
    order.serve((request(0.0, program="p"),), (), 2.0)
    later, other = request(10.0, program="p"), request(10.0, program="q")
    order.arrive(later)
    order.arrive(other)
    assert list(order.promote(15.9)) == []
    assert order.key(later)[0] > 0
    assert list(order.promote(16.0)) == [later]
    assert order.key(later)[0] == 0


def test_programs_served_longest_ago_are_forgotten() -> None:
    order = Plas(quantum_s=1.0, programs=2)
    for program in "abca":
        order.serve((request(0.0, program=program),), (), 5.0)
    stands = []
    for program in "abc":
        later = request(1.0, program=program)
        order.arrive(later)
        stands.append(order.attained[later])
    assert stands == [5.0, 0.0, 5.0]  # b was forgotten for c, and a for b's sake came back


def test_tenants_have_programs_of_their_own() -> None:
    order = Plas()
    order.serve((request(0.0, program="p"),), (), 5.0)
    stranger = request(0.0, program="p", scope="other")
    order.arrive(stranger)
    assert order.attained[stranger] == 0.0


def test_nothing_of_a_request_is_kept_when_it_has_left() -> None:
    order, one = Plas(), request(0.0, program="p")
    order.arrive(one)
    order.left(one)
    order.serve((one,), (), 1.0)  # the step in which it ended
    assert order.attained == {}
