"""The book of pins: which programs' cells are kept until when, and whose go first. Pure; no cells are touched here.

A pin belongs to a program between two of its turns. It is dropped when its deadline has passed and no turn of the
program waits; when the program's next turn begins; when the program has ended; and when others need the cells: then the
program that arrived last goes first.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.events import Notice, ProgramEnded, TurnEnded
from holdfast.replicas.kv.cache import KVCache, in_use, running
from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.kv.radix import PinnedPages
from holdfast.replicas.retention.latency import tool_set
from holdfast.replicas.retention.policy import Learned, Pause, policy_of
from holdfast.replicas.retention.rows import surely
from holdfast.replicas.scheduling.queue import Key, Order, WaitingQueue
from holdfast.replicas.sequences import Owner, Sequence
from holdfast.replicas.stats import EngineStats

_LOOKED_AT = 16  # pins past their deadline, kept for a turn that waits, that are looked at in one step
_SLACK = 64  # entries of dropped pins that may stay in a heap of any size


@dataclass(slots=True, eq=False)
class Held:
    """One pin. `request_id` is the turn that left it, `turn` its number in the program, `since` when it ended.

    `run_turn` counts from 1 after the program's last answer. `arrival` is the program's; `live` until it is dropped.
    """

    owner: Owner
    pin: Pin
    arrival: float
    request_id: str
    turn: int
    run_turn: int
    since: float
    deadline: float
    live: bool = True


class Waits(Protocol):
    """Whether a turn of a program waits now."""

    def __call__(self, owner: Owner) -> bool: ...


class _Queue:
    """A heap of pins by a key; those that were dropped, or have another key by now, are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Held]] = []
        self._numbers = count()

    def push(self, key: float, held: Held) -> None:
        heapq.heappush(self._heap, (key, next(self._numbers), held))

    def top(self) -> tuple[float, Held] | None:
        while self._heap and not self._heap[0][2].live:
            heapq.heappop(self._heap)
        return (self._heap[0][0], self._heap[0][2]) if self._heap else None

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def trim(self, live: int) -> None:
        if len(self._heap) > 2 * live + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapq.heapify(self._heap)


class Pins:
    """Pins by program: at most one each."""

    def __init__(self) -> None:
        self._held: dict[Owner, Held] = {}
        self._due = _Queue()
        self._latest = _Queue()
        self._overdue: dict[Held, None] = {}  # past their deadline, for a turn of theirs waits

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def due(self, *, overdue: bool) -> float | None:
        """When the next deadline passes; None: there is none. With `overdue` also one that has passed, for a turn that
        waited then.
        """
        if overdue and self._overdue:
            return min(held.deadline for held in self._overdue)
        while (top := self._due.top()) is not None and top[0] != top[1].deadline:
            self._due.pop()  # it was given another one since
        return top[0] if top is not None else None

    def find(self, owner: Owner) -> Held | None:
        return self._held.get(owner)

    def add(self, held: Held) -> None:
        """Enter a pin. Its program has none: it was dropped before."""
        self._held[held.owner] = held
        self._due.push(held.deadline, held)
        self._latest.push(-held.arrival, held)

    def drop(self, held: Held) -> None:
        """Strike a pin out; the caller gives its cells back."""
        del self._held[held.owner]
        held.live = False
        self._overdue.pop(held, None)
        self._due.trim(len(self))
        self._latest.trim(len(self))

    def until(self, held: Held, deadline: float) -> None:
        """Give a pin another deadline."""
        held.deadline = deadline
        self._overdue.pop(held, None)
        self._due.push(deadline, held)
        self._due.trim(2 * len(self))

    def expired(self, now: float, waits: Waits) -> list[Held]:
        """Those past their deadline of whose program no turn waits, as far as they were looked at. Drops nothing.

        A pin that was kept for a turn which then went away unserved is found a few steps later: there may be many.
        """
        found: dict[Held, None] = {}
        for held in list(self._overdue)[:_LOOKED_AT] if self._overdue else ():
            del self._overdue[held]
            if waits(held.owner):
                self._overdue[held] = None  # behind the others
            else:
                found[held] = None
        while (top := self._due.top()) is not None and top[0] <= now:
            self._due.pop()
            deadline, held = top
            if held.deadline != deadline or held in self._overdue or held in found:
                continue  # it was given another one since, or the same again
            if waits(held.owner):
                self._overdue[held] = None
            else:
                found[held] = None
        return list(found)

    def latest(self, besides: Owner | None = None) -> Held | None:
        """The pin of the program that arrived last, but for `besides`."""
        top = self._latest.top()
        if top is None or top[1].owner != besides:
            return top[1] if top else None
        self._latest.pop()
        other = self._latest.top()
        self._latest.push(*top)
        return other[1] if other else None


