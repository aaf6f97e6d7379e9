"""Programs: the one record of each, the table that owns them, their sequences, and the page-table rows they keep.

    program     what lasts from turn to turn: an agent's run, a client's session, or a prefill handle
    sequence    one request of it: its tokens, and how far the engine has come with them
    row         a row of the page table; a sequence has one while it runs, a program may keep it until its next turn

Queue, admission, retention and scheduler read and write these records; none keeps a dictionary by program of its own.
Not here: which cells there are (`kv/`), how long a pin lasts (`retention/`), what a step computes (`scheduling/`).
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.errors import ErrorInfo
from holdfast.replicas.kv.cache import Holding, KVCache
from holdfast.replicas.kv.pages import PageIds, PagePool
from holdfast.replicas.kv.radix import Node, Pin
from holdfast.replicas.plan import Draw, Sampling
from holdfast.replicas.requests import (
    Failed,
    FinishReason,
    ForkSession,
    HandleReleased,
    Notice,
    ProgramEnded,
    SessionLog,
    Submit,
    Timing,
    TurnEnded,
    Usage,
    Work,
)
from holdfast.replicas.retention.latency import ToolPause
from holdfast.replicas.retention.policy import Pause
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import NO_TOKENS, Origin, Priority, TokenCounts, TokenIds, common_prefix

log = logging.getLogger(__name__)

T = TypeVar("T")
Found: TypeAlias = "tuple[Program | None, Program | None]"

MOST_PROGRAMS = 65_536  # records kept; the one used least recently is forgotten first


class Kind(Enum):
    PROGRAM = "program"  # an agent's run
    SESSION = "session"  # opened by a client; its history is pinned until it is closed
    HANDLE = "handle"  # names the beginning of a program's next prompt, which a client sent ahead


class ProgramKey(NamedTuple):
    scope: str  # the tenant's cache scope
    name: str
    kind: Kind = Kind.PROGRAM

    @classmethod
    def of(cls, submit: Submit) -> ProgramKey | None:
        """The program of a request. None: the request stands alone."""
        if submit.session is not None:
            return cls(submit.scope, submit.session.session_id, Kind.SESSION)
        if submit.background is not None:
            return cls(submit.scope, submit.background.handle, Kind.HANDLE)
        return cls(submit.scope, submit.program_id) if submit.program_id else None

    @classmethod
    def noticed(cls, notice: Notice) -> ProgramKey | None:
        """The program that a notice concerns; None: it concerns no program."""
        if isinstance(notice, TurnEnded | ProgramEnded):
            return cls(notice.scope, notice.program_id)
        return cls(notice.scope, notice.handle, Kind.HANDLE) if isinstance(notice, HandleReleased) else None

    @property
    def own_scope(self) -> str:
        """A part of the tenant's cache scope that this program alone uses."""
        return f"{self.scope}\0{self.kind.value}\0{self.name}"


