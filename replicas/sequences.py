"""A sequence, which is the engine's state of one request; its owner, who comes back for more; the pool of rows.

Data and counters. Not here: who gets a row or cells (`retention/rows`, `kv/cache`), what is computed (`scheduling`).
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.errors import ErrorInfo
from holdfast.replicas.events import Failed, FinishReason, Submit
from holdfast.replicas.kv.holding import Holding
from holdfast.replicas.plan import Draw, Sampling
from holdfast.replicas.requests import Timing, Usage, Work
from holdfast.replicas.types import Origin, Priority, TokenCounts, TokenIds


class Owner(NamedTuple):
    """Whose turn a sequence is. `session`: opened by a client; else a program. A tuple, for it is looked up often."""

    scope: str
    name: str
    session: bool

    @classmethod
    def of(cls, submit: Submit) -> "Owner | None":
        """Whose a request is; None for a single one."""
        if submit.session is not None:
            return cls(submit.scope, submit.session.session_id, session=True)
        if submit.background is not None and submit.background.handle:
            return cls.handle(submit.scope, submit.background.handle)
        return cls(submit.scope, submit.program_id, session=False) if submit.program_id else None

    @classmethod
    def handle(cls, scope: str, handle: str) -> "Owner":
        """Who comes back for what is computed ahead under a handle: no program has such a name."""
        return cls(scope, f"\0{handle}", session=False)

    @property
    def is_handle(self) -> bool:
        return self.name.startswith("\0")

    @property
    def own_scope(self) -> str:
        """A part of its tenant's scope of the cache that is this owner's alone."""
        return f"{self.scope}\0{'session' if self.session else 'program'}\0{self.name}"


class Status(Enum):
    """Where a sequence is in its life; changed by `Sequence.move` alone."""

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

    Cells below `n_computed` are filled. Who owns their pages (the tree or this sequence) is written in `holding`,
    which is None while the sequence waits. `pending` is one token while decoding and more while prefilling.
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
    expected_s: float = 0.0  # until its answer, as was foretold when it came; 0: nothing was
    n_history: int = 0  # tokens of the session before this operation: they stay pinned whatever becomes of it
    n_before: int = 0  # tokens that were computed when it was preempted, while it waits
    cache_scope: str | None = None  # where its cells are found and kept; None: nowhere
    owner: Owner | None = None  # who comes back for what this sequence leaves; None: nobody
    seed: int = 0
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    pinned: bool = False  # it stands with programs whose cells are kept; who changes it tells the queue (`reorder`)
    attained_s: float = 0.0  # seconds of service that count against it, where the order counts them
    turn: tuple[float, float] = (0.0, 0.0)  # its turn among its tenant's programs, where the order gives them turns
    # How its tokens are drawn, by the number of drafts, where that is the same in every step; set by the first of each.
    draws: dict[int, Draw] = field(default_factory=dict)
    # While the step after one in flight is planned, else 0 and None: how many tokens that one computes, and which of
    # its chunks draws this sequence's next token.
    in_flight: int = 0
    awaited: int | None = None
    counts: TokenCounts | None = None  # of `generated`, as far as `count` has come; None: nobody has asked
    seen: TokenCounts | None = None  # of `tokens`, as far as whoever asks has counted
    request_id: str = field(init=False)
    matcher: Matcher | None = field(init=False)  # which tokens may come next, of a constrained sequence
    background: bool = field(init=False)  # nobody waits for it: it takes what all others leave
    batch: bool = field(init=False)  # it takes what interactive requests leave
    counted: bool = field(init=False)  # among clients' requests: a client sent it, and waits for it

    def __post_init__(self) -> None:
        self.request_id = self.submit.request_id
        self.matcher = self.submit.matcher
        self.background = self.submit.background is not None
        self.batch = self.submit.priority is Priority.BATCH and not self.background
        self.counted = self.submit.origin is Origin.CLIENT and not self.background

    @classmethod
    def of(cls, submit: Submit, number: int, now: float, eos: frozenset[int], seed: int) -> "Sequence":
        n_prompt = len(submit.tokens)
        buffer = np.empty(n_prompt + submit.sampling.max_tokens, np.int32)
        buffer[:n_prompt] = submit.tokens
        stop_ids = submit.sampling.stop_token_ids | (frozenset() if submit.sampling.ignore_eos else eos)
        owner = Owner.of(submit)
        return cls(submit, number, now, n_prompt, buffer, n_prompt, owner=owner, seed=seed, stop_ids=stop_ids)

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
        return self.length + (self.awaited is not None) - self.n_computed - self.in_flight

    @property
    def decoding(self) -> bool:
        end = self.length + (self.awaited is not None)
        return end - self.n_computed - self.in_flight == 1 and end > self.n_prompt

    @property
    def planned_length(self) -> int:
        """Its length once the step in flight is over; without one, its length."""
        return self.length + (self.awaited is not None)

    @property
    def closing(self) -> bool:
        """It ends with the step in flight, whatever that draws."""
        end = self.planned_length
        return self.in_flight > 0 and end == len(self.buffer) and self.pending == end - self.length

    @property
    def prompt_computed(self) -> bool:
        """Whether it decodes already without the step in flight: its prompt is in the cache for all to see."""
        return self.length - self.n_computed == 1 and self.length > self.n_prompt

    @property
    def the_holding(self) -> Holding:
        """What a running sequence holds of the cache."""
        assert self.holding is not None, self.request_id
        return self.holding

    @property
    def the_row(self) -> int:
        """The page-table row of a running sequence."""
        assert self.row is not None, self.request_id
        return self.row

    @property
    def usage(self) -> Usage:
        """As its client knows it: what it goes on from is a part of its reply, and not of its prompt."""
        n_prompt = self.n_prompt - self.submit.n_generated
        found = 0 if self.background else self.n_cached
        work = Work(self.prompt_work, found, self.drawn, self.drafted, self.accepted)
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
        for at, token in enumerate(kept, self.length):  # a few: sooner done than one array in another
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
