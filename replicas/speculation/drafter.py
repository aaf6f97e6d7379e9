"""The one entrance to speculation: for each sequence propose drafts, and learn from what was drawn.

    own tokens --- NGramIndex ---.
    tenant's turns - TurnMemory --+-- longest match -- draft -- gate over all sequences of the step -- propose
    declared tools - SkeletonSet -'   (within a call: fixed text, and values from the other two)

Deterministic, no clock, no torch. Whether a draft is right only the model says; a wrong one costs time, never output.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.speculation.gate import (
    Acceptance,
    LearnedCost,
    VerificationCost,
    cap,
    competing_lengths,
    draft_length,
    uniform_length,
)
from holdfast.replicas.speculation.ngrams import (
    GAP,
    NO_OCCURRENCE,
    WINDOW,
    Context,
    NGramIndex,
    Occurrence,
    common_prefix,
)
from holdfast.replicas.speculation.skeletons import SHORT_VALUE, SkeletonCursor, SkeletonSet
from holdfast.replicas.stats import DraftCounts, DraftSource
from holdfast.replicas.types import TokenIds, tenant_of

NO_DRAFT: TokenIds = np.zeros(0, np.int32)
NO_DRAFT.setflags(write=False)

_INITIAL_ACCEPTANCE = 0.6  # of a sequence, and of a kind of draft, of which nothing is known yet
_EXPLORED = 4  # an exploring step verifies one draft for so many sequences
_SCOPES = 1024  # tenants whose acceptance is remembered, the latest come
_LENGTH_CLASSES = WINDOW.bit_length() + 1  # of match lengths, by powers of two


@dataclass(slots=True)
class DraftState:
    """One sequence as the drafter knows it: an index of its tokens and how its drafts fared."""

    scope: str
    index: NGramIndex
    cursor: SkeletonCursor | None
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(_INITIAL_ACCEPTANCE))
    draft: Sequence[int] = ()  # what may follow, before the gate
    source: DraftSource = DraftSource.PROMPT_LOOKUP  # of `draft`
    kind: Acceptance | None = None  # of the drafts like `draft`
    proposed: int = 0  # tokens of `draft` that passed the gate

    def expected(self) -> float:
        """Acceptance of `draft` as far as its like and this sequence let know."""
        return (self.kind.value + self.acceptance.value) / 2 if self.kind is not None else 0.0


class Drafter:
    """Drafts for all sequences of an engine. Not thread-safe: the loop that plans steps calls it."""

    def __init__(self, config: DraftConfig, cost: VerificationCost | None = None) -> None:
        self.config = config
        self.counts = DraftCounts()
        self._cost = LearnedCost(cost, config.verify_rows) if cost is not None and config.cost_gate else None
        self._memory = TurnMemory(config.memory_bytes, config.scope_bytes)
        self._kinds: OrderedDict[str, tuple[Acceptance, ...]] = OrderedDict()
        self._steps = 0

    @property
    def memory_bytes(self) -> int:
        """Held for the tenants' earlier turns; at most `config.memory_bytes`."""
        return self._memory.nbytes

    def open(self, scope: str, tokens: TokenIds, skeletons: SkeletonSet | None = None) -> DraftState:
        """Begin a sequence with its prompt. Costs numpy passes over it."""
        if not self.config.enabled:
            tokens, skeletons = NO_DRAFT, None
        index = NGramIndex(tokens)
        cursor = None
        if skeletons is not None and skeletons.flat and self.config.skeleton:
            cursor = SkeletonCursor(skeletons, int(tokens[-1]) if len(tokens) else 0)
        return DraftState(scope, index, cursor)

    def propose(self, state: DraftState, limit: int, decoding: int = 1) -> TokenIds:
        """At most `limit` drafts that may follow the sequence, int32, often none.

        `decoding` sequences verify theirs in the same step.
        """
        return self.propose_all(((state, limit),), decoding)[0]

    def propose_all(self, sequences: Sequence[tuple[DraftState, int]], decoding: int = 0) -> list[TokenIds]:
        """Drafts for the sequences of one step, each with its limit: int32, often none.

        `decoding` sequences are in the step, those of `sequences` among them; 0: those alone.
        """
        config = self.config
        if not config.enabled:
            return [NO_DRAFT] * len(sequences)
        decoding = max(decoding, len(sequences))
        shared = self._cost is not None and config.shared_budget and decoding < config.verify_rows
        most = config.max_draft if shared else cap(config, decoding)
        for state, limit in sequences:
            self._draft(state, min(limit, most))
        lengths = self._lengths([state for state, _ in sequences], decoding)
        drafts: list[int] = []
        for (state, _), length in zip(sequences, lengths, strict=True):
            state.proposed = length
            self.counts.withheld += len(state.draft) - length
            drafts += state.draft[:length]
        tokens, end = np.array(drafts, np.int32), 0  # one array, for each takes its time however small
        proposals = []
        for length in lengths:
            end += length
            proposals.append(tokens[end - length : end] if length else NO_DRAFT)
        return proposals

    def learn(self, state: DraftState, drawn: Sequence[int], verified: Sequence[int] | None = None) -> None:
        """Append the tokens drawn in a step: accepted drafts and the one after them.

        `verified` are the drafts in the step, where they may be others than those proposed: cut off for lack of room,
        or by a grammar that forces its own.

        What could have been drafted is compared with them whether or not it was verified, so a source that the gate
        turned off comes back when it is right again.
        """
        if not self.config.enabled:
            return
        if state.kind is not None:
            right = common_prefix(state.draft, drawn)
            compared = min(right + 1, len(state.draft), len(drawn))
            state.acceptance.learn(compared, right, self.config.ema_weight)
            state.kind.learn(compared, right, self.config.ema_weight)
            state.kind = None
            counted = state.proposed
            if verified is not None:
                counted = common_prefix(state.draft[:counted], verified)
            if counted:
                self.counts.drafted[state.source] += counted
                self.counts.accepted[state.source] += min(right, counted)
        if state.cursor is not None:
            state.cursor.advance(drawn, state.index.window)
        state.index.extend(drawn)

    def measured(self, rows: int, seconds: float) -> None:
        """A step that verified `rows` rows and did nothing else took `seconds`."""
        if self._cost is not None:
            self._cost.learn(rows, seconds)

    def close(self, state: DraftState, n_prompt: int) -> None:
        """End a sequence; its completion, all after `n_prompt` tokens, is remembered for its scope."""
        if self.config.enabled and self.config.memory and len(state.index) > n_prompt:
            self._memory.add(state.scope, state.index.tokens(max(n_prompt - self.config.memory_context, 0)))

    # ---- what may follow a sequence ----

    def _draft(self, state: DraftState, most: int) -> None:
        """Find it: at most `most` tokens."""
        state.kind, state.draft = None, ()
        if most == 0:
            return
        context = state.index.context()
        own = self._own(state, context)
        found, source, copied = self._longest(state, context, own, most)
        draft: Sequence[int] = copied
        cursor = state.cursor
        if cursor is not None and cursor.place is not None and found.length < self.config.raw_length:
            composed = cursor.compose(draft, most, partial(self._value, state, cursor, context, own, copied, most))
            if composed:
                source, draft = DraftSource.SKELETON, composed
        if draft:
            state.kind = self._kind(state.scope, source, found.length)
            state.source, state.draft = source, draft

    def _value(
        self,
        state: DraftState,
        cursor: SkeletonCursor,
        context: Context,
        own: Occurrence,
        copied: array[int],
        most: int,
        so_far: list[int],
    ) -> array[int]:
        """What continues a call that is drafted `so_far` and ends in a value, which is rather the conversation's own.

        Before anything is drafted the sequence's match is `own`, and the longest goes on with what is `copied`.
        """
        if so_far:
            context = context.then(so_far)
            own = self._own(state, context)
        if (so_far or cursor.filled <= SHORT_VALUE) and own.length >= self.config.own_value_length:
            return state.index.after(own, most) if own.length else array("i")
        return self._longest(state, context, own, most)[2] if so_far else copied

    def _own(self, state: DraftState, context: Context) -> Occurrence:
        """The longest match in the sequence itself."""
        if not self.config.prompt_lookup:
            return NO_OCCURRENCE
        found = state.index.longest(context)
        return found if found.length >= self.config.min_n else NO_OCCURRENCE

    def _longest(
        self, state: DraftState, context: Context, own: Occurrence, most: int
    ) -> tuple[Occurrence, DraftSource, array[int]]:
        """The longest match in the sequence, which is its `own`, or the memory; and at most `most` tokens after it."""
        config = self.config
        memory = self._memory.find(state.scope) if config.memory else None
        if memory is not None:
            found = memory.longest(context, above=max(own.length, config.memory_min_n - 1))
            if found.length:
                return found, DraftSource.MEMORY, memory.after(found, most)
        return own, DraftSource.PROMPT_LOOKUP, state.index.after(own, most) if own.length else array("i")

    # ---- how much of it is verified ----

    def _lengths(self, states: Sequence[DraftState], decoding: int) -> list[int]:
        """How many of each one's drafts pass the gate."""
        config = self.config
        acceptances, most = [], []
        for state in states:
            acceptance = state.expected()
            acceptances.append(acceptance)
            most.append(draft_length(config, len(state.draft), acceptance))
        if self._cost is None or decoding >= config.verify_rows or not any(most):
            return most
        self._steps += 1
        table = self._cost.table
        if config.shared_budget:
            least = -(-decoding // _EXPLORED) if self._steps % config.explore_every == 0 else 0
            return competing_lengths(acceptances, most, table, decoding, least)
        return [uniform_length(a, n, decoding, table) for a, n in zip(acceptances, most, strict=True)]

    def _kind(self, scope: str, source: DraftSource, length: int) -> Acceptance:
        """How drafts of this source and length of match fared in the scope."""
        kinds = self._kinds.get(scope)
        if kinds is None:
            kinds = tuple(Acceptance(_INITIAL_ACCEPTANCE) for _ in range(len(DraftSource) * _LENGTH_CLASSES))
            self._kinds[scope] = kinds
            if len(self._kinds) > _SCOPES:
                self._kinds.popitem(last=False)
        return kinds[source * _LENGTH_CLASSES + length.bit_length()]


class TurnMemory:
    """What the model said in earlier turns, by scope, the latest used scope last. No scope sees another's text.

    A scope beyond its share forgets the older half of its tokens. Where the scopes of a tenant are beyond one share
    together, or all scopes beyond theirs, the least recently used go whole. So a token is indexed a few times in its
    life, and only when a turn ends.
    """

    __slots__ = ("_nbytes", "_of", "_scope_bytes", "_scopes", "_total_bytes")

    def __init__(self, total_bytes: int, scope_bytes: int) -> None:
        self._total_bytes, self._scope_bytes = total_bytes, min(scope_bytes, total_bytes)
        self._scopes: OrderedDict[str, NGramIndex] = OrderedDict()
        self._nbytes = 0
        self._of: Counter[str] = Counter()  # bytes by tenant

    @property
    def nbytes(self) -> int:
        """Bytes held, at most `total_bytes`."""
        return self._nbytes

    def find(self, scope: str) -> NGramIndex | None:
        """The scope's turns, or None before its first."""
        return self._scopes.get(scope)

    def add(self, scope: str, turn: TokenIds) -> None:
        """Remember a turn, which ends with a gap."""
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
        if index.nbytes > self._scope_bytes:  # too small a share for anything
            return
        self._scopes[scope] = index
        self._count(scope, index.nbytes)
        tenant = tenant_of(scope)
        while self._of[tenant] > self._scope_bytes:
            self._forget(next(each for each in self._scopes if tenant_of(each) == tenant))
        while self._nbytes > self._total_bytes:
            self._forget(next(iter(self._scopes)))

    def _forget(self, scope: str) -> None:
        self._count(scope, -self._scopes.pop(scope).nbytes)

    def _count(self, scope: str, nbytes: int) -> None:
        tenant = tenant_of(scope)
        self._nbytes += nbytes
        self._of[tenant] += nbytes
        if not self._of[tenant]:
            del self._of[tenant]
