"""The batch: the step that is being planned for it, the sequences in it, and how they leave.

    StepBuilder    what is planned so far, for which sequences
    Step           the plan as the runner gets it, and for whom it is
    Running        the sequences in the batch; each has a row and cells, and gives both back however it leaves
    Terminator     takes sequences out, wherever they are, and notes the events of their requests

While a step is in flight, the scheduler knows which cells it fills and which sequences get one more token. It does not
know the tokens, or whether one of them ends its sequence. So the next step is planned as if this one were over, and the
runner puts the drawn tokens in (`Chunk.follows`). If a sequence has ended, was aborted or was preempted meanwhile, the
later step's tokens for it are dropped: it no longer has the holding that the step was planned for. Its cells were freed
when it left; later writes to them were planned later, and run later.
"""

import logging
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from holdfast.replicas.constraints.matcher import RowMasks
from holdfast.replicas.errors import EngineError, ErrorInfo, ErrorKind, InvalidRequestError
from holdfast.replicas.kv.cache import Freed, Holding, KVCache, Reloads
from holdfast.replicas.kv.pages import NO_MOVES, NO_PAGES, SHARED, PageCopy, PageIds, PageMoves, joined
from holdfast.replicas.kv.radix import Pin, Prefix
from holdfast.replicas.kv.states import CheckpointStore, RunningState
from holdfast.replicas.kv.windows import WINDOW_KIND, RunningWindow
from holdfast.replicas.plan import Chunk, Draw, RowWrite, StepPlan
from holdfast.replicas.programs import KeptRow, Kind, Program, Programs, Rows, Sequence, Status, give_back
from holdfast.replicas.requests import Aborted, Event, Finished, FinishReason
from holdfast.replicas.scheduling.pins import Retention
from holdfast.replicas.scheduling.queue import Forecast, Key, RequestOrder, WaitingQueue
from holdfast.replicas.speculation.drafter import NO_DRAFT, Drafter
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import TokenCounts, TokenIds, common_prefix, record

log = logging.getLogger(__name__)

GENERATION_PROMPT = 8  # tokens at a prompt's end that the next turn's prompt may not have, such as an opened <think>
UNBOUNDED = 1 << 62
NO_ROOM = ErrorInfo(ErrorKind.OVERLOADED, "the KV cache has no room for this request, even alone")


@dataclass(frozen=True, slots=True)
class Load:
    """The cells of `sequence` up to `end` are brought back from the host, into the `holding` that it has now."""

    sequence: Sequence
    holding: Holding
    end: int
    moves: PageMoves
    checkpoint: PageMoves = NO_MOVES  # of the state slot or window pages at `end`

    @property
    def present(self) -> bool:
        """Whether the sequence still is as it was when the step was planned."""
        return self.sequence.holding is self.holding


@record
class Step:
    """A plan and its sequences: `sequences[i]` has `holdings[i]` and belongs to `plan.chunks[i]`.

    `begun` is when it was planned. `open`: the next step may be planned before this one is over. A step is not open if
    drafts, masks or penalties of the next step need its tokens.
    """

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    loads: tuple[Load, ...] = ()
    holdings: tuple[Holding | None, ...] = ()
    begun: float = 0.0
    open: bool = False

    def present(self) -> Iterator[tuple[int, Sequence]]:
        """The sequences that are still as they were when the step was planned, each with its chunk's number.

        A sequence whose last token was refused meanwhile is not: the step computes what follows that token.
        """
        for i, (sequence, holding) in enumerate(zip(self.sequences, self.holdings, strict=True)):
            if sequence.holding is holding and self.plan.chunks[i].start <= sequence.n_computed:
                yield i, sequence


