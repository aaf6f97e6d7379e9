"""What is pinned for programs between their turns: whose cells are kept until when, and who gives way.

    a turn ends           pinned for a moment, until it is known what the turn called
    what it called        known: pinned for what the policy says, or not at all; where that yields, as long as may be
    the next turn comes   kept past the deadline while it waits; given back as it begins. With its cells it stands
                          before programs without, for as long as the policy says; it stays there if others take them
    others need cells     what yields and is past its time gives way, unless its next turn waits already; then programs
                          behind them in order, first who is away for long, then the latest; where nothing runs, any
    it comes, without     where they yielded it stands with those that have theirs: again for as long as the policy
                          says, and where it was not away for long

`Pins` is the book: at most one pin a program, deadlines, limits. `Retention` decides, as the engine tells it what
happens to programs. Not here: for how long (`policy`), what sessions keep and who keeps a row (`rows`).
"""

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeAlias

from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.events import HandleReleased, Notice, ProgramEnded, ProgramExpected, ToolLatencies, TurnEnded
from holdfast.replicas.kv.cache import Freed, KVCache
from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.retention.latency import LatencySnapshot, tool_set
from holdfast.replicas.retention.policy import Conditions, LoadStats, Pause, policy_of
from holdfast.replicas.retention.rows import Rows, give_back
from holdfast.replicas.sequences import Owner, Sequence
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import Priority

_LOOKED_AT = 16  # pins past their deadline, kept for a turn that waits, that are looked at in one step
_SLACK = 64  # entries of dropped pins that may stay in a heap of any size
_PLACES = 65_536  # programs whose cells gave way that are remembered, the oldest forgotten first

Rank: TypeAlias = tuple[float, ...]


class Waiting(Protocol):
    """What is asked of the queue."""

    def __len__(self) -> int: ...

    def turns_of(self, owner: Owner) -> list[Sequence]:
        """The waiting requests of a program."""
        ...

    def reorder(self, sequence: Sequence) -> None:
        """Whether its program has a pin has changed for a waiting request, and with it maybe its place."""
        ...


class Ranking(Protocol):
    """What is asked of the order: who gives way to whom."""

    by_arrival: bool
    """The rank of a pin is its class and its program's arrival; else it is among pins of one tenant and class alone."""

    def rank(self, sequence: Sequence) -> Rank:
        """Where a sequence that needs cells stands among the pins."""
        ...

    def pin_rank(self, scope: str, arrival: float, priority: Priority = Priority.INTERACTIVE) -> Rank:
        """Where a program's pin stands: it gives way to smaller ones only. The last number is the `arrival`."""
        ...


@dataclass(slots=True, eq=False)
class ProgramPin:
    """What a turn left pinned, or work ahead for a handle, which is the `owner` then.

    `request_id` is the turn, `turn` its number in the program, `since` when it ended. `run_turn` counts from 1 after
    the program's last answer. `arrival` is the program's; `live` until it is dropped. From `lapse` on it is worth less
    than what it holds to whoever is short of that, as far as that was known when it was `paused`; from `away` on its
    next turn is far off. No two pins have one `number`.
    """

    owner: Owner
    program: Owner
    pin: Pin
    arrival: float
    request_id: str
    turn: int
    run_turn: int
    since: float
    deadline: float
    number: int
    priority: Priority = Priority.INTERACTIVE
    live: bool = True
    paused: Pause | None = None
    lapse: float = math.inf
    away: float = math.inf

    @property
    def batch(self) -> bool:
        return self.priority is Priority.BATCH

    @property
    def place(self) -> tuple[float, int]:
        """By arrival, and of those that came at once by who paused later."""
        return self.arrival, -self.number


