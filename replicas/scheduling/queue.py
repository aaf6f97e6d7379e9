"""The orders of requests, the queue of requests that wait for admission, and how long they wait (`Forecast`).

An order is a small policy that `engine.order` names. The smallest key is served first. `key` orders the running
requests, of which the last is preempted when cells run out. `waiting` orders the waiting ones, after those that were
preempted. Both compare requests of one class; batch comes after interactive. The first running request is therefore
never preempted, so one always makes progress: keys change between steps only and have to settle. Orders that share
among tenants keep a line of waiting requests for each (`line`, `first`). Not here: which request fits (`admission`).
"""

import heapq
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from typing import Protocol, TypeAlias

from holdfast.replicas.config import made
from holdfast.replicas.plan import Chunk
from holdfast.replicas.programs import Sequence
from holdfast.replicas.requests import Submit
from holdfast.replicas.scheduling.shares import TENANTS, Classes, Contended, Roots, Shares
from holdfast.replicas.stats import Mean
from holdfast.replicas.types import RANKS, Priority

Key: TypeAlias = tuple[float, ...]
Sequences: TypeAlias = tuple[Sequence, ...]
Chunks: TypeAlias = tuple[Chunk, ...]
Line: TypeAlias = tuple[Priority | None, str | None]

_AHEAD: Line = (None, None)  # the line of background prefills, which have no class
_NOBODY: Mapping[Priority, int] = {}
_ASIDE = -1  # the ticket of a sequence that is set aside: it is in no heap
_SLACK = 64  # invalid entries that may stay in a heap of any size
_ON_TIME = 0.95  # of the answers come by their forecast
_STRIDE = 0.05  # by which the correction grows after a forecast that was too short
_MOST = 4.0  # times a forecast, at most


class RequestOrder(Protocol):
    """The interface of an order of requests. A subclass has to define `key`; the other methods have defaults."""

    settled: bool = True
    """The key of a running request never changes."""

    by_arrival: bool = True
    """Paused programs of a class are ranked by arrival (`pin_rank`). False: only those of a class and a tenant are."""

    changes: int = 0
    """Counts events after which `first` may choose another line."""

    @abstractmethod
    def key(self, sequence: Sequence) -> Key:
        """The place of a running request. No two requests may have the same key."""
        raise NotImplementedError

    def waiting(self, sequence: Sequence) -> Key:
        """The place of a waiting request in its line. It may change only with an event of that request."""
        return self.key(sequence)

    def arrive(self, sequence: Sequence, *, alone: bool = False) -> None:
        """A request has come in; its key is asked for next. `alone`: no other one of its class waits."""
        return

    def line(self, sequence: Sequence) -> str:
        """The line in which it waits. It stays the same while the request waits."""
        return ""

    def first(self, heads: Sequences) -> Sequence:
        """The one to serve next of `heads`, each the first of its line."""
        return heads[0] if len(heads) == 1 else min(heads, key=self.waiting)

    def begin(self, sequence: Sequence) -> None:
        """It has been given a row and runs from the next step on."""
        return

    def left(self, sequence: Sequence) -> None:
        """It neither waits nor runs any more."""
        return

    def serve(
        self, sequences: Sequences, chunks: Chunks, seconds: float, waiting: Mapping[Priority, int] = _NOBODY
    ) -> None:
        """A step of these, each with its chunk, took `seconds`, while so many of each class were `waiting`."""
        return

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        """Other replicas served so many seconds more, by the names of `contended`."""
        return

    @property
    def contended(self) -> Mapping[str, float]:
        """Seconds that were served while others waited, by class and tenant, for other replicas to count."""
        return {}

    def due(self, sequence: Sequence) -> float | None:
        """When `promote` is called for a waiting request that was never started; None: never."""
        return None

    def promote(self, sequence: Sequence) -> None:
        """The time that `due` named has come: the key may change now."""
        return

    def rank(self, sequence: Sequence) -> Key:
        """The place among paused programs of a request that needs the cells pinned for them."""
        return (0.0,)

    def pin_rank(self, scope: str, arrival: float, priority: Priority = Priority.INTERACTIVE) -> Key:
        """The place of a paused program: its cells are given to smaller ones only. The last number is the `arrival`."""
        return (1.0, arrival)


class ProgramOrder(RequestOrder):
    """By the program's first arrival, those with pinned cells before the others (Continuum, section 4.4)."""

    def key(self, sequence: Sequence) -> Key:
        return (sequence.submit.program_arrival, sequence.arrived, sequence.number)

    def waiting(self, sequence: Sequence) -> Key:
        return (0.0 if sequence.pinned else 1.0, *self.key(sequence))

    def rank(self, sequence: Sequence) -> Key:
        return (sequence.submit.program_arrival,)

    def pin_rank(self, scope: str, arrival: float, priority: Priority = Priority.INTERACTIVE) -> Key:
        return (arrival,)