class Status(Enum):
    """The state of a sequence, changed only by `Sequence.move`."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


_MOVES = {
    Status.WAITING: {Status.RUNNING, Status.ENDED},
    Status.RUNNING: {Status.WAITING, Status.ENDED},  # back to waiting: preempted
    Status.ENDED: set[Status](),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and how far the engine has come with them.

    tokens   |<---- cached ---->|<- computed ->|<--- pending --->|
             0             n_cached        n_computed         length

    Cells below `n_computed` are filled. `holding` says whether the tree or this sequence owns their pages; it is None
    while the sequence waits. `pending` is one token while decoding and more while prefilling.
    """

    submit: Submit
    number: int  # of the submission; no two sequences of an engine have the same
    arrived: float
    n_prompt: int
    buffer: TokenIds  # capacity for prompt and completion; valid up to `length`
    length: int
    n_cached: int = 0  # prompt tokens that were found in the cache when it was first admitted
    n_computed: int = 0
    # What the engine's totals have of it, in tokens: of the prompt computed, drawn, and drafted, and right of these.
    prompt_work: int = 0
    drawn: int = 0
    drafted: int = 0
    accepted: int = 0
    status: Status = Status.WAITING
    preempted: bool = False
    reuse: bool = True  # False once a cached prefix left it too little room to grow, though it ran alone
    row: int | None = None
    holding: Holding | None = None
    scheduled: float | None = None
    first_token: float | None = None
    expected_s: float = 0.0  # until its answer, as forecast on arrival; 0: no forecast
    n_history: int = 0  # tokens of the session before this operation: they stay pinned however it ends
    n_before: int = 0  # tokens that were computed when it was preempted, while it waits
    cache_scope: str | None = None  # where its cells are found and kept; None: nowhere
    program: Program | None = None  # None: the request stands alone
    target: Program | None = None  # the program whose next turn uses what a prefill computes; else `program`
    seed: int = 0
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    pinned: bool = False  # it queues with programs whose cells are kept; a change must call the queue's `reorder`
    turn: tuple[float, float] = (0.0, 0.0)  # its turn among its tenant's programs, where the order gives them turns
    # How its tokens are drawn, by the number of drafts, where that is the same in every step; set by the first of each.
    draws: dict[int, Draw] = field(default_factory=dict)
    # While the step after one in flight is planned, else 0 and None: how many tokens that one computes, and which of
    # its chunks draws this sequence's next token.
    in_flight: int = 0
    awaited: int | None = None
    counts: TokenCounts | None = None  # of `generated`, as far as `count` has come; None: not requested yet
    seen: TokenCounts | None = None  # of `tokens`, as far as its reader has counted
    request_id: str = field(init=False)
    matcher: Matcher | None = field(init=False)  # which tokens may come next, of a constrained sequence
    background: bool = field(init=False)  # no client waits for it: it takes the room that all others leave
    batch: bool = field(init=False)  # it takes the room that interactive requests leave
    counted: bool = field(init=False)  # among clients' requests: a client sent it, and waits for it

    def __post_init__(self) -> None:
        self.request_id = self.submit.request_id
        self.matcher = self.submit.matcher
        self.background = self.submit.background is not None
        self.batch = self.submit.priority is Priority.BATCH and not self.background
        self.counted = self.submit.origin is Origin.CLIENT and not self.background

    @classmethod
    def of(
        cls, submit: Submit, number: int, now: float, eos: frozenset[int], seed: int, of: Found = (None, None)
    ) -> Sequence:
        """`of`: its program and its target, as `Programs.of` finds them."""
        n_prompt = len(submit.tokens)
        buffer = np.empty(n_prompt + submit.sampling.max_tokens, np.int32)
        buffer[:n_prompt] = submit.tokens
        stop_ids = submit.sampling.stop_token_ids | (frozenset() if submit.sampling.ignore_eos else eos)
        program, target = of
        return cls(
            submit,
            number,
            now,
            n_prompt,
            buffer,
            n_prompt,
            program=program,
            target=target,
            seed=seed,
            stop_ids=stop_ids,
        )

    @property
    def sampling(self) -> Sampling:
        return self.submit.sampling

    @property
    def tokens(self) -> TokenIds:
        """Prompt and completion so far, int32 [length]; a view."""
        return self.buffer[: self.length]

    @property
    def generated(self) -> TokenIds:
        """The completion, with that of the request it goes on from before it."""
        return self.buffer[self.n_prompt - self.submit.n_generated : self.length]

    def count(self) -> TokenCounts:
        """How often each token was generated so far. Only what came since the last call is counted."""
        if self.counts is None:
            self.counts = TokenCounts()
        self.counts.add(self.generated[self.counts.seen :])
        return self.counts

    @property
    def pending(self) -> int:
        """Tokens that have no KV yet, and are not getting it in the step in flight."""
        return self.planned_length - self.n_computed - self.in_flight

    @property
    def decoding(self) -> bool:
        end = self.length if self.awaited is None else self.length + 1
        return end - self.n_computed - self.in_flight == 1 and end > self.n_prompt

    @property
    def planned_length(self) -> int:
        """Its length once the step in flight is over; without one, its length."""
        return self.length if self.awaited is None else self.length + 1

    @property
    def closing(self) -> bool:
        """Whether it ends with the step in flight, whichever tokens that draws."""
        end = self.planned_length
        return self.in_flight > 0 and end == len(self.buffer) and self.pending == end - self.length

    @property
    def prompt_computed(self) -> bool:
        """Whether it decoded before the step in flight: its prompt is in the cache for others to find."""
        return self.length - self.n_computed == 1 and self.length > self.n_prompt

    @property
    def the_holding(self) -> Holding:
        """The holding of a running sequence."""
        assert self.holding is not None, self.request_id
        return self.holding

    @property
    def the_row(self) -> int:
        """The page-table row of a running sequence."""
        assert self.row is not None, self.request_id
        return self.row

    @property
    def usage(self) -> Usage:
        """The usage as its client sees it: tokens that it continues from count as reply, not as prompt."""
        n_prompt = self.n_prompt - self.submit.n_generated
        cached = 0 if self.background else self.n_cached
        work = Work(self.prompt_work, cached, self.drawn, self.drafted, self.accepted)
        return Usage(n_prompt, min(self.n_cached, n_prompt), self.length - n_prompt, work=work)

    def timing(self, now: float) -> Timing:
        return Timing(self.arrived, self.scheduled, self.first_token, now)

    def move(self, status: Status) -> None:
        if status not in _MOVES[self.status]:
            raise AssertionError(f"{self.request_id}: {self.status.value} -> {status.value}")
        self.status = status

    def append(self, drawn: tuple[int, ...], now: float) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append drawn tokens up to the one that ends the sequence; returns those kept, and why it ends.

        Those from the first one on that the matcher refuses are not kept: it is drawn again, under its mask.
        """
        if self.first_token is None:
            self.first_token = now
        kept, room = drawn, len(self.buffer) - self.length
        stops = not self.stop_ids.isdisjoint(drawn)
        if stops:
            kept = drawn[: next(i for i, token in enumerate(drawn) if token in self.stop_ids) + 1]
            stops = len(kept) <= room
        kept = kept[:room]
        refused = False
        if (matcher := self.matcher) is not None:
            content = kept[:-1] if stops else kept  # a token that ends the reply is none of a grammar's while it binds
            stand = matcher.advance(content) if content else 0
            if stand and matcher.finished:
                kept, stops = kept[:stand], True
            elif stand < len(content) or (stops and not matcher.binding and not matcher.advance(kept[stand:])):
                kept, stops, refused = kept[:stand], False, True
                self.draws.clear()
        for at, token in enumerate(kept, self.length):  # for a few tokens faster than an array operation
            self.buffer[at] = token
        self.length += len(kept)
        if stops:
            return kept, "stop"
        return kept, "length" if len(kept) == room and not refused else None

    def failed(self, error: ErrorInfo) -> Failed:
        return Failed(self.request_id, error, self.usage)

    def cut(self, completion: int) -> None:
        """Forget what was drawn after so many tokens."""
        self.length = min(self.length, self.n_prompt + completion)
        self.n_computed = min(self.n_computed, self.length)
        self.counts = self.seen = None


@dataclass(frozen=True, slots=True)
class KeptRow:
    """Where a program left off: `n_tokens` computed, shown by `row` if it kept one.

    `pages` are what the page table shows in the row, from slot 0 on. Other tokens may have these pages by now: a
    sequence that takes the row over compares them with the pages it is given. `pin` holds a session's history.
    """

    n_tokens: int
    row: int | None
    pages: PageIds
    pin: Pin | None = None


@dataclass(slots=True, eq=False)
class ProgramPin:
    """A soft pin on the cells that a turn, or a handle's prefill, left for the program's next turn. Times in seconds.

    `turn` counts from 1; `run_turn` counts from 1 after the program's last answer. From `lapse` on the cells are worth
    less than what they hold up, as far as that was known when the pause began; from `away` on the next turn is far off.
    No two pins have the same `number`.
    """

    program: Program
    target: Program  # the program whose next turn uses the cells: for a handle another one
    pin: Pin
    arrival: float  # of the program
    request_id: str  # of the turn
    turn: int
    run_turn: int
    since: float  # when the turn ended
    deadline: float
    number: int
    priority: Priority = Priority.INTERACTIVE
    paused: Pause | None = None  # the tools that the turn called, once known
    lapse: float = math.inf
    away: float = math.inf

    @property
    def scope(self) -> str:
        return self.program.key.scope

    @property
    def awaited(self) -> bool:
        """Whether the program's next turn waits already."""
        return bool(self.target.waiting)

    @property
    def batch(self) -> bool:
        return self.priority is Priority.BATCH

    @property
    def place(self) -> tuple[float, int]:
        """Sorts by arrival; of pins with equal arrival the later one comes first."""
        return self.arrival, -self.number


