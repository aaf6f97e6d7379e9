"""Speculation for the scheduler: drafts for each sequence that decodes, learned from the tokens that were drawn.

    the sequence's own tokens - NGramIndex -.
    the tenant's earlier turns - TurnMemory -+- longest match -.
    the model's layer for one more token (MTP) ----------------+- most expected -> gate over all sequences -> propose
    tokens that a grammar forces ------------------------------------------------------------------------'

The model verifies every draft, so a wrong one costs time and never changes the output. Deterministic; no clock.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.plan import VERIFY_ROWS, StepCost
from holdfast.replicas.programs import Sequence, Status
from holdfast.replicas.speculation.ngrams import (
    GAP,
    LIBRARY,
    Acceptance,
    Doubles,
    DraftTable,
    Int32s,
    NGramIndex,
    gate,
)
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import TokenIds, tenant_of

log = logging.getLogger(__name__)

NO_DRAFT: TokenIds = np.zeros(0, np.int32)
NO_DRAFT.setflags(write=False)

MOST_FORCED = 32  # tokens of a grammar in one step; the fixed text between two values of a call is seldom longer

_MEMORY_MATCH = 2  # shortest match in earlier turns: one token matches almost everywhere
_MEMORY_CONTEXT = 16  # tokens before a turn that are remembered with it, so that the turn's start can be found
_TENANTS = 16  # a tenant may use this fraction of the memory
_ACCEPTANCE = Acceptance(by_match=(0.0, 0.33, 0.51, 0.73, 0.80, 0.87, 0.98), unknown=0.6, weight=0.1)
"""`by_match` was measured on 32 conversations of an airline agent."""
_GAP: TokenIds = np.array([GAP], np.int32)
_LEVEL_WEIGHT = 0.1  # of one step in the mean time of such steps
_SLOPE_WEIGHT = 0.05  # of one step in what more rows cost
_SLOPES = (0.1, 10.0)  # the least and the largest slope
_WIDE = 64  # rows; what they cost beyond one row says how large a difference between steps is
_SEEN = 0.1  # of that difference, as large as one that has been seen before the first step
_TINY = 1e-3  # of one row's cost, so that a flat curve has a difference too
_LEAST = 0.9  # of one row's cost: so much is taken off all costs at most
_DELAYED = 1.5  # a step counts for at most this multiple of its expected time: something else ran meanwhile
_UNLIKELY = 0.01  # a draft less likely to be right never pays for its row
_WORTH = 1.02  # least gain over a step without drafts: the best of many estimates is usually too optimistic
_BLIND = 3  # steps planned without asking for drafts after a step without any, where that lets steps overlap

FREE: StepCost = (1.0,) * (VERIFY_ROWS + 1)
"""Used where the cost was not measured: rows cost nothing."""


class StepTimes:
    """How the time of real steps differs from the cost that was measured at load.

    At load contexts are short, and other programs may have been busy. So the time of a step of n rows is taken to be
    level + slope * cost[n]. The level is that of steps with about as many sequences, since their contexts are read too.
    The slope is learned from steps with about as many sequences and other numbers of drafts.
    """

    def __init__(self, cost: Doubles) -> None:
        self._cost = cost
        # Mean cost and seconds of steps, by the number of binary digits of how many sequences they have.
        self._means: dict[int, tuple[float, float]] = {}
        # Mean squares and products of differences from these means, as if a slope of 1 had been seen.
        self._spread = self._together = (_SEEN * float(cost[_WIDE] - cost[1]) + _TINY * float(cost[1])) ** 2

    @property
    def slope(self) -> float:
        """Seconds that a wider step takes more, for each second that the measured cost says."""
        return min(max(self._together / self._spread, _SLOPES[0]), _SLOPES[1])

    def add(self, rows: int, seconds: float, sequences: int) -> None:
        """A step of `rows` rows took `seconds`."""
        cost, kind = float(self._cost[rows]), sequences.bit_length()
        mean_cost, mean_s = self._means.get(kind, (cost, cost))
        wider = cost - mean_cost
        expected = max(mean_s + self.slope * wider, 0.0)
        longer = min(seconds, _DELAYED * expected) - mean_s
        self._means[kind] = (mean_cost + _LEVEL_WEIGHT * wider, mean_s + _LEVEL_WEIGHT * longer)
        # Steps of one width say nothing of the slope, so they make nothing forgotten.
        forget = 1.0 - _SLOPE_WEIGHT * wider**2 / (wider**2 + self._spread)
        self._spread = forget * self._spread + _SLOPE_WEIGHT * wider**2
        self._together = forget * self._together + _SLOPE_WEIGHT * wider * longer

    def extra_s(self, sequences: int) -> float:
        """What is to be added to every cost, so that costs are in the proportion of real steps' times."""
        known = self._means.get(sequences.bit_length())
        if known is None:
            return 0.0
        return max(known[1] / self.slope - known[0], -_LEAST * float(self._cost[1]))


