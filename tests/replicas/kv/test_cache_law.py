"""The law of the cache: whatever happens, every sequence reads exactly its own tokens' cells.

A cell is simulated by a number that stands for (scope, all tokens up to its position): what attention would have put
there. Sequences compute, publish, finish, are dropped and preempted in any order, in worlds small enough to run out of
pages all the time.
"""

from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from kv_audit import check_cache

from holdfast.replicas.kv.cache import Holding, KVCache, Reloads
from holdfast.replicas.kv.host import HostTier
from holdfast.replicas.kv.radix import Pin
from holdfast.replicas.kv.tags import UNLABELLED, Label, Labels
from holdfast.replicas.types import TokenIds

GARBAGE = -1
tails = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
tags, tiers, lapses = st.sampled_from(["", "user_query"]), st.sampled_from([-1, 0, 20, 80]), st.sampled_from([3.0, inf])
kinds = st.builds(Label, tags, tiers, lapses, st.booleans())
labels = st.builds(
    lambda ends, parts, rest: Labels(ends[: len(parts)], parts[: len(ends)], rest),
    st.lists(st.integers(1, 40), max_size=3, unique=True).map(lambda ends: tuple(sorted(ends))),
    st.lists(kinds, max_size=3).map(tuple),
    kinds,
)
people = st.sampled_from("pq")
scopes = st.sampled_from(["a", "a", "a", "b", "b", None])
Drawn: TypeAlias = tuple[int, int, tuple[int, ...]]
prompts = st.tuples(st.integers(0, 5), st.integers(0, 40), tails)  # arguments of `_prompt`


@dataclass(eq=False)
class Agent:
    """A sequence as the test sees it."""

    scope: str | None
    tokens: list[int]
    holding: Holding
    n_computed: int
    ended: bool = False

    @property
    def ids(self) -> TokenIds:
        return np.array(self.tokens, dtype=np.int32)

    def true_cells(self) -> list[int]:
        return [hash((self.scope, tuple(self.tokens[: i + 1]))) for i in range(len(self.tokens))]