class Operation(NamedTuple):
    """An operation of a session that was accepted and has not begun."""

    command: Submit | ForkSession
    accepted: float


@dataclass(slots=True, eq=False)
class Session:
    """The explicit history of a program of kind SESSION. Its operations are ordinary requests, one after the other.

    `past` is what finished operations made; `running` goes on from it.
    """

    program: Program
    opened: float
    used: float
    past: SessionLog = field(default_factory=SessionLog)
    queue: deque[Operation] = field(default_factory=deque)
    running: Sequence | None = None

    @property
    def life(self) -> str:
        """Distinguishes it from earlier sessions of the same name, and from those on other replicas."""
        return self.past.life

    @property
    def history(self) -> TokenIds:
        return self.past.tokens


@dataclass(slots=True, eq=False)
class Program:
    """One program as a replica knows it.

        its turn waits      `waiting` has it; with a `pin` it goes before the turns of programs without
        its turn runs       cells and row are the sequence's; `row` and `pin` are None
        its turn is over    `row` stays until rows are short, `pin` until its deadline or until others need the cells
        meanwhile           `ahead` computes the beginning of its next prompt, kept by the pins of its `handles`

    A handle is a record of its own, with a pin and with its prefills in `ahead`.
    """

    key: ProgramKey
    session: Session | None = None
    live: int = 0  # requests that wait or run
    waiting: list[Sequence] = field(default_factory=list)
    ahead: list[Sequence] = field(default_factory=list)  # prefills of its next prompt that wait or run
    row: KeptRow | None = None
    pin: ProgramPin | None = None
    handles: list[Program] = field(default_factory=list)  # those with a pin
    pause: ToolPause | None = None  # its tools run
    first_until: float = -math.inf  # its pin gave way: a turn that comes by then goes before programs without cells
    computed: TokenIds = field(default_factory=lambda: NO_TOKENS)  # by the end of its last turn
    cache_scope: str | None = None  # of `computed`
    prefilled: tuple[int, int] = (0, 0)  # positions computed ahead, for its next turn to find

    @property
    def idle(self) -> bool:
        """Whether forgetting the record loses nothing but statistics."""
        return not (self.live or self.ahead or self.row or self.pin or self.handles or self.session)

    def rewritten(self, prompt: TokenIds, n_cached: int) -> int:
        """How many computed tokens lie behind the place where `prompt` leaves what the last turn computed; 0: it does
        not leave it.

        Some chat templates rewrite earlier messages: they drop reasoning, or move the system prompt. No cache helps
        against that. Where more is cached than the two have in common, the prompt continues something else.
        """
        shortest = min(len(self.computed), len(prompt))
        if n_cached >= shortest:
            return 0
        common = common_prefix(self.computed, prompt)
        return len(self.computed) - common if common < shortest and n_cached <= common else 0


