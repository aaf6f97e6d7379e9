"""Speculation for the scheduler: drafts for each sequence that decodes, learned from the tokens that were drawn.

    the sequence's own tokens - NGramIndex -.
    the tenant's earlier turns - TurnMemory -+- longest match -.
    the model's layer for one more token (MTP) ----------------+- most expected -> gate over all sequences -> propose
    tokens that a grammar forces ------------------------------------------------------------------------'

The model verifies every draft, so a wrong one costs time and never changes the output. Deterministic; no clock.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.plan import VERIFY_ROWS, StepCost
from holdfast.replicas.programs import Sequence, Status
from holdfast.replicas.speculation.ngrams import GAP, NGramIndex, common_prefix
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import TokenIds, tenant_of

log = logging.getLogger(__name__)

NO_DRAFT: TokenIds = np.zeros(0, np.int32)
NO_DRAFT.setflags(write=False)

MOST_FORCED = 32  # tokens of a grammar in one step; the fixed text between two values of a call is seldom longer

_MEMORY_MATCH = 2  # shortest match in earlier turns: one token matches almost everywhere
_MEMORY_CONTEXT = 16  # tokens before a turn that are remembered with it, so that the turn's start can be found
_TENANTS = 16  # a tenant may use this fraction of the memory
_WEIGHT = 0.1  # of one draft in the moving average of acceptance
_UNKNOWN = 0.6  # acceptance of a sequence whose drafts were not compared yet
_BY_MATCH = (0.0, 0.33, 0.51, 0.73, 0.80, 0.87, 0.98)
"""Acceptance by the bit length of the match's length: measured on 32 conversations of an airline agent."""
_COST_WEIGHT = 0.1  # of one step in what steps take longer than measured
_DELAYED = 1.5  # a step counts for at most this multiple of its expected time: something else ran meanwhile
_UNLIKELY = 0.01  # a draft less likely to be right never pays for its row
_WORTH = 1.02  # least gain over a step without drafts: the best of many estimates is usually too optimistic
_BLIND = 3  # steps planned without asking for drafts after a step without any, where that lets steps overlap

FREE: StepCost = (1.0,) * (VERIFY_ROWS + 1)
"""Used where the cost was not measured: rows cost nothing."""


