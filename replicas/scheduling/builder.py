"""A step's plan in the making: what has been planned for which sequence, and how to take it back."""

from dataclasses import dataclass, field

import numpy as np

from holdfast.replicas.constraints.matcher import RowMasks
from holdfast.replicas.scheduling.plan import (
    NO_MOVES,
    Chunk,
    Draw,
    PageCopy,
    PageIds,
    PageMoves,
    RowWrite,
    StepPlan,
)
from holdfast.replicas.sequences.ahead import reach
from holdfast.replicas.sequences.sequence import Sequence
from holdfast.replicas.speculation.drafter import NO_DRAFT
from holdfast.replicas.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class Load:
    """A sequence's cells up to `end` are brought back from the host."""

    sequence: Sequence
    end: int
    moves: PageMoves


@dataclass(slots=True)
class PlanBuilder:
    """`sequences[i]` belongs to `chunks[i]`."""

    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    writes: list[RowWrite] = field(default_factory=list)
    copies: dict[int, tuple[PageCopy, ...]] = field(default_factory=dict)  # by row
    loads: list[Load] = field(default_factory=list)
    times: int = 1  # steps that it may stand for, as long as all that is planned is to decode

    @property
    def busy(self) -> bool:
        """Whether some sequence gets on."""
        return bool(self.chunks or self.loads)

    def compute(self, sequence: Sequence, size: int, drafts: TokenIds = NO_DRAFT) -> None:
        """Plan the next `size` tokens of a sequence, and `drafts` after its last one."""
        start = sequence.n_computed + sequence.ahead
        end = start + size
        tokens = sequence.buffer[start:end]  # a view: they never change any more
        if end > sequence.length:  # the step in flight draws the last one: whoever runs the plan puts it there
            tokens = np.append(tokens[:-1], np.int32(0))
        draw = None
        if end == reach(sequence) and end < len(sequence.buffer):
            draw = sequence.draw
            if draw is None or len(drafts):
                draw = _draw(sequence, drafts)
                tokens = np.concatenate((tokens, drafts))
        if draw is None or draw is not sequence.draw:
            self.times = 1
        assert sequence.row is not None, sequence.request_id
        self.chunks.append(Chunk(sequence.row, start, tokens, draw, sequence.awaited))
        self.sequences.append(sequence)

    def write(self, sequence: Sequence, first: int, pages: PageIds) -> None:
        if len(pages):
            self.writes.append(RowWrite(sequence.the_row, first, pages))

    def forget(self, sequence: Sequence) -> None:
        """Take everything of a sequence back: it was preempted, and its row and pages may go to another."""
        row = sequence.the_row
        self.copies.pop(row, None)
        self.writes = [write for write in self.writes if write.row != row]
        self.loads = [load for load in self.loads if load.sequence is not sequence]
        if sequence in self.sequences:
            i = self.sequences.index(sequence)
            del self.sequences[i], self.chunks[i]

    def plan(self, saves: PageMoves) -> StepPlan:
        """The step. `saves` are the copies of what was evicted for it."""
        copies = tuple(copy for some in self.copies.values() for copy in some)
        loads = NO_MOVES
        if self.loads:
            device = np.concatenate([load.moves.device for load in self.loads])
            loads = PageMoves(device, np.concatenate([load.moves.host for load in self.loads]))
        times = 1 if len(saves) or self.loads or not self.chunks else self.times
        return StepPlan(tuple(self.chunks), tuple(self.writes), copies, saves, loads, times)


def _draw(sequence: Sequence, drafts: TokenIds) -> Draw:
    """What to draw after a sequence's last token. Where that is the same in every step the sequence keeps it."""
    sampling, matcher = sequence.sampling, sequence.matcher
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    history = sequence.generated.copy() if penalised else None
    masks = RowMasks(matcher, tuple(drafts.tolist())) if matcher is not None else None
    draw = Draw(sampling, sequence.seed, len(drafts), history, masks)
    if draw.plain:
        sequence.draw = draw
    return draw
