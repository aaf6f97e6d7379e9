"""Pins on the cells of programs between their turns: how long cells stay, and which give way first.

    a turn ends            its cells are pinned for a moment, until the engine knows what the turn called
    its calls are known    pinned as long as the policy says, or not at all. A yielding policy pins for as long as it
                           may, and marks when the pin lapses
    the next turn waits    the pin stays past its deadline. For as long as the policy says, the turn goes before turns
                           of programs without cells; it keeps that place if others take the cells
    the next turn begins   the pin is given back
    others need cells      lapsed pins give way first, unless the next turn waits already; then pins of programs behind
                           them in order: those away for long first, then the latest. Where nothing runs, any

`Pins` is the index of the pins: deadlines, order, limits. `Retention` decides, as the engine reports what happens to
programs. Not here: for how long (`retention/policy`), sessions' histories and the rows that programs keep (`programs`).
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.kv.cache import Freed, KVCache
from holdfast.replicas.kv.radix import Pin
from holdfast.replicas.programs import Kind, Program, ProgramKey, ProgramPin, Programs, Rows, Sequence, give_back
from holdfast.replicas.requests import Notice, ToolLatencies, TurnEnded
from holdfast.replicas.retention.latency import LatencySnapshot, tool_set
from holdfast.replicas.retention.policy import Conditions, LoadStats, Pause, retention_policy
from holdfast.replicas.scheduling.queue import Key, RequestOrder, WaitingQueue
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import Priority

T = TypeVar("T")

SETTLE_S = 1.0  # how long the cells of a turn are kept until its tools are known: far longer than a report takes


class Sorted(Generic[T]):
    """Values by their keys of equal length, the smallest first; equal keys in the order in which they were put.

    An operation costs a binary search, and moves the references behind the place.
    """

    __slots__ = ("_entries", "_keys", "_numbers")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, ...]] = []  # the numbers of its key, that of the operation, the value
        self._keys: dict[T, Key] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """The present values. Any thread may iterate."""
        return (entry[-1] for entry in self._entries.copy())

    def __reversed__(self) -> Iterator[T]:
        return (entry[-1] for entry in reversed(self._entries))

    def up_to(self, key: Key) -> list[T]:
        """The values of the smallest keys, `key` included."""
        return [entry[-1] for entry in self._entries[: bisect_left(self._entries, (*key, math.inf))]]

    def put(self, value: T, key: Key) -> None:
        """Enter a value, or give it another key."""
        self.discard(value)
        self._keys[value] = place = *key, next(self._numbers)
        insort(self._entries, (*place, value))

    def discard(self, value: T) -> None:
        place = self._keys.pop(value, None)
        if place is not None:
            del self._entries[bisect_left(self._entries, place)]


class Pins:
    """All pins, at most one of each program, within the limits on the cells of a tenant and of all.

    A program's waiting turns know whether it has a pin, or kept its place without one. The order sorts them by that.
    """

    def __init__(self, config: RetentionConfig, cache: KVCache, queue: WaitingQueue) -> None:
        cells = cache.pool.total * cache.page_size
        self._most = int(cells * config.share)
        self._most_of_tenant = int(cells * config.tenant_share)
        self._cache = cache
        self._queue = queue
        self._numbers = count()
        self._due: Sorted[ProgramPin] = Sorted()  # all, by deadline
        self._looked_at = -math.inf  # time of the last call of `expired`
        self._lapsing: Sorted[ProgramPin] = Sorted()  # by when they lapse
        self._ranked: dict[tuple[Priority, str], Sorted[ProgramPin]] = {}  # by class and tenant, each by `place`

    def __len__(self) -> int:
        return len(self._due)

    def __iter__(self) -> Iterator[ProgramPin]:
        """The present pins. Any thread may iterate."""
        return iter(self._due)

    @property
    def cells(self) -> int:
        """Cells that pins keep from being evicted, shared ones counted once."""
        return self._cache.cells.soft_pinned

    def cells_of(self, tenant: str) -> int:
        return self._cache.cells.soft_pinned_of(tenant)

    @property
    def due(self) -> float | None:
        """The time of the next deadline; None: there is none. Pins kept for waiting turns do not count."""
        return next((pin.deadline for pin in self._due if pin.deadline > self._looked_at or not pin.awaited), None)

    def expired(self, now: float) -> list[ProgramPin]:
        """Pins past their deadline whose program has no waiting turn. Drops none."""
        self._looked_at = now
        return [pin for pin in self._due.up_to((now,)) if not pin.awaited]

    def lapsed(self, now: float) -> list[ProgramPin]:
        """Pins that have lapsed, the first one first."""
        return self._lapsing.up_to((now,))

    def behind(self, to: Key | None, rank: Callable[[ProgramPin], Key]) -> Iterator[ProgramPin]:
        """Pins of a greater `rank` than `to`; None: all. Looks at one more of each class and tenant."""
        for ranked in self._ranked.values():
            for pin in reversed(ranked):
                if to is not None and rank(pin) <= to:
                    break
                yield pin

    def add(self, sequence: Sequence, pin: Pin, now: float, deadline: float) -> int:
        """Enter the `pin` on what `sequence` left in the tree, in place of what its program had pinned before.

        Returns how many pins were dropped to stay within the limits of its tenant and of all. Its own may be one.
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
        if target is not program:
            target.handles.append(program)
        self._due.put(each, (deadline,))
        self._ranked.setdefault((each.priority, each.scope), Sorted()).put(each, each.place)
        self._mark(program, pinned=True)
        return self._keep_within_limits(each.scope)

    def until(self, pin: ProgramPin, deadline: float) -> None:
        """Give a pin another deadline."""
        pin.deadline = deadline
        self._due.put(pin, (deadline,))

    def lapses(self, pin: ProgramPin, time: float) -> None:
        """Set the `time` from which a pin is worth less than the cells that it holds."""
        pin.lapse = time
        self._lapsing.put(pin, (time,))

    def drop(self, pin: ProgramPin, *, place: float | None = None) -> None:
        """Give a pin's cells back. `place`: turns of its program that arrive up to this time keep their place."""
        program, group = pin.program, (pin.priority, pin.scope)
        program.pin = None
        if pin.target is not program:
            pin.target.handles.remove(program)
        for pins in (self._due, self._lapsing, self._ranked[group]):
            pins.discard(pin)
        if not self._ranked[group]:
            del self._ranked[group]
        give_back(self._cache.unpin, pin.pin)
        if place is None:
            self._mark(program, pinned=False)
        else:
            program.first_until = place

    def _keep_within_limits(self, tenant: str) -> int:
        """Drop pins until the rest is within the limits, the latest first of those whose cells no other pin keeps."""
        before = len(self)
        while self.cells_of(tenant) > min(self._most_of_tenant, self._cache.cells.may_pin(tenant)):
            own = (pin for pin in self if pin.scope == tenant)
            self.drop(max(own, key=lambda pin: (_keeps_alone(pin), *pin.place)))
        while self.cells > self._most:
            self.drop(max(self, key=lambda pin: (_keeps_alone(pin), pin.batch, *pin.place)))
        return before - len(self)

    def _mark(self, program: Program, *, pinned: bool) -> None:
        for sequence in program.waiting:
            sequence.pinned = pinned
            self._queue.reorder(sequence)


