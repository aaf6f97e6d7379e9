"""The orders of requests, the queue of requests that wait for admission, and how long they wait (`Forecast`).

    order      key of a running request       key of a waiting one             line     rank of a paused program
    request    its arrival                    the same                         one      after all requests
    program    its program's arrival          programs with pins first         one      its arrival
    fair       as `program`                   its program's turn, then that    tenant   its tenant's service, arrival

`engine.order` names one. The smallest key is served first; the last running request is preempted when cells run out.
Keys compare requests of one class: batch comes after interactive, and preempted requests come before both. The first
running request is never preempted, so one always makes progress: keys change between steps only and have to settle.
Not here: which request fits (`admission`).
"""

from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count, takewhile
from typing import Protocol, TypeAlias

from holdfast.replicas.config import made
from holdfast.replicas.plan import Chunk
from holdfast.replicas.programs import Sequence
from holdfast.replicas.scheduling.shares import TENANTS, Classes, FairShares
from holdfast.replicas.stats import Mean
from holdfast.replicas.types import RANKS, Priority

Key: TypeAlias = tuple[float, ...]
Sequences: TypeAlias = tuple[Sequence, ...]
Chunks: TypeAlias = tuple[Chunk, ...]
Line: TypeAlias = tuple[Priority | None, str | None]
Entry: TypeAlias = tuple[Key, int, Sequence, Line]  # the number keeps equal keys in the order in which they came

_AHEAD: Line = (None, None)  # the line of background prefills, which have no class
_NOBODY: Mapping[Priority, int] = {}
_SLACK = 64  # entries of no sequence that a line of any length may have
_ON_TIME = 0.95  # of the answers come by their forecast
_STRIDE = 0.05  # by which the correction grows after a forecast that was too short
_MOST = 4.0  # times a forecast, at most


class RequestOrder(Protocol):
    """The interface of an order of requests. A subclass has to define `key`; the other methods have defaults."""

    settled: bool = True
    """The key of a running request never changes."""

    changes: int = 0
    """Counts events after which `first` may choose another line."""

    @abstractmethod
    def key(self, sequence: Sequence) -> Key:
        """The place of a running request. No two requests may have the same key."""
        raise NotImplementedError

    def waiting(self, sequence: Sequence) -> Key:
        """The place of a waiting request in its line. It may change only with an event of that request."""
        return self.key(sequence)

    def line(self, sequence: Sequence) -> str:
        """The line in which it waits. It stays the same while the request waits."""
        return ""

    def first(self, heads: Sequences) -> Sequence:
        """The one to serve next of `heads`, each the first of its line."""
        return heads[0] if len(heads) == 1 else min(heads, key=self.waiting)

    def arrive(self, sequence: Sequence, *, alone: bool = False) -> None:
        """A request has arrived; the queue asks for its key next. `alone`: no other one of its class waits."""

    def begin(self, sequence: Sequence) -> None:
        """The request has a row and runs from the next step on."""

    def left(self, sequence: Sequence) -> None:
        """The request has left the queue and the batch."""

    def serve(
        self, sequences: Sequences, chunks: Chunks, seconds: float, waiting: Mapping[Priority, int] = _NOBODY
    ) -> None:
        """A step of `sequences`, each with its chunk, took `seconds`. `waiting`: requests that waited, by class."""

    def promote(self, now: float) -> Iterable[Sequence]:
        """Called before each step. Returns waiting requests whose key has changed with the time."""
        return ()

    def rank(self, sequence: Sequence) -> Key:
        """The place among paused programs of a request that needs the cells pinned for them."""
        return (0.0,)

    def pin_rank(self, scope: str, arrival: float, priority: Priority = Priority.INTERACTIVE) -> Key:
        """The place of a paused program: only requests of smaller rank take its cells. The last number is `arrival`.

        Paused programs of one class and tenant are ranked by arrival.
        """
        return (1.0, arrival)

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        """Count seconds that other replicas served, by the names of `contended`."""

    @property
    def contended(self) -> Mapping[str, float]:
        """Seconds that were served while others waited, by class and tenant, for other replicas to count."""
        return {}


class ArrivalOrder(RequestOrder):
    """First come, first served by request: the baseline of request-driven servers."""

    def key(self, sequence: Sequence) -> Key:
        return (sequence.arrived, sequence.number)


