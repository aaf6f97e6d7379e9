"""The book of pins, against a list that is searched."""

import math

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from kv_audit import check_cache, pinned_pages

from holdfast.replicas.config import RetentionConfig
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Program, ProgramKey, ProgramPin, Sequence
from holdfast.replicas.requests import Submit
from holdfast.replicas.scheduling.pins import Pins
from holdfast.replicas.scheduling.queue import ProgramOrder, WaitingQueue
from holdfast.replicas.types import Priority

names = st.sampled_from("abcdefgh")
TOKENS = np.arange(1, 33, dtype=np.int32)


def key_of(name: str) -> ProgramKey:
    return ProgramKey("u" if name in "fgh" else "t", name)


def priority_of(name: str) -> Priority:
    return Priority.BATCH if name in "dh" else Priority.INTERACTIVE


class Book:
    """Pins of a cache that has one text of each of two tenants, in pages of 4."""

    def __init__(self) -> None:
        self.cache = KVCache(64, 4)
        for tenant in "tu":
            holding = self.cache.acquire(tenant, TOKENS, 0.0).holding
            self.cache.grow(holding, len(TOKENS))
            self.cache.finish(holding, TOKENS, len(TOKENS), 0.0)
        self.programs: dict[str, Program] = {}
        self.pins = Pins(RetentionConfig(), self.cache, WaitingQueue(ProgramOrder()))

    def program(self, name: str) -> Program:
        return self.programs.setdefault(name, Program(key_of(name)))

    def turn(self, name: str, arrival: float = 0.0) -> Sequence:
        of = {"scope": key_of(name).scope, "program_id": name, "priority": priority_of(name)}
        submit = Submit("r", tokens=TOKENS, sampling=Sampling(), program_arrival=arrival, **of)
        return Sequence.of(submit, 0, 0.0, frozenset(), 0, (self.program(name),) * 2)

    def add(self, name: str, arrival: float, deadline: float, n: int = 32) -> ProgramPin:
        pin = self.cache.pin(key_of(name).scope, TOKENS[:n], 0.0, soft=True)
        self.pins.add(self.turn(name, arrival), pin, 0.0, deadline)
        added = self.program(name).pin
        assert added is not None
        return added


class PinsMachine(RuleBasedStateMachine):
    by_arrival = True

    def __init__(self) -> None:
        super().__init__()
        self.book = Book()
        self.served = {"t": 0, "u": 0}
        self.pins = self.book.pins
        self.model: dict[str, ProgramPin] = {}
        self.now, self.looked_at = 0.0, -math.inf

    @rule(name=names, arrival=st.integers(0, 5), ttl=st.integers(0, 9), n=st.integers(1, 32))
    def add(self, name: str, arrival: int, ttl: int, n: int) -> None:
        # Arrivals of different programs differ, so that there is one latest.
        self.model[name] = self.book.add(name, arrival + ord(name) / 1e3, self.now + ttl, n)

    @rule(name=names, ttl=st.integers(-3, 9))
    def prolong(self, name: str, ttl: int) -> None:
        pin = self.model.get(name)
        if pin is not None:
            self.pins.until(pin, self.now + ttl)

    @rule(name=names)
    def drop(self, name: str) -> None:
        pin = self.model.pop(name, None)
        if pin is not None:
            self.pins.drop(pin)

    @rule(name=names)
    def turn(self, name: str) -> None:
        waiting = self.book.program(name).waiting
        if waiting:
            waiting.clear()
        else:
            waiting.append(self.book.turn(name))
            waiting[0].pinned = name in self.model

    @rule(seconds=st.integers(0, 6))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        self.looked_at = self.now
        found = self.pins.expired(self.now)
        due = {pin for pin in self.model.values() if pin.deadline <= self.now and not pin.program.waiting}
        assert set(found) == due
        for pin in found:
            self.pins.drop(pin)
            del self.model[pin.program.key.name]

    @rule(tenant=st.sampled_from("tu"), seconds=st.integers(1, 3))
    def serve(self, tenant: str, seconds: int) -> None:
        self.served[tenant] += seconds

    def rank(self, pin: ProgramPin) -> tuple[float, ...]:
        """As `program` has it, and as `fair` does."""
        return (pin.batch, pin.arrival) if self.by_arrival else (pin.batch, self.served[pin.scope], pin.arrival)

    @rule(name=names, arrival=st.integers(0, 5))
    def behind(self, name: str, arrival: int) -> None:
        served = () if self.by_arrival else (self.served[key_of(name).scope],)
        for to in (None, (priority_of(name) is Priority.BATCH, *served, float(arrival))):
            found = list(self.pins.behind(to, self.rank))
            assert len(found) == len(set(found))
            assert set(found) == {pin for pin in self.model.values() if to is None or self.rank(pin) > to}
        assert len(self.pins) == len(self.model)
        assert set(self.pins) == set(self.model.values())

    @rule(name=names, age=st.floats(-3.0, 9.0))
    def lapse(self, name: str, age: float) -> None:
        pin = self.model.get(name)
        if pin is not None:
            self.pins.lapses(pin, self.now + age)

    @rule()
    def lapsed(self) -> None:
        found = self.pins.lapsed(self.now)
        assert [pin.lapse for pin in found] == sorted(pin.lapse for pin in found)
        assert set(found) == {pin for pin in self.model.values() if pin.lapse <= self.now}

    @rule()
    def count(self) -> None:
        for tenant in "tu":
            pinned = pinned_pages(pin.pin for pin in self.pins if pin.scope == tenant)
            assert self.pins.cells_of(tenant) == 4 * pinned
        assert self.pins.cells == self.pins.cells_of("t") + self.pins.cells_of("u")
        check_cache(self.book.cache)
        soon = [pin.deadline for pin in self.model.values() if pin.deadline > self.looked_at or not pin.awaited]
        assert self.pins.due == min(soon, default=None)
        for name, program in self.book.programs.items():
            assert all(waiting.pinned is (name in self.model) for waiting in program.waiting)


class FairPinsMachine(PinsMachine):
    by_arrival = False


PinsMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40)
FairPinsMachine.TestCase.settings = PinsMachine.TestCase.settings
TestPinsLaw = PinsMachine.TestCase
TestFairPinsLaw = FairPinsMachine.TestCase


def test_pins_that_come_and_go_leave_nothing_behind():
    book = Book()
    for i in range(1000):
        pin = book.add("p", float(i), 1e9)
        book.pins.until(pin, 2e9)
        book.pins.lapses(pin, 2e9)
        book.pins.drop(pin)
    assert [len(each) for each in (book.pins._due, book.pins._ranked, book.pins._lapsing)] == [0, 0, 0]
    assert book.pins.expired(3e9) == []
    assert book.pins.cells == 0