def _keeps_alone(pin: ProgramPin) -> bool:
    """Whether no other pin keeps some of its cells."""
    return any(node.soft == 1 and node.owned for node in pin.pin.node.path())


def _end_pause(program: Program, now: float, *, returned: bool) -> None:
    if program.pause is not None:
        program.pause.end(now, returned=returned)
        program.pause = None


class Retention:
    """Decides which cells stay pinned for programs between their turns, and which give way."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        programs: Programs,
        rows: Rows,
        queue: WaitingQueue,
        order: RequestOrder,
        load: LoadStats,
        stats: EngineStats,
    ) -> None:
        self.pins = Pins(config.retention, cache, queue)
        self._order = order
        self._most_s = config.retention.most_s
        # Cells and checkpoints share the memory so that they run short together: one is worth this many cells.
        self._state_cells = config.cells // config.state_slots if config.state_slots else 0
        if cache.windows is not None:
            self._state_cells = config.cells * cache.windows.window // config.window_cells
        self._policy = retention_policy(config.retention.policy)
        self._active = config.retention.policy != "none" and (config.has("prefix_cache") or config.has("sessions"))
        self._load = load
        self._cache = cache
        self._programs = programs
        self._rows = rows
        self._stats = stats
        self._now = 0.0  # time of the latest step or notice

    # ---- turns come and go ----

    def arrived(self, sequence: Sequence) -> None:
        """A request has arrived and is not in the queue yet."""
        program = sequence.program
        if program is None:
            return
        pin = program.pin
        until = self._first_until(pin, lost=False) if pin is not None else program.first_until
        sequence.pinned = sequence.arrived <= until
        if sequence.background:
            return
        _end_pause(program, sequence.arrived, returned=True)
        if sequence.submit.program_turns and self._active:
            if pin is not None:
                self._stats.pin_hits += 1
                self._load.returned(pin.pin.length, sequence.arrived)
            else:
                self._stats.pin_misses += 1

    def begins(self, sequence: Sequence, now: float) -> bool:
        """A sequence gets its cells: give back its program's pin. Returns whether there was one.

        A background prefill leaves the pin for the turn that it prepares.
        """
        if sequence.background:
            return False
        program = sequence.program
        pin = program.pin if program is not None else None
        if program is not None:
            program.first_until = -math.inf
        if pin is not None:
            self.pins.drop(pin)
        elif sequence.submit.program_turns and sequence.scheduled is None:
            self._load.waited(now - sequence.arrived)
        return pin is not None

    def found(self, sequence: Sequence) -> None:
        """A turn has its cached prefix: drop the pins of handles whose cells are a part of it."""
        for handle in sequence.program.handles.copy() if sequence.program is not None else ():
            if handle.pin is not None and sequence.the_holding.contains(handle.pin.pin):
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
        """A turn is over: keep the `pin` on its cells until its tool calls are known, a handle's as long as its client
        requested.
        """
        background = sequence.submit.background
        keep_s = SETTLE_S if background is None else background.keep_s
        self._stats.pins_refused += self.pins.add(sequence, pin, now, now + keep_s)

    def notice(self, notice: Notice, now: float) -> None:
        """Take in a notice about a paused program. Late notices have no effect."""
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
        else:  # the program has ended, or the handle is released
            _end_pause(program, now, returned=False)
            program.first_until = -math.inf
            if pin is not None and program.key.kind is Kind.PROGRAM:
                self._load.turns.ended(pin.run_turn)
            for each in (program, *program.handles):
                if each.pin is not None:
                    self.pins.drop(each.pin)

    def _turn_ended(self, ended: TurnEnded, pin: ProgramPin) -> None:
        """Keep the turn's cells as long as that pays, from its end on.

        The last turn drops its program's pin, whichever branch left it, unless a later turn did.
        """
        if pin.request_id != ended.request_id and not (ended.last and pin.turn <= ended.turn):
            return
        pause = pin.paused = Pause(ended.scope, tool_set(ended.tools), pin.pin.length, pin.run_turn, self._state_cells)
        if ended.last:
            self.pins.drop(pin)
            return
        if not pin.awaited:
            _end_pause(pin.program, pin.since, returned=False)
            pin.program.pause = self._load.pauses.began(pause.tenant, pause.tools, pin.since)
        known = self._known
        ttl = self._policy.ttl(pause, *known)
        if not self._policy.yielding and ttl <= 0.0:
            self.pins.drop(pin)
            return
        self._stats.pins += 1
        self.pins.until(pin, pin.since + (self._most_s if self._policy.yielding else min(ttl, self._most_s)))
        if self._policy.yielding:
            self.pins.lapses(pin, pin.since + ttl)
            pin.away = pin.since + self._policy.away(pause, *known)

    @property
    def _known(self) -> tuple[LatencySnapshot, Conditions]:
        """The present state, as the policy sees it."""
        # Cells kept for programs and for idle sessions belong to no running sequence.
        busy = max(self._cache.cells.active - self._rows.idle_session_cells, 0)
        return self._load.latency, self._load.conditions(busy, self.pins.cells, self._now)

    # ---- pins come to their end ----

    @property
    def due(self) -> float | None:
        """The time at which `expire` next drops a pin; None: there is no pin."""
        return self.pins.due

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over and whose program has no turn waiting."""
        self._now = now
        for pin in self.pins.expired(now):
            self._stats.pins_expired += 1
            self.pins.drop(pin)

    def drop_next(
        self, to: Sequence | None, besides: Program | None = None, of_tenants: Callable[[str], bool] = lambda _: True
    ) -> bool:
        """Drop a lapsed pin, or else the last one behind `to` in order (None: of all). False: there is none.

        `of_tenants`: only pins of these tenants.
        """
        pin = next(self._giving_way(to, besides, of_tenants), None)
        if pin is not None:
            self.drop((pin,))
        return pin is not None

    def pins_to_drop(
        self,
        to: Sequence | None,
        freed: Freed,
        enough: Callable[[Freed], bool],
        besides: Program | None = None,
        of_tenants: Callable[[str], bool] = lambda _: True,
    ) -> list[ProgramPin] | None:
        """The pins to drop, in the order of `drop_next`, until `freed` is `enough`. None: all pins are not enough.

        Returns no pin that is not needed. Drops none; the chosen pins count in `freed`.
        """
        chosen: list[ProgramPin] = []
        giving_way = self._giving_way(to, besides, of_tenants)
        while not enough(freed):
            pin = next(giving_way, None)
            if pin is None:
                return None
            if pin.pin not in freed:
                chosen.append(pin)
                freed.add(pin.pin)
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

    def make_room_below(self, mark: int, to: Sequence) -> bool:
        """Whether fewer than `mark` cells are in use, after dropping pins behind `to` as far as needed.

        If all of those pins would not be enough, none is dropped.
        """
        cells, size = self._cache.cells, self._cache.page_size
        if cells.active >= mark:
            return False
        pins = self.pins_to_drop(to, Freed(), lambda freed: cells.in_use - freed.total * size < mark)
        self.drop(pins or ())
        return pins is not None

    def _giving_way(
        self, to: Sequence | None, besides: Program | None, of_tenants: Callable[[str], bool]
    ) -> Iterator[ProgramPin]:
        """The pins that may be dropped, in order."""
        lapsed = set()
        for pin in self.pins.lapsed(self._now):
            if pin.awaited or pin.target is besides or not of_tenants(pin.scope):
                continue
            assert pin.paused is not None, "a pin lapses only after its turn has ended"
            lapse = pin.since + self._policy.ttl(pin.paused, *self._known)
            if lapse <= self._now:
                lapsed.add(pin)
                yield pin
            else:  # under the present load it is worth its cells again
                self.pins.lapses(pin, lapse)
        rank = (to.batch, *self._order.rank(to)) if to is not None else None
        behind = [
            pin
            for pin in self.pins.behind(rank, self._rank)
            if pin not in lapsed and pin.target is not besides and of_tenants(pin.scope)
        ]
        yield from sorted(behind, key=self._last, reverse=True)

    def _first_until(self, pin: ProgramPin, *, lost: bool) -> float:
        """Time until which the next turn goes before turns of programs without cells. `lost`: its cells are lost."""
        if pin.paused is None:
            return math.inf
        return pin.since + self._policy.first_within(pin.paused, self._known[1], lost=lost)

    def _rank(self, pin: ProgramPin) -> Key:
        return (pin.batch, *self._order.pin_rank(pin.scope, pin.arrival, pin.priority))

    def _last(self, pin: ProgramPin) -> Key:
        """Sort key: the greatest is dropped first. Among equal tenants that is one away for long, else the latest."""
        *tenant, arrival = self._rank(pin)
        away = (1.0, -pin.away) if pin.away <= self._now else (0.0, arrival)
        return (*tenant, *away, *pin.place)