@dataclass(frozen=True, slots=True)
class _State:
    """The drafter's view of one sequence: its index, and its slot in the table."""

    scope: str
    index: NGramIndex
    slot: int


class Drafter:
    """Drafts for all sequences of an engine. Not thread-safe: the loop that plans steps calls it.

    A sequence has a state from its first token on. A preempted one keeps it, since its tokens stay the same.
    """

    def __init__(
        self, config: DraftConfig, stats: EngineStats, cost: StepCost | None = None, *, bounded: bool = False
    ) -> None:
        """`cost` is that of the model's steps as measured at load; None: verifying is taken to cost nothing.

        `bounded`: no step has more drafts than `max_draft`, forced ones included: a recurrent state has a window of
        that size.
        """
        self.enabled = config.enabled and not LIBRARY.missing
        if config.enabled and not self.enabled:
            log.warning("nothing is drafted: %s", LIBRARY.missing)
        self._max_draft = config.max_draft
        self._most_forced = min(MOST_FORCED, config.max_draft) if bounded else MOST_FORCED
        self._stats = stats
        self._cost = np.array(cost or FREE)
        self._times = StepTimes(self._cost) if cost is not None else None
        self._memory = TurnMemory(config.memory_bytes, config.memory_bytes // _TENANTS)
        self._table = DraftTable(config.max_draft, _ACCEPTANCE)
        self._states: dict[str, _State | None] = {}  # by request id; None: speculation failed
        self._drafts: dict[str, TokenIds] = {}  # of the step that is being planned
        self._ended: list[tuple[_State, int]] = []  # to be remembered, each with the length of its prompt
        self._blind = 0  # steps that may still be planned without asking for drafts

    @property
    def silent(self) -> bool:
        """Whether the next step can be planned without drafts, before the tokens of this one are known."""
        return not self.enabled or self._blind > 0

    @property
    def memory_bytes(self) -> int:
        """Bytes used for earlier turns; at most `config.memory_bytes`."""
        return self._memory.nbytes

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """The supervisor of speculation: an error costs the sequences in flight their drafts, and nothing else."""
        try:
            yield
        except Exception:
            log.exception("speculation failed: the sequences in flight go on without drafts")
            self._states, self._drafts, self._ended = dict.fromkeys(self._states), {}, []
            self._table = DraftTable(self._max_draft, _ACCEPTANCE)

    def prepare(self, decoding: Collection[Sequence]) -> None:
        """Draft for the sequences that decode in the next step. None has drafts while the last token is in flight."""
        self._drafts = {}
        if not self.enabled:
            return
        if any(sequence.awaited is not None for sequence in decoding):
            self._blind -= 1
            return
        self._blind = 0
        with self._optional():
            self._table.learn()
            drafting, slots, limits, memories = [], [], [], []
            states, find = self._states, self._memory.find
            for sequence in decoding:
                limit, request_id = len(sequence.buffer) - sequence.length - 1, sequence.request_id  # as `_room` has it
                state = states.get(request_id)
                if limit > 0 and (state is not None or (state := self._state(sequence)) is not None):
                    drafting.append(request_id)
                    slots.append(state.slot)
                    limits.append(limit)
                    memories.append(find(state.scope))
            drafts = 0
            if drafting:
                offers = self._table.draft(slots, limits, memories, _MEMORY_MATCH)
                extra_s = self._times.extra_s(len(decoding)) if self._times is not None else 0.0
                lengths = draft_lengths(offers.chances, offers.lengths, len(decoding), self._cost, extra_s)
                drafts = sum(lengths)
                self._stats.drafts_withheld += sum(offers.lengths.tolist()) - drafts
                rows = zip(drafting, offers.tokens, lengths, strict=True)
                self._drafts = {request_id: tokens[:length] for request_id, tokens, length in rows if length}
            if decoding and not drafts:
                self._blind = _BLIND

    def propose(self, sequence: Sequence) -> TokenIds:
        """Drafts to verify after the sequence's last token: the prepared ones, or those that its grammar forces.

        A forced token is always drawn, so it costs a row of a forward and saves a step. While a grammar does not bind,
        it reads tokens only once they are drawn: checking drafts as well took a third of its time.
        """
        drafts, matcher = self._drafts.get(sequence.request_id, NO_DRAFT), sequence.matcher
        if matcher is None or sequence.awaited is not None:
            return drafts
        limit = min(self._most_forced, _room(sequence))
        forced = matcher.forced()[:limit] if limit > 0 else []
        if forced and drafts[: len(forced)].tolist() != forced:
            drafts = np.array(forced, np.int32)
        elif matcher.binding and len(drafts):
            drafts = drafts[: matcher.accepts(drafts.tolist())]
        if len(drafts):
            self._blind = 0
        return drafts

    def learn(self, sequence: Sequence, drawn: SequenceOf[int], predicted: int | None = None) -> None:
        """Add the tokens drawn for a sequence in a step: accepted drafts and the one after them. `predicted`: what the
        model expects after these.

        They are compared with the whole draft, verified or not, so a sequence that the gate stopped can recover. The
        table learns them all at once, before the next drafts.
        """
        if (state := self._states.get(sequence.request_id)) is not None:
            self._table.drawn(state.slot, drawn, predicted)

    def measured(self, rows: int, seconds: float, sequences: int) -> None:
        """A step of `rows` rows, in which so many sequences only decoded, took `seconds`."""
        if self._times is not None and rows < len(self._cost):
            self._times.add(rows, seconds, sequences)

    def close(self, sequence: Sequence) -> None:
        """A sequence ended. `catch_up` will remember its completion for its scope."""
        state = self._states.pop(sequence.request_id, None)
        if state is not None:
            self._ended.append((state, sequence.n_prompt))

    def catch_up(self, sequences: Collection[Sequence]) -> None:
        """While a step runs: remember completions that ended, and index the prompts of the step's `sequences`."""
        with self._optional():
            self._table.learn()
            ended, self._ended = self._ended, []
            for state, n_prompt in ended:
                self._table.remove(state.slot)
                if len(state.index) > n_prompt:
                    self._memory.add(state.scope, state.index.tokens(max(n_prompt - _MEMORY_CONTEXT, 0)))
            for sequence in sequences if self.enabled else ():
                new = sequence.request_id not in self._states
                if new and _room(sequence) > 1 and sequence.status is Status.RUNNING:
                    self._state(sequence)

    def _state(self, sequence: Sequence) -> _State | None:
        request_id = sequence.request_id
        if request_id not in self._states:
            self._states[request_id] = None  # and it stays so if the next lines fail
            index = NGramIndex(sequence.tokens, room=len(sequence.buffer))
            self._states[request_id] = _State(sequence.submit.cache_scope, index, self._table.add(index))
        return self._states[request_id]


def _room(sequence: Sequence) -> int:
    """Drafts that a sequence has room for: so few that the token after them still fits."""
    return len(sequence.buffer) - sequence.length - 1


def draft_lengths(
    acceptances: Doubles, offered: Int32s, decoding: int, cost: Doubles, extra_s: float = 0.0
) -> list[int]:
    """How many drafts of each sequence to verify, so that the step yields the most tokens a second (Stateful
    inference, 3.6).

    Sequence i offers `offered[i]` drafts. Its draft n is right with probability acceptance ** n (Leviathan et al. 2023,
    equation 1). The step has `decoding` rows without drafts; a step of n rows takes `cost[n] + extra_s` seconds. It
    reads the weights once for all rows, so the most likely drafts of all sequences compete for the rows that pay.
    """
    return gate(acceptances, offered, decoding, cost, extra_s, _UNLIKELY, _WORTH)


class TurnMemory:
    """The completions of earlier turns, by scope. No scope reads another's tokens.

    A scope over its share forgets the older half of its tokens. If a tenant's scopes together exceed one share, or all
    scopes exceed the total, the least recently used scopes are dropped. So each token is indexed only a few times.
    """

    def __init__(self, total_bytes: int, scope_bytes: int) -> None:
        self._total_bytes, self._scope_bytes = total_bytes, min(scope_bytes, total_bytes)
        self._scopes: OrderedDict[str, NGramIndex] = OrderedDict()  # least recently used first
        self.nbytes = 0  # used, at most `total_bytes`
        self._tenant_bytes: Counter[str] = Counter()  # of these, by tenant

    def find(self, scope: str) -> NGramIndex | None:
        """The scope's turns; None before its first."""
        return self._scopes.get(scope)

    def add(self, scope: str, turn: TokenIds) -> None:
        """Remember a turn. A gap after it separates it from the next."""
        index = self._scopes.pop(scope, None)
        if index is None:
            index = NGramIndex(turn)
        else:
            self._count(scope, -index.nbytes)
            index.extend(turn)
        index.extend(_GAP)
        if index.crowded:
            index = NGramIndex(index.tokens(), capacity=2 * len(index))
        while index.nbytes > self._scope_bytes and len(index) > 1:
            index = NGramIndex(index.tokens(len(index) - len(index) // 2))
        if index.nbytes > self._scope_bytes:  # even one token needs more than a share
            return
        self._scopes[scope] = index
        self._count(scope, index.nbytes)
        tenant = tenant_of(scope)
        while self._tenant_bytes[tenant] > self._scope_bytes:
            self._drop(next(each for each in self._scopes if tenant_of(each) == tenant))
        while self.nbytes > self._total_bytes:
            self._drop(next(iter(self._scopes)))

    def _drop(self, scope: str) -> None:
        self._count(scope, -self._scopes.pop(scope).nbytes)

    def _count(self, scope: str, nbytes: int) -> None:
        tenant = tenant_of(scope)
        self.nbytes += nbytes
        self._tenant_bytes[tenant] += nbytes
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]