@contextmanager
def as_if_over(step: Step) -> Iterator[None]:
    """Let the sequences of a step in flight look as if it were over, except for the drawn tokens."""
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
    """The step planned so far: `sequences[i]` has `chunks[i]`."""

    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    writes: list[RowWrite] = field(default_factory=list)
    copies: dict[int, tuple[PageCopy, ...]] = field(default_factory=dict)  # by row
    loads: list[Load] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether some sequence makes progress."""
        return bool(self.chunks or self.loads)

    def compute(self, sequence: Sequence, size: int, drafts: TokenIds = NO_DRAFT) -> None:
        """Plan the next `size` tokens of a sequence, and `drafts` after its last one."""
        start = sequence.n_computed + sequence.in_flight
        end = start + size
        buffer, length, awaited = sequence.buffer, sequence.length, sequence.awaited
        tokens, draw, following = buffer[start:end], None, 0  # a view of tokens that never change any more
        if end > length:  # the step in flight draws the last one; the runner puts it there
            tokens = np.append(tokens[:-1], np.int32(0))
        if end == (length if awaited is None else length + 1) and end < len(buffer):
            n_drafts = len(drafts)
            draw = sequence.draws.get(n_drafts) or _draw(sequence, drafts)
            if n_drafts:  # behind the sequence's tokens, where commit writes what the step draws
                buffer[end : end + n_drafts] = drafts
                tokens = buffer[start : end + n_drafts]
        elif end < length:
            following = int(buffer[end])
        assert sequence.row is not None, sequence.request_id
        self.chunks.append(Chunk(sequence.row, start, tokens, draw, awaited, None, following))
        self.sequences.append(sequence)

    def write(self, sequence: Sequence, first: int, pages: PageIds) -> None:
        if len(pages):
            self.writes.append(RowWrite(sequence.the_row, first, pages))

    def show_window(self, sequence: Sequence, window: RunningWindow) -> None:
        """Write the window pages that the page table does not show yet."""
        if window.shown < window.end:
            pages = window.row[window.shown : window.end].copy()
            self.writes.append(RowWrite(sequence.the_row, window.shown, pages, WINDOW_KIND))
            window.shown = window.end

    def writes_to(self, sequence: Sequence) -> bool:
        """Whether something is planned to be written to the sequence's row."""
        return sequence.row in self.copies or any(write.row == sequence.row for write in self.writes)

    def forget(self, sequence: Sequence) -> None:
        """Remove a preempted sequence from the plan: its row and pages may go to another sequence."""
        row = sequence.the_row
        self.copies.pop(row, None)
        self.writes = [write for write in self.writes if write.row != row]
        self.loads = [load for load in self.loads if load.sequence is not sequence]
        if sequence in self.sequences:
            i = self.sequences.index(sequence)
            del self.sequences[i], self.chunks[i]

    def use_states(self, states: CheckpointStore[Any]) -> None:
        """Plan each chunk's use of its sequence's recurrent state. The plan must not change after that.

        A chunk that draws leaves its last token and its drafts out of the state: they may be computed again.
        """
        for i, (sequence, chunk) in enumerate(zip(self.sequences, self.chunks, strict=True)):
            held = chunk.draw.drafts + 1 if chunk.draw is not None else 0
            if (state := sequence.the_holding.state) is not None:
                self.chunks[i] = replace(chunk, state=states.advance(state, chunk.start, len(chunk.tokens), held))

    def step(self, reloads: Reloads, now: float, *, undrafted: bool) -> Step:
        """The step, with the copies of what was evicted for it. `undrafted`: the next step needs no drafts."""
        copies = tuple(copy for row_copies in self.copies.values() for copy in row_copies)
        loads, checkpoints = joined([load.moves for load in self.loads]), [load.checkpoint for load in self.loads]
        moves = reloads.saves(), loads, reloads.checkpoint_saves(), joined(checkpoints)
        plan = StepPlan(tuple(self.chunks), tuple(self.writes), copies, *moves)
        free = (undrafted or all(chunk.draw is None for chunk in self.chunks)) and plan.plain
        holdings = tuple([sequence.holding for sequence in self.sequences])
        return Step(plan, tuple(self.sequences), tuple(self.loads), holdings, now, free)


def _draw(sequence: Sequence, drafts: TokenIds) -> Draw:
    """How to draw after the last token of a sequence, which keeps a draw that does not change from step to step."""
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
    """How often each token stands in prompt and completion so far; counts new tokens only."""
    if sequence.seen is None:
        sequence.seen = TokenCounts()
    sequence.seen.add(sequence.tokens[sequence.seen.seen :])
    return sequence.seen