# ---- The cells that are kept for programs between their turns: pinned in the cache, counted, and never more than
# allowed.
#
# The only caller of the cache for programs' pins. Not here: whom they are kept for and how long (`keeping`).


class Kept:
    """Pins by program. Waiting turns of a program know whether it has one, and stand where the order puts them then."""

    def __init__(self, config: RetentionConfig, cache: KVCache, waiting: WaitingQueue) -> None:
        cells = cache.pool.total * cache.page_size
        self._most = int(cells * config.share)
        self._most_of_tenant = int(cells * config.tenant_share)
        self._cache = cache
        self._waiting = waiting
        self._pins = Pins()
        self._pages = PinnedPages(cache.tree)

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._pins)

    @property
    def cells(self) -> int:
        """Cells that pins keep from being evicted, shared ones counted once."""
        return self._pages.total * self._cache.page_size

    def cells_of(self, tenant: str) -> int:
        return self._pages.of(tenant) * self._cache.page_size

    def find(self, owner: Owner | None) -> Held | None:
        return self._pins.find(owner) if owner is not None else None

    def keep(self, sequence: Sequence, owner: Owner, pin: Pin, now: float, until: float) -> int:
        """Hold the `pin` on what `sequence` left in the tree, in place of what its program had pinned before.

        Returns how many pins were dropped because its tenant's, or all, would have kept too much; its own may be
        one of them.
        """
        before = self._pins.find(owner)
        if before is not None:
            self.drop(before)
        submit = sequence.submit
        turn = submit.program_turns + 1
        run_turn = turn - submit.answered_turns
        self._pins.add(Held(owner, pin, submit.program_arrival, submit.request_id, turn, run_turn, now, until))
        self._pages.add(owner.scope, pin.node)
        self._mark(owner, pinned=True)
        return self._keep_within_limits(owner.scope)

    def until(self, held: Held, deadline: float) -> None:
        self._pins.until(held, deadline)

    def drop(self, held: Held) -> None:
        self._pins.drop(held)
        self._pages.remove(held.owner.scope, held.pin.node)
        surely(self._cache.unpin, held.pin)
        self._mark(held.owner, pinned=False)

    @property
    def due(self) -> float | None:
        """When `expired` may find something next; None: never. What is kept for turns that wait does not count."""
        return self._pins.due(overdue=not len(self._waiting))

    def expired(self, now: float) -> list[Held]:
        """Those past their deadline whose program has no turn waiting. Drops none."""
        return self._pins.expired(now, lambda owner: bool(self._waiting.turns_of(owner)))

    def latest(self, besides: Owner | None = None) -> Held | None:
        """That of the program that arrived last, but for `besides`."""
        return self._pins.latest(besides)

    def _keep_within_limits(self, tenant: str) -> int:
        before = len(self)
        while self.cells_of(tenant) > self._most_of_tenant:
            self.drop(max((held for held in self if held.owner.scope == tenant), key=lambda held: held.arrival))
        while self.cells > self._most:
            latest = self._pins.latest()
            assert latest is not None, "cells are pinned by nobody"
            self.drop(latest)
        return before - len(self)

    def _mark(self, owner: Owner, *, pinned: bool) -> None:
        for sequence in self._waiting.turns_of(owner):
            sequence.pinned = pinned
            self._waiting.reorder(sequence)


# ---- Programs between their turns: the cells of a turn that is over stay pinned for as long as that is worth it.
#
#     a turn ends           pinned for a moment, until it is known what the turn called
#     what it called        known: pinned for what the policy says, or not at all
#     the next turn comes   kept past the deadline while it waits; given back as it begins
#     others need cells     programs behind them in order give way; where nothing runs, any
#
# Not here: for how long (`retention/ttl`), the pins themselves (`kept`). The rows of paused programs are `places`'.


