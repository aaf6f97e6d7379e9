"""The law of tenants' shares of the cells: floors and ceilings hold whatever tenants do, none is refused in vain."""

from dataclasses import dataclass
from math import inf

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from kv_audit import check_cache

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.cache import Holding, KVCache
from holdfast.replicas.kv.pages import FORGOTTEN_S
from holdfast.replicas.kv.radix import Pin
from holdfast.replicas.kv.tags import Label, Labels
from holdfast.replicas.types import CellLimits

TENANTS = "abc"
tenants = st.sampled_from(TENANTS)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
labels = st.builds(lambda tier: Labels(rest=Label("user_query", tier)), st.sampled_from([0, 0, 40]))


@dataclass(eq=False)
class Agent:
    tenant: str
    tokens: list[int]
    holding: Holding
    ended: bool = False


class LimitsMachine(RuleBasedStateMachine):
    agents = Bundle("agents")
    pins = Bundle("pins")

    @initialize(size=st.sampled_from([1, 4]), pages=st.sampled_from([8, 20, 40]))
    def start(self, size: int, pages: int) -> None:
        self.cache = KVCache(pages, size)
        self.book = self.cache.tree.tenants
        self.now = 0.0
        self.floors = dict.fromkeys(TENANTS, 0.0)

    def _used(self) -> dict[str, int]:
        return {each: self.book.used.get(each, 0) for each in TENANTS}

    def _expect(self, tenant: str, before: dict[str, int]) -> None:
        """What a tenant did took nothing of others' floors, and its ceiling holds."""
        for each, n in self._used().items():
            assert each == tenant or n >= min(before[each], self.book.floor(each)), "a floor was taken from"
        assert self.book.used.get(tenant, 0) <= max(before[tenant], self.book.ceiling(tenant)), "beyond its ceiling"

    @rule(target=agents, tenant=tenants, tokens=texts, said=labels, salt=st.sampled_from(["", "", "x"]))
    def begin(self, tenant: str, tokens: list[int], said: Labels, salt: str) -> Agent:
        before, self.now = self._used(), self.now + 1
        scope = f"{tenant}\0salt\0{salt}" if salt else tenant
        holding = self.cache.acquire(scope, np.array(tokens, np.int32), self.now, labels=said, tenant=tenant).holding
        self._expect(tenant, before)
        agent = Agent(tenant, tokens, holding)
        self._grow(agent, len(tokens))
        return agent

    @rule(agent=agents, more=texts)
    def grow(self, agent: Agent, more: list[int]) -> None:
        if not agent.ended:
            agent.tokens = agent.tokens + more
            self._grow(agent, len(agent.tokens))

    def _grow(self, agent: Agent, n: int) -> None:
        """Pages come exactly where the limits and the others leave so many."""
        before, free = self._used(), self.cache.pool.free
        missing = self.cache.pool.pages_for(n) - agent.holding.n_pages
        ceiling = self.book.ceiling(agent.tenant) - self.book.active(agent.tenant)
        kept = sum(max(0, self.book.floor(t) - self.book.active(t)) for t in TENANTS if t != agent.tenant)
        room = min(ceiling, free + self.cache.tree.evictable - kept)
        grown = self.cache.grow(agent.holding, n)
        assert (grown is None) == (missing > 0 and missing > room), "refused in vain, or given beyond the limits"
        self._expect(agent.tenant, before)

    @rule(agent=consumes(agents), keeps=st.sampled_from(["finish", "pin", "drop"]))
    def end(self, agent: Agent, keeps: str) -> None:
        agent.ended, self.now = True, self.now + 1
        n = min(agent.holding.capacity, len(agent.tokens))
        if keeps == "drop":
            self.cache.drop(agent.holding)
            return
        tokens = np.array(agent.tokens, np.int32)
        pin = self.cache.finish(agent.holding, tokens, n, self.now, pin=keeps == "pin")
        if pin is not None:
            self.cache.unpin(pin)

    @rule(target=pins, tenant=tenants, tokens=texts)
    def pin(self, tenant: str, tokens: list[int]) -> Pin:
        self.now += 1
        return self.cache.pin(tenant, np.array(tokens, np.int32), self.now, soft=True)

    @rule(pin=consumes(pins))
    def unpin(self, pin: Pin) -> None:
        self.cache.unpin(pin)

    @rule(tenant=tenants, floor=st.sampled_from([0.0, 0.1, 0.3]), ceiling=st.sampled_from([0.3, 0.55, 1.0]))
    def limit(self, tenant: str, floor: float, ceiling: float) -> None:
        self.cache.limit(tenant, CellLimits(floor, ceiling), self.now)

    @rule()
    def long_after(self) -> None:
        """A tenant that sends no request for long loses its limits."""
        self.now += FORGOTTEN_S + 1
        self.cache.limit("a", CellLimits(0.1), self.now)
        assert set(self.book.known_limits) == {"a"}

    @invariant()
    def books_balance(self) -> None:
        check_cache(self.cache)


LimitsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestLimitsLaw = LimitsMachine.TestCase


def test_limits_that_make_no_sense_are_refused_by_name():

    for given, field in (
        ({"floor": -0.1}, "floor"),
        ({"ceiling": 0.0}, "ceiling"),
        ({"pinned": 1.1}, "pinned"),
        ({"floor": 0.5, "ceiling": 0.4}, "floor"),
        ({"floor": inf}, "floor"),
    ):
        with pytest.raises(ConfigError) as error:
            CellLimits(**given)
        assert error.value.field == field