class Programs:
    """The table of all programs of an engine. It outlives the books of the cache (`restart`).

    At most `most` idle records and `tokens` tokens in `Program.computed` are kept, the latest used.
    """

    def __init__(self, stats: EngineStats, tokens: int, most: int = MOST_PROGRAMS) -> None:
        self._stats = stats
        self._tokens = tokens
        self._most = most
        self._programs: OrderedDict[ProgramKey, Program] = OrderedDict()  # least recently used first
        self._sessions: dict[ProgramKey, Program] = {}  # open ones; they are never forgotten
        self.remembered = 0  # tokens in `Program.computed`
        self.ahead = 0  # prefills that wait or run

    def __len__(self) -> int:
        return len(self._programs) + len(self._sessions)

    def __iter__(self) -> Iterator[Program]:
        yield from self._programs.values()
        yield from self._sessions.values()

    @property
    def sessions(self) -> list[Program]:
        """The open sessions. Any thread may ask."""
        return list(self._sessions.values())

    def find(self, key: ProgramKey) -> Program | None:
        return self._sessions.get(key) if key.kind is Kind.SESSION else self._programs.get(key)

    def of(self, submit: Submit) -> Found:
        """The program of a request and its target, made if they are new. None: the request stands alone."""
        key = ProgramKey.of(submit)
        if key is None:
            return None, None
        program = self._sessions.get(key) if key.kind is Kind.SESSION else self._use(key)
        return program, self._use(ProgramKey(submit.scope, submit.program_id)) if submit.background else program

    def begin(self, sequence: Sequence) -> None:
        """A request waits from now on."""
        if sequence.program is not None:
            sequence.program.live += 1
        if sequence.background:
            for program in _pair(sequence):
                program.ahead.append(sequence)
            self.ahead += 1

    def end(self, sequence: Sequence) -> None:
        """A request has left the queue and the batch."""
        if sequence.program is not None:
            sequence.program.live -= 1
        if sequence.background:
            for program in _pair(sequence):
                program.ahead.remove(sequence)
            self.ahead -= 1

    def open_session(self, key: ProgramKey, now: float, past: SessionLog) -> Session:
        program = self._sessions[key] = Program(key)
        program.session = Session(program, now, now, past)
        return program.session

    def close_session(self, program: Program) -> None:
        del self._sessions[program.key]
        program.session = None

    def remember(self, program: Program, tokens: TokenIds, cache_scope: str | None) -> None:
        """A turn of `program` ended with these tokens computed."""
        if program.key in self._programs:
            self._programs.move_to_end(program.key)
        self.remembered += len(tokens) - len(program.computed)
        program.computed, program.cache_scope = tokens.copy(), cache_scope
        self._trim()

    def forget_computed(self, program: Program) -> None:
        """The program has no next turn."""
        self.remembered -= len(program.computed)
        program.computed, program.cache_scope = NO_TOKENS, None

    # ---- prefills ahead of a turn: used if the turn finds them cached, wasted if it does not or never comes ----

    def prefilled(self, sequence: Sequence, end: int) -> None:
        """A prefill is over: behind what it found cached it computed the tokens up to position `end`.

        Of prefills that do not continue each other only the longer one is remembered: a turn can find one of them.
        """
        program, start = sequence.target, sequence.n_cached
        if program is None or end <= start:
            return
        first, last = program.prefilled
        if first <= start <= last < end and first < last:
            start = first
        elif first < last:
            self._stats.ahead_wasted += min(end - start, last - first)
            start, end = max(program.prefilled, (start, end), key=lambda span: span[1] - span[0])
        program.prefilled = start, end

    def use_prefilled(self, program: Program, n_cached: int) -> None:
        """A turn begins, and `n_cached` tokens of its prompt were found; 0 if there is no next turn."""
        start, end = program.prefilled
        used = max(min(n_cached, end) - start, 0)
        self._stats.ahead_used += used
        self._stats.ahead_wasted += end - start - used
        program.prefilled = 0, 0

    def restart(self) -> None:
        """The engine made new books: no program has cells, rows or requests. Sessions keep their history."""
        for program in self:
            program.live, program.row, program.pin, program.first_until = 0, None, None, -math.inf
            program.waiting.clear()
            program.ahead.clear()
            program.handles.clear()
            self.forget_computed(program)
            self.use_prefilled(program, 0)
        self.ahead = 0

    def _use(self, key: ProgramKey) -> Program:
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(key)
            self._trim()
        self._programs.move_to_end(key)
        return program

    def _trim(self) -> None:
        """Forget the programs used least recently. Records in use only lose `computed` and count as just used."""
        looks = len(self._programs) - 1
        while looks > 0 and (len(self._programs) > self._most or self.remembered > self._tokens):
            looks -= 1
            key, program = self._programs.popitem(last=False)
            self.forget_computed(program)
            if program.idle:
                self.use_prefilled(program, 0)
            else:
                self._programs[key] = program


