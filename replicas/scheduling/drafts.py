"""Drafts for the sequences of a step: asked of the drafter, cut to what a grammar allows, or forced by it.

Drafts are optional. So a drafter that raises costs a sequence its drafts and nothing else: this file is the supervisor
of the calls to it.
"""

import logging
from collections.abc import Collection, Iterable

import numpy as np

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.plan import Chunk, StepPlan
from holdfast.replicas.programs import Sequence, Status
from holdfast.replicas.speculation.drafter import NO_DRAFT, Drafter, DraftState
from holdfast.replicas.types import TokenIds

log = logging.getLogger(__name__)


_BLIND = 3  # after a step without drafts so many are planned without asking, where that lets steps overlap


class Drafts:
    """The drafter's state of each sequence that has begun to decode, and the drafts of the step in the making.

    A preempted sequence keeps its state: its tokens stay the same.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.active = drafter.config.enabled
        self._drafter = drafter
        self._states: dict[str, DraftState | None] = {}  # None: its drafter failed
        self._drafts: dict[str, TokenIds] = {}  # of the step in the making
        self._ended: list[tuple[DraftState, int]] = []  # not remembered yet, each with the length of its prompt
        self._blind = 0  # steps that may still be planned without asking for drafts

    @property
    def silent(self) -> bool:
        """Whether the next step can do without drafts: there were none lately, or never are any."""
        return not self.active or self._blind > 0

    def prepare(self, decoding: Collection[Sequence]) -> None:
        """Draft for all sequences that decode in a step: they share what verifying may cost.

        Whose last token is not known yet has no drafts.
        """
        self._drafts.clear()
        if not self.active:
            return
        offered: list[tuple[DraftState, int]] = []
        requests: list[str] = []
        for sequence in decoding:
            if sequence.awaited is not None:
                self._blind -= 1
                return
            # So few that the token after them still fits.
            limit = len(sequence.buffer) - sequence.length - 1
            state = self._state(sequence) if limit > 0 else None
            if state is not None:
                offered.append((state, limit))
                requests.append(sequence.request_id)
        try:
            drafts = self._drafter.propose_all(offered, len(decoding))
        except Exception:
            for request_id in requests:
                self._give_up(request_id)
            return
        self._drafts.update(zip(requests, drafts, strict=True))
        self._blind = 0 if not decoding or any(len(draft) for draft in drafts) else _BLIND

    def propose(self, sequence: Sequence) -> TokenIds:
        """The drafts prepared for a sequence, to verify after its last token."""
        return self._drafts.get(sequence.request_id, NO_DRAFT)

    def forced(self) -> None:
        """A grammar forces tokens: the next steps are better asked for drafts."""
        self._blind = 0

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """The step of this plan, which only decoded, took `seconds`: what verifying costs."""
        if not self.active:
            return
        rows = sum(len(chunk.tokens) for chunk in plan.chunks)
        try:
            self._drafter.measured(rows, seconds)
        except Exception:
            log.exception("what verifying costs could not be learned")

    def learn(self, sequence: Sequence, chunk: Chunk, drawn: tuple[int, ...]) -> None:
        """Tell which tokens were drawn for a sequence in its `chunk`, once for each step that drew."""
        state = self._states.get(sequence.request_id)
        if state is None:
            return
        n, verified = chunk.draw.drafts if chunk.draw is not None else 0, None
        if sequence.matcher is not None or n != state.proposed:  # else they are those that were proposed
            verified = chunk.tokens[len(chunk.tokens) - n :].tolist()
        try:
            self._drafter.learn(state, drawn, verified)
        except Exception:
            self._give_up(sequence.request_id)

    def close(self, sequence: Sequence) -> None:
        """A sequence has ended; its completion is going to be remembered for its tenant."""
        state = self._states.pop(sequence.request_id, None)
        if state is not None:
            self._ended.append((state, sequence.n_prompt))

    def catch_up(self, sequences: Iterable[Sequence], chunks: Iterable[Chunk]) -> None:
        """While a step of these runs: remember the completions of those that have ended, read the prompts that it ends.

        Nothing is read where behind the token that it draws there is no room for drafts.
        """
        for state, n_prompt in self._ended:
            try:
                self._drafter.close(state, n_prompt)
            except Exception:
                log.exception("a turn could not be remembered for drafts")
        self._ended.clear()
        if not self.active:
            return
        for sequence, chunk in zip(sequences, chunks, strict=True):
            room = len(sequence.buffer) - sequence.length > 2
            if room and chunk.draw is not None and sequence.status is Status.RUNNING:
                self._state(sequence)

    def _state(self, sequence: Sequence) -> DraftState | None:
        request_id = sequence.request_id
        state = self._states.get(request_id)
        if state is None and request_id not in self._states:
            submit = sequence.submit
            try:
                state = self._states[request_id] = self._drafter.open(
                    submit.cache_scope, sequence.tokens, submit.skeletons
                )
            except Exception:
                self._give_up(request_id)
        return state

    def _give_up(self, request_id: str) -> None:
        log.exception("no more drafts for %s: the drafter failed", request_id)
        self._states[request_id] = None


MOST_FORCED = 32  # tokens a step; the fixed text between two values of a call is seldom longer


def fitting(sequence: Sequence, drafts: TokenIds) -> TokenIds:
    """Of `drafts` those that the sequence's grammar lets through; or the tokens it forces, `MOST_FORCED` at most.

    Forced tokens are always drawn, so they cost a row of the forward each and never a step. Drafts of tokens that are
    drawn freely are not asked about: the grammar reads them once they are drawn, and twice took a third of its time.
    """
    matcher = sequence.matcher
    if matcher is None or sequence.awaited is not None:  # nobody knows yet what may follow a token that is in flight
        return drafts
    limit = min(MOST_FORCED, len(sequence.buffer) - sequence.length - 1)
    forced = matcher.forced()[:limit] if limit > 0 else []
    if forced and drafts[: len(forced)].tolist() != forced:
        return np.array(forced, np.int32)
    if not matcher.binding:
        return drafts
    return drafts[: matcher.accepts(drafts.tolist())] if len(drafts) else NO_DRAFT


def check_grammar(sequence: Sequence) -> None:
    """Raises InvalidRequestError once the sequence's grammar has grown beyond its limits: it says no more."""
    if sequence.matcher is not None and sequence.matcher.failed:
        raise InvalidRequestError("the grammar of the reply grew beyond its limits; simplify its schemas")
