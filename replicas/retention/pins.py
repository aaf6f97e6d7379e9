"""Pins on the cells of programs between their turns: whose cells stay until when, and whose give way.

    a turn ends            its cells are pinned for a moment, until the engine knows what the turn called
    its calls are known    pinned as long as the policy says, or not at all. A yielding policy pins for as long as it
                           may, and marks when the pin lapses
    the next turn waits    the pin stays past its deadline. For as long as the policy says, the turn goes before turns
                           of programs without cells; it keeps that place if others take the cells
    the next turn begins   the pin is given back
    others need cells      lapsed pins give way first, unless the next turn waits already; then pins of programs behind
                           them in order: those away for long first, then the latest. Where nothing runs, any

`Pins` is the index of the pins: deadlines, order, limits. `Retention` decides, as the engine reports what happens to
programs. Not here: for how long (`policy`), the histories of sessions and the rows that programs keep (`programs`).
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Protocol, TypeAlias

from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.kv.cache import Freed, KVCache
from holdfast.replicas.kv.radix import Pin
from holdfast.replicas.programs import Kind, Program, ProgramKey, ProgramPin, Programs, Rows, Sequence, give_back
from holdfast.replicas.requests import Notice, ProgramEnded, ProgramExpected, ToolLatencies, TurnEnded
from holdfast.replicas.retention.latency import LatencySnapshot, tool_set
from holdfast.replicas.retention.policy import Conditions, LoadStats, Pause, retention_policy
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import Priority

_LOOKED_AT = 16  # pins past their deadline whose turn waits that are checked in one step
_SLACK = 64  # entries of dropped pins that may stay in a heap of any size
SETTLE_S = 1.0  # how long the cells of a turn are kept until its tools are known: far longer than a report takes

Rank: TypeAlias = tuple[float, ...]


class Queue(Protocol):
    """What pins ask of the queue."""

    def __len__(self) -> int: ...

    def reorder(self, sequence: Sequence) -> None:
        """The program of a waiting request got or lost its pin, so the request's place may change."""
        ...


class Ranking(Protocol):
    """What retention asks of the order: whose pins give way to whom."""

    by_arrival: bool
    """Whether arrival orders all pins of a class; else only those of one class and tenant."""

    def rank(self, sequence: Sequence) -> Rank:
        """The rank of a sequence that needs cells among the pins."""
        ...

    def pin_rank(self, scope: str, arrival: float, priority: Priority = Priority.INTERACTIVE) -> Rank:
        """The rank of a program's pin: it gives way to smaller ranks only. The last number is the `arrival`."""
        ...


