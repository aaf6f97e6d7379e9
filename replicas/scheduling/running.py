"""The sequences that run: each has a page-table row and cells of the cache, and gives both back however it leaves.

`Running` gives and takes; `Ends` takes sequences out, wherever they are, and notes what became of their requests.
"""

import logging
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum

from holdfast.replicas.errors import EngineError, ErrorInfo, ErrorKind, InvalidRequestError
from holdfast.replicas.events import Aborted, Event, Finished, FinishReason
from holdfast.replicas.kv.cache import Freed, KVCache
from holdfast.replicas.kv.holding import Holding, Pin
from holdfast.replicas.kv.host import Reloads
from holdfast.replicas.kv.pages import NO_PAGES
from holdfast.replicas.kv.radix import Prefix
from holdfast.replicas.retention.pins import Retention
from holdfast.replicas.retention.rows import ParkedRow, Rows, give_back
from holdfast.replicas.scheduling.ahead import WorkAhead
from holdfast.replicas.scheduling.drafts import Drafts
from holdfast.replicas.scheduling.queue import Forecast, Key, Order, WaitingQueue
from holdfast.replicas.scheduling.step import Load, StepBuilder
from holdfast.replicas.sequences import Owner, Sequence, Status
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import NO_TOKENS, TokenIds, common_prefix

log = logging.getLogger(__name__)

NO_ROOM = ErrorInfo(ErrorKind.OVERLOADED, "the KV cache has no room for this request, even alone")


class Leaving(Enum):
    """How a sequence leaves, and with it what stays: its cells in the tree, its row with its owner."""

    FINISHED = "finished"  # cells and row
    ABORTED = "aborted"  # cells and row, but a session's history is as before
    PREEMPTED = "preempted"  # cells
    FAILED = "failed"  # nothing

    @property
    def keeps_row(self) -> bool:
        """The row shows what was computed: every plan that wrote to it has run."""
        return self in (Leaving.FINISHED, Leaving.ABORTED)


class BooksError(Exception):
    """Rows or cells could not be given back: nobody knows any more what is free. Only new books help."""