class ProgramOrder(RequestOrder):
    """By the program's first arrival, those with pinned cells before the others (Continuum, section 4.4)."""

    def key(self, sequence: Sequence) -> Key:
        return (sequence.submit.program_arrival, sequence.arrived, sequence.number)

    def waiting(self, sequence: Sequence) -> Key:
        return (0.0 if sequence.pinned else 1.0, *self.key(sequence))

    def rank(self, sequence: Sequence) -> Key:
        submit = sequence.submit
        return self.pin_rank(submit.scope, submit.program_arrival, submit.priority)

    def pin_rank(self, scope: str, arrival: float, priority: Priority = Priority.INTERACTIVE) -> Key:
        return (arrival,)


class FairOrder(ProgramOrder):
    """The tenant that was served least for its weight comes first (`Shares`), its programs in turn (`Roots`).

    A step's seconds are charged to its sequences by their tokens, each class by itself. Background work takes what is
    left and is not charged.
    """

    def __init__(self, tenants: int = TENANTS) -> None:
        super().__init__()
        self._fair = FairShares(tenants)  # tenants are cache scopes

    def arrive(self, sequence: Sequence, *, alone: bool = False) -> None:
        if not sequence.background:
            submit = sequence.submit
            self._fair.of_class[submit.priority].on_arrive(submit.scope, submit.weight, alone=alone)
            sequence.turn = self._fair.roots.use((submit.priority, submit.scope)).on_arrive(submit.root_program)

    def begin(self, sequence: Sequence) -> None:
        if not sequence.background:
            submit = sequence.submit
            self._fair.of_class[submit.priority].on_start(submit.scope)
            self._fair.roots.use((submit.priority, submit.scope)).on_start(sequence.turn)
            self.changes += 1

    def left(self, sequence: Sequence) -> None:
        if not sequence.background:
            submit = sequence.submit
            self._fair.roots.use((submit.priority, submit.scope)).on_end(submit.root_program)

    def line(self, sequence: Sequence) -> str:
        return sequence.submit.scope

    def waiting(self, sequence: Sequence) -> Key:
        return (*sequence.turn, *super().waiting(sequence))

    def first(self, heads: Sequences) -> Sequence:
        first = self._fair.of_class[heads[0].submit.priority].first([head.submit.scope for head in heads])
        return heads[first[0]] if len(first) == 1 else min([heads[place] for place in first], key=self.waiting)

    def serve(
        self, sequences: Sequences, chunks: Chunks, seconds: float, waiting: Mapping[Priority, int] = _NOBODY
    ) -> None:
        self.changes += 1
        for shares in self._fair.of_class.values():
            shares.reset()
        total = sum(len(chunk.tokens) for chunk in chunks)
        for sequence, chunk in zip(sequences, chunks, strict=True):
            if sequence.background:
                continue
            submit, had = sequence.submit, seconds / total * len(chunk.tokens)
            priority, contended = submit.priority, waiting.get(submit.priority, 0) > 0
            self._fair.of_class[priority].runs(submit.scope)
            self._fair.charge(priority, submit.scope, had, contended=contended)
            self._fair.roots.use((priority, submit.scope)).charge(submit.root_program, had)

    def pin_rank(self, scope: str, arrival: float, priority: Priority = Priority.INTERACTIVE) -> Key:
        return (self._fair.of_class[priority].of(scope).served, arrival)

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        self.changes += 1
        self._fair.learn(elsewhere)

    @property
    def contended(self) -> Mapping[str, float]:
        return self._fair.contended


ORDERS: Mapping[str, Callable[[], RequestOrder]] = {
    "auto": ProgramOrder,  # where `resolve` has not decided
    "program": ProgramOrder,
    "request": ArrivalOrder,
    "fair": FairOrder,
}


def request_order(name: str) -> RequestOrder:
    """A new order called `name`, or of the class `module:Class`. Raises ConfigError."""
    return made(name, ORDERS, RequestOrder, "order")