class Pins:
    """All pins, at most one of each program, within the limits on the cells of a tenant and of all.

    Waiting turns of a program know whether it has a pin, or kept its place when that gave way; the order places them by
    that. `by_arrival`: as of `Ranking`.
    """

    def __init__(self, config: RetentionConfig, cache: KVCache, queue: Queue, *, by_arrival: bool = True) -> None:
        cells = cache.pool.total * cache.page_size
        self._most = int(cells * config.share)
        self._most_of_tenant = int(cells * config.tenant_share)
        self._cache = cache
        self._queue = queue
        self._n = 0
        self._due = _Heap()  # by deadline
        self._by_arrival = by_arrival
        self._numbers = count()
        self._lines: dict[tuple[Priority, str], list[tuple[float, int, ProgramPin]]] = {}  # each by `place`
        self._lapsing = _Heap()  # by when they lapse
        self._overdue: dict[ProgramPin, None] = {}  # past their deadline, for a turn of theirs waits

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[ProgramPin]:
        """The pins there are now. Any thread may ask."""
        return iter([pin for line in list(self._lines.values()) for *_, pin in line.copy()])

    @property
    def cells(self) -> int:
        """Cells that pins keep from being evicted, shared ones counted once."""
        return self._cache.cells.soft_pinned

    def cells_of(self, tenant: str) -> int:
        return self._cache.cells.soft_pinned_of(tenant)

    def behind(self, to: Rank | None, rank: Callable[[ProgramPin], Rank]) -> Iterator[ProgramPin]:
        """Pins of a greater `rank` than `to`; None: all. Looks at one more of each line."""
        for line in self._lines.values():
            for *_, pin in reversed(line):
                if to is not None and rank(pin) <= to:
                    break
                yield pin

    def lapses(self, pin: ProgramPin, when: float) -> None:
        """From `when` on a pin is worth less than the cells that it holds."""
        pin.lapse = when
        self._lapsing.push(when, pin)
        self._lapsing.trim(2 * len(self))

    def lapsed(self, now: float, may: Callable[[ProgramPin], bool] = lambda _: True) -> ProgramPin | None:
        """The pin that lapsed first, of those that `may` go; None: none has lapsed by `now`."""
        passed, found = [], None
        while found is None and (top := self._lapsing.top()) is not None and top[0] <= now:
            when, pin = top
            if pin.lapse != when:
                self._lapsing.pop()  # it lapses at another time now
            elif not may(pin):
                passed.append(top)
                self._lapsing.pop()
            else:
                found = pin
        for each in passed:
            self._lapsing.push(*each)
        return found

    def add(self, sequence: Sequence, pin: Pin, now: float, deadline: float) -> int:
        """Enter the `pin` on what `sequence` left in the tree, in place of what its program had pinned before.

        Returns how many pins were dropped because its tenant's, or all, would have kept too much; its own may be
        one of them.
        """
        program, target, submit = sequence.program, sequence.target, sequence.submit
        assert program is not None, sequence.request_id
        assert target is not None, sequence.request_id
        if program.pin is not None:
            self.drop(program.pin)
        turn = submit.program_turns + 1
        run_turn, arrival, number = turn - submit.answered_turns, submit.program_arrival, next(self._numbers)
        program.pin = each = ProgramPin(
            program, target, pin, arrival, submit.request_id, turn, run_turn, now, deadline, number, submit.priority
        )
        self._n += 1
        if target is not program:
            target.handles.append(program)
        self._due.push(deadline, each)
        insort(self._lines.setdefault(self._line(each), []), (*each.place, each))
        self._mark(program, pinned=True)
        return self._keep_within_limits(each.scope)

    def until(self, pin: ProgramPin, deadline: float) -> None:
        """Give a pin another deadline."""
        pin.deadline = deadline
        self._overdue.pop(pin, None)
        self._due.push(deadline, pin)
        self._due.trim(2 * len(self))

    def drop(self, pin: ProgramPin, *, place: float | None = None) -> None:
        """Give a pin's cells back. `place`: turns of its program that wait, or arrive until then, keep their place."""
        program, pin.live = pin.program, False
        program.pin = None
        self._n -= 1
        if pin.target is not program:
            pin.target.handles.remove(program)
        line = self._lines[self._line(pin)]
        del line[bisect_left(line, pin.place)]
        if not line:
            del self._lines[self._line(pin)]
        self._overdue.pop(pin, None)
        self._due.trim(len(self))
        self._lapsing.trim(len(self))
        give_back(self._cache.unpin, pin.pin)
        if place is None:
            self._mark(program, pinned=False)
        else:
            program.first_until = place

    @property
    def due(self) -> float | None:
        """When `expired` may find a pin next; None: never. Pins kept for turns that wait do not count."""
        if self._overdue and not len(self._queue):  # the turns that they were kept for were aborted
            return min(pin.deadline for pin in self._overdue)
        while (top := self._due.top()) is not None and top[0] != top[1].deadline:
            self._due.pop()  # it has another deadline now
        return top[0] if top is not None else None

    def expired(self, now: float) -> list[ProgramPin]:
        """Pins past their deadline whose program has no waiting turn. Drops none.

        A pin kept for a turn that was then aborted is found a few steps later: a step checks a bounded number.
        """
        found: dict[ProgramPin, None] = {}
        for pin in list(self._overdue)[:_LOOKED_AT] if self._overdue else ():
            del self._overdue[pin]
            if pin.awaited:
                self._overdue[pin] = None  # behind the others
            else:
                found[pin] = None
        while (top := self._due.top()) is not None and top[0] <= now:
            self._due.pop()
            deadline, pin = top
            if pin.deadline != deadline or pin in self._overdue or pin in found:
                continue  # it has another deadline now, or the same again
            if pin.awaited:
                self._overdue[pin] = None
            else:
                found[pin] = None
        return list(found)

    def _keep_within_limits(self, tenant: str) -> int:
        """Drop pins until the rest is within the limits: the latest first, those whose cells no other pin keeps."""
        before = len(self)
        while self.cells_of(tenant) > min(self._most_of_tenant, self._cache.cells.may_pin(tenant)):
            own = (pin for pin in self if pin.scope == tenant)
            self.drop(max(own, key=lambda pin: (_keeps_alone(pin), pin.arrival, -pin.number)))
        while self.cells > self._most:
            self.drop(max(self, key=lambda pin: (_keeps_alone(pin), pin.batch, pin.arrival, -pin.number)))
        return before - len(self)

    def _line(self, pin: ProgramPin) -> tuple[Priority, str]:
        """Pins of one line never change their order."""
        return pin.priority, "" if self._by_arrival else pin.scope

    def _mark(self, program: Program, *, pinned: bool) -> None:
        for sequence in program.waiting:
            sequence.pinned = pinned
            self._queue.reorder(sequence)


