"""The fair queue in front of full replicas: capacity, fair shares, waiting requests, and the queue that joins them.

A request waits for its program's home or for any replica. When a slot comes free, the replica takes the first request
of its own queue and the common one. The order is: interactive before batch; where tenants share (`fair`), the tenant
served least for its weight; then the caller's key. A full queue drops the last request of the tenant with most of it.

Only `DispatchQueue` knows the event loop; the other classes are pure.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from holdfast.replicas.errors import OverloadedError
from holdfast.replicas.scheduling.shares import BATCH_SHARE, Bounds, Classes, FairShares, Roots, Turn
from holdfast.replicas.stats import Mean
from holdfast.replicas.types import Priority
from holdfast.router.placement import Reason

T = TypeVar("T")
Key: TypeAlias = tuple[float, ...]

DROPPED = "the queue is full, and this request is the last of its tenant or class; retry later"
BATCH_RESERVE = 8  # batch leaves an eighth of a replica's slots to interactive requests
CLOSED_S = 0.05  # a replica that said it is full is asked again after this, or when a request ends there
_SLACK = 64  # outdated entries that a heap may hold beside its live ones


class Line(NamedTuple):
    """The waiting requests of one tenant and class."""

    tenant: str
    priority: Priority = Priority.INTERACTIVE


@dataclass(frozen=True, slots=True)
class FairShareKey:
    """The share that a request counts against: a tenant, its class, and the tenant's root program ("": none)."""

    tenant: str
    weight: float = 1.0
    priority: Priority = Priority.INTERACTIVE
    root: str = ""

    @property
    def line(self) -> Line:
        return Line(self.tenant, self.priority)


UNSHARED = FairShareKey("")  # goes before all tenants and counts against no share


