"""A runner that computes nothing: it knows which token comes next, and how long the machine would have taken.

Several decode steps pass as one where the scheduler decides nothing between them (`StepPlan.times`): the runner draws
as many tokens for each sequence, and charges what the steps would take one by one.

The token after n is n + 1, so nobody has to hold texts (`programs` draws prompts to this rule).
"""

from __future__ import annotations

from typing import Protocol

from holdfast.loadgen.simulator.profile import Profile, contexts
from holdfast.replicas.scheduling.plan import Chunk, Drawn, Runner, StepOutput, StepPlan


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
        self.steps, self.decoded = plan.times, plan.decodes
        if self.decoded:
            self.seconds = profile.decode_s(len(chunks), contexts(chunks), plan.times)
        else:
            self.seconds = profile.step(plan, self._page_size)
        drawn = tuple([_draw(chunk, plan.times) if chunk.draw else None for chunk in chunks])
        self.drew = len(chunks) if self.decoded else sum([each is not None for each in drawn])
        return StepOutput(drawn, load_s=len(plan.loads) * self._page_size * profile.reload_s)


def _draw(chunk: Chunk, steps: int) -> Drawn:
    first = chunk.tokens.item(-1) + 1
    return Drawn(tuple(range(first, first + steps)))