class Pins:
    """Programs' pins, and the cells they keep: at most one a program, no more than a tenant, or all, may keep.

    Waiting turns of a program know whether it has a pin, or kept its place when that gave way, and stand where the
    order puts them then.
    """

    def __init__(self, config: RetentionConfig, cache: KVCache, waiting: Waiting, *, by_arrival: bool = True) -> None:
        """`by_arrival`: as of `Ranking`."""
        cells = cache.pool.total * cache.page_size
        self._most = int(cells * config.share)
        self._most_of_tenant = int(cells * config.tenant_share)
        self._cache = cache
        self._waiting = waiting
        self._pins: dict[Owner, ProgramPin] = {}
        self._handles: dict[Owner, dict[ProgramPin, None]] = {}  # those of handles, by program
        self._due = _Heap()  # by deadline
        self._by_arrival = by_arrival
        self._numbers = count()
        self._lines: dict[tuple[Priority, str], list[tuple[float, int, ProgramPin]]] = {}  # each by `place`
        self._lapsing = _Heap()  # by when they lapse
        self._overdue: dict[ProgramPin, None] = {}  # past their deadline, for a turn of theirs waits
        self._places: OrderedDict[Owner, float] = OrderedDict()  # of programs whose pins gave way: as of `place`

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[ProgramPin]:
        """Of the pins there are now. Any thread may ask."""
        return iter(list(self._pins.values()))

    def __contains__(self, owner: Owner | None) -> bool:
        return owner in self._pins

    @property
    def cells(self) -> int:
        """Cells that pins keep from being evicted, shared ones counted once."""
        return self._cache.cells.soft_pinned

    def cells_of(self, tenant: str) -> int:
        return self._cache.cells.soft_pinned_of(tenant)

    def place(self, owner: Owner | None) -> float:
        """Until when a turn of a program whose pin gave way stands where it would with that; -inf: it does not."""
        return self._places.get(owner, -math.inf) if owner is not None else -math.inf

    def leave(self, owner: Owner | None) -> None:
        """A program needs no place any more: it runs, or is over."""
        if owner is not None:
            self._places.pop(owner, None)

    def find(self, owner: Owner | None) -> ProgramPin | None:
        return self._pins.get(owner) if owner is not None else None

    def behind(self, to: Rank | None, rank: Callable[[ProgramPin], Rank]) -> Iterator[ProgramPin]:
        """Those of a greater `rank`, an order's, than `to`; None: all. Looks at one more of each line."""
        for line in self._lines.values():
            for *_, pin in reversed(line):
                if to is not None and rank(pin) <= to:
                    break
                yield pin

    def lapses(self, pin: ProgramPin, when: float) -> None:
        """From then on a pin is worth less than what it holds."""
        pin.lapse = when
        self._lapsing.push(when, pin)
        self._lapsing.trim(2 * len(self))

    def lapsed(self, now: float, may: Callable[[ProgramPin], bool] = lambda _: True) -> ProgramPin | None:
        """That which lapsed first, of those that `may` go; None where none has by `now`."""
        passed, found = [], None
        while found is None and (top := self._lapsing.top()) is not None and top[0] <= now:
            when, pin = top
            if pin.lapse != when:
                self._lapsing.pop()  # it was given another time since
            elif not may(pin):
                passed.append(top)
                self._lapsing.pop()
            else:
                found = pin
        for each in passed:
            self._lapsing.push(*each)
        return found

    def add(self, sequence: Sequence, owner: Owner, pin: Pin, now: float, deadline: float) -> int:
        """Enter the `pin` on what `sequence` left in the tree, in place of what its program had pinned before.

        Returns how many pins were dropped because its tenant's, or all, would have kept too much; its own may be
        one of them.
        """
        before = self._pins.get(owner)
        if before is not None:
            self.drop(before)
        submit = sequence.submit
        turn = submit.program_turns + 1
        run_turn = turn - submit.answered_turns
        program = Owner(submit.scope, submit.program_id, session=False)
        each = ProgramPin(
            owner,
            program,
            pin,
            submit.program_arrival,
            submit.request_id,
            turn,
            run_turn,
            now,
            deadline,
            next(self._numbers),
            submit.priority,
        )
        self._pins[owner] = each
        if owner.is_handle:
            self._handles.setdefault(program, {})[each] = None
        self._due.push(deadline, each)
        insort(self._lines.setdefault(self._line(each), []), (*each.place, each))
        self._mark(owner, pinned=True)
        return self._keep_within_limits(owner.scope)

    def awaited(self, pin: ProgramPin) -> bool:
        """Whether a turn of its program waits already."""
        return bool(self._waiting.turns_of(pin.program))

    def lengthen(self, pin: ProgramPin, more: Pin) -> int:
        """A pin keeps what `more` does from now on. Returns how many were dropped, as `add` does."""
        before, pin.pin = pin.pin, more
        give_back(self._cache.unpin, before)
        return self._keep_within_limits(pin.owner.scope)

    def of_handles(self, program: Owner) -> list[ProgramPin]:
        """What is kept for a program under handles."""
        return list(self._handles.get(program, ())) if self._handles else []

    def until(self, pin: ProgramPin, deadline: float) -> None:
        """Give a pin another deadline."""
        pin.deadline = deadline
        self._overdue.pop(pin, None)
        self._due.push(deadline, pin)
        self._due.trim(2 * len(self))

    def drop(self, pin: ProgramPin, *, place: float | None = None) -> None:
        """Give a pin's cells back. `place`: those turns of its program that wait, or come by then, stand where they
        would with the pin.
        """
        del self._pins[pin.owner]
        if pin.owner.is_handle:
            del self._handles[pin.program][pin]
            if not self._handles[pin.program]:
                del self._handles[pin.program]
        pin.live = False
        line = self._lines[self._line(pin)]
        del line[bisect_left(line, pin.place)]
        if not line:
            del self._lines[self._line(pin)]
        self._overdue.pop(pin, None)
        self._due.trim(len(self))
        self._lapsing.trim(len(self))
        give_back(self._cache.unpin, pin.pin)
        if place is None:
            self._mark(pin.owner, pinned=False)
            return
        self._places[pin.owner] = place
        if len(self._places) > _PLACES:
            self._places.popitem(last=False)

    @property
    def due(self) -> float | None:
        """When `expired` may find something next; None: never. What is kept for turns that wait does not count."""
        if self._overdue and not len(self._waiting):  # the turns that they were kept for went away unserved
            return min(pin.deadline for pin in self._overdue)
        while (top := self._due.top()) is not None and top[0] != top[1].deadline:
            self._due.pop()  # it was given another one since
        return top[0] if top is not None else None

    def expired(self, now: float) -> list[ProgramPin]:
        """Those past their deadline of whose program no turn waits, as far as they were looked at. Drops none.

        A pin that was kept for a turn which then went away unserved is found a few steps later: there may be many.
        """
        found: dict[ProgramPin, None] = {}
        for pin in list(self._overdue)[:_LOOKED_AT] if self._overdue else ():
            del self._overdue[pin]
            if self._waiting.turns_of(pin.program):
                self._overdue[pin] = None  # behind the others
            else:
                found[pin] = None
        while (top := self._due.top()) is not None and top[0] <= now:
            self._due.pop()
            deadline, pin = top
            if pin.deadline != deadline or pin in self._overdue or pin in found:
                continue  # it was given another one since, or the same again
            if self._waiting.turns_of(pin.program):
                self._overdue[pin] = None
            else:
                found[pin] = None
        return list(found)

    def _keep_within_limits(self, tenant: str) -> int:
        """Drop pins until the others keep no more than they may, the latest first; not those that others keep whole."""
        before = len(self)
        while self.cells_of(tenant) > min(self._most_of_tenant, self._cache.cells.may_pin(tenant)):
            own = (pin for pin in self if pin.owner.scope == tenant)
            self.drop(max(own, key=lambda pin: (_keeps_alone(pin), pin.arrival)))
        while self.cells > self._most:
            self.drop(max(self, key=lambda pin: (_keeps_alone(pin), pin.batch, pin.arrival)))
        return before - len(self)

    def _line(self, pin: ProgramPin) -> tuple[Priority, str]:
        """Pins whose order among each other never changes."""
        return pin.priority, "" if self._by_arrival else pin.owner.scope

    def _mark(self, owner: Owner, *, pinned: bool) -> None:
        for sequence in self._waiting.turns_of(owner):
            sequence.pinned = pinned
            self._waiting.reorder(sequence)