class Capacity:
    """The number of further requests that each replica takes, as far as this process knows.

    Other routers may have requests at the same replica; they show only when the replica says that it is full. A
    replica takes `control_calls` beside its slots, and counts them in what it reports.
    """

    def __init__(self, closed_s: float, control_calls: int = 0) -> None:
        self._closed_s = closed_s
        self._control_calls = control_calls
        self._capacity: Mapping[str, int] = {}
        self._taken: Counter[tuple[str, str]] = Counter()  # by replica and request, which may try a replica again
        self._in_hand: Counter[str] = Counter()
        self._ongoing: dict[str, int] = {}  # what the replica reported last, less what has ended since
        self._closed: dict[str, float] = {}  # until when a replica is not asked

    @property
    def replicas(self) -> Iterable[str]:
        return self._capacity

    def update(self, capacity: Mapping[str, int]) -> None:
        """Set the replicas, each with the requests that it takes at once."""
        self._capacity = capacity
        for counters in (self._ongoing, self._closed):
            for replica_id in counters.keys() - capacity.keys():
                del counters[replica_id]

    def room(self, replica_id: str, now: float, reserve: int = 0) -> bool:
        """Whether a replica takes one more request. `reserve`: leave one of so many slots to others."""
        if self._closed.get(replica_id, now) > now:
            return False
        capacity = self._capacity.get(replica_id, 0)
        return self._in_hand[replica_id] < capacity - (capacity // reserve if reserve else 0)

    def take(self, replica_id: str, request_id: str) -> None:
        self._taken[replica_id, request_id] += 1
        self._in_hand[replica_id] += 1

    def release(self, replica_id: str, request_id: str) -> bool:
        """Give a slot back; False if the request has none. A closed replica stays closed: it may have refused this."""
        taken = self._taken.pop((replica_id, request_id), 0)
        if taken > 1:
            self._taken[replica_id, request_id] = taken - 1
        self._in_hand[replica_id] -= bool(taken)
        return bool(taken)

    def on_report(self, replica_id: str, ongoing: int, now: float) -> float | None:
        """A replica reports its calls of any kind; when to ask it again if it is full, None if it is not."""
        self._ongoing[replica_id] = ongoing
        capacity = self._capacity.get(replica_id, 0)
        if ongoing < capacity:
            self._closed.pop(replica_id, None)
        return self._close(replica_id, now) if ongoing >= capacity + self._control_calls else None

    def on_accept(self, replica_id: str, request_id: str, now: float) -> float | None:
        """The latest report came with the acceptance of this request; as `on_report`.

        If the request has ended meanwhile, the report is as old as the request and says nothing.
        """
        if not self._taken[replica_id, request_id]:
            self._ongoing.pop(replica_id, None)
            return None
        full = self._ongoing.get(replica_id, 0) >= self._capacity.get(replica_id, 0)
        return self._close(replica_id, now) if full else None

    def reported(self, replica_id: str) -> int | None:
        """Calls at a replica: its latest report less what has ended since; None: unknown."""
        return self._ongoing.get(replica_id)

    def on_end(self, replica_id: str) -> None:
        """A call that the replica had reported has ended."""
        self._closed.pop(replica_id, None)
        if replica_id in self._ongoing:
            self._ongoing[replica_id] = max(0, self._ongoing[replica_id] - 1)

    def _close(self, replica_id: str, now: float) -> float:
        self._closed[replica_id] = now + self._closed_s
        return self._closed[replica_id]


class SlotShares:
    """Chooses the line that gets the next slot, by the rule of `engine.order: fair` over the seconds that requests hold
    slots.

    The classes take turns, in each of them the tenants, and in each tenant its programs. All times come from one
    monotonic clock.
    """

    def __init__(self, batch_share: float = BATCH_SHARE) -> None:
        self._classes = Classes(batch_share)
        self._fair = FairShares()
        self._charged: dict[Line, float] = {}  # until when the tenants with slots are charged
        self._classes_charged = 0.0
        self._running: Counter[Priority] = Counter()  # slots
        self._waiting: Counter[Priority] = Counter()  # requests

    def on_arrive(self, key: FairShareKey, now: float) -> Turn:
        """A request begins to wait. Returns its turn among its tenant's requests."""
        alone = not self._waiting[key.priority]
        self._waiting[key.priority] += 1
        return self._arrive(key, now, alone=alone)

    def on_leave(self, key: FairShareKey) -> None:
        """A waiting request left without a slot."""
        self._waiting[key.priority] -= 1
        if key.root:
            self._roots(key.line).on_end(key.root)

    def on_start(self, key: FairShareKey, now: float, turn: Turn | None = None) -> None:
        """A request got a slot: with the turn that it waited with, or None if it did not wait."""
        self._charge_classes(now)
        self._running[key.priority] += 1
        if turn is None:
            turn = self._arrive(key, now, alone=not self._waiting[key.priority])
        else:
            self._waiting[key.priority] -= 1
        if not key.tenant:
            return
        self._charge(key.line, now)
        self._fair.of_class[key.priority].on_start(key.tenant).weight = key.weight
        self._roots(key.line).on_start(turn)
        self._charged[key.line] = now

    def on_end(self, key: FairShareKey, now: float, seconds: float = 0.0) -> None:
        """A request gave its slot back, which it held for `seconds`."""
        self._charge_classes(now)
        self._running[key.priority] -= 1
        if not key.tenant:
            return
        self._charge(key.line, now)
        shares = self._fair.of_class[key.priority]
        shares.on_end(key.tenant)
        if key.root:
            self._roots(key.line).charge(key.root, seconds)
            self._roots(key.line).on_end(key.root)
        if not shares.of(key.tenant).running:
            del self._charged[key.line]

    def first(self, lines: Sequence[Line], now: float) -> Line:
        """The line that gets the next slot. `lines` must not be empty."""
        self._charge_classes(now)
        priority = Priority.BATCH if self._classes.due else Priority.INTERACTIVE
        lines = [line for line in lines if line.priority is priority] or lines
        unshared = next((line for line in lines if line.tenant == UNSHARED.tenant), None)
        if unshared is not None:
            return unshared
        for line in lines:
            self._charge(line, now)
        shares = self._fair.of_class[lines[0].priority]
        return lines[shares.first([line.tenant for line in lines])[0]]

    def crowding(self, waiting: Mapping[Line, int], key: FairShareKey) -> Line | None:
        """The line that has most of a full queue for its weight, more than `key` with one request more; None: none has.

        Any batch line makes room for an interactive request.
        """
        batch = {line: n for line, n in waiting.items() if line.priority is Priority.BATCH}
        if key.priority is Priority.INTERACTIVE and batch:
            return max(batch, key=batch.__getitem__)
        shares = self._fair.of_class[key.priority]
        counts = {
            line: n / shares.of(line.tenant).weight
            for line, n in waiting.items()
            if line.tenant and line.priority is key.priority
        }
        most = max(counts, key=counts.__getitem__, default=None)
        if not key.tenant or most is None or counts[most] <= (waiting.get(key.line, 0) + 1) / key.weight:
            return None
        return most

    def _arrive(self, key: FairShareKey, now: float, *, alone: bool) -> Turn:
        if not key.tenant:
            return (0.0, 0.0)
        for line in list(self._charged):
            self._charge(line, now)
        self._fair.of_class[key.priority].on_arrive(key.tenant, key.weight, alone=alone)
        return self._roots(key.line).on_arrive(key.root) if key.root else (0.0, 0.0)

    def _charge(self, line: Line, now: float) -> None:
        """Charge a tenant for its slots since the last charge."""
        since = self._charged.get(line)
        if since is None or since == now:
            return
        seconds = self._fair.of_class[line.priority].of(line.tenant).running * (now - since)
        self._fair.charge(line.priority, line.tenant, seconds, contended=self._waiting[line.priority] > 0)
        self._charged[line] = now

    def _charge_classes(self, now: float) -> None:
        seconds, self._classes_charged = now - self._classes_charged, now
        batch, slots = self._running[Priority.BATCH], self._running.total()
        batch_waits = batch > 0 or self._waiting[Priority.BATCH] > 0
        part = batch / slots if slots else 0.0
        self._classes.serve(seconds * (1.0 - part) if slots else 0.0, seconds * part, wanted=batch_waits)

    def _roots(self, line: Line) -> Roots:
        return self._fair.roots.use((line.priority, line.tenant))


@dataclass(slots=True, eq=False)
class Place(Generic[T]):
    """A waiting request's place. `home` None: any replica will do."""

    key: Key
    waiter: T
    home: str | None
    line: Line = UNSHARED.line
    n_prompt: int = 0  # tokens
    gone: bool = False


class ReplicaQueues(Generic[T]):
    """The waiting requests: a heap for each home and line, all together bounded.

    Entries are deleted lazily: one step costs O(log n) for each tenant that waits.
    """

    def __init__(self, most: int, most_tokens: int = 1 << 62) -> None:
        self._bounds = Bounds(most, most_tokens)
        self.tokens = 0  # in the prompts of those that wait
        self._tickets = count()  # equal keys are served first in, first out
        self._heaps: dict[str | None, dict[Line, list[tuple[Key, int, Place[T]]]]] = {}  # by home
        self._waiting = 0
        self._counts: Counter[Line] = Counter()

    def __len__(self) -> int:
        return self._waiting

    @property
    def waiting(self) -> Mapping[Line, int]:
        """Requests by line."""
        return self._counts

    def making_room(self, lasts: Iterable[Place[T]], tokens: int) -> list[Place[T]] | None:
        """The places of `lasts` that must leave for a request of `tokens`; None: all of them are not enough."""
        return self._bounds.giving_way(lasts, self._waiting, self.tokens, tokens)

    def enter(self, key: Key, waiter: T, home: str | None, line: Line = UNSHARED.line, tokens: int = 0) -> Place[T]:
        """Raises OverloadedError if the queue is full."""
        if not self._bounds.room(self._waiting, self.tokens, tokens):
            text = f"{self._waiting} requests of {self.tokens} tokens wait for a replica already"
            raise OverloadedError(text)
        place = Place(key, waiter, home, line, tokens)
        self._waiting += 1
        self.tokens += tokens
        self._counts[line] += 1
        self._push(place)
        return place

    def leave(self, place: Place[T]) -> None:
        """The request no longer waits. A second call does nothing."""
        if not place.gone:
            place.gone = True
            self._waiting -= 1
            self.tokens -= place.n_prompt
            self._counts[place.line] -= 1
            if not self._counts[place.line]:
                del self._counts[place.line]

    def lines(self, replica_id: str) -> list[Line]:
        """Lines with a request that a replica could serve."""
        names = {line: None for home in (replica_id, None) for line in list(self._heaps.get(home, ()))}
        return [line for line in names if any(self._heads(replica_id, line))]

    def take(self, replica_id: str, line: Line = UNSHARED.line) -> T | None:
        """Remove and return the line's first request that a replica could serve."""
        heads = list(self._heads(replica_id, line))
        if not heads:
            return None
        place = min(heads)[2]
        self.leave(place)
        return place.waiter

    def lasts(self, line: Line) -> Iterator[Place[T]]:
        """The places of a line, the last one first. Sorts all of them."""
        entries = [entry for lines in self._heaps.values() for entry in lines.get(line, ()) if not entry[2].gone]
        yield from (entry[2] for entry in sorted(entries, reverse=True))

    def keep(self, replica_ids: Iterable[str]) -> None:
        """Set the replicas. Requests that waited for another one wait for any."""
        for home in self._heaps.keys() - set(replica_ids) - {None}:
            for entries in self._heaps.pop(home).values():
                for _, _, place in entries:
                    if not place.gone:
                        place.home = None
                        self._push(place)

    def _push(self, place: Place[T]) -> None:
        entries = self._heaps.setdefault(place.home, {}).setdefault(place.line, [])
        if len(entries) > 2 * self._waiting + _SLACK:
            entries[:] = [entry for entry in entries if not entry[2].gone]
            heapq.heapify(entries)
        heapq.heappush(entries, (place.key, next(self._tickets), place))

    def _heads(self, replica_id: str, line: Line) -> Iterator[tuple[Key, int, Place[T]]]:
        """The first live entry of a line's heap for a replica, and of the one for any replica."""
        for home in (replica_id, None):
            lines = self._heaps.get(home, {})
            entries = lines.get(line)
            while entries and entries[0][2].gone:
                heapq.heappop(entries)
            if entries:
                yield entries[0]
            elif line in lines:
                del lines[line]
                if not lines:
                    del self._heaps[home]


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A waiting request. `slot` gets the replica's id, or None once there is no replica any more."""

    request_id: str
    key: FairShareKey
    turn: Turn
    slot: asyncio.Future[str | None]


class TurnCounter(Protocol):
    """Counts the turns in hand of each replica (`Placement`)."""

    def sent(self, replica_id: str) -> None: ...

    def ended(self, replica_id: str) -> None: ...


class DispatchQueue:
    """Slots of replicas, and the requests that wait for one. Every slot that is taken has to be released."""

    def __init__(
        self,
        max_waiting: int,
        counter: TurnCounter,
        control_calls: int = 0,
        *,
        fair: bool = False,
        max_waiting_tokens: int = 1 << 62,
    ) -> None:
        self._counter = counter
        self._fair = fair
        self.shares = SlotShares()
        self._holders: dict[tuple[str, str], tuple[FairShareKey, float]] = {}  # of slots, and since when
        self._capacity = Capacity(CLOSED_S, control_calls)
        self._queues: ReplicaQueues[Waiter] = ReplicaQueues(max_waiting, max_waiting_tokens)
        self._gap = Mean()  # seconds between two starts while others wait
        self._started: float | None = None  # the latest of these starts

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queues)

    @property
    def tokens(self) -> int:
        """Tokens in the prompts of the requests that wait."""
        return self._queues.tokens

    @property
    def expected_s(self) -> float:
        """Expected wait in seconds of a request at the end of the queue; 0 if none waits or nothing is known yet."""
        return (len(self._queues) + 1) * self._gap.value if len(self._queues) else 0.0

    def take(self, replica_id: str, request_id: str, key: FairShareKey = UNSHARED) -> bool:
        """Take a slot at a replica; False if it has none."""
        if not self._room(replica_id, key.priority):
            return False
        self._start(replica_id, request_id, self._shared(key))
        return True

    def take_any(self, request_id: str, key: FairShareKey = UNSHARED) -> str | None:
        """Take a slot at any replica that has one."""
        return next((each for each in self._capacity.replicas if self.take(each, request_id, key)), None)

    async def wait(
        self,
        order: Key,
        home: str | None,
        request_id: str,
        timeout_s: float,
        key: FairShareKey = UNSHARED,
        tokens: int = 0,
    ) -> str | None:
        """Wait for a slot at `home`, or at any replica. None: none came free in time, or the last replica is gone.

        Raises OverloadedError if the queue is full, or if this request is dropped for one of another tenant or of a
        higher class. No request is dropped for one that would still not fit.
        """
        loop = asyncio.get_running_loop()
        slot: asyncio.Future[str | None] = loop.create_future()
        key = self._shared(key)
        for place in self._queues.making_room(self._droppable(key), tokens) or ():
            self._queues.leave(place)
            self.shares.on_leave(place.waiter.key)
            place.waiter.slot.set_exception(OverloadedError(DROPPED))
        turn = self.shares.on_arrive(key, loop.time())
        try:
            place = self._queues.enter((*turn, *order), Waiter(request_id, key, turn, slot), home, key.line, tokens)
        except OverloadedError:
            self.shares.on_leave(key)
            raise
        self._started = loop.time() if self._started is None else self._started
        try:
            await asyncio.wait({slot}, timeout=max(0.0, timeout_s))
        except asyncio.CancelledError:
            if slot.done() and slot.exception() is None and (replica_id := slot.result()) is not None:
                self.release(replica_id, request_id)
            raise
        finally:
            if not place.gone:
                self._queues.leave(place)
                self.shares.on_leave(key)
            if not len(self._queues):
                self._started = None
        return slot.result() if slot.done() else None

    def release(self, replica_id: str, request_id: str) -> None:
        """A request has ended at a replica, was refused there, or never went there."""
        if self._capacity.release(replica_id, request_id):
            now = asyncio.get_running_loop().time()
            key, since = self._holders.pop((replica_id, request_id), (None, now))
            if key is not None:
                self.shares.on_end(key, now, now - since)
            self._counter.ended(replica_id)
        self._serve(replica_id)

    def on_report(self, replica_id: str, ongoing: int) -> None:
        """A replica reports how many calls it has."""
        self._ask_at(replica_id, self._capacity.on_report(replica_id, ongoing, asyncio.get_running_loop().time()))

    def on_accept(self, replica_id: str, request_id: str) -> int | None:
        """A replica accepted a request, just after `on_report`. Its calls; None if that report is too old to count."""
        self._ask_at(replica_id, self._capacity.on_accept(replica_id, request_id, asyncio.get_running_loop().time()))
        return self._capacity.reported(replica_id)

    def on_end(self, replica_id: str) -> None:
        """A call that a replica reported has ended."""
        self._capacity.on_end(replica_id)
        self._serve(replica_id)

    def update(self, capacity: Mapping[str, int]) -> None:
        """Set the replicas, each with the requests that it takes at once. Without any, nobody waits."""
        self._capacity.update(capacity)
        self._queues.keep(capacity)
        if not capacity:
            while (waiter := self._next("", batch=True)) is not None:
                self.shares.on_leave(waiter.key)
                waiter.slot.set_result(None)
        for replica_id in capacity:
            self._serve(replica_id)

    def _ask_at(self, replica_id: str, at: float | None) -> None:
        if at is None:
            self._serve(replica_id)
        else:
            asyncio.get_running_loop().call_at(at, self._serve, replica_id)

    def _serve(self, replica_id: str) -> None:
        """Give a replica's free slots to waiting requests."""
        now = asyncio.get_running_loop().time()
        while self._room(replica_id, Priority.INTERACTIVE):
            waiter = self._next(replica_id, batch=self._room(replica_id, Priority.BATCH))
            if waiter is None:
                return
            self._start(replica_id, waiter.request_id, waiter.key, waiter.turn)
            waiter.slot.set_result(replica_id)
            if self._started is not None:
                self._gap.add(now - self._started)
            self._started = now if len(self._queues) else None

    def _room(self, replica_id: str, priority: Priority) -> bool:
        reserve = BATCH_RESERVE if priority is Priority.BATCH else 0
        return self._capacity.room(replica_id, asyncio.get_running_loop().time(), reserve)

    def _next(self, replica_id: str, *, batch: bool) -> Waiter | None:
        """Remove and return the first request for a replica; without `batch` the first interactive one."""
        lines = [line for line in self._queues.lines(replica_id) if batch or line.priority is Priority.INTERACTIVE]
        if not lines:
            return None
        return self._queues.take(replica_id, self.shares.first(lines, asyncio.get_running_loop().time()))

    def _droppable(self, key: FairShareKey) -> Iterator[Place[Waiter]]:
        """Requests that a full queue may drop for `key`, in this order."""
        waiting = Counter(self._queues.waiting)
        lasts: dict[Line, Iterator[Place[Waiter]]] = {}
        while (line := self.shares.crowding(waiting, key)) is not None:
            if line not in lasts:
                lasts[line] = self._queues.lasts(line)
            yield next(lasts[line])
            waiting -= Counter((line,))

    def _start(self, replica_id: str, request_id: str, key: FairShareKey, turn: Turn | None = None) -> None:
        self._capacity.take(replica_id, request_id)
        now = asyncio.get_running_loop().time()
        if (replica_id, request_id) not in self._holders:
            self._holders[replica_id, request_id] = key, now
            self.shares.on_start(key, now, turn)
        elif turn is not None:
            self.shares.on_leave(key)
        self._counter.sent(replica_id)

    def _shared(self, key: FairShareKey) -> FairShareKey:
        """The key that a request counts by: its class alone where tenants do not share."""
        return key if self._fair else replace(UNSHARED, priority=key.priority)


@dataclass(slots=True)
class QueueStats:
    """`waiting`, `tokens`, `replicas` and `balance` are current values, the rest are totals."""

    waiting: int = 0
    tokens: int = 0  # in the prompts of the requests that wait
    waits: int = 0  # requests that had to wait; one that waited twice counts once
    home_waits: int = 0  # of these, for their program's home
    wait_s: float = 0.0
    home_wait_s: float = 0.0
    replicas: int = 0
    joined: int = 0
    lost: int = 0
    balance: float = 1.0  # turns in hand of the busiest replica over the mean
    placed: Counter[Reason] = field(default_factory=Counter)  # turns by the reason of their placement

    @classmethod
    def total(cls, stats: Iterable["QueueStats"]) -> "QueueStats":
        """The stats of several routers in one process."""
        rows = list(stats)
        numbers = [each.name for each in fields(cls) if each.name not in ("balance", "placed")]
        return cls(
            **{name: sum(getattr(row, name) for row in rows) for name in numbers},
            balance=max((row.balance for row in rows), default=1.0),
            placed=sum((row.placed for row in rows), Counter[Reason]()),
        )