def _pair(prefill: Sequence) -> list[Program]:
    """The handle and the target of a prefill."""
    return [program for program in (prefill.program, prefill.target) if program is not None]


# ---- rows of the page table ----


class Region(Enum):
    """TRANSIENT rows serve single requests; SESSION rows those of programs and sessions, which come back for more."""

    TRANSIENT = "transient"
    SESSION = "session"


class SequencePool:
    """Page-table rows `0..rows-1`, the last `session_rows` of which form the session region (stateful inference, 3.1).

    It never waits: a request waits in the scheduler's queue, in order and with a timeout, until a row is free.
    """

    def __init__(self, rows: int, session_rows: int = 0) -> None:
        if not 0 <= session_rows < rows:
            raise ValueError(f"session_rows must be in [0, {rows}), not {session_rows}")
        self.rows = rows
        self.first_session_row = rows - session_rows
        # Stacks: the row returned last is the one whose memory is warm.
        self._free = {
            Region.TRANSIENT: list(range(self.first_session_row - 1, -1, -1)),
            Region.SESSION: list(range(rows - 1, self.first_session_row - 1, -1)),
        }
        self._taken: set[int] = set()

    def free(self, region: Region = Region.TRANSIENT) -> int:
        return len(self._free[region])

    @property
    def taken(self) -> int:
        return len(self._taken)

    def acquire(self, region: Region = Region.TRANSIENT) -> int | None:
        """A free row of the region, or None when there is none."""
        if not self._free[region]:
            return None
        row = self._free[region].pop()
        self._taken.add(row)
        return row

    def release(self, row: int) -> None:
        """Return a row. Raises ValueError if it is not taken: a double release would give it to two sequences."""
        if row not in self._taken:
            raise ValueError(f"row {row} is not taken")
        self._taken.remove(row)
        self._free[Region.TRANSIENT if row < self.first_session_row else Region.SESSION].append(row)