class ArrivalOrder(RequestOrder):
    """First come, first served by request: the baseline of request-driven servers."""

    def key(self, sequence: Sequence) -> Key:
        return (sequence.arrived, sequence.number)


class FairOrder(ProgramOrder):
    """The tenant that was served least for its weight comes first (`Shares`), its programs in turn (`Roots`).

    A step's seconds are charged to its sequences by their tokens, each class by itself. Running requests are ordered
    as in `ProgramOrder`. Background work takes what is left and is not charged.
    """

    by_arrival = False

    def __init__(self, tenants: int = TENANTS) -> None:
        super().__init__()
        self._tenants = tenants
        self._shares = {each: Shares(tenants) for each in Priority}  # by cache scope
        self._roots: OrderedDict[tuple[Priority, str], Roots] = OrderedDict()
        self._contended = Contended(tenants)

    def arrive(self, sequence: Sequence, *, alone: bool = False) -> None:
        if sequence.background:
            return
        submit = sequence.submit
        self._shares[submit.priority].on_arrive(submit.scope, submit.weight, alone=alone)
        sequence.turn = self._roots_of(submit).on_arrive(submit.root_program)

    def left(self, sequence: Sequence) -> None:
        if not sequence.background:
            self._roots_of(sequence.submit).on_end(sequence.submit.root_program)

    def line(self, sequence: Sequence) -> str:
        return sequence.submit.scope

    def waiting(self, sequence: Sequence) -> Key:
        return (*sequence.turn, *super().waiting(sequence))

    def first(self, heads: Sequences) -> Sequence:
        shares = self._shares[heads[0].submit.priority]
        first = shares.first([head.submit.scope for head in heads])
        return heads[first[0]] if len(first) == 1 else min((heads[place] for place in first), key=self.waiting)

    def begin(self, sequence: Sequence) -> None:
        if not sequence.background:
            submit = sequence.submit
            self._shares[submit.priority].on_start(submit.scope)
            self._roots_of(submit).on_start(sequence.turn)
            self.changes += 1

    def serve(
        self, sequences: Sequences, chunks: Chunks, seconds: float, waiting: Mapping[Priority, int] = _NOBODY
    ) -> None:
        self.changes += 1
        for shares in self._shares.values():
            shares.reset()
        if not chunks:
            return
        each = seconds / sum(len(chunk.tokens) for chunk in chunks)
        for sequence, chunk in zip(sequences, chunks, strict=True):
            if sequence.background:
                continue
            submit, had = sequence.submit, each * len(chunk.tokens)
            shares = self._shares[submit.priority]
            shares.runs(submit.scope)
            shares.charge(submit.scope, had)
            self._roots_of(submit).charge(submit.root_program, had)
            if waiting.get(submit.priority):
                self._contended.add(submit.priority, submit.scope, had)

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        self.changes += 1
        for name, seconds in elsewhere.items():
            priority, _, tenant = name.partition("/")
            if priority in tuple(Priority):
                self._shares[Priority(priority)].elsewhere(tenant, seconds)

    @property
    def contended(self) -> Mapping[str, float]:
        return self._contended.told()

    def rank(self, sequence: Sequence) -> Key:
        submit = sequence.submit
        return self.pin_rank(submit.scope, submit.program_arrival, submit.priority)

    def pin_rank(self, scope: str, arrival: float, priority: Priority = Priority.INTERACTIVE) -> Key:
        return (self._shares[priority].of(scope).served, arrival)

    def _roots_of(self, submit: Submit) -> Roots:
        key = submit.priority, submit.scope
        roots = self._roots.get(key)
        if roots is None:
            roots = self._roots[key] = Roots()
            if len(self._roots) > self._tenants:
                self._roots.popitem(last=False)
        self._roots.move_to_end(key)
        return roots


ORDERS: Mapping[str, Callable[[], RequestOrder]] = {
    "auto": ProgramOrder,  # where `resolve` has not decided
    "program": ProgramOrder,
    "request": ArrivalOrder,
    "fair": FairOrder,
}


def request_order(name: str) -> RequestOrder:
    """A new order called `name`, or of the class `module:Class`. Raises ConfigError."""
    return made(name, ORDERS, RequestOrder, "order")


Ticket: TypeAlias = int