class WaitingQueue:
    """Waiting sequences, in lines. `classes` chooses the class to serve while both classes wait.

    A line is a heap. The entry of a sequence that left its place stays in it, but never as the first.
    """

    def __init__(self, order: RequestOrder, classes: Classes | None = None) -> None:
        self._order = order
        self._classes = classes or Classes(0.0)
        self.waiting: Counter[Priority] = Counter()  # requests by class, without background prefills
        self.tokens = 0  # in the prompts of all waiting requests
        self.tokens_ahead = 0  # of these, in background prefills
        self._in: dict[Sequence, Entry | None] = {}  # the entry of each; None: it is set aside
        self._lines: dict[Line, list[Entry]] = {}
        self._numbers = count()
        self._since: OrderedDict[Sequence, float] = OrderedDict()  # when the waiting time of each began
        self._unseen: dict[Sequence, None] = {}  # operations of sessions that no step has seen yet
        self._changes = 0
        self._head: Sequence | None = None  # as of `_found_at`
        self._found_at: tuple[int, int, bool, int] | None = None

    def __len__(self) -> int:
        return len(self._in)

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, in no particular order."""
        return iter(self._in)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._in

    @property
    def ahead(self) -> int:
        """How many background prefills wait."""
        return len(self._in) - sum(self.waiting[each] for each in Priority)

    def push(self, sequence: Sequence) -> None:
        """Enter a sequence. Its waiting time counts from its arrival; for an operation of a session from the next
        `promote`, because it may have waited for others of its session before.
        """
        if not sequence.preempted:  # a request that has started is not timed out
            self._order.arrive(sequence, alone=not self.waiting[sequence.submit.priority])
            if sequence.submit.session is not None:
                self._unseen[sequence] = None
            else:
                self._since[sequence] = sequence.arrived
        if sequence.program is not None:
            sequence.program.waiting.append(sequence)
        self._count(sequence, 1)
        self._place(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        del self._in[sequence]
        self._since.pop(sequence, None)
        self._unseen.pop(sequence, None)
        self._count(sequence, -1)
        if sequence.program is not None:
            sequence.program.waiting.remove(sequence)

    def head(self, passed: Collection[Line] = ()) -> Sequence | None:
        """The next sequence to be admitted; it stays in the queue.

        It is the first among the heads of all lines of the class to serve, except the lines in `passed`. Background
        prefills come last.
        """
        at = self._changes, self._order.changes, self._classes.due, len(passed)
        if self._found_at != at:
            self._found_at, self._head = at, self._find_head(passed)
        return self._head

    def _find_head(self, passed: Collection[Line]) -> Sequence | None:
        heads = {name: line[0][2] for name, line in self._lines.items() if name not in passed}
        for turn in RANKS[::-1] if self._classes.due else RANKS:
            if (turn, None) in heads:
                return heads[turn, None]
            if of_class := tuple([head for name, head in heads.items() if name[0] is turn]):
                return self._order.first(of_class)
        return heads.get(_AHEAD)

    def line_of(self, sequence: Sequence) -> Line | None:
        """The line in which a sequence waits; None if tenants share it."""
        line = self._line(sequence)
        return line if line[1] else None

    def set_aside(self, passed: Collection[Line] = ()) -> Sequence:
        """Set the head aside: it still waits, can be removed and can expire, but is not the head until `put_back`."""
        sequence = self.head(passed)
        if sequence is None:
            raise IndexError("no request is waiting")
        self._take_out(sequence)
        return sequence

    def put_back(self, sequence: Sequence) -> None:
        """Put a sequence that was set aside back in its place, unless it was removed in the meantime."""
        if sequence in self:
            self._place(sequence)

    def reorder(self, sequence: Sequence) -> None:
        """The order's key of a sequence has changed: give it its new place, unless it has gone."""
        if self._in.get(sequence) is not None:
            self._take_out(sequence)
            self._place(sequence)

    def promote(self, now: float) -> None:
        """A step begins at `now`: operations of sessions begin to wait, and the order may promote requests."""
        for sequence in self._unseen:
            self._since[sequence] = now
        self._unseen.clear()
        for sequence in self._order.promote(now):
            self.reorder(sequence)

    def before(self, sequence: Sequence) -> int:
        """How many would be admitted before a sequence that arrives now. Looks at all waiting sequences.

        Where the order has several lines, each line is assumed to advance by one for each sequence of its own.
        """
        order, rank = self._order, sequence.submit.rank
        line, key = order.line(sequence), order.waiting(sequence)
        own, first, others = 0, 0, Counter[str]()
        for each in self:
            if each.preempted or each.submit.rank < rank:
                first += 1
            elif each.submit.rank == rank and order.line(each) != line:
                others[order.line(each)] += 1
            elif each.submit.rank == rank and (line or order.waiting(each) < key):
                own += 1
        return first + own + sum(min(n, own + 1) for n in others.values())

    def up_to(self, rank: int) -> int:
        """How many sequences of this class or a higher one wait. Any thread may ask."""
        return len(self) if rank == len(RANKS) else sum(self.waiting[each] for each in RANKS[: rank + 1])

    def last_below(self, rank: int) -> Iterator[Sequence]:
        """Sequences of lower classes that never started, the last of the lowest class first. They stay in the queue.

        Looks at all waiting sequences when the first one is asked for.
        """
        lower = [each for each in self if not each.preempted and each.submit.rank > rank]
        yield from sorted(lower, key=lambda each: (each.submit.rank, self._order.waiting(each)), reverse=True)

    def expired(self, before: float) -> list[Sequence]:
        """Remove and return the sequences that have waited since before `before` and never started."""
        late = [sequence for sequence, _ in takewhile(lambda each: each[1] < before, self._since.items())]
        for sequence in late:
            self.remove(sequence)
        return late

    def _line(self, sequence: Sequence) -> Line:
        """Preempted sequences have a line of their own, before others of their class: part of their work is done."""
        if sequence.background:
            return _AHEAD
        return sequence.submit.priority, None if sequence.preempted else self._order.line(sequence)

    def _place(self, sequence: Sequence) -> None:
        name = self._line(sequence)
        line = self._lines.setdefault(name, [])
        entry = self._in[sequence] = self._order.waiting(sequence), next(self._numbers), sequence, name
        heappush(line, entry)
        if len(line) > 2 * len(self._in) + _SLACK:
            line[:] = [each for each in line if self._in.get(each[2]) is each]
            heapify(line)
        self._changes += 1

    def _take_out(self, sequence: Sequence) -> None:
        entry, self._in[sequence] = self._in[sequence], None
        if entry is not None:
            line = self._lines[entry[3]]
            while line and self._in.get(line[0][2]) is not line[0]:
                heappop(line)
            if not line:
                del self._lines[entry[3]]
            self._changes += 1

    def _count(self, sequence: Sequence, by: int) -> None:
        self.tokens += by * sequence.n_prompt
        self.tokens_ahead += by * sequence.n_prompt * sequence.background
        self.waiting[sequence.submit.priority] += by * (not sequence.background)