class Rows:
    """Rows between turns: programs keep theirs until rows are short, sessions until they are closed.

        between turns    cells                              row
        program          in the tree, pinned by its pin     kept; the least recently used is taken first
        session          pinned until it is closed          kept, if the pool had a session row

    A kept row still shows the pages of the last turn: the next one writes only what differs. The only caller of the
    pool, and of the cache for the pins of sessions. `keep`: programs keep rows. `share`: the histories of sessions are
    cached in their tenants' scopes, where others find them, and not in scopes of their own.
    """

    def __init__(self, cache: KVCache, pool: SequencePool, programs: Programs, *, keep: bool, share: bool) -> None:
        self._cache = cache
        self._pool = pool
        self._programs = programs
        self._keep = keep
        self._share = share
        self._kept: OrderedDict[int, Program] = OrderedDict()  # by row, of programs alone; least recently used first
        self._history_pages: tuple[int, int] | None = None  # as of `idle_session_cells`, `session_cells`; None: unknown

    @property
    def total(self) -> int:
        return self._pool.rows

    @property
    def kept(self) -> int:
        """Rows that programs keep between turns; a sequence without a row may take one."""
        return len(self._kept)

    @property
    def taken(self) -> int:
        """Rows that no other sequence may take now."""
        return self._pool.taken - len(self._kept)

    def begin(self, program: Program | None) -> tuple[int, KeptRow | None] | None:
        """A row for a sequence, and where its program left off, if that is known. None: no row is free.

        A program that goes on gets the row it kept; the pin of a session is given back. Rows of programs with pinned
        cells are taken last.
        """
        last = program.row if program is not None else None
        row = last.row if last is not None and last.row is not None else self._free_row(program)
        if row is not None and program is not None and last is not None:
            program.row = None
            self._kept.pop(row, None)
            self._unpin(last.pin)
        return None if row is None else (row, last)

    def has_row(self, program: Program | None) -> bool:
        """Whether `begin` would find a row."""
        if program is None:
            return self._pool.free() > 0
        own = program.row is not None and program.row.row is not None
        return own or bool(self._kept) or self._pool.free(Region.SESSION) > 0 or self._pool.free() > 0

    def release(self, row: int) -> None:
        give_back(self._pool.release, row)

    def keep_row(self, program: Program, last: KeptRow) -> None:
        """A program's turn is over: it keeps its row if that is a session row."""
        if last.row is None or not self._keep or last.row < self._pool.first_session_row:
            if last.row is not None:
                self.release(last.row)
            return
        self.forget(program)
        program.row = last
        self._kept[last.row] = program

    def keep_history(self, program: Program, history: TokenIds, last: KeptRow, now: float) -> None:
        """An operation of a session is over: `history` stays pinned, and its row is kept if that is a session row.

        Without a row in `last`, what is cached of the history is pinned for a session that begins with it: a fork.
        """
        row = last.row
        if row is not None and row < self._pool.first_session_row:
            self.release(row)
            row = None
        pin = self._pin(program, history, now)
        self.forget(program)
        program.row = KeptRow(len(history), row, last.pages, pin)
        self._history_pages = None

    def forget(self, program: Program) -> None:
        """Give back the row and the history that a program keeps."""
        last, program.row = program.row, None
        if last is None:
            return
        self._unpin(last.pin)
        if last.row is not None:
            self._kept.pop(last.row, None)
            self.release(last.row)

    # ---- cells of sessions' histories; those that several share count once ----

    @property
    def idle_session_cells(self) -> int:
        """Cells that sessions between operations keep from being evicted."""
        return self._counted()[0] * self._cache.page_size

    @property
    def session_cells(self) -> int:
        """Cells of all histories. Cells that an operation adds count once it has ended."""
        return self._counted()[1] * self._cache.page_size

    def session_cells_of(self, tenant: str) -> int:
        """Cells of a tenant's histories. Looks at all sessions."""
        own = [program for program in self._programs.sessions if program.key.scope == tenant]
        return _history_pages(own, self._cache.pool)[1] * self._cache.page_size

    def holding_changed(self, sequence: Sequence) -> None:
        """The cells of a running sequence have changed."""
        if sequence.n_history:
            self._history_pages = None

    # ---- parts ----

    def _free_row(self, program: Program | None) -> int | None:
        """Rows that can be kept go to programs, as long as there are any."""
        if program is None:
            return self._pool.acquire()
        row = self._pool.acquire(Region.SESSION)
        if row is None and self._kept:
            row = next((row for row, kept in self._kept.items() if kept.pin is None), next(iter(self._kept)))
            self._kept.pop(row).row = None
        return row if row is not None else self._pool.acquire()

    def _counted(self) -> tuple[int, int]:
        if self._history_pages is None:
            self._history_pages = _history_pages(self._programs.sessions, self._cache.pool)
        return self._history_pages

    def _unpin(self, pin: Pin | None) -> None:
        if pin is not None:
            self._history_pages = None
            give_back(self._cache.unpin, pin)

    def _pin(self, program: Program, tokens: TokenIds, now: float) -> Pin | None:
        """Without its pin a session may have to compute its history again, and nothing worse: no reason to fail."""
        try:
            scope = program.key.scope if self._share else program.key.own_scope
            return self._cache.pin(scope, tokens, now) if len(tokens) else None
        except Exception:
            log.exception("a session's cells could not be pinned")
            return None