class WaitingQueue:
    """Waiting sequences, in heaps with lazy deletion: each operation costs O(log n), and the length is exact.

    `classes` says whose turn it is where both classes wait.
    """

    def __init__(self, order: RequestOrder, classes: Classes | None = None) -> None:
        self._order = order
        self._classes = classes or Classes(0.0)
        self.waiting: Counter[Priority] = Counter()  # how many of each class, without background prefills
        self._tickets = count()  # breaks ties first-in first-out, so sequences are never compared
        self._first: Sequence | None = None  # the head, if it is known
        self._changes = (0, False)  # of the order and the classes, when the head was found
        self._passed = 0  # how many lines were passed over when the head was found
        self._heads: dict[Line, Sequence] | None = None  # of all lines, if they are known
        self._lines = _Lines(self._waits)
        self._due: list[tuple[float, int, Sequence]] = []  # when sequences that wait too long are promoted
        self._arrivals: deque[tuple[float, Sequence]] = deque()  # and since when each waits
        self._unseen: list[Sequence] = []  # operations of sessions that no step has seen yet
        self._entries: dict[str, tuple[Ticket, Sequence]] = {}  # by request id, with the valid ticket
        self.tokens = 0  # in the prompts of all that wait
        self.tokens_ahead = 0  # of these, in background prefills

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def ahead(self) -> int:
        """How many background prefills wait."""
        return len(self._entries) - sum(self.waiting[each] for each in Priority)

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, in no particular order."""
        return (sequence for _, sequence in self._entries.values())

    def __contains__(self, sequence: Sequence) -> bool:
        entry = self._entries.get(sequence.request_id)
        return entry is not None and entry[1] is sequence

    def push(self, sequence: Sequence) -> None:
        """Enter a sequence. Its waiting time counts from its arrival; for an operation of a session from the next
        `promote`, because it may have waited for others of its session before.
        """
        if not sequence.preempted:  # a request that has started is neither timed out nor promoted
            self._order.arrive(sequence, alone=not self.waiting[sequence.submit.priority])
            if sequence.submit.session is not None:
                self._unseen.append(sequence)
            else:
                self._arrivals.append((sequence.arrived, sequence))
            due = self._order.due(sequence)
            if due is not None:
                heapq.heappush(self._due, (due, sequence.number, sequence))
        if sequence.program is not None:
            sequence.program.waiting.append(sequence)
        self._place(sequence)

    def head(self, passed: Collection[Line] = ()) -> Sequence | None:
        """The next sequence to be admitted; it stays in the queue.

        It is the first among the heads of all lines of the class whose turn it is, except the lines that are `passed`.
        Background prefills come where no other request waits.
        """
        changes = self._order.changes, self._classes.due
        if self._changes != changes or self._passed != len(passed):
            self._changes, self._passed, self._first = changes, len(passed), None
        if self._first is None and self._entries:
            if self._heads is None:
                self._heads = self._lines.heads()
            heads = self._heads.copy()
            for line in passed:
                heads.pop(line, None)
            ahead = heads.pop(_AHEAD, None)
            first, other = Priority.INTERACTIVE, Priority.BATCH
            if self.waiting[other]:
                due = self._classes.due and any(line[0] is other for line in heads)
                if due or not any(line[0] is first for line in heads):
                    first = other
                heads = {line: head for line, head in heads.items() if line[0] is first}
            if not heads:
                self._first = ahead
            elif (first, None) in heads:
                self._first = heads[first, None]
            else:
                self._first = self._order.first(tuple(heads.values()))
        return self._first

    def line_of(self, sequence: Sequence) -> Line | None:
        """The line in which a sequence waits; None if tenants share it."""
        line = _line(self._order, sequence)
        return line if line[1] else None

    def set_aside(self, passed: Collection[Line] = ()) -> Sequence:
        """Set the head aside: it still waits, can be removed and can expire, but is not the head until `put_back`."""
        sequence = self.head(passed)
        if sequence is None:
            raise IndexError("nobody is waiting")
        self._lines.pop(_line(self._order, sequence))
        self._first = self._heads = None
        self._entries[sequence.request_id] = (_ASIDE, sequence)
        return sequence

    def put_back(self, sequence: Sequence) -> None:
        """Put a sequence that was set aside back in its place, unless it was removed in the meantime."""
        if sequence in self:
            self._place(sequence)

    def reorder(self, sequence: Sequence) -> None:
        """The order's key of a sequence has changed: give it its new place, unless it has gone."""
        if sequence in self and self._entries[sequence.request_id][0] != _ASIDE:
            self._place(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._entries[sequence.request_id]
        self._count(sequence, -1)
        self._first = self._heads = None
        if sequence.program is not None:
            sequence.program.waiting.remove(sequence)

    def promote(self, now: float) -> None:
        """Promote sequences that wait too long by `now`, the beginning of a step."""
        self._arrivals.extend((now, sequence) for sequence in self._unseen)
        self._unseen.clear()
        while self._due and self._due[0][0] <= now:
            sequence = heapq.heappop(self._due)[2]
            if sequence in self and not sequence.preempted:
                self._order.promote(sequence)
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
        """Sequences of lower classes that never started, the last of the lowest class first. They stay in the queue."""
        lower = [each for each in self if not each.preempted and each.submit.rank > rank]
        yield from sorted(lower, key=lambda each: (each.submit.rank, self._order.waiting(each)), reverse=True)

    def expired(self, before: float) -> list[Sequence]:
        """Remove and return the sequences that have waited since before `before` and never started."""
        late = []
        while self._arrivals:
            since, sequence = self._arrivals[0]
            waits = sequence in self and not sequence.preempted
            if waits and since >= before:
                break
            self._arrivals.popleft()
            if waits:
                self.remove(sequence)
                late.append(sequence)
        return late

    def _count(self, sequence: Sequence, by: int) -> None:
        self.tokens += by * sequence.n_prompt
        self.tokens_ahead += by * sequence.n_prompt * sequence.background
        self.waiting[sequence.submit.priority] += by * (not sequence.background)

    def _place(self, sequence: Sequence) -> None:
        ticket = next(self._tickets)
        self._first = self._heads = None
        if sequence.request_id not in self._entries:
            self._count(sequence, 1)
        self._entries[sequence.request_id] = (ticket, sequence)
        most = 2 * len(self._entries) + _SLACK
        self._lines.push(_line(self._order, sequence), self._order.waiting(sequence), ticket, sequence, most)
        if len(self._arrivals) > most:
            self._arrivals = deque(entry for entry in self._arrivals if entry[1] in self and not entry[1].preempted)
        if len(self._unseen) > most:
            self._unseen = [each for each in self._unseen if each in self]
        if len(self._due) > most:
            self._due = [entry for entry in self._due if entry[2] in self]
            heapq.heapify(self._due)

    def _waits(self, ticket: Ticket, sequence: Sequence) -> bool:
        entry = self._entries.get(sequence.request_id)
        return entry is not None and entry[0] == ticket


def _line(order: RequestOrder, sequence: Sequence) -> Line:
    """Preempted sequences have a line of their own, before all others of their class: part of their work is done."""
    if sequence.background:
        return _AHEAD
    return sequence.submit.priority, None if sequence.preempted else order.line(sequence)


class _Lines:
    """Lines of waiting sequences by name, each a heap with lazy deletion: entries that `counts` rejects are skipped."""

    def __init__(self, counts: Callable[[Ticket, Sequence], bool]) -> None:
        self._counts = counts
        self._heaps: dict[Line, list[tuple[Key, Ticket, Sequence]]] = {}

    def __len__(self) -> int:
        """Entries, with those that do not count."""
        return sum(map(len, self._heaps.values()))

    def push(self, line: Line, key: Key, ticket: Ticket, sequence: Sequence, most: int) -> None:
        """Enter a sequence; a line of more than `most` entries drops those that do not count."""
        heap = self._heaps.setdefault(line, [])
        heapq.heappush(heap, (key, ticket, sequence))
        if len(heap) > most:
            heap[:] = [entry for entry in heap if self._counts(*entry[1:])]
            heapq.heapify(heap)

    def heads(self) -> dict[Line, Sequence]:
        """The first of each line that has any."""
        found = {}
        for line, heap in list(self._heaps.items()):
            while heap and not self._counts(heap[0][1], heap[0][2]):
                heapq.heappop(heap)
            if heap:
                found[line] = heap[0][2]
            else:
                del self._heaps[line]
        return found

    def pop(self, line: Line) -> None:
        """Take the first of a line out."""
        heapq.heappop(self._heaps[line])


class Forecast:
    """Forecasts when the answer to a request will be complete, in seconds, for one engine.

    now         + waiting                                        + serving
    arrival       requests before it * seconds between starts      first token (+ tokens * seconds of each)

    times a correction by how much recent forecasts were too short. Seconds between starts are learned while requests
    wait: then each start is as early as there is room. Requests whose clients left count as far as they came, or a
    server that is too slow for all of them would learn nothing. One thread writes, any may read.
    """

    def __init__(self) -> None:
        self._gap = Mean()  # between two starts
        self._first = Mean()  # from a start to the first token
        self._token = Mean()  # of each further one
        self._tokens = Mean()  # that an answer has
        self._since: float | None = None  # the latest start while requests wait
        self.correction = 1.0

    # ---- learning ----

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

    # ---- foretelling ----

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
        waiting_s = (before + 1) * self.gap_s if before else 0.0
        return waiting_s + self.serving_s(max_tokens, begins)