def _keeps_alone(pin: ProgramPin) -> bool:
    """Whether no other pin keeps some of its cells."""
    return any(node.soft == 1 and node.owned for node in pin.pin.node.path())


class _Heap:
    """Pins by a key; those that were dropped are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ProgramPin]] = []
        self._numbers = count()

    def push(self, key: float, pin: ProgramPin) -> None:
        heapq.heappush(self._heap, (key, next(self._numbers), pin))

    def top(self) -> tuple[float, ProgramPin] | None:
        while self._heap and not self._heap[0][2].live:
            heapq.heappop(self._heap)
        return (self._heap[0][0], self._heap[0][2]) if self._heap else None

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def trim(self, live: int) -> None:
        if len(self._heap) > 2 * live + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapq.heapify(self._heap)


class Retention:
    """Decides what stays pinned, and gives way. `rows` says how many cells idle sessions keep."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        rows: Rows,
        waiting: Waiting,
        ranking: Ranking,
        learned: LoadStats,
        stats: EngineStats,
    ) -> None:
        self.pins = Pins(config.retention, cache, waiting, by_arrival=ranking.by_arrival)
        self._ranking = ranking
        self._config = config.retention
        self._policy = policy_of(config.retention)
        self._active = config.retention.policy != "none" and (config.prefix_cache or config.sessions)
        self._learned = learned
        self._cache = cache
        self._rows = rows
        self._stats = stats
        self._now = 0.0  # of the step, or of what was last heard

    # ---- turns come and go ----

    def arrived(self, sequence: Sequence) -> None:
        """A request comes in, before it is put in the queue."""
        pin = self.pins.find(sequence.owner)
        place = self._first_until(pin, lost=False) if pin is not None else self.pins.place(sequence.owner)
        sequence.pinned = sequence.arrived <= place
        if sequence.owner is not None and not sequence.background:
            self._learned.pauses.ended(sequence.owner, sequence.arrived)
        if sequence.submit.program_turns and self._active and not sequence.background:
            if pin is not None:
                self._stats.pin_hits += 1
                self._learned.returned(pin.pin.length, sequence.arrived)
            else:
                self._stats.pin_misses += 1

    def begins(self, sequence: Sequence, now: float) -> bool:
        """A sequence gets its cells now: its program's pin, if there is one, is given back. Whether there was one.

        Work ahead leaves it where it is, for the turn that is to come.
        """
        if sequence.background:
            return False
        pin = self.pins.find(sequence.owner)
        self.pins.leave(sequence.owner)
        if pin is not None:
            self.pins.drop(pin)
        elif sequence.submit.program_turns and sequence.scheduled is None:
            self._learned.waited(now - sequence.arrived)
        return pin is not None

    def found(self, sequence: Sequence) -> None:
        """A turn has its cached prefix: what was kept under handles, and is a part of that, has done its work."""
        if sequence.owner is not None:
            for pin in self.pins.of_handles(sequence.owner):
                if self._cache.contains(sequence.the_holding, pin.pin):
                    self.pins.drop(pin)

    def wants(self, sequence: Sequence) -> bool:
        """Whether a finished sequence leaves cells that a next turn of its program may come back for."""
        owner, background = sequence.owner, sequence.submit.background
        if background is not None:
            return background.keep_s > 0.0 if background.handle else owner in self.pins
        return owner is not None and not owner.session and self._active and not sequence.submit.program_end

    def paused(self, sequence: Sequence, pin: Pin, now: float) -> None:
        """A program's turn is over, its cells have a `pin`: keep that until it is known what the turn called. What work
        ahead leaves is kept as long as its handle says, or as what it goes on from.
        """
        assert sequence.owner is not None
        background, kept = sequence.submit.background, self.pins.find(sequence.owner)
        if background is not None and not background.handle:
            assert kept is not None, "work ahead leaves a pin only where there is one"
            refused = self.pins.lengthen(kept, pin)
        else:
            keep_s = self._config.settle_s if background is None else background.keep_s
            refused = self.pins.add(sequence, sequence.owner, pin, now, now + keep_s)
        self._stats.pins_refused += refused

    def notice(self, notice: Notice, now: float) -> None:
        """Something about programs that pause. What comes too late is ignored."""
        self.expire(now)
        if isinstance(notice, TurnEnded):
            self._turn_ended(notice)
        elif isinstance(notice, ProgramEnded):
            program = Owner(notice.scope, notice.program_id, session=False)
            self._learned.pauses.forget(program, now)
            self.pins.leave(program)
            pin = self.pins.find(program)
            if pin is not None:
                self._learned.turns.ended(pin.run_turn)
                self.pins.drop(pin)
            for each in self.pins.of_handles(program):
                self.pins.drop(each)
        elif isinstance(notice, ProgramExpected):
            pin = self.pins.find(Owner(notice.scope, notice.program_id, session=False))
            if pin is not None:
                self.pins.until(pin, max(pin.deadline, now + min(notice.seconds, self._config.most_s)))
        elif isinstance(notice, HandleReleased):
            pin = self.pins.find(Owner.handle(notice.scope, notice.handle))
            if pin is not None:
                self.pins.drop(pin)
        elif isinstance(notice, ToolLatencies):
            self._learned.latency = notice.latency

    def _turn_ended(self, ended: TurnEnded) -> None:
        """Keep the turn's cells as long as that is worth it, from its end on.

        The last turn lets go of its program's cells whichever branch left them, unless that was a later turn's.
        """
        if ended.last:
            self._learned.turns.ended(ended.run_turn)
        pin = self.pins.find(Owner(ended.scope, ended.program_id, session=False))
        if pin is None:
            return
        if pin.request_id != ended.request_id and not (ended.last and pin.turn <= ended.turn):
            return
        pin.paused = Pause(ended.scope, tool_set(ended.tools), pin.pin.length, pin.run_turn)
        if not ended.last and not self.pins.awaited(pin):
            self._learned.pauses.began(pin.program, ended.scope, pin.paused.tools, pin.since)
        known = self._known
        ttl = 0.0 if ended.last else self._policy.ttl(pin.paused, *known)
        if self._policy.yielding and not ended.last:
            self._stats.pins += 1
            self.pins.until(pin, pin.since + self._config.most_s)
            self.pins.lapses(pin, pin.since + ttl)
            pin.away = pin.since + self._policy.away(pin.paused, *known)
        elif ttl > 0.0:
            self._stats.pins += 1
            self.pins.until(pin, pin.since + min(ttl, self._config.most_s))
        else:
            self.pins.drop(pin)

    @property
    def _known(self) -> tuple[LatencySnapshot, Conditions]:
        """What the policy may know, as things are now."""
        # What is kept for programs and for idle sessions waits for nobody.
        busy = max(self._cache.cells.active - self._rows.sessions.idle, 0)
        return self._learned.latency, self._learned.conditions(busy, self.pins.cells, self._now)

    # ---- pins come to their end ----

    @property
    def due(self) -> float | None:
        """When `expire` has something to look at next; None: nothing is pinned."""
        return self.pins.due

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over and whose program has no turn waiting."""
        self._now = now
        for pin in self.pins.expired(now):
            self._stats.pins_expired += 1
            self.pins.drop(pin)

    def give_way(
        self, to: Sequence | None, besides: Owner | None = None, whose: Callable[[str], bool] = lambda _: True
    ) -> bool:
        """Drop a pin that has lapsed, if there is one; else one that comes behind `to` in order; None: any.

        `whose`: pins of these tenants alone. False where there is none to drop.
        """
        pin = next(self._giving_way(to, besides, whose), None)
        if pin is not None:
            self.drop((pin,))
        return pin is not None

    def leaving(
        self,
        to: Sequence | None,
        freed: Freed,
        enough: Callable[[Freed], bool],
        besides: Owner | None = None,
        whose: Callable[[str], bool] = lambda _: True,
    ) -> list[ProgramPin] | None:
        """Pins that have to give way, in the order of `give_way`, until what is `freed` is `enough`; None where all of
        them would not be. It could do without none of them. Drops none; those that were looked at count in `freed`.
        """
        chosen: list[ProgramPin] = []
        for pin in () if enough(freed) else self._giving_way(to, besides, whose):
            if pin.pin not in freed:
                chosen.append(pin)
                freed.add(pin.pin)
                if enough(freed):
                    break
        if not enough(freed):
            return None
        for pin in chosen[-2::-1]:  # without the last one it was not enough
            freed.remove(pin.pin)
            if enough(freed):
                chosen.remove(pin)
            else:
                freed.add(pin.pin)
        return chosen

    def drop(self, pins: Iterable[ProgramPin]) -> None:
        """These give way."""
        for pin in pins:
            self._stats.pins_given_way += 1
            keeps_place = self._policy.yielding and not pin.owner.is_handle
            self.pins.drop(pin, place=min(self._first_until(pin, lost=True), pin.away) if keeps_place else None)

    def _giving_way(
        self, to: Sequence | None, besides: Owner | None, whose: Callable[[str], bool]
    ) -> Iterator[ProgramPin]:
        """The pins that may give way, the first one first."""
        told: set[ProgramPin] = set()

        def may(pin: ProgramPin) -> bool:
            return pin not in told and pin.program != besides and whose(pin.owner.scope)

        while (pin := self._lapsed(lambda pin: may(pin) and not self.pins.awaited(pin))) is not None:
            told.add(pin)
            yield pin
        rank = (to.batch, *self._ranking.rank(to)) if to is not None else None
        yield from sorted(filter(may, self.pins.behind(rank, self._rank)), key=self._yields, reverse=True)

    def _first_until(self, pin: ProgramPin, *, lost: bool) -> float:
        """A turn that comes by then stands before those of programs without cells, as things are now. `lost`: as of
        `Policy`.
        """
        if pin.paused is None:
            return math.inf
        return pin.since + self._policy.first_within(pin.paused, self._known[1], lost=lost)

    def makes_room(self, mark: int, to: Sequence) -> bool:
        """Whether fewer than `mark` cells are in use, once pins behind `to` have given way as far as that needs it.

        Where all of those would not be enough, none gives way.
        """
        cells, size = self._cache.cells, self._cache.page_size
        if cells.active >= mark:
            return False
        found = self.leaving(to, Freed(), lambda freed: cells.in_use - freed.total * size < mark)
        self.drop(found or ())
        return found is not None

    def _lapsed(self, may: Callable[[ProgramPin], bool]) -> ProgramPin | None:
        """A pin that has lapsed and, as things are now, would have."""
        while (pin := self.pins.lapsed(self._now, may)) is not None:
            assert pin.paused is not None, "what nobody spoke of does not lapse"
            lapse = pin.since + self._policy.ttl(pin.paused, *self._known)
            if lapse <= self._now:
                return pin
            self.pins.lapses(pin, lapse)
        return None

    def _yields(self, pin: ProgramPin) -> Rank:
        """The greatest gives way first: among pins that differ by arrival alone who has been away longest, or else the
        latest.
        """
        *tenant, arrival = self._rank(pin)
        return (*tenant, 1.0, -pin.away) if pin.away <= self._now else (*tenant, 0.0, arrival)

    def _rank(self, pin: ProgramPin) -> Rank:
        return (pin.batch, *self._ranking.pin_rank(pin.owner.scope, pin.arrival, pin.priority))