def _history_pages(sessions: Iterable[Program], pool: PagePool) -> tuple[int, int]:
    """Pages of the histories of sessions between operations, and of all sessions.

    between operations    pinned, in the tree
    in an operation       held by its sequence: in the tree, but for an end that the sequence writes to
    """
    in_tree: dict[Node, int] = {}
    running: list[tuple[Holding, int]] = []
    for program in sessions:
        if program.row is not None and program.row.pin is not None:
            _count_path(in_tree, program.row.pin.node, program.row.pin.length, pool)
        session = program.session
        if session is not None and session.running is not None and session.running.holding is not None:
            running.append((session.running.holding, session.running.n_history))
    idle, written = sum(in_tree.values()), 0
    for holding, n_history in running:
        _count_path(in_tree, holding.node, n_history, pool)
        if n_history > holding.n_shared:
            written += pool.pages_for(n_history) - holding.n_shared // pool.page_size
    return idle, sum(in_tree.values()) + written


def _count_path(in_tree: dict[Node, int], node: Node | None, end: int, pool: PagePool) -> None:
    """Count the pages below position `end` on the path to `node`, as far as they are not counted yet."""
    while node is not None:
        before = in_tree.get(node)
        if node.start < end:
            pages = node.owned if node.end <= end else node.owned_before(end, pool.page_size)
            in_tree[node] = max(pages, before or 0)
        if before is not None:
            return  # as are the nodes above
        node = node.parent


def give_back(release: Callable[[T], object], resource: T) -> None:
    """Give a resource back, and retry once after a failure: the memory it needs may be free by then."""
    try:
        release(resource)
    except Exception:
        log.exception("giving back failed, trying again")
        release(resource)