class Running:
    """The only caller of the cache for cells; rows come from `rows`."""

    def __init__(
        self,
        cache: KVCache,
        rows: Rows,
        order: Order,
        stats: EngineStats,
        retention: Retention,
        ahead: WorkAhead,
        tags: bool = True,
    ) -> None:
        self._tags = tags
        self.rows = rows
        self.retention = retention
        self.ahead = ahead
        self.reloads = Reloads(cache.host)
        self._cache = cache
        self._order = order
        self._stats = stats
        self._histories = Histories(cache.pool.total * cache.page_size)
        self._sequences: list[Sequence] = []
        self._in_order: list[Sequence] | None = None  # the same, first to be served first; None: not known yet

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def cells_pinned(self) -> int:
        """Cells that sessions keep from being evicted, those with an operation in the batch included."""
        return self.rows.sessions.total

    def in_order(self) -> list[Sequence]:
        """All, first to be served first, so the last one is to be preempted next."""
        if self._in_order is None or not self._order.settled:
            self._in_order = sorted(self._sequences, key=self._key)
        return self._in_order

    def _key(self, sequence: Sequence) -> tuple[bool, bool, Key]:
        return sequence.background, sequence.batch, self._order.key(sequence)

    def part(self, *, decoding: bool) -> list[Sequence]:
        """Those that decode, or those that prefill, in order; without those that are about to end."""
        return [s for s in self.in_order() if s.decoding is decoding and not (s.in_flight and s.closing)]

    def start(self, builder: StepBuilder, sequence: Sequence, prefix: Prefix | None, now: float) -> bool:
        """Give a waiting sequence a row and its cached prefix, which `prefix` has found; False when no row is free.

        Where its owner left off the row shows the pages already, and only what differs is written.
        """
        begun = self.rows.begin(sequence.owner, spared=self.retention.pins.__contains__)
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
            )
        except Exception:
            self.rows.release(row)
            raise
        holding = sequence.holding = acquired.holding
        sequence.row, sequence.n_computed = row, holding.n_cached
        reach = self.reloads.begin(holding, sequence.tokens) if sequence.reuse else 0
        self._stats.tokens_recomputed += max(sequence.n_before - max(holding.n_cached, reach), 0)
        sequence.n_before = 0
        sequence.move(Status.RUNNING)
        self._sequences.append(sequence)
        self.rows.sessions.runs(sequence)
        self._order.begin(sequence)
        if self._in_order is not None:
            insort(self._in_order, sequence, key=self._key)
        same = common_prefix(last.pages, holding.pages) if last is not None and last.row is not None else 0
        builder.copies[row] = acquired.copies
        builder.write(sequence, same, holding.pages[same:])
        if sequence.scheduled is None and not sequence.background:
            self._count(sequence, last)
            self.ahead.used(sequence, holding.n_cached)
            self.retention.found(sequence)
        return True

    def grow(self, builder: StepBuilder, sequence: Sequence, n_tokens: int) -> bool:
        """Make sure that `n_tokens` positions of the sequence have cells; False when they are not to be had."""
        holding = sequence.holding
        assert holding is not None, sequence.request_id
        first = holding.n_pages
        if n_tokens <= first * holding.page_size:
            return True
        pages = self._cache.grow(holding, n_tokens)
        if pages is None:
            return False
        builder.write(sequence, first, pages)
        return True

    def helping(self, sequence: Sequence, n: int = 1) -> Callable[[str], bool]:
        """Of which tenants cells could be among the `n` pages that a sequence lacks."""
        tenants, scope = self._cache.tree.tenants, sequence.submit.scope
        return lambda other: tenants.helps(other, scope, n)

    def helpers(self, sequence: Sequence) -> list[Sequence]:
        """Who could make room for a sequence that lacks a page, itself among them, first to be served first."""
        helps = self.helping(sequence)
        return [each for each in self.in_order() if helps(each.submit.scope)]

    def grow_over_pins(self, builder: StepBuilder, sequence: Sequence, n_tokens: int) -> bool:
        """The same; if need be with cells that were kept for programs which come behind it, but not to work ahead."""
        if self.grow(builder, sequence, n_tokens):
            return True
        return (
            not sequence.background
            and self.room_over_pins(sequence, n_tokens, sequence)
            and self.grow(builder, sequence, n_tokens)
        )

    def room_over_pins(self, sequence: Sequence, n_tokens: int, to: Sequence | None) -> bool:
        """Whether programs that pause, behind `to` (None: any), have given way so that `n_tokens` have cells now.

        Where all of those would not be enough, none gives way.
        """
        cache, holding = self._cache, sequence.the_holding
        missing = cache.pool.pages_for(n_tokens) - holding.n_pages
        whose = self.helping(sequence)
        found = self.retention.leaving(
            to, Freed(), lambda freed: cache.cells.pages_for(holding.tenant, freed) >= missing, whose=whose
        )
        self.retention.drop(found or ())
        return bool(found)

    def load(self, builder: StepBuilder, sequence: Sequence, most: int) -> bool:
        """Plan to bring up to `most` of the sequence's cells back from the host; False where it has none there.

        All but the last end with a page. Nothing is planned where cells are not to be had.
        """
        reach = self.reloads.reach(sequence.the_holding)
        if reach <= sequence.n_computed:
            return False
        size = self._cache.page_size
        end = min(reach, (sequence.n_computed + max(most, size)) // size * size)
        if self.grow_over_pins(builder, sequence, end):
            moves = self.reloads.load(sequence.the_holding, sequence.n_computed, end)
            builder.loads.append(Load(sequence, sequence.the_holding, end, moves))
        return True

    def publish(self, sequence: Sequence, now: float) -> None:
        """Let others alias what the sequence has computed so far."""
        self._cache.publish(sequence.the_holding, sequence.tokens, sequence.n_computed, now)
        self.rows.sessions.runs(sequence)

    def leave(self, sequence: Sequence, now: float, leaving: Leaving) -> None:
        """Take row and cells back, or keep them for its owner's next turn. Raises BooksError when that fails."""
        self._sequences.remove(sequence)
        if self._in_order is not None:
            self._in_order.remove(sequence)
        holding, row, owner = sequence.the_holding, sequence.the_row, sequence.owner
        computed = sequence.tokens[: sequence.n_computed]
        sequence.holding = sequence.row = None
        sequence.n_computed = sequence.in_flight = 0
        sequence.awaited = None
        try:
            self.reloads.end(holding)
            pages = holding.pages[: self._cache.pool.pages_for(len(computed))].copy()
            pin = leaving is Leaving.FINISHED and len(computed) > 0 and self.retention.wants(sequence)
            pinned = self._settle(holding, computed, now, keep=leaving is not Leaving.FAILED, pin=pin)
            if pinned is not None:
                self.retention.paused(sequence, pinned, now)
            if sequence.submit.program_end and leaving is Leaving.FINISHED:
                self._let_go(sequence.cache_scope, computed, sequence.submit.who)
            if sequence.background and leaving is not Leaving.PREEMPTED:
                self.ahead.computed(sequence, len(computed))
            if owner is not None and owner.is_handle:
                owner = None  # whoever comes back for its cells is a program, with a row of its own
            if not leaving.keeps_row or owner is None:
                self.rows.release(row)
            if owner is not None:
                last = ParkedRow(len(computed), row, pages) if leaving.keeps_row else ParkedRow(0, None, NO_PAGES)
                self._park_row(sequence, owner, last, leaving, now)
        except Exception as failure:
            raise BooksError(f"{sequence.request_id} could not be taken out: {failure}") from failure

    def ended(self, program: Owner) -> None:
        """A program is over: what it alone has in the tree goes before all else."""
        scope, tokens = self._histories.forget(program)
        self._let_go(scope, tokens, program.name)

    def _let_go(self, scope: str | None, tokens: TokenIds, who: str) -> None:
        if self._tags and scope is not None:
            self._cache.let_go(scope, tokens, who)

    def _park_row(self, sequence: Sequence, owner: Owner, last: ParkedRow, leaving: Leaving, now: float) -> None:
        if owner.session:
            kept = leaving is Leaving.FINISHED and sequence.submit.turn.keep
            history = sequence.buffer[: last.n_tokens if kept else sequence.n_history]
            self.rows.park_session(owner, history, last, now)
        elif leaving.keeps_row:
            self._histories.remember(owner, sequence.cache_scope, sequence.buffer[: last.n_tokens])
            self.rows.park_program(owner, last)

    def _settle(self, holding: Holding, computed: TokenIds, now: float, *, keep: bool, pin: bool) -> Pin | None:
        """Give a holding back, with a `pin` on its cells or without; where keeping them fails they are freed."""
        if keep:
            try:
                return self._cache.finish(holding, computed, len(computed), now, pin=pin)
            except Exception:
                log.exception("cells could not be kept")
        give_back(self._cache.drop, holding)
        return None

    def _count(self, sequence: Sequence, last: ParkedRow | None) -> None:
        """A turn begins: how much of what its owner had is in place, and how much was in vain."""
        n_cached, owner = sequence.n_computed, sequence.owner
        for tag, n in sequence.submit.labels.tokens(n_cached).items():
            self._stats.hits_by_tag[tag] += n * sequence.counted
        if last is not None and last.row is not None and n_cached >= last.n_tokens > 0:
            self._stats.turns_continued += 1
            self._stats.tokens_continued += n_cached
        if owner is not None and not owner.session:
            self._stats.tokens_rewritten += self._histories.rewritten(owner, sequence.tokens, n_cached)


class Ends:
    """Takes sequences out, wherever they are, and tells of it. `events` belongs to the engine: it outlives these books.

    An event is noted before rows and cells are given back, so a request has its terminal event even where that fails.
    """

    def __init__(
        self,
        running: Running,
        waiting: WaitingQueue,
        drafts: Drafts,
        order: Order,
        stats: EngineStats,
        events: list[Event],
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._drafts = drafts
        self._order = order
        self._stats = stats
        self.events = events
        self.forecast = Forecast()

    def end(self, sequence: Sequence, now: float, leaving: Leaving) -> None:
        """Take a sequence out. Its terminal event has been noted. Raises BooksError."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.forecast.left(sequence, now, whole=leaving is Leaving.FINISHED)
            self._running.leave(sequence, now, leaving)
        if sequence.background:
            self._running.ahead.end(sequence)
        self._drafts.close(sequence)
        self._order.left(sequence)
        sequence.move(Status.ENDED)

    def abort(self, sequence: Sequence, now: float) -> None:
        self.events.append(Aborted(sequence.request_id, sequence.usage, sequence.timing(now)))
        self.end(sequence, now, Leaving.ABORTED)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self.events.append(Finished(sequence.request_id, reason, sequence.usage, sequence.timing(now)))
        self.end(sequence, now, Leaving.FINISHED)

    def give_up(self, builder: StepBuilder | None, sequence: Sequence, now: float) -> None:
        """End work ahead as far as it has come: no cells are free for more."""
        self.events.append(Finished(sequence.request_id, "stop", sequence.usage, sequence.timing(now)))
        leaving = Leaving.FINISHED
        if builder is not None and builder.writes_to(sequence):
            builder.forget(sequence)
            leaving = Leaving.PREEMPTED  # what was to be written to its row is not
        self.end(sequence, now, leaving)

    def fail(self, sequence: Sequence, error: ErrorInfo, now: float) -> None:
        self.events.append(sequence.failed(error))
        self.end(sequence, now, Leaving.FAILED)

    def preempt(self, builder: StepBuilder | None, sequence: Sequence, now: float) -> None:
        """Back to the queue: what it computed goes to the tree, and what is evicted there is computed again.

        Nothing is lost: noise is keyed by position, so the recomputed sequence goes on as it would have.
        """
        self._stats.preemptions += 1
        sequence.n_before = sequence.n_computed
        if builder is not None:
            builder.forget(sequence)
        self._running.leave(sequence, now, Leaving.PREEMPTED)
        sequence.preempted = True
        sequence.move(Status.WAITING)
        self._waiting.push(sequence)

    def start_over(self, builder: StepBuilder, sequence: Sequence, now: float) -> None:
        """Nobody else could make room for one that lacks cells: it starts again without its cached prefix, and fails
        where that was not what is missing.
        """
        if sequence.reuse:
            sequence.reuse = False
            self.preempt(builder, sequence, now)
        else:
            self.fail(sequence, NO_ROOM, now)

    def fault(self, builder: StepBuilder | None, sequence: Sequence, failure: Exception, now: float) -> None:
        """The supervisor of planning and commit: what was raised for one sequence fails that sequence alone."""
        if isinstance(failure, BooksError) or sequence.status is Status.ENDED:
            raise failure
        log.error("%s failed", sequence.request_id, exc_info=failure)
        if builder is not None and sequence.status is Status.RUNNING:
            builder.forget(sequence)
        known = failure if isinstance(failure, InvalidRequestError) else EngineError(f"the engine failed: {failure}")
        self.fail(sequence, known.info, now)


class Histories:
    """What programs had computed when their last turn ended, to see how much of it their next prompt drops.

    Some chat templates rewrite what was said: they drop old reasoning, or move the system prompt. Everything behind the
    first changed token is computed again, and no cache can help; here it is counted. `capacity` tokens are remembered;
    the least recently seen program goes first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens: OrderedDict[Owner, tuple[str | None, TokenIds]] = OrderedDict()  # with their cache scope
        self._remembered = 0

    @property
    def remembered(self) -> int:
        """Tokens remembered."""
        return self._remembered

    def remember(self, owner: Owner, scope: str | None, tokens: TokenIds) -> None:
        """`owner` ended a turn with these tokens computed, in this cache scope."""
        self.forget(owner)
        self._tokens[owner] = scope, tokens.copy()
        self._remembered += len(tokens)
        while self._remembered > self._capacity:
            self._remembered -= len(self._tokens.popitem(last=False)[1][1])

    def forget(self, owner: Owner) -> tuple[str | None, TokenIds]:
        """What `owner` had, which has no next turn, and in which cache scope."""
        scope, tokens = self._tokens.pop(owner, (None, NO_TOKENS))
        self._remembered -= len(tokens)
        return scope, tokens

    def rewritten(self, owner: Owner, prompt: TokenIds, n_cached: int) -> int:
        """Computed tokens behind the place where `prompt` leaves what `owner` had; 0 where it does not leave it.

        Where more is cached than the two have in common, the prompt goes on from something else that the program
        had computed, and nothing was rewritten.
        """
        _, before = self._tokens.get(owner, (None, None))
        if before is None or n_cached >= min(len(before), len(prompt)):
            return 0
        common = common_prefix(before, prompt)
        leaves = common < min(len(before), len(prompt)) and n_cached <= common
        return len(before) - common if leaves else 0