class ExitReason(Enum):
    """Why a sequence leaves the batch; decides what stays: its cells in the tree, its row with its program."""

    FINISHED = "finished"  # cells and row
    ABORTED = "aborted"  # cells and row, but a session's history is as before
    PREEMPTED = "preempted"  # cells
    FAILED = "failed"  # nothing

    @property
    def keeps_row(self) -> bool:
        """The row matches the computed cells: every plan that wrote to it has run."""
        return self in (ExitReason.FINISHED, ExitReason.ABORTED)


class BooksError(Exception):
    """Rows or cells could not be freed, so it is unknown which ones are free. The engine needs new books."""


class Running:
    """The sequences in the batch. The only caller of the cache for their cells; rows come from `rows`.

    `tags`: cells of programs that are over are evicted first.
    """

    def __init__(
        self,
        cache: KVCache,
        programs: Programs,
        rows: Rows,
        order: RequestOrder,
        stats: EngineStats,
        retention: Retention,
        *,
        tags: bool,
    ) -> None:
        self._tags = tags
        self.rows = rows
        self.retention = retention
        self.reloads = Reloads(cache.host)
        self._cache = cache
        self._programs = programs
        self._order = order
        self._stats = stats
        self._sequences: list[Sequence] = []
        self._in_order: list[Sequence] | None = None  # the same, first to be served first; None: not known yet

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def cells_pinned(self) -> int:
        """Cells that sessions keep from eviction, those with an operation in the batch included."""
        return self.rows.session_cells

    def in_order(self) -> list[Sequence]:
        """All, first to be served first; the last one is preempted next."""
        if self._in_order is None or not self._order.settled:
            self._in_order = sorted(self._sequences, key=self._key)
        return self._in_order

    def _key(self, sequence: Sequence) -> tuple[bool, bool, Key]:
        return sequence.background, sequence.batch, self._order.key(sequence)

    def part(self, *, decoding: bool) -> list[Sequence]:
        """Sequences that decode, or prefill, in order, except those that end with the step in flight."""
        return [s for s in self.in_order() if s.decoding is decoding and not (s.in_flight and s.closing)]

    def can_start(self, sequence: Sequence) -> bool:
        """Whether there are a row for it, and a state slot or window pages."""
        states = self._cache.states
        return self.rows.has_row(sequence.program) and (states is None or states.can_begin(len(sequence.buffer)))

    def start(self, builder: StepBuilder, sequence: Sequence, prefix: Prefix | None, now: float) -> bool:
        """Give a waiting sequence a row and its cached `prefix`. False: no row is free.

        A kept row shows the pages of its program's last turn already: only what differs is written.
        """
        begun = self.rows.begin(sequence.program)
        if begun is None:
            return False
        row, last = begun
        pinned = self.retention.begins(sequence, now)
        try:
            acquired = self._cache.acquire(
                sequence.cache_scope,
                sequence.tokens,
                now,
                reuse=sequence.reuse,
                continues=pinned or last is not None,
                prefix=prefix,
                labels=sequence.submit.labels,
                who=sequence.submit.who,
                tenant=sequence.submit.scope,
                longest=len(sequence.buffer),
            )
        except Exception:
            self.rows.release(row)
            raise
        holding = sequence.holding = acquired.holding
        sequence.row, sequence.n_computed = row, holding.n_cached
        mark_prompt(sequence, holding)
        reach = self.reloads.begin(holding, sequence.tokens) if sequence.reuse else 0
        self._stats.tokens_recomputed += max(sequence.n_before - max(holding.n_cached, reach), 0)
        sequence.n_before = 0
        sequence.move(Status.RUNNING)
        self._sequences.append(sequence)
        self.rows.holding_changed(sequence)
        self._order.begin(sequence)
        if self._in_order is not None:
            insort(self._in_order, sequence, key=self._key)
        same = common_prefix(last.pages, holding.pages) if last is not None and last.row is not None else 0
        builder.copies[row] = acquired.copies
        builder.write(sequence, same, holding.pages[same:])
        if (window := holding.window) is not None:
            builder.show_window(sequence, window)
        if sequence.scheduled is None and not sequence.background:
            self._count_turn(sequence, last)
            if sequence.program is not None:
                self._programs.use_prefilled(sequence.program, holding.n_cached)
            self.retention.found(sequence)
        return True

    def room(self, sequence: Sequence) -> int:
        """Tokens of its next chunk that window pages are available for."""
        windows, window = self._cache.windows, sequence.the_holding.window
        if windows is None or window is None:
            return UNBOUNDED
        return windows.reach(window) - sequence.n_computed - sequence.in_flight

    def grow(self, builder: StepBuilder, sequence: Sequence, n_tokens: int, *, window: bool = True) -> bool:
        """Give `n_tokens` positions of the sequence cells. False: there are not enough.

        `window`: in layers with window pages, too.
        """
        holding = sequence.holding
        assert holding is not None, sequence.request_id
        if not holding.covers(n_tokens):
            first = holding.n_pages
            pages = self._cache.grow(holding, n_tokens, window=window)
            if pages is None:
                return False
            builder.write(sequence, first, pages)
        if window and self._cache.windows is not None and (own := holding.window) is not None:
            builder.show_window(sequence, own)
        return True

    def helping(self, sequence: Sequence, n: int = 1) -> Callable[[str], bool]:
        """Whether a page that a tenant frees could be one of the `n` pages that a sequence lacks."""
        tenants, scope = self._cache.tree.tenants, sequence.submit.scope
        return lambda other: tenants.helps(other, scope, n)

    def helpers(self, sequence: Sequence) -> list[Sequence]:
        """Sequences that could make room for one that lacks a page, itself among them, first to be served first."""
        helps = self.helping(sequence)
        return [each for each in self.in_order() if helps(each.submit.scope)]

    def grow_dropping_pins(
        self, builder: StepBuilder, sequence: Sequence, n_tokens: int, *, window: bool = True
    ) -> bool:
        """`grow`; where that fails, after dropping pins of programs behind it. Background prefills drop no pins."""
        if self.grow(builder, sequence, n_tokens, window=window):
            return True
        return (
            not sequence.background
            and self.drop_pins_for(sequence, n_tokens, sequence)
            and self.grow(builder, sequence, n_tokens, window=window)
        )

    def drop_pins_for(self, sequence: Sequence, n_tokens: int, to: Sequence | None) -> bool:
        """Drop pins of programs behind `to` (None: any), so that `n_tokens` get cells. False: none was dropped.

        If all of those pins would not be enough, none is dropped.
        """
        cache, holding = self._cache, sequence.the_holding
        missing = cache.pool.pages_for(n_tokens) - holding.n_pages
        helps = self.helping(sequence)
        pins = self.retention.pins_to_drop(
            to, Freed(), lambda freed: cache.cells.pages_for(holding.tenant, freed) >= missing, of_tenants=helps
        )
        self.retention.drop(pins or ())
        return bool(pins)

    def load(self, builder: StepBuilder, sequence: Sequence, most: int) -> bool:
        """Plan to load up to `most` of the sequence's cells from the host. False: it has none there.

        Each load but the last ends with a page. Nothing is planned where there are no cells to load into.
        """
        reach = self.reloads.reach(sequence.the_holding)
        if reach <= sequence.n_computed:
            return False
        size, holding, states = self._cache.page_size, sequence.the_holding, self._cache.states
        end = min(reach, (sequence.n_computed + max(most, size)) // size * size)
        if states is not None:  # there is no checkpoint to go on from before the end
            end = reach
        if not self.grow_dropping_pins(builder, sequence, end, window=False):
            return True
        checkpoint = NO_MOVES
        if states is not None:
            into = states.landing(holding.state, end)
            if into is None:
                return True
            checkpoint = self.reloads.load_checkpoint(holding, into)
        moves = self.reloads.load(holding, sequence.n_computed, end)
        builder.loads.append(Load(sequence, holding, end, moves, checkpoint))
        return True

    def publish(self, sequence: Sequence, now: float) -> None:
        """Let others alias what the sequence has computed so far."""
        self._cache.publish(sequence.the_holding, sequence.tokens, sequence.n_computed, now)
        self.rows.holding_changed(sequence)

    def leave(self, sequence: Sequence, now: float, why: ExitReason) -> None:
        """Take row and cells back, or keep them for the program's next turn. Raises BooksError when that fails."""
        self._sequences.remove(sequence)
        if self._in_order is not None:
            self._in_order.remove(sequence)
        holding, row, program = sequence.the_holding, sequence.the_row, sequence.program
        computed = sequence.tokens[: sequence.n_computed]
        sequence.holding = sequence.row = None
        sequence.n_computed = sequence.in_flight = 0
        sequence.awaited = None
        try:
            self.reloads.end(holding)
            self.rows.holding_changed(sequence)
            pages = holding.pages[: self._cache.pool.pages_for(len(computed))].copy()
            pin = why is ExitReason.FINISHED and len(computed) > 0 and self.retention.wants(sequence)
            pinned = self._settle(holding, computed, now, keep=why is not ExitReason.FAILED, pin=pin)
            if pinned is not None:
                self.retention.paused(sequence, pinned, now)
            if sequence.submit.program_end and why is ExitReason.FINISHED:
                self._demote(sequence.cache_scope, computed, sequence.submit.who)
            if sequence.background and why is not ExitReason.PREEMPTED:
                self._programs.prefilled(sequence, len(computed))
            if program is None or sequence.background or not why.keeps_row:
                self.rows.release(row)
            last = KeptRow(len(computed), row, pages) if why.keeps_row else KeptRow(0, None, NO_PAGES)
            if program is None or sequence.background:
                return
            if program.key.kind is Kind.SESSION:
                kept = why is ExitReason.FINISHED and sequence.submit.turn.keep
                history = sequence.buffer[: last.n_tokens if kept else sequence.n_history]
                self.rows.keep_history(program, history, last, now)
            elif why.keeps_row:
                self._programs.remember(program, computed, sequence.cache_scope)
                self.rows.keep_row(program, last)
        except Exception as failure:
            raise BooksError(f"{sequence.request_id} could not be taken out: {failure}") from failure

    def program_ended(self, program: Program) -> None:
        """A program is over: cells that it alone has in the tree are evicted first."""
        self._demote(program.cache_scope, program.computed, program.key.name)
        self._programs.forget_computed(program)
        self._programs.use_prefilled(program, 0)

    def _demote(self, scope: str | None, tokens: TokenIds, who: str) -> None:
        if self._tags and scope is not None:
            self._cache.demote(scope, tokens, who)

    def _settle(self, holding: Holding, computed: TokenIds, now: float, *, keep: bool, pin: bool) -> Pin | None:
        """Give a holding back, with a `pin` on its cells or without. Where keeping the cells fails they are freed."""
        if keep:
            try:
                return self._cache.finish(holding, computed, len(computed), now, pin=pin)
            except Exception:
                log.exception("cells could not be kept")
        give_back(self._cache.drop, holding)
        return None

    def _count_turn(self, sequence: Sequence, last: KeptRow | None) -> None:
        """A turn begins: count the cells of its program that it uses, and those that its prompt no longer matches."""
        n_cached, program = sequence.n_computed, sequence.program
        for tag, n in sequence.submit.labels.tokens(n_cached).items():
            self._stats.hits_by_tag[tag] += n * sequence.counted
        if last is not None and last.row is not None and n_cached >= last.n_tokens > 0:
            self._stats.turns_continued += 1
            self._stats.tokens_continued += n_cached
        if program is not None:
            self._stats.tokens_rewritten += program.rewritten(sequence.tokens, n_cached)


def mark_prompt(sequence: Sequence, holding: Holding) -> None:
    """Leave a checkpoint near the prompt's end. The next turn may leave this one there: a thinking model's does.

    A prefill ahead of a turn leaves one where it ends. Tenants alias a shared preamble in whole pages.
    """
    if not sequence.background:
        shared = sequence.cache_scope == SHARED
        holding.mark(sequence.n_prompt - (0 if shared else GENERATION_PROMPT))


def lost_state(sequence: Sequence) -> bool:
    """Whether its recurrent state is ahead of its tokens: a planned step applied one that was refused since."""
    state = sequence.holding.state if sequence.holding is not None else None
    return isinstance(state, RunningState) and state.at > sequence.n_computed


class Terminator:
    """Ends sequences, waiting or running. `events` belongs to the engine: it outlives these books.

    An event is noted before rows and cells are given back, so a request has its terminal event even if that fails.
    """

    def __init__(
        self,
        programs: Programs,
        running: Running,
        waiting: WaitingQueue,
        drafts: Drafter,
        order: RequestOrder,
        stats: EngineStats,
        events: list[Event],
    ) -> None:
        self._programs = programs
        self._running = running
        self._waiting = waiting
        self._drafts = drafts
        self._order = order
        self._stats = stats
        self.events = events
        self.forecast = Forecast()

    def end(self, sequence: Sequence, now: float, why: ExitReason) -> None:
        """Take a sequence out. Its terminal event has been noted. Raises BooksError."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.forecast.left(sequence, now, whole=why is ExitReason.FINISHED)
            self._running.leave(sequence, now, why)
        self._programs.end(sequence)
        self._drafts.close(sequence)
        self._order.left(sequence)
        sequence.move(Status.ENDED)

    def abort(self, sequence: Sequence, now: float) -> None:
        self.events.append(Aborted(sequence.request_id, sequence.usage, sequence.timing(now)))
        self.end(sequence, now, ExitReason.ABORTED)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.background:
            self._stats.ahead_ended["complete" if reason == "length" else "overtaken"] += 1
        self.events.append(Finished(sequence.request_id, reason, sequence.usage, sequence.timing(now)))
        self.end(sequence, now, ExitReason.FINISHED)

    def finish_early(self, builder: StepBuilder | None, sequence: Sequence, now: float) -> None:
        """End a background prefill early because no cells are free for more."""
        self._stats.ahead_ended["no_cells"] += 1
        self.events.append(Finished(sequence.request_id, "stop", sequence.usage, sequence.timing(now)))
        why = ExitReason.FINISHED
        if builder is not None and builder.writes_to(sequence):
            builder.forget(sequence)
            why = ExitReason.PREEMPTED  # its row was not written as planned
        self.end(sequence, now, why)

    def fail(self, sequence: Sequence, error: ErrorInfo, now: float) -> None:
        self.events.append(sequence.failed(error))
        self.end(sequence, now, ExitReason.FAILED)

    def preempt(self, builder: StepBuilder | None, sequence: Sequence, now: float) -> None:
        """Put a sequence back into the queue. Its cells go to the tree; cells evicted there are computed again.

        No token changes: noise is keyed by position, so the recomputed sequence continues as it would have.
        """
        self._stats.preemptions += 1
        sequence.n_before = sequence.n_computed
        if builder is not None:
            builder.forget(sequence)
        self._running.leave(sequence, now, ExitReason.PREEMPTED)
        sequence.preempted = True
        sequence.move(Status.WAITING)
        self._waiting.push(sequence)

    def restart_without_prefix(self, builder: StepBuilder, sequence: Sequence, now: float) -> None:
        """Restart a sequence without its cached prefix: no other can make room for it. The second time, fail it."""
        if sequence.reuse:
            sequence.reuse = False
            self.preempt(builder, sequence, now)
        else:
            self.fail(sequence, NO_ROOM, now)

    def fault(self, builder: StepBuilder | None, sequence: Sequence, failure: Exception, now: float) -> None:
        """The supervisor of planning and commit: an exception for one sequence fails that sequence alone."""
        if isinstance(failure, BooksError) or sequence.status is Status.ENDED:
            raise failure
        log.error("%s failed", sequence.request_id, exc_info=failure)
        if builder is not None and sequence.status is Status.RUNNING:
            builder.forget(sequence)
        known = failure if isinstance(failure, InvalidRequestError) else EngineError(f"the engine failed: {failure}")
        self.fail(sequence, known.info, now)