@dataclass(slots=True)
class _State:
    """The drafter's view of one sequence. `draft` are the tokens that may follow it, before the gate; the model
    `predicted` one.
    """

    scope: str
    index: NGramIndex
    acceptance: float = _UNKNOWN
    draft: array[int] | None = None
    matched: int = 0  # length of the match that `draft` continues
    predicted: int | None = None
    predictions: float = _UNKNOWN  # acceptance of `predicted`

    @property
    def offer(self) -> tuple[array[int], float]:
        """The draft for the gate, and its estimated acceptance. Both sources are compared by the tokens that they are
        expected to save; where both begin alike, the longer draft counts.

        Of `draft` the estimate is the mean of the sequence's and of that of matches as long.
        """
        draft, predicted = self.draft or array("i"), self.predicted
        expected = (_BY_MATCH[self.matched.bit_length()] + self.acceptance) / 2
        if predicted is None:
            return draft, expected
        if draft and draft[0] == predicted:
            return draft, max(expected, self.predictions)
        if self.predictions >= sum(expected**n for n in range(1, len(draft) + 1)):
            return array("i", [predicted]), self.predictions
        return draft, expected


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
        self.enabled = config.enabled
        self._max_draft = config.max_draft
        self._most_forced = min(MOST_FORCED, config.max_draft) if bounded else MOST_FORCED
        self._stats = stats
        self._cost = cost or FREE
        self._extra_s = 0.0  # seconds that steps take longer than `_cost` says, as contexts grow
        self._memory = TurnMemory(config.memory_bytes, config.memory_bytes // _TENANTS)
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
            self._states = dict.fromkeys(self._states)
            self._drafts = {}

    def prepare(self, decoding: Collection[Sequence]) -> None:
        """Draft for the sequences that decode in the next step. None has drafts while the last token is in flight."""
        self._drafts = {}
        if not self.enabled:
            return
        offers: dict[str, _State] = {}
        with self._optional():
            for sequence in decoding:
                if sequence.awaited is not None:
                    self._blind -= 1
                    return
                limit = min(_room(sequence), self._max_draft)
                state = self._state(sequence) if limit > 0 else None
                if state is not None:
                    self._find(state, limit)
                    if state.offer[0]:
                        offers[sequence.request_id] = state
            self._blind = _BLIND if decoding and not self._gate(offers, len(decoding)) else 0

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

        They are compared with the whole draft, verified or not, so a sequence that the gate stopped can recover.
        """
        state = self._states.get(sequence.request_id)
        if state is None:
            return
        with self._optional():
            if state.draft and drawn:
                right = common_prefix(state.draft, drawn)
                compared = min(right + 1, len(state.draft), len(drawn))
                state.acceptance += (1 - (1 - _WEIGHT) ** compared) * (right / compared - state.acceptance)
            if state.predicted is not None and drawn:
                state.predictions += _WEIGHT * ((drawn[0] == state.predicted) - state.predictions)
            state.draft, state.predicted = None, predicted
            state.index.extend(drawn)

    def measured(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows that only decoded took `seconds`.

        The measurement at load used short contexts. Longer ones add the same time to steps of any width, which makes
        drafts cheaper by comparison.
        """
        if rows < len(self._cost) and self._cost is not FREE:
            expected = self._cost[rows] + self._extra_s
            error = min(seconds, _DELAYED * expected) - expected
            self._extra_s = max(self._extra_s + _COST_WEIGHT * error, 0.0)

    def close(self, sequence: Sequence) -> None:
        """A sequence ended. `catch_up` will remember its completion for its scope."""
        state = self._states.pop(sequence.request_id, None)
        if state is not None:
            self._ended.append((state, sequence.n_prompt))

    def catch_up(self, sequences: Collection[Sequence]) -> None:
        """While a step runs: remember completions that ended, and index the prompts of the step's `sequences`."""
        ended, self._ended = self._ended, []
        with self._optional():
            for state, n_prompt in ended:
                if len(state.index) > n_prompt:
                    self._memory.add(state.scope, state.index.tokens(max(n_prompt - _MEMORY_CONTEXT, 0)))
            for sequence in sequences if self.enabled else ():
                if _room(sequence) > 1 and sequence.status is Status.RUNNING:
                    self._state(sequence)

    def _state(self, sequence: Sequence) -> _State | None:
        request_id = sequence.request_id
        if request_id not in self._states:
            self._states[request_id] = None  # and it stays so if the next line fails
            self._states[request_id] = _State(sequence.submit.cache_scope, NGramIndex(sequence.tokens))
        return self._states[request_id]

    def _find(self, state: _State, limit: int) -> None:
        """Set the draft: at most `limit` tokens after the longest match, of equals the sequence's own."""
        window, index = state.index.window(), state.index
        found = own = index.longest(window)
        memory = self._memory.find(state.scope)
        if memory is not None:
            longer = memory.longest(window, above=max(own.length, _MEMORY_MATCH - 1))
            if longer.length:
                found, index = longer, memory
        state.draft = index.after(found, limit) if found.length else None
        state.matched = found.length

    def _gate(self, offers: dict[str, _State], decoding: int) -> bool:
        """Set the drafts of the step to those that pay. Whether there are any."""
        if not offers:
            return False
        drafts, acceptances = zip(*(state.offer for state in offers.values()), strict=True)
        offered = [len(draft) for draft in drafts]
        lengths = draft_lengths(acceptances, offered, decoding, self._cost, self._extra_s)
        self._stats.drafts_withheld += sum(offered) - sum(lengths)
        for request_id, draft, length in zip(offers, drafts, lengths, strict=True):
            if length:
                self._drafts[request_id] = np.frombuffer(draft, np.int32, length)
        return any(lengths)


def _room(sequence: Sequence) -> int:
    """Drafts that a sequence has room for: so few that the token after them still fits."""
    return len(sequence.buffer) - sequence.length - 1


def draft_lengths(
    acceptances: SequenceOf[float], offered: SequenceOf[int], decoding: int, cost: StepCost, extra_s: float = 0.0
) -> list[int]:
    """How many drafts of each sequence to verify, so that the step yields the most tokens a second (Stateful
    inference, 3.6).

    Sequence i offers `offered[i]` drafts. Its draft n is right with probability acceptance ** n (Leviathan et al. 2023,
    equation 1). The step has `decoding` rows without drafts; a step of n rows takes `cost[n] + extra_s` seconds. It
    reads the weights once for all rows, so the most likely drafts of all sequences compete for the rows that pay.
    """
    offers: list[tuple[float, int]] = []
    for i, acceptance in enumerate(acceptances):
        right, left = acceptance, offered[i]
        while left and right >= _UNLIKELY:
            offers.append((-right, i))
            right *= acceptance
            left -= 1
    lengths = [0] * len(offered)
    room = len(cost) - 1 - decoding
    if room <= 0:
        return lengths
    offers.sort()
    tokens, taken, best = float(decoding), 0, _WORTH * decoding / (cost[decoding] + extra_s)
    for n, (right, _) in enumerate(offers[:room], 1):
        tokens -= right
        rate = tokens / (cost[decoding + n] + extra_s)
        if rate > best:
            taken, best = n, rate
    for _, i in offers[:taken]:
        lengths[i] += 1
    return lengths


class TurnMemory:
    """The completions of earlier turns, by scope. No scope reads another's tokens.

    A scope over its share forgets the older half of its tokens. If a tenant's scopes together exceed one share, or all
    scopes exceed the total, the least recently used scopes are dropped. So each token is indexed only a few times.
    """

    def __init__(self, total_bytes: int, scope_bytes: int) -> None:
        self._total_bytes, self._scope_bytes = total_bytes, min(scope_bytes, total_bytes)
        self._scopes: OrderedDict[str, NGramIndex] = OrderedDict()  # least recently used first
        self.nbytes = 0  # used, at most `total_bytes`
        self._of: Counter[str] = Counter()  # of these, by tenant

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
            index.extend(turn.tolist())
        index.extend((GAP,))
        if index.crowded:
            index = NGramIndex(index.tokens(), capacity=2 * len(index))
        while index.nbytes > self._scope_bytes and len(index) > 1:
            index = NGramIndex(index.tokens(len(index) - len(index) // 2))
        if index.nbytes > self._scope_bytes:  # even one token needs more than a share
            return
        self._scopes[scope] = index
        self._count(scope, index.nbytes)
        tenant = tenant_of(scope)
        while self._of[tenant] > self._scope_bytes:
            self._drop(next(each for each in self._scopes if tenant_of(each) == tenant))
        while self.nbytes > self._total_bytes:
            self._drop(next(iter(self._scopes)))

    def _drop(self, scope: str) -> None:
        self._count(scope, -self._scopes.pop(scope).nbytes)

    def _count(self, scope: str, nbytes: int) -> None:
        tenant = tenant_of(scope)
        self.nbytes += nbytes
        self._of[tenant] += nbytes
        if not self._of[tenant]:
            del self._of[tenant]
