"""The book of pins, against a list that is searched."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.kv.radix import Node
from holdfast.replicas.retention.pins import Held, Pins
from holdfast.replicas.sequences import Owner

NODE = Node(np.empty(0, np.int32), 0, np.empty(0, np.int32), 0)
names = st.sampled_from("abcdefgh")


class PinsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pins = Pins()
        self.model: dict[Owner, Held] = {}
        self.waiting: set[Owner] = set()
        self.now = 0.0

    def _owner(self, name: str) -> Owner:
        return Owner("t", name, session=False)

    @rule(name=names, arrival=st.integers(0, 5), ttl=st.integers(0, 9))
    def add(self, name: str, arrival: int, ttl: int) -> None:
        owner = self._owner(name)
        if owner in self.model:
            self.pins.drop(self.model.pop(owner))
        # Arrivals of different programs differ, so that there is one latest.
        held = Held(owner, Pin(NODE, 0), arrival + ord(name) / 1e3, name, 1, 1, self.now, self.now + ttl)
        self.pins.add(held)
        self.model[owner] = held

    @rule(name=names, ttl=st.integers(-3, 9))
    def prolong(self, name: str, ttl: int) -> None:
        held = self.model.get(self._owner(name))
        if held is not None:
            self.pins.until(held, self.now + ttl)

    @rule(name=names)
    def drop(self, name: str) -> None:
        held = self.model.pop(self._owner(name), None)
        if held is not None:
            self.pins.drop(held)

    @rule(name=names)
    def turn(self, name: str) -> None:
        self.waiting ^= {self._owner(name)}

    @rule(seconds=st.integers(0, 6))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        found = self.pins.expired(self.now, lambda owner: owner in self.waiting)
        due = {owner for owner, held in self.model.items() if held.deadline <= self.now and owner not in self.waiting}
        assert {held.owner for held in found} == due
        for held in found:
            self.pins.drop(held)
            del self.model[held.owner]

    @rule(besides=names)
    def latest(self, besides: str) -> None:
        owner = self._owner(besides)
        for spared in (None, owner):
            rest = [held for held in self.model.values() if held.owner != spared]
            assert self.pins.latest(spared) is max(rest, key=lambda held: held.arrival, default=None)
        assert len(self.pins) == len(self.model)
        assert {held.owner for held in self.pins} == set(self.model)


PinsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPinsLaw = PinsMachine.TestCase


def test_pins_that_come_and_go_leave_nothing_behind():
    pins, owner = Pins(), Owner("t", "p", session=False)
    for i in range(5000):
        held = Held(owner, Pin(NODE, 0), float(i), "r", 1, 1, 0.0, 1e9)
        pins.add(held)
        pins.until(held, 2e9)
        pins.drop(held)
    assert len(pins._due._heap) < 200
    assert len(pins._latest._heap) < 200
    assert pins.expired(3e9, lambda owner: False) == []


def test_a_program_whose_turn_waits_is_looked_at_again():
    pins, waiting = Pins(), True
    for i in range(100):
        pins.add(Held(Owner("t", str(i), session=False), Pin(NODE, 0), float(i), "r", 1, 1, 0.0, 1.0))
    assert pins.expired(2.0, lambda owner: waiting) == []
    waiting = False
    steps, gone = 0, 0
    while len(pins):
        for held in pins.expired(2.0, lambda owner: waiting):
            pins.drop(held)
            gone += 1
        steps += 1
    assert gone == 100
    assert steps <= 10, "a bounded part of them a step, and none forgotten"