class Keeping:
    """Decides what is kept, as the engine tells it what happens to programs.

    `idle` says how many cells idle sessions keep from being evicted.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        waiting: WaitingQueue,
        order: Order,
        learned: Learned,
        stats: EngineStats,
        idle: Callable[[], int],
    ) -> None:
        self._order = order
        self._config = config.retention
        self._policy = policy_of(config.retention)
        self._active = config.retention.policy != "none" and (config.prefix_cache or config.sessions)
        self._learned = learned
        self._cache = cache
        self._stats = stats
        self._idle = idle
        self.kept = Kept(config.retention, cache, waiting)

    @property
    def due(self) -> float | None:
        """When `expire` has something to look at next; None: nothing is kept."""
        return self.kept.due

    def holds(self, owner: Owner | None) -> bool:
        return self.kept.find(owner) is not None

    def arrived(self, sequence: Sequence) -> None:
        """A request comes in, before it is put in the queue."""
        sequence.pinned = self.holds(sequence.owner)
        if sequence.submit.program_turns and self._active:
            if sequence.pinned:
                self._stats.pin_hits += 1
            else:
                self._stats.pin_misses += 1

    def begins(self, sequence: Sequence, now: float) -> bool:
        """A sequence gets its cells now: its program's pin, if there is one, is given back. Whether there was one."""
        held = self.kept.find(sequence.owner)
        if held is not None:
            self.kept.drop(held)
        elif sequence.submit.program_turns and sequence.scheduled is None:
            self._learned.waited(now - sequence.arrived)
        return held is not None

    def wants(self, sequence: Sequence) -> bool:
        """Whether a finished sequence leaves cells that a next turn of its program may come back for."""
        owner = sequence.owner
        return owner is not None and not owner.session and self._active and not sequence.submit.program_end

    def paused(self, sequence: Sequence, pin: Pin, now: float) -> None:
        """A program's turn is over, its cells have a `pin`: keep that until it is known what the turn called."""
        assert sequence.owner is not None
        self._stats.pins_refused += self.kept.keep(sequence, sequence.owner, pin, now, now + self._config.settle_s)

    def notice(self, notice: Notice, now: float) -> None:
        """Something about programs that pause. What comes too late is ignored."""
        self.expire(now)
        if isinstance(notice, TurnEnded):
            self._turn_ended(notice)
        elif isinstance(notice, ProgramEnded):
            held = self.kept.find(Owner(notice.scope, notice.program_id, session=False))
            if held is not None:
                self._learned.turns.ended(held.run_turn)
                self.kept.drop(held)
        else:
            self._learned.latency = notice.latency

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over and whose program has no turn waiting."""
        for held in self.kept.expired(now):
            self._stats.pins_expired += 1
            self.kept.drop(held)

    def give_way(self, to: Sequence | None, besides: Owner | None = None) -> bool:
        """Drop the pin of the program that comes last in order, if it comes behind `to`; None: wherever it comes.

        False where there is none to drop.
        """
        held = self._last(besides)
        if held is None or (to is not None and self._rank(held) <= self._order.asking(to)):
            return False
        self._stats.pins_given_way += 1
        self.kept.drop(held)
        return True

    def makes_room(self, mark: int, to: Sequence) -> bool:
        """Whether fewer than `mark` cells are in use, once pins behind `to` have given way as far as that needs it.

        Where all pins would not be enough, none gives way.
        """
        if running(self._cache) >= mark:
            return False
        while in_use(self._cache) >= mark:
            if not self.give_way(to):
                return False
        return True

    def _last(self, besides: Owner | None) -> Held | None:
        if self._order.by_arrival:
            return self.kept.latest(besides)
        return max((held for held in self.kept if held.owner != besides), key=self._rank, default=None)

    def _rank(self, held: Held) -> Key:
        return self._order.paused(held.owner.scope, held.arrival)

    def _turn_ended(self, ended: TurnEnded) -> None:
        """Keep the turn's cells as long as that is worth it, from its end on.

        The last turn lets go of its program's cells whichever branch left them, unless that was a later turn's.
        """
        if ended.last:
            self._learned.turns.ended(ended.run_turn)
        held = self.kept.find(Owner(ended.scope, ended.program_id, session=False))
        if held is None:
            return
        if held.request_id != ended.request_id and not (ended.last and held.turn <= ended.turn):
            return
        ttl = 0.0 if ended.last else self._ttl(ended, held)
        if ttl > 0.0:
            self._stats.pins += 1
            self.kept.until(held, held.since + min(ttl, self._config.most_s))
        else:
            self.kept.drop(held)

    def _ttl(self, ended: TurnEnded, held: Held) -> float:
        """What the policy says of a turn that left a pin."""
        # What is kept for programs and for idle sessions waits for nobody.
        busy = max(running(self._cache) - self._idle(), 0)
        pause = Pause(ended.scope, tool_set(ended.tools), held.pin.length, held.run_turn)
        return self._policy.ttl(pause, self._learned.latency, self._learned.conditions(busy))
