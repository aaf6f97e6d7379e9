"""The book of pins: which programs' cells are kept until when, and whose go first. Pure; no cells are touched here.

A pin belongs to a program between two of its turns. It is dropped when its deadline has passed and no turn of the
program waits; when the program's next turn begins; when the program has ended; and when others need the cells: then the
program that arrived last goes first.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.sequences.parking import Owner

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
