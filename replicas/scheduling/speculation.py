"""The drafter as the scheduler uses it: one state for each sequence that has begun to decode."""

from collections.abc import Sequence as Tokens

from holdfast.replicas.sequences.sequence import Sequence
from holdfast.replicas.speculation.drafter import NO_DRAFT, Drafter, DraftState
from holdfast.replicas.tokens import TokenIds


class Speculation:
    """Drafts for decoding sequences, by request. A preempted sequence keeps its state: its tokens stay the same."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._states: dict[str, DraftState] = {}

    def propose(self, sequence: Sequence, decoding: int) -> TokenIds:
        """Drafts to verify after the sequence's last token, so few that the token after them still fits."""
        limit = len(sequence.buffer) - sequence.length - 1
        if limit <= 0 or not self._drafter.config.enabled:
            return NO_DRAFT
        state = self._states.get(sequence.request_id)
        if state is None:
            state = self._drafter.open(sequence.submit.scope, sequence.tokens, sequence.submit.skeletons)
            self._states[sequence.request_id] = state
        return self._drafter.propose(state, limit, decoding)

    def learn(self, sequence: Sequence, drawn: Tokens[int]) -> None:
        """Tell which tokens were drawn for a sequence, once for each step that drew."""
        state = self._states.get(sequence.request_id)
        if state is not None:
            self._drafter.learn(state, drawn)

    def close(self, sequence: Sequence) -> None:
        """A sequence has ended; its completion is remembered for its tenant."""
        state = self._states.pop(sequence.request_id, None)
        if state is not None:
            self._drafter.close(state, sequence.n_prompt)
