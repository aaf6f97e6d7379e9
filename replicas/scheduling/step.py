"""A planned step and whom it is for; and how the next one is planned while it is still running.

A step in flight leaves no doubt about what it computes: which cells are filled when it is over, which sequences have
one more token. Only the tokens are not known, and whether one of them ends its sequence. So the next step is planned as
if this one were over, and whoever runs it puts the drawn tokens in (`Chunk.follows`). Where that turns out to have been
in vain, because the sequence ended, was aborted or preempted meanwhile, what the later step draws for it is nobody's:
the sequence does not have the holding any more that the step was planned for. Its cells went back when it left, and
whatever is written to them later was planned, and runs, later.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.replicas.kv.holding import Holding
from holdfast.replicas.records import record
from holdfast.replicas.scheduling.builder import Load
from holdfast.replicas.scheduling.plan import StepPlan
from holdfast.replicas.sequences.sequence import Sequence


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
