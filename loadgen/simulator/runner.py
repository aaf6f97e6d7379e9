"""A runner that computes nothing: it knows which token comes next, and how long the machine would have taken.

Several decode steps pass as one where the scheduler decides nothing between them: the runner takes the cells that they
need, draws as many tokens for each sequence, and charges what the steps would take one by one. The scheduler knows
nothing of it: it sees a step in which each sequence drew more.

The token after n is n + 1, so nobody has to hold texts (`programs` draws prompts to this rule).
"""

from __future__ import annotations

from typing import Protocol

from holdfast.loadgen.simulator.profile import Profile, contexts
from holdfast.replicas.engine import Engine
from holdfast.replicas.plan import Chunk, Drawn, Landed, RowWrite, Runner, StepOutput, StepPlan


class Machine(Runner, Protocol):
    """A runner that tells of its latest plan: `seconds` until its result was there, `steps` that it stood for, `drew`
    how many sequences drew; `decoded`: it did nothing else. `own`: the tokens are a model's.
    """

    seconds: float
    steps: int
    drew: int
    decoded: bool
    own: bool

    def start(self, engine: Engine, most: int) -> None:
        """The engine begins a step. `most`: it may stand for so many if it does nothing but decode."""
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
        self._engine: Engine | None = None
        self._most = 1

    def start(self, engine: Engine, most: int) -> None:
        self._engine, self._most = engine, most
        self.seconds, self.drew = 0.0, 0

    def end(self) -> float:
        return self.seconds

    def begin(self, plan: StepPlan) -> Landed:
        profile, chunks = self._profile, plan.chunks
        self.steps, self.decoded = 1, plan.decodes
        if self.decoded:
            if self._most > 1 and self._engine is not None and more_cells(self._engine, plan, self._most) is not None:
                self.steps = self._most
            self.seconds = profile.decode_s(len(chunks), contexts(chunks), self.steps)
        else:
            self.seconds = profile.step(plan, self._page_size)
        drawn = tuple([_draw(chunk, self.steps) if chunk.draw else None for chunk in chunks])
        self.drew = len(chunks) if self.decoded else sum([each is not None for each in drawn])
        return Landed(StepOutput(drawn, load_s=len(plan.loads) * self._page_size * profile.reload_s))


def more_cells(engine: Engine, plan: StepPlan, steps: int) -> list[RowWrite] | None:
    """Cells for `steps` steps at once, for each sequence of a plan of the engine's; what is new in their rows.

    None where it does not do nothing but decode, where some sequence needs each token before the next (for drafts, a
    mask, a penalty), or where cells are missing.
    """
    if not plan.decodes or not all(chunk.draw is not None and chunk.draw.plain for chunk in plan.chunks):
        return None
    sequences = {sequence.row: sequence for sequence in engine.live.values()}
    holdings = [sequences[chunk.row].the_holding for chunk in plan.chunks]
    ends = [chunk.start + steps for chunk in plan.chunks]
    needed = sum(engine.cache.pool.pages_for(end) - each.n_pages for end, each in zip(ends, holdings, strict=True))
    if needed * engine.cache.page_size > engine.cache.cells.available:  # none gets any: rows have to show their pages
        return None
    writes = []
    for chunk, holding in zip(plan.chunks, holdings, strict=True):
        first = holding.n_pages
        pages = engine.cache.grow(holding, chunk.start + steps)
        if pages is None:
            return None
        if len(pages):
            writes.append(RowWrite(chunk.row, first, pages))
    return writes


def _draw(chunk: Chunk, steps: int) -> Drawn:
    first = chunk.tokens.item(-1) + 1
    return Drawn(tuple(range(first, first + steps)))