class Forecast:
    """Forecasts when the answer to a request will be complete, in seconds, for one engine.

    now         + waiting                                        + serving
    arrival       requests before it * seconds between starts      first token (+ tokens * seconds of each)

    times a correction for recent forecasts that were too short. Seconds between starts are learned while requests wait,
    as each start is then as early as there is room. Requests whose clients left count up to that point; else a server
    that is too slow for all of them would learn nothing. One thread writes, any may read.
    """

    def __init__(self) -> None:
        self._gap = Mean()  # between two starts
        self._first = Mean()  # from a start to the first token
        self._token = Mean()  # of each further one
        self._tokens = Mean()  # that an answer has
        self._since: float | None = None  # the latest start while requests wait
        self.correction = 1.0

    def started(self, n: int, waiting: int, now: float) -> None:
        """A step begins with `n` new requests, and `waiting` others still wait."""
        if n and self._since is not None:
            self._gap.add(now - self._since, n)
        if not waiting:
            self._since = None
        elif n or self._since is None:
            self._since = now

    def left(self, sequence: Sequence, now: float, *, whole: bool) -> None:
        """A sequence leaves the batch for good, with its `whole` answer or a part of it."""
        if sequence.background or sequence.scheduled is None:
            return
        first, drawn = sequence.first_token, sequence.length - sequence.n_prompt
        self._first.add((now if first is None else first) - sequence.scheduled)
        self._tokens.add(drawn if whole else max(drawn, self._tokens.value))
        if first is not None and drawn > 1:
            self._token.add(now - first, drawn - 1)
        end = first if sequence.submit.begins else now if whole else None
        late = (now if end is None else end) - sequence.arrived > sequence.expected_s * self.correction
        if sequence.expected_s > 0 and (late or end is not None):
            step = _STRIDE * (_ON_TIME if late else _ON_TIME - 1)
            self.correction = min(max(self.correction + step, 1.0), _MOST)

    @property
    def gap_s(self) -> float:
        """Between two starts while requests wait; 0: not known yet."""
        return self._gap.value

    def serving_s(self, max_tokens: float, begins: bool) -> float:
        """From a start to the whole answer, or with `begins` to its first token."""
        if begins:
            return self._first.value
        tokens = min(max_tokens, self._tokens.value)
        return self._first.value + max(0.0, tokens - 1) * self._token.value

    def answer_s(self, max_tokens: float, begins: bool, before: int) -> float:
        """From arrival to the answer, or with `begins` to its first token, behind `before` others; not corrected."""
        return (before + 1 if before else 0) * self.gap_s + self.serving_s(max_tokens, begins)
