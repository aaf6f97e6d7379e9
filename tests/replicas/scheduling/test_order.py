"""The policies of order, one by one, and in an engine that serves one request at a time."""

from itertools import count
from typing import get_args

import numpy as np
import pytest
from engine_world import World, words

from holdfast.replicas.config import EngineConfig, OrderName, RetentionConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.events import Submit
from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Sequence
from holdfast.replicas.scheduling.queue import PlasOrder, order_of

_numbers = count()


def request(arrived: float, began: float = 0.0, program: str = "", pinned: bool = False) -> Sequence:
    submit = Submit(
        "r", tokens=np.asarray([1], np.int32), sampling=Sampling(1), program_id=program, program_arrival=began
    )
    made = Sequence.of(submit, next(_numbers), arrived, frozenset(), 0)
    made.pinned = pinned
    return made


def first(name: str, *requests: Sequence) -> int:
    """Which of the requests a policy takes first."""
    order = order_of(name)
    return min(range(len(requests)), key=lambda i: order.waiting(requests[i]))


def test_the_word_of_the_configuration_decides():
    old, new, pinned = request(5.0, began=1.0), request(4.0, began=2.0), request(6.0, began=3.0, pinned=True)
    assert first("program", old, new, pinned) == 2
    assert first("infercept", old, new, pinned) == 0
    assert first("request", old, new, pinned) == 1
    assert first("plas", old, new, pinned) == 1


@pytest.mark.parametrize("name", get_args(OrderName))
def test_a_pin_says_nothing_among_the_running(name):
    order, one = order_of(name), request(1.0)
    before = order.key(one)
    one.pinned = True
    assert order.key(one) == before


class TestPlas:
    def test_a_request_begins_where_its_program_stands(self):
        order = PlasOrder(levels=3, quantum_s=1.0, factor=4.0)
        order.serve((request(0.0, program="p"),), (), 1.5)
        later, other = request(1.0, program="p"), request(2.0, program="q")
        order.arrive(later)
        order.arrive(other)
        assert order.key(later)[0] == 1
        assert order.key(other)[0] == 0

    def test_it_sinks_as_it_is_served_and_no_further_than_the_last_level(self):
        order, one, levels = PlasOrder(levels=3, quantum_s=1.0, factor=2.0), request(0.0), []
        for _ in range(6):
            levels.append(order.key(one)[0])
            order.serve((one,), (), 0.5)
        assert levels == [0, 0, 1, 1, 2, 2]
        order.serve((one,), (), 1e9)
        assert order.key(one)[0] == 2

    def test_the_longer_a_program_was_served_the_longer_it_is_patient(self):
        order = PlasOrder(quantum_s=1.0, patience=3.0)
        order.serve((request(0.0, program="p"),), (), 2.0)
        later, other = request(10.0, program="p"), request(10.0, program="q")
        order.arrive(later)
        order.arrive(other)
        assert order.due(later) == 16.0
        assert order.due(other) is None
        order.promote(later)
        assert order.key(later)[0] == 0

    def test_programs_served_longest_ago_are_forgotten(self):
        order = PlasOrder(quantum_s=1.0, programs=2)
        for program in "abca":
            order.serve((request(0.0, program=program),), (), 5.0)
        stands = []
        for program in "abc":
            later = request(1.0, program=program)
            order.arrive(later)
            stands.append(later.attained_s)
        assert stands == [5.0, 0.0, 5.0]  # b was forgotten for c, and a for b's sake came back

    def test_tenants_have_programs_of_their_own(self):
        order = PlasOrder()
        order.serve((request(0.0, program="p"),), (), 5.0)
        submit = Submit("r", tokens=np.asarray([1], np.int32), scope="other", program_id="p")
        stranger = Sequence.of(submit, 0, 0.0, frozenset(), 0)
        order.arrive(stranger)
        assert stranger.attained_s == 0.0


def _served(order: str) -> list[str]:
    """The order in which one row serves: a long turn of `old`, then its next one beside a newer program's first."""
    world = World(order=order, max_sequences=1)
    world.step_s = 1.0
    world.submit("old 1", words(1, 10), 8, program="old", began=1.0)
    for _ in range(2):
        world.step()
    world.submit("new 1", words(2, 10), 8, program="new", began=5.0)
    world.submit("old 2", words(3, 10), 8, program="old", began=1.0)
    world.run()
    return sorted(world.ends, key=lambda name: world.end(name).timing.finished)


def test_the_engine_serves_in_the_order_it_was_given():
    assert _served("program") == ["old 1", "old 2", "new 1"]
    assert _served("infercept") == ["old 1", "old 2", "new 1"]
    assert _served("request") == ["old 1", "new 1", "old 2"]
    assert _served("plas") == ["old 1", "new 1", "old 2"]


def test_intercepts_order_goes_with_its_own_rule_only():
    assert EngineConfig(order="infercept", retention=RetentionConfig("infercept")).order == "infercept"
    for retention in (RetentionConfig(), RetentionConfig(policy="none")):
        with pytest.raises(ConfigError, match="InferCept's own rule") as refused:
            EngineConfig(order="infercept", retention=retention)
        assert refused.value.field == "retention.policy"
