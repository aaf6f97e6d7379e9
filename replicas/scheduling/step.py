"""A step of the engine: in the making (`StepBuilder`), planned, and in flight.

A step in flight leaves no doubt about what it computes: which cells are filled when it is over, which sequences have
one more token. Only the tokens are not known, and whether one of them ends its sequence. So the next step is planned as
if this one were over, and whoever runs it puts the drawn tokens in (`Chunk.follows`). Where that turns out to have been
in vain, because the sequence ended, was aborted or preempted meanwhile, what the later step draws for it is nobody's:
the sequence does not have the holding any more that the step was planned for. Its cells went back when it left, and
whatever is written to them later was planned, and runs, later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from holdfast.replicas.constraints.matcher import RowMasks
from holdfast.replicas.kv.holding import Holding
from holdfast.replicas.kv.pages import NO_MOVES, PageCopy, PageIds, PageMoves
from holdfast.replicas.plan import Chunk, Draw, RowWrite, StepPlan
from holdfast.replicas.sequences import Sequence
from holdfast.replicas.speculation.drafter import NO_DRAFT
from holdfast.replicas.types import TokenCounts, TokenIds, record


@dataclass(frozen=True, slots=True)
class Load:
    """The cells of `sequence` up to `end` are brought back from the host, into the `holding` that it has now."""

    sequence: Sequence
    holding: Holding
    end: int
    moves: PageMoves

    @property
    def present(self) -> bool:
        """Whether the sequence still is as it was when the step was planned."""
        return self.sequence.holding is self.holding


@record
class Step:
    """A plan and whom it is for: `sequences[i]` has `holdings[i]` and belongs to `plan.chunks[i]`.

    `loads` are what is brought back; `begun` is when it was planned. `open`: the next step may be planned before this
    one is over. It may not where tokens are needed first: to draft, to mask, to count penalties from.
    """

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    loads: tuple[Load, ...] = ()
    holdings: tuple[Holding | None, ...] = ()
    begun: float = 0.0
    open: bool = False

    def present(self) -> Iterator[tuple[int, Sequence]]:
        """The sequences that are still as they were when the step was planned, each with its chunk's number.

        One whose last token was refused meanwhile is not: the step computes what comes after that token.
        """
        for i, (sequence, holding) in enumerate(zip(self.sequences, self.holdings, strict=True)):
            if sequence.holding is holding and self.plan.chunks[i].start <= sequence.n_computed:
                yield i, sequence


@contextmanager
def as_if_over(step: Step) -> Iterator[None]:
    """Let the sequences of a step in flight look as if it were over, but for what it draws."""
    try:
        for i, sequence in step.present():
            chunk = step.plan.chunks[i]
            sequence.in_flight = len(chunk.tokens)
            sequence.awaited = i if chunk.draw is not None else None
        yield
    finally:
        for sequence in step.sequences:
            sequence.in_flight, sequence.awaited = 0, None


@dataclass(slots=True)
class StepBuilder:
    """What has been planned for which sequence so far, and how to take it back. `sequences[i]` has `chunks[i]`."""

    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    writes: list[RowWrite] = field(default_factory=list)
    copies: dict[int, tuple[PageCopy, ...]] = field(default_factory=dict)  # by row
    loads: list[Load] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether some sequence gets on."""
        return bool(self.chunks or self.loads)

    def compute(self, sequence: Sequence, size: int, drafts: TokenIds = NO_DRAFT) -> None:
        """Plan the next `size` tokens of a sequence, and `drafts` after its last one."""
        start = sequence.n_computed + sequence.in_flight
        end = start + size
        tokens = sequence.buffer[start:end]  # a view: they never change any more
        if end > sequence.length:  # the step in flight draws the last one: whoever runs the plan puts it there
            tokens = np.append(tokens[:-1], np.int32(0))
        draw = None
        if end == sequence.length + (sequence.awaited is not None) and end < len(sequence.buffer):
            n_drafts = len(drafts)
            draw = sequence.draws.get(n_drafts) or _draw(sequence, drafts)
            if n_drafts:
                tokens = np.concatenate((tokens, drafts))
        assert sequence.row is not None, sequence.request_id
        self.chunks.append(Chunk(sequence.row, start, tokens, draw, sequence.awaited))
        self.sequences.append(sequence)

    def write(self, sequence: Sequence, first: int, pages: PageIds) -> None:
        if len(pages):
            self.writes.append(RowWrite(sequence.the_row, first, pages))

    def writes_to(self, sequence: Sequence) -> bool:
        """Whether something is planned to be written to the sequence's row."""
        return sequence.row in self.copies or any(write.row == sequence.row for write in self.writes)

    def forget(self, sequence: Sequence) -> None:
        """Take everything of a sequence back: it was preempted, and its row and pages may go to another."""
        row = sequence.the_row
        self.copies.pop(row, None)
        self.writes = [write for write in self.writes if write.row != row]
        self.loads = [load for load in self.loads if load.sequence is not sequence]
        if sequence in self.sequences:
            i = self.sequences.index(sequence)
            del self.sequences[i], self.chunks[i]

    def step(self, saves: PageMoves, now: float, *, undrafted: bool) -> Step:
        """The step. `saves` are the copies of what was evicted for it.

        `undrafted`: the step after it can do without drafts for what this one draws.
        """
        copies = tuple(copy for some in self.copies.values() for copy in some)
        loads = NO_MOVES
        if self.loads:
            device = np.concatenate([load.moves.device for load in self.loads])
            loads = PageMoves(device, np.concatenate([load.moves.host for load in self.loads]))
        plan = StepPlan(tuple(self.chunks), tuple(self.writes), copies, saves, loads)
        free = (undrafted or all(chunk.draw is None for chunk in self.chunks)) and plan.plain
        holdings = tuple([sequence.holding for sequence in self.sequences])
        return Step(plan, tuple(self.sequences), tuple(self.loads), holdings, now, free)


def _draw(sequence: Sequence, drafts: TokenIds) -> Draw:
    """What to draw after a sequence's last token; kept by it where so many drafts need the same in every step."""
    sampling, matcher = sequence.sampling, sequence.matcher
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    counts = sequence.count() if penalised else None
    seen = _count_all(sequence) if sampling.repetition_penalty != 1 else None
    masks = RowMasks(matcher, tuple(drafts.tolist())) if matcher is not None and matcher.binding else None
    least = sequence.n_prompt - sequence.submit.n_generated + sampling.min_tokens if sampling.min_tokens else 0
    draw = Draw(sampling, sequence.seed, len(drafts), counts, masks, seen, least)
    if counts is None and masks is None and seen is None:
        sequence.draws[len(drafts)] = draw
    return draw


def _count_all(sequence: Sequence) -> TokenCounts:
    """How often each token stands in prompt and completion so far. Only what is new is counted."""
    if sequence.seen is None:
        sequence.seen = TokenCounts()
    sequence.seen.add(sequence.tokens[sequence.seen.seen :])
    return sequence.seen