def _common(a: list[int], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class CacheMachine(RuleBasedStateMachine):
    agents = Bundle("agents")
    pins = Bundle("pins")

    @initialize(
        page_size=st.sampled_from([1, 4, 16]), n_pages=st.integers(1, 24), host_pages=st.sampled_from([0, 1, 3, 12, 40])
    )
    def start(self, page_size: int, n_pages: int, host_pages: int) -> None:
        host = HostTier(host_pages, page_size) if host_pages else None
        self.cache = KVCache(n_pages, page_size, host)
        self.reloads = Reloads(host)
        self.host_cells: npt.NDArray[np.int64] = np.full((host_pages, page_size), GARBAGE, dtype=np.int64)
        self.cells: npt.NDArray[np.int64] = np.full((n_pages, page_size), GARBAGE, dtype=np.int64)
        self.live: list[Agent] = []
        self.pinned: list[tuple[Pin, str, list[int]]] = []
        self.saved: set[tuple[str, tuple[int, ...]]] = set()
        self.begun: list[list[int]] = [[0]]
        self.now = 0.0
        self.passed = 0

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def _evicted(self) -> None:
        """What a step does first: pages that were evicted are still as they were."""
        moves = self.reloads.saves()
        assert len(set(moves.host.tolist())) == len(moves)
        self.host_cells[moves.host] = self.cells[moves.device]

    def _write(self, agent: Agent, start: int, values: list[int]) -> None:
        """What a forward does: cells at [start, ...) through the page row, into own pages only."""
        size = self.cache.page_size
        own = set(agent.holding.own.tolist())
        for position, value in enumerate(values, start):
            page = int(agent.holding.pages[position // size])
            assert page in own, "a cell of the tree was written"
            self.cells[page, position % size] = value

    def _read(self, agent: Agent, n: int) -> list[int]:
        positions = np.arange(n)
        size = self.cache.page_size
        found: list[int] = self.cells[agent.holding.pages[positions // size], positions % size].tolist()
        return found

    def _longest_saved(self, scope: str | None, tokens: list[int]) -> int:
        return max((_common(tokens[:-1], saved) for of, saved in self.saved if of == scope), default=0)

    def _prompt(self, back: int, cut: int, tail: tuple[int, ...]) -> list[int]:
        """A part of something a sequence had before, and new tokens."""
        return [*self.begun[-1 - back % len(self.begun)][:cut], *tail]

    @rule(target=agents, scope=scopes, prompt=prompts, continues=st.booleans(), said=labels, who=people)
    def begin(self, scope: str | None, prompt: Drawn, continues: bool, said: Labels, who: str) -> Agent:
        return self._begin(scope, self._prompt(*prompt), continues, said, who)

    @rule(target=pins, scope=st.sampled_from("ab"), back=st.integers(0, 5), cut=st.integers(1, 40), soft=st.booleans())
    def pin(self, scope: str, back: int, cut: int, soft: bool) -> tuple[Pin, str, list[int]]:
        tokens = self._prompt(back, cut, ())
        known = self.cache.peek(scope, np.array([*tokens, 0], dtype=np.int32))
        pin = self.cache.pin(scope, np.array(tokens, dtype=np.int32), self._tick(), soft=soft)
        assert pin.length == known
        self.pinned.append((pin, scope, tokens[:known]))
        return self.pinned[-1]

    @rule(pinned=consumes(pins))
    def unpin(self, pinned: tuple[Pin, str, list[int]]) -> None:
        self.cache.unpin(pinned[0])
        self.pinned.remove(pinned)

    @rule(target=agents, prompt=prompts, n=st.integers(1, 40), token=st.integers(0, 2))
    def begin_twins(self, prompt: Drawn, n: int, token: int) -> object:
        """Two sequences that compute the same tokens at the same time, and may then go different ways."""
        tokens = self._prompt(*prompt)
        twins = [self._begin("a", [*tokens, *end]) for end in ([], [token])]
        for agent in twins:
            self._compute(agent, n, 0, token)
        return multiple(*twins)

    def _begin(
        self, scope: str | None, tokens: list[int], continues: bool = False, said: Labels = UNLABELLED, who: str = ""
    ) -> Agent:
        seen = self.cache.peek(scope, np.array(tokens, dtype=np.int32))
        acquired = self.cache.acquire(
            scope, np.array(tokens, dtype=np.int32), self._tick(), continues=continues, labels=said, who=who
        )
        holding, copies = acquired.holding, acquired.copies
        self._evicted()
        assert holding.n_cached <= seen < len(tokens)
        assert holding.n_cached > seen - self.cache.page_size, "at most the cells of one page are given up"
        if self.cache.stats.evicted == 0:
            assert seen == self._longest_saved(scope, tokens)
        for copy in copies:
            self.cells[copy.target, : copy.cells] = self.cells[copy.source, : copy.cells]
        if holding.n_shared < holding.n_cached:
            self._taken_out(scope, tokens, holding)
        agent = Agent(scope, tokens, holding, holding.n_cached)
        self.reloads.begin(holding, agent.ids)
        self.live.append(agent)
        self.begun.append(tokens)
        return agent

    def _taken_out(self, scope: str | None, tokens: list[int], holding: Holding) -> None:
        """The last page of the prefix is the agent's own now, and the others do not find its cells."""
        assert holding.n_cached - holding.n_shared < self.cache.page_size
        for of, saved in list(self.saved):
            if of == scope and _common(tokens, saved) > holding.n_shared:
                self.saved.remove((of, saved))
                self.saved.add((of, saved[: holding.n_shared]))

    @rule(agent=agents, n=st.integers(1, 30), drafts=st.integers(0, 5), token=st.integers(0, 2))
    def compute(self, agent: Agent, n: int, drafts: int, token: int) -> None:
        if not agent.ended:
            self._compute(agent, n, drafts, token)

    def _compute(self, agent: Agent, n: int, drafts: int, token: int) -> None:
        """A step: up to `n` tokens, sampled beyond the prompt; rejected drafts leave garbage behind them."""
        end = min(agent.n_computed + n, max(len(agent.tokens), agent.n_computed + 1))
        before = agent.holding.pages.tolist()
        free, room = self.cache.pool.free, self.cache.cells.available
        added = self.cache.grow(agent.holding, end + drafts)
        self._evicted()
        missing = self.cache.pool.pages_for(end + drafts) - len(before)
        assert (added is None) == (missing * self.cache.page_size > room)
        assert agent.holding.pages.tolist() == before + ([] if added is None else added.tolist())
        if added is None:
            return
        assert self.cache.pool.free == max(free - max(missing, 0), 0), "more was evicted than was missing"
        agent.tokens.extend([token] * (end - len(agent.tokens)))
        self._write(agent, agent.n_computed, agent.true_cells()[agent.n_computed : end] + [GARBAGE] * drafts)
        agent.n_computed = end

    @rule(agent=agents, n=st.integers(1, 60))
    def load(self, agent: Agent, n: int) -> None:
        """Bring up to `n` cells back from the host, if there are any for this agent."""
        end = min(agent.n_computed + n, self.reloads.reach(agent.holding))
        if agent.ended or end <= agent.n_computed or self.cache.grow(agent.holding, end) is None:
            return
        self._evicted()
        moves = self.reloads.load(agent.holding, agent.n_computed, end)
        assert set(moves.device.tolist()) <= set(agent.holding.own.tolist()), "a cell of the tree was written"
        self.cells[moves.device] = self.host_cells[moves.host]
        agent.n_computed = end
        self.reloads.loaded(agent.holding, end)

    @rule(target=agents, scope=st.sampled_from("ab"), back=st.integers(0, 5), length=st.integers(1, 40), n=tails)
    def there_and_back(self, scope: str, back: int, length: int, n: tuple[int, ...]) -> Agent:
        """A text is computed and ends, others take its place, and it goes on with what the host has of it."""
        text = self._prompt(back, 12, (*(length * (2, 1)),))
        self._compute_and_finish(scope, text)
        stats = self.cache.stats
        if stats.free + stats.evictable:
            self.passed += 1
            self._compute_and_finish("a", [1000 + self.passed] * (stats.free + stats.evictable))
        agent = self._begin(scope, [*text, *n])
        for _ in n:
            self.load(agent, 11)
        return agent

    def _compute_and_finish(self, scope: str, text: list[int]) -> None:
        agent = self._begin(scope, text)
        self._compute(agent, len(text), 0, 0)
        self._finish(agent)

    @rule()
    def lose_the_host(self) -> None:
        self.reloads.lose()
        self.host_cells[:] = GARBAGE

    @rule(agent=agents)
    def publish(self, agent: Agent) -> None:
        if agent.ended:
            return
        before = agent.holding.pages.tolist()
        self.cache.publish(agent.holding, agent.ids, agent.n_computed, self._tick())
        assert agent.holding.pages.tolist() == before
        full = agent.n_computed // self.cache.page_size * self.cache.page_size
        if agent.scope is not None:
            self.saved.add((agent.scope, tuple(agent.tokens[:full])))
            assert agent.holding.n_shared >= full

    @rule(target=pins, agent=consumes(agents))
    def finish_with_a_pin(self, agent: Agent) -> object:
        if agent.ended:
            return multiple()
        pin = self._finish(agent, pin=True)
        if agent.scope is None:
            assert pin is None
            return multiple()
        assert pin is not None
        assert pin.length == agent.n_computed
        self.pinned.append((pin, agent.scope, agent.tokens[: pin.length]))
        return self.pinned[-1]

    @rule(scope=st.sampled_from("ab"), back=st.integers(0, 5), cut=st.integers(1, 40), who=people)
    def demote(self, scope: str, back: int, cut: int, who: str) -> None:
        """Nothing goes by that, but it goes first."""
        tokens = np.array([*self._prompt(back, cut, ()), 0], dtype=np.int32)
        known = self.cache.peek(scope, tokens)
        self.cache.demote(scope, tokens[:-1], who)
        assert self.cache.peek(scope, tokens) == known

    @rule(agent=consumes(agents))
    def finish(self, agent: Agent) -> None:
        if not agent.ended:
            self._finish(agent)

    def _finish(self, agent: Agent, pin: bool = False) -> Pin | None:
        self.reloads.end(agent.holding)
        pinned = self.cache.finish(agent.holding, agent.ids, agent.n_computed, self._tick(), pin=pin)
        self._end(agent)
        if agent.scope is not None:
            self.saved.add((agent.scope, tuple(agent.tokens[: agent.n_computed])))
            assert self.cache.peek(agent.scope, np.array([*agent.tokens, 0], dtype=np.int32)) >= agent.n_computed
        return pinned

    @rule(agent=consumes(agents))
    def drop(self, agent: Agent) -> None:
        if not agent.ended:
            self.reloads.end(agent.holding)
            self.cache.drop(agent.holding)
            self._end(agent)

    def _end(self, agent: Agent) -> None:
        agent.ended = True
        self.live.remove(agent)
        self.begun.append(list(agent.tokens))

    @invariant()
    def every_sequence_reads_its_own_cells(self) -> None:
        for agent in self.live:
            assert self._read(agent, agent.n_computed) == agent.true_cells()[: agent.n_computed]

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        for _, scope, tokens in self.pinned:
            assert self.cache.peek(scope, np.array([*tokens, 0], dtype=np.int32)) >= len(tokens)

    @invariant()
    def books_balance(self) -> None:
        check_cache(self.cache)
        stats = self.cache.stats
        assert stats.free + stats.tree + stats.held == stats.total
        assert stats.evictable <= stats.tree
        assert stats.host_used == 0 or self.cache.host is not None

    @invariant()
    def what_is_on_the_host_can_be_brought_back(self) -> None:
        """Every pin there protects the cells of its tokens."""
        for agent in self.live:
            reach = self.reloads.reach(agent.holding)
            if reach:
                pages = self.reloads._host.pages(self.reloads._pins[agent.holding])
                positions = np.arange(reach)
                size = self.cache.page_size
                found = self.host_cells[pages[positions // size], positions % size].tolist()
                assert found == agent.true_cells()[:reach]

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for agent in self.live:
            self.reloads.end(agent.holding)
            self.cache.drop(agent.holding)
        for pin, _, _ in self.pinned:
            self.cache.unpin(pin)
        check_cache(self.cache)
        stats = self.cache.stats
        assert stats.held == 0
        assert len(self.reloads) == 0
        assert stats.free + stats.evictable == stats.total, "with nobody left, every cell can be had"


CacheMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestCacheLaw = CacheMachine.TestCase