def _keeps_alone(pin: ProgramPin) -> bool:
    """Whether some of its cells are kept by no other pin."""
    return any(node.soft == 1 and node.owned for node in pin.pin.node.path())


class _Heap:
    """A heap of pins by a key; skips dropped pins."""

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
    """Decides which cells stay pinned for programs between their turns, and which give way."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        programs: Programs,
        rows: Rows,
        queue: Queue,
        ranking: Ranking,
        load: LoadStats,
        stats: EngineStats,
    ) -> None:
        self.pins = Pins(config.retention, cache, queue, by_arrival=ranking.by_arrival)
        self._ranking = ranking
        self._config = config.retention
        self._policy = retention_policy(config.retention.policy)
        self._active = config.retention.policy != "none" and (config.has("prefix_cache") or config.has("sessions"))
        self._load = load
        self._cache = cache
        self._programs = programs
        self._rows = rows
        self._stats = stats
        self._now = 0.0  # of the step, or of what was last heard

    # ---- turns come and go ----

    def arrived(self, sequence: Sequence) -> None:
        """A request comes in, before it is put in the queue."""
        program = sequence.program
        pin = program.pin if program is not None else None
        if pin is not None:
            sequence.pinned = sequence.arrived <= self._first_until(pin, lost=False)
        elif program is not None:
            sequence.pinned = sequence.arrived <= program.first_until
        if sequence.background:
            return
        if program is not None:
            self._end_pause(program, sequence.arrived, returned=True)
        if sequence.submit.program_turns and self._active:
            if pin is not None:
                self._stats.pin_hits += 1
                self._load.returned(pin.pin.length, sequence.arrived)
            else:
                self._stats.pin_misses += 1

    def begins(self, sequence: Sequence, now: float) -> bool:
        """A sequence gets its cells now: its program's pin, if there is one, is given back. Whether there was one.

        A prefill ahead of a turn leaves it where it is, for that turn.
        """
        program = sequence.program
        if sequence.background:
            return False
        pin = program.pin if program is not None else None
        if program is not None:
            program.first_until = -math.inf
        if pin is not None:
            self.pins.drop(pin)
        elif sequence.submit.program_turns and sequence.scheduled is None:
            self._load.waited(now - sequence.arrived)
        return pin is not None

    def found(self, sequence: Sequence) -> None:
        """A turn has its cached prefix: handles whose cells are a part of that are not needed any more."""
        for handle in list(sequence.program.handles) if sequence.program is not None else ():
            if handle.pin is not None and self._cache.contains(sequence.the_holding, handle.pin.pin):
                self.pins.drop(handle.pin)

    def wants(self, sequence: Sequence) -> bool:
        """Whether a finished sequence leaves cells that a next turn of its program may come back for."""
        program, background = sequence.program, sequence.submit.background
        if program is None or program.key.kind is Kind.SESSION:
            return False
        if background is not None:
            return background.keep_s > 0.0
        return self._active and not sequence.submit.program_end

    def paused(self, sequence: Sequence, pin: Pin, now: float) -> None:
        """A turn is over and its cells have a `pin`: keep it until it is known what the turn called. Cells of a handle
        are kept as long as the client said.
        """
        background = sequence.submit.background
        keep_s = SETTLE_S if background is None else background.keep_s
        self._stats.pins_refused += self.pins.add(sequence, pin, now, now + keep_s)

    def notice(self, notice: Notice, now: float) -> None:
        """Something about programs that pause. What comes too late is ignored."""
        self.expire(now)
        if isinstance(notice, ToolLatencies):
            self._load.latency = notice.latency
            return
        if isinstance(notice, TurnEnded) and notice.last:
            self._load.turns.ended(notice.run_turn)
        key = ProgramKey.noticed(notice)
        program = self._programs.find(key) if key is not None else None
        if program is None:
            return
        pin = program.pin
        if isinstance(notice, TurnEnded):
            if pin is not None:
                self._turn_ended(notice, pin)
        elif isinstance(notice, ProgramExpected):
            if pin is not None:
                self.pins.until(pin, max(pin.deadline, now + min(notice.seconds, self._config.most_s)))
        else:
            self._end_pause(program, now, returned=False)
            program.first_until = -math.inf
            if pin is not None:
                if isinstance(notice, ProgramEnded):
                    self._load.turns.ended(pin.run_turn)
                self.pins.drop(pin)
            for handle in list(program.handles):
                if handle.pin is not None:
                    self.pins.drop(handle.pin)

    def _end_pause(self, program: Program, now: float, *, returned: bool) -> None:
        if program.pause is not None:
            self._load.pauses.ended(program.pause, now, returned=returned)
            program.pause = None

    def _turn_ended(self, ended: TurnEnded, pin: ProgramPin) -> None:
        """Keep the turn's cells as long as that is worth it, from its end on.

        The last turn lets go of its program's cells whichever branch left them, unless that was a later turn's.
        """
        if pin.request_id != ended.request_id and not (ended.last and pin.turn <= ended.turn):
            return
        pin.paused = Pause(ended.scope, tool_set(ended.tools), pin.pin.length, pin.run_turn)
        if ended.last:
            self.pins.drop(pin)
            return
        if not pin.awaited:
            self._end_pause(pin.program, pin.since, returned=False)
            pin.program.pause = self._load.pauses.began(ended.scope, pin.paused.tools, pin.since)
        known = self._known
        ttl = self._policy.ttl(pin.paused, *known)
        if self._policy.yielding:
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
        """The present state, as the policy sees it."""
        # Cells kept for programs and for idle sessions belong to no running sequence.
        busy = max(self._cache.cells.active - self._rows.idle_session_cells, 0)
        return self._load.latency, self._load.conditions(busy, self.pins.cells, self._now)

    # ---- pins come to their end ----

    @property
    def due(self) -> float | None:
        """When `expire` has something to do next; None: there is no pin."""
        return self.pins.due

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over and whose program has no turn waiting."""
        self._now = now
        for pin in self.pins.expired(now):
            self._stats.pins_expired += 1
            self.pins.drop(pin)

    def drop_next(
        self, to: Sequence | None, besides: Program | None = None, whose: Callable[[str], bool] = lambda _: True
    ) -> bool:
        """Drop a lapsed pin; if there is none, the last one behind `to` in order, None: of all. Returns whether it did.

        `whose`: only pins of these tenants.
        """
        pin = next(self._giving_way(to, besides, whose), None)
        if pin is not None:
            self.drop((pin,))
        return pin is not None

    def pins_to_drop(
        self,
        to: Sequence | None,
        freed: Freed,
        enough: Callable[[Freed], bool],
        besides: Program | None = None,
        whose: Callable[[str], bool] = lambda _: True,
    ) -> list[ProgramPin] | None:
        """The pins to drop, in the order of `drop_next`, until `freed` is `enough`; None: all pins would not be.

        Each of them is needed. Drops none; pins that were considered count in `freed`.
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
        for pin in chosen[-2::-1]:  # without the last pin it was not enough
            freed.remove(pin.pin)
            if enough(freed):
                chosen.remove(pin)
            else:
                freed.add(pin.pin)
        return chosen

    def drop(self, pins: Iterable[ProgramPin]) -> None:
        """Drop pins whose cells others need."""
        for pin in pins:
            self._stats.pins_given_way += 1
            keeps_place = self._policy.yielding and pin.target is pin.program
            self.pins.drop(pin, place=min(self._first_until(pin, lost=True), pin.away) if keeps_place else None)

    def _giving_way(
        self, to: Sequence | None, besides: Program | None, whose: Callable[[str], bool]
    ) -> Iterator[ProgramPin]:
        """The pins that may be dropped, in order."""
        told: set[ProgramPin] = set()

        def may(pin: ProgramPin) -> bool:
            return pin not in told and pin.target is not besides and whose(pin.scope)

        while (pin := self._lapsed(lambda pin: may(pin) and not pin.awaited)) is not None:
            told.add(pin)
            yield pin
        rank = (to.batch, *self._ranking.rank(to)) if to is not None else None
        yield from sorted(filter(may, self.pins.behind(rank, self._rank)), key=self._yields, reverse=True)

    def _first_until(self, pin: ProgramPin, *, lost: bool) -> float:
        """Until when an arriving turn goes before turns of programs without cells. `lost`: its cells are gone."""
        if pin.paused is None:
            return math.inf
        return pin.since + self._policy.first_within(pin.paused, self._known[1], lost=lost)

    def make_room_below(self, mark: int, to: Sequence) -> bool:
        """Whether fewer than `mark` cells are in use, after dropping pins behind `to` as far as needed.

        If all of those pins would not be enough, none is dropped.
        """
        cells, size = self._cache.cells, self._cache.page_size
        if cells.active >= mark:
            return False
        found = self.pins_to_drop(to, Freed(), lambda freed: cells.in_use - freed.total * size < mark)
        self.drop(found or ())
        return found is not None

    def _lapsed(self, may: Callable[[ProgramPin], bool]) -> ProgramPin | None:
        """A pin that has lapsed, and by the present state would lapse."""
        while (pin := self.pins.lapsed(self._now, may)) is not None:
            assert pin.paused is not None, "a pin lapses only after its turn has ended"
            lapse = pin.since + self._policy.ttl(pin.paused, *self._known)
            if lapse <= self._now:
                return pin
            self.pins.lapses(pin, lapse)
        return None

    def _yields(self, pin: ProgramPin) -> Rank:
        """The greatest is dropped first: of pins that differ by arrival alone the longest away, or else the latest."""
        *tenant, arrival = self._rank(pin)
        return (*tenant, 1.0, -pin.away) if pin.away <= self._now else (*tenant, 0.0, arrival)

    def _rank(self, pin: ProgramPin) -> Rank:
        return (pin.batch, *self._ranking.pin_rank(pin.scope, pin.arrival, pin.priority))
