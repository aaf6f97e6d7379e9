"""What one engine step does: frozen data from the scheduler to the runner, and the runner's answer.

The scheduler knows pages and tokens and no tensors; the runner knows tensors and no requests.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from holdfast.replicas.events import Draw, TokenLogprobs
from holdfast.replicas.kv.holding import Holding
from holdfast.replicas.kv.pages import NO_MOVES, PageCopy, PageIds, PageMoves
from holdfast.replicas.sequences import Sequence
from holdfast.replicas.types import TokenIds, record


@record
class RowWrite:
    """Put `pages` into page-table row `row`, from page slot `first` on: one device operation, any length."""

    row: int
    first: int
    pages: PageIds


@record
class Chunk:
    """One sequence's query tokens, at absolute positions [start, start + len(tokens)).

    Its KV is written to the pages of `row` at those positions and it attends to everything before.
    `draw` None: a prefill chunk that is not the prompt's last. `follows`: its only token stands for the one that this
    chunk of the step before draws, which was not known when the step was planned; it must be `Draw.plain`.
    """

    row: int
    start: int
    tokens: TokenIds
    draw: Draw | None = None
    follows: int | None = None

    @property
    def decodes(self) -> bool:
        """Whether it takes its sequence one token further, with drafts or without."""
        return self.draw is not None and len(self.tokens) == self.draw.drafts + 1


@record
class StepPlan:
    """One step. Order of effects: saves, copies, row writes, then loads beside one forward over all chunks.

    `saves` go from the device to the host, `loads` back; nothing in the same step reads what is loaded. `times`: a step
    that does nothing but decode may stand for so many; each sequence draws as many tokens in it.
    """

    chunks: tuple[Chunk, ...]
    writes: tuple[RowWrite, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    saves: PageMoves = NO_MOVES
    loads: PageMoves = NO_MOVES
    times: int = 1

    @property
    def moves(self) -> bool:
        """Whether pages go from one tier to the other."""
        return len(self.saves) > 0 or len(self.loads) > 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to do that cannot wait for the next step."""
        return len(self.chunks) > 0 or self.moves

    @property
    def decodes(self) -> bool:
        """Whether it takes every sequence in it one token further, and does nothing else that takes time."""
        if self.times > 1:
            return True
        return len(self.chunks) > 0 and not self.moves and not self.prefills

    @property
    def prefills(self) -> bool:
        """Whether a part of a prompt is among the chunks, where the scheduler puts it: behind those that decode."""
        return not all(chunk.decodes for chunk in reversed(self.chunks))

    @property
    def plain(self) -> bool:
        """Whether the step after it can be planned before it is known what this one draws."""
        once = not self.moves and self.times == 1
        return once and all(chunk.draw is None or chunk.draw.plain for chunk in self.chunks)

    def after(self, drawn: "Iterable[Drawn | None]") -> "StepPlan":
        """The plan with the tokens that the step before drew, where it follows them; 0 where that step failed."""
        if all(chunk.follows is None for chunk in self.chunks):
            return self
        known = {i: each.tokens[-1] for i, each in enumerate(drawn) if each is not None}
        chunks = tuple(
            chunk
            if chunk.follows is None
            else replace(chunk, tokens=np.array([known.get(chunk.follows, 0)], np.int32), follows=None)
            for chunk in self.chunks
        )
        return replace(self, chunks=chunks)


@record
class Drawn:
    """Tokens drawn for one chunk: accepted drafts, then the next token. Never empty."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@record
class StepOutput:
    """`drawn[i]` belongs to `plan.chunks[i]`; None where the chunk draws nothing.

    Seconds spent in the two parts of the step, measured by the runner. `moved` False: copies between the tiers failed,
    and it is not known what they wrote. `load_s`: how long the loads took, beside the forward.
    """

    drawn: tuple[Drawn | None, ...]
    forward_s: float = 0.0
    sample_s: float = 0.0
    moved: bool = True
    load_s: float = 0.0


class Runner(Protocol):
    """Runs plans on a model. Raises only for a failed step; its state survives a failure."""

    def run(self, plan: StepPlan) -> StepOutput: ...


class Flight(Protocol):
    """A step that has begun."""

    def land(self) -> StepOutput:
        """Wait until it is over; once. Raises like `Runner.run`."""


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """A runner whose steps can be begun before the one before is over. They happen in the order they were begun in."""

    def begin(self, plan: StepPlan) -> Flight: ...


# ---- A planned step and whom it is for; and how the next one is planned while it is still running.
#
# A step in flight leaves no doubt about what it computes: which cells are filled when it is over, which sequences have
# one more token. Only the tokens are not known, and whether one of them ends its sequence. So the next step is planned
# as
# if this one were over, and whoever runs it puts the drawn tokens in (`Chunk.follows`). Where that turns out to have
# been
# in vain, because the sequence ended, was aborted or preempted meanwhile, what the later step draws for it is
# nobody's:
# the sequence does not have the holding any more that the step was planned for. Its cells went back when it left, and
# whatever is written to them later was planned, and runs, later.


@dataclass(frozen=True, slots=True)
class Load:
    """A sequence's cells up to `end` are brought back from the host."""

    sequence: Sequence
    end: int
    moves: PageMoves


@record
class Step:
    """A plan and whom it is for: `sequences[i]` has `held[i]` and belongs to `plan.chunks[i]`.

    `loads` are what is brought back; `begun` is when it was planned. `open`: the next step may be planned before this
    one is over. It may not where tokens are needed first: to draft, to mask, to count penalties from.
    """

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    loads: tuple[Load, ...] = ()
    held: tuple[Holding | None, ...] = ()
    begun: float = 0.0
    open: bool = False

    def present(self) -> Iterator[tuple[int, Sequence]]:
        """The sequences that are still as they were when the step was planned, each with its chunk's number."""
        for i, (sequence, held) in enumerate(zip(self.sequences, self.held, strict=True)):
            if sequence.holding is held:
                yield i, sequence


@contextmanager
def as_if_over(step: Step) -> Iterator[None]:
    """Let the sequences of a step in flight look as if it were over, but for what it draws."""
    try:
        for i, sequence in step.present():
            chunk = step.plan.chunks[i]
            sequence.ahead = len(chunk.tokens)
            sequence.awaited = i if chunk.draw is not None else None
        yield
    finally:
        for sequence in step.sequences:
            sequence.ahead, sequence.awaited = 0, None
