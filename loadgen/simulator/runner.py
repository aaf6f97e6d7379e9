"""A runner that computes nothing: it knows which token comes next, and how long the machine would have taken.

Several decode steps pass as one where the scheduler decides nothing between them: the engine is given the coming
tokens as drafts, and the runner lets as many come true as there are steps. It charges what the steps would take one by
one. Where a step turns out to do anything but decode, no draft comes true: it is one step.

The token after n is n + 1, so nobody has to hold texts (`programs` draws prompts to this rule).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from holdfast.loadgen.simulator.profile import Profile, contexts, decodes_only
from holdfast.replicas.scheduling.plan import Chunk, Drawn, Runner, StepOutput, StepPlan
from holdfast.replicas.speculation.config import DraftConfig
from holdfast.replicas.speculation.drafter import NO_DRAFT, Drafter, DraftState
from holdfast.replicas.speculation.ngrams import NGramIndex
from holdfast.replicas.speculation.skeleton import SkeletonSet
from holdfast.replicas.tokens import TokenIds

_NOTHING = NGramIndex(NO_DRAFT)


@dataclass(slots=True)
class Known(DraftState):
    """A sequence whose tokens are known: `last` is the one it drew last."""

    last: int = 0


class Foresight(Drafter):
    """Proposes what will be drawn in the next `steps` steps."""

    def __init__(self) -> None:
        super().__init__(DraftConfig())
        self.steps = 1

    def open(self, scope: str, tokens: TokenIds, skeletons: SkeletonSet | None = None) -> DraftState:
        return Known(scope, _NOTHING, None, last=int(tokens[-1]))

    def propose_all(self, sequences: Sequence[tuple[DraftState, int]], decoding: int = 0) -> list[TokenIds]:
        if self.steps == 1:
            return [NO_DRAFT] * len(sequences)
        proposed = []
        for state, limit in sequences:
            assert isinstance(state, Known)
            first = state.last + 1
            proposed.append(np.arange(first, first + min(limit, self.steps - 1), dtype=np.int32))
        return proposed

    def learn(self, state: DraftState, drawn: Sequence[int]) -> None:
        assert isinstance(state, Known)
        state.last = drawn[-1]

    def close(self, state: DraftState, n_prompt: int) -> None:
        return


class Machine(Runner, Protocol):
    """A runner that tells of its latest plan: `seconds` until its result was there, `steps` that it stood for, `drew`
    how many sequences drew; `decoded`: it did nothing else. `own`: the tokens are a model's.
    """

    seconds: float
    steps: int
    drew: int
    decoded: bool
    own: bool

    def begin(self) -> None:
        """The engine begins a step."""
        ...

    def end(self) -> float:
        """It is over; how long it took, with what the engine did around the runner."""
        ...


class CostRunner:
    """Takes as long as a profile says; what the engine does is part of its constant."""

    own = False

    def __init__(self, profile: Profile, page_size: int) -> None:
        self._profile = profile
        self._page_size = page_size
        self.seconds = 0.0
        self.steps = 1
        self.drew = 0
        self.decoded = False

    def begin(self) -> None:
        self.seconds, self.drew = 0.0, 0

    def end(self) -> float:
        return self.seconds

    def run(self, plan: StepPlan) -> StepOutput:
        profile, chunks = self._profile, plan.chunks
        self.decoded = len(chunks) > 0 and decodes_only(plan)
        if self.decoded:
            self.steps = 1 + min(chunk.draw.drafts for chunk in chunks if chunk.draw)
            self.seconds = profile.decode_s(len(chunks), contexts(chunks), self.steps)
        else:
            self.steps = 1
            self.seconds = profile.step(plan, self._page_size)
        drawn = tuple(_draw(chunk, self.steps) if chunk.draw else None for chunk in chunks)
        self.drew = sum(each is not None for each in drawn)
        return StepOutput(drawn, load_s=len(plan.loads) * self._page_size * profile.reload_s)


def _draw(chunk: Chunk, steps: int) -> Drawn:
    drafts = chunk.draw.drafts if chunk.draw else 0
    first = int(chunk.tokens[len(chunk.tokens) - drafts - 1]) + 1
    return Drawn(tuple(range(first, first + steps)))
