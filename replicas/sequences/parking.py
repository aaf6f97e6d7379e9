"""Where programs and sessions left off: rows of the pool, kept between two turns of the same owner.

A parked program stands in nobody's way. Its cells are the tree's, evictable like any others, and its row goes to
whoever needs one. A session is opened by a client and gives nothing back before it is closed: its cells are pinned.

    between turns    cells          row
    program          in the tree    parked, first to go when rows are short
    session          pinned         kept, where the region had one

Not here: the pool and the cache themselves; `scheduling/running` is their only caller.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.scheduling.plan import PageIds


class Owner(NamedTuple):
    """Whose turn a sequence is. `session`: opened by a client; else a program. A tuple, for it is looked up often."""

    scope: str
    name: str
    session: bool

    @classmethod
    def of(cls, scope: str, session_id: str, program_id: str) -> "Owner | None":
        """Whose a request is; None for a single one."""
        if session_id:
            return cls(scope, session_id, session=True)
        return cls(scope, program_id, session=False) if program_id else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an owner left off: `n_tokens` computed, and shown by a row.

    `pages` are what the page table shows in `row`, from slot 0 on. They may be other tokens' by now: whoever takes
    the row over compares them with the pages it is given.
    """

    n_tokens: int
    row: int | None
    pages: PageIds
    pin: Pin | None = None


def next_to_go(parked: Iterable[Owner], spared: Callable[[Owner], bool]) -> Owner | None:
    """Which of the parked programs, least recently used first, gives its row away next: one that is not spared."""
    first = None
    for owner in parked:
        if not spared(owner):
            return owner
        first = first or owner
    return first


class Parking:
    """Places by owner. Whoever takes one out has to give its row and its pin back, or park them again."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Owner, Place] = OrderedDict()
        self._sessions: dict[Owner, Place] = {}

    @property
    def rows(self) -> int:
        """Parked rows that anybody may have."""
        return len(self._programs)

    @property
    def pins(self) -> list[Pin]:
        return [place.pin for place in self._sessions.values() if place.pin is not None]

    def find(self, owner: Owner | None) -> Place | None:
        if owner is None:
            return None
        return (self._sessions if owner.session else self._programs).get(owner)

    def park(self, owner: Owner, place: Place) -> Place | None:
        """Remember where `owner` left off, as the latest used; returns the place that this one takes the place of."""
        places = self._sessions if owner.session else self._programs
        before = places.pop(owner, None)
        places[owner] = place
        return before

    def take(self, owner: Owner) -> Place | None:
        """Take a place out: its owner goes on, or has gone."""
        return (self._sessions if owner.session else self._programs).pop(owner, None)

    def give_way(self, spared: Callable[[Owner], bool] = lambda owner: False) -> int | None:
        """The row of the parked program that goes next; None when none is parked."""
        owner = next_to_go(self._programs, spared)
        return None if owner is None else self._programs.pop(owner).row
