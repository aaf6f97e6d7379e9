"""Who is next: of the two classes, of tenants by their weights, of a tenant's programs. Pure: no clock, no queue.

    classes    interactive requests first; batch has at least a part of the time where those would take all of it
    tenants    who was served least for its weight (`Shares`)
    programs   by root: who began first, until it has had a `quantum` more than the others (`Roots`)

And where a queue is full, who leaves it for one that comes (`Bounds`).

An engine shares the seconds of its steps so (`queue`), a router the slots of its replicas (`router/lines`).
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from holdfast.replicas.types import Priority

Turn: TypeAlias = tuple[float, float]
T = TypeVar("T", bound="Sized")

TENANTS = 65_536  # remembered, the one longest without anything forgotten first
_ROOTS = 4096  # of a tenant
_MANY = 1000  # requests over which is averaged what one takes
_ELSEWHERE_S = 10.0  # of what a tenant had at other places, at most so much counts from one of its requests to the next
_DUE_S = 0.5  # of time, that batch has to be owed before it is given
BATCH_SHARE = 0.05  # of the time, for batch where interactive requests would take all of it
QUANTUM_S = 20.0  # of service, within which programs of a tenant are served by when they began


@dataclass(slots=True)
class Share:
    """One tenant's: the seconds it was served over its weight, how many of its requests run, and its weight.

    `elsewhere`: the same of other places, not yet counted.
    """

    served: float = 0.0
    running: int = 0
    weight: float = 1.0
    elsewhere: float = 0.0


class Shares:
    """Who was served least for its weight comes first: start-time fair queueing (Goyal et al. 1996) of virtual token
    counters (Sheng et al. 2024).

    What runs is charged for in advance with what requests have taken on average, so that places which come free
    together go to several. The virtual time is the least that any of those who wait has been served; where nobody
    waits, the most that any of those has whose requests run. Who comes back begins there at least: being away earns
    nothing, and nobody with a weight waits for ever. And who had all while nobody else wanted any is behind nobody for
    it.

    What a tenant is served elsewhere counts once a request of it has begun here, up to a bound: so it is overtaken,
    but not for ever (distributed start-time fair queueing, Wang and Merchant 2007).
    """

    def __init__(self, tenants: int = TENANTS) -> None:
        self._tenants = tenants
        self._shares: OrderedDict[str, Share] = OrderedDict()
        self._busy: dict[str, Share] = {}  # of those with requests that run
        self._time = 0.0  # virtual
        self._begun = 0.0  # requests, the older the less
        self._spent = 0.0  # seconds on them

    def of(self, tenant: str) -> Share:
        """The share of a tenant, which is the last now to be forgotten."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share(self._time)
            if len(self._shares) > self._tenants:
                self._shares.popitem(last=False)
        self._shares.move_to_end(tenant)
        return share

    def come(self, tenant: str, weight: float, *, alone: bool) -> None:
        """A request of a tenant waits from now on; `alone`: no other one of any tenant does."""
        if alone:
            self._time = max([self._time, *(share.served for share in self._busy.values())])
        share = self.of(tenant)
        share.weight = weight
        share.served = max(share.served, self._time)

    @property
    def usual(self) -> float:
        """Seconds that a request takes on average."""
        return self._spent / max(self._begun, 1.0)

    def first(self, tenants: Iterable[str]) -> list[int]:
        """Which of these, who wait, was served least, by its place; several where those were alike. One of them is
        served next.
        """
        usual, served = self.usual, math.inf
        least = math.inf, math.inf
        found: list[int] = []
        for place, tenant in enumerate(tenants):
            share = self._shares.get(tenant) or self.of(tenant)  # who waits has come lately, so is not to be moved
            charged = share.running / share.weight
            standing = (share.served + charged * usual, charged)
            if standing < least:
                least, found = standing, [place]
            elif standing == least:
                found.append(place)
            served = min(served, share.served)
        self._time = max(self._time, served)
        return found

    def begin(self, tenant: str) -> Share:
        """A request of a tenant runs from now on."""
        self._begun += 1
        share = self.runs(tenant)
        share.served += share.elsewhere
        share.elsewhere = 0.0
        return share

    def runs(self, tenant: str) -> Share:
        """One more request of a tenant runs, which was counted when it began."""
        share = self._busy[tenant] = self.of(tenant)
        share.running += 1
        return share

    def end(self, tenant: str) -> None:
        """A request of a tenant runs no more."""
        share = self._busy[tenant]
        share.running -= 1
        if not share.running:
            del self._busy[tenant]

    def rest(self) -> None:
        """Nothing runs, until it is said that something does."""
        for share in self._busy.values():
            share.running = 0
        self._busy.clear()

    def charge(self, tenant: str, seconds: float) -> None:
        """A tenant was served for so long."""
        share = self.of(tenant)
        share.served += seconds / share.weight
        self._spent += seconds
        if self._begun > _MANY:
            self._begun, self._spent = self._begun / 2, self._spent / 2

    def elsewhere(self, tenant: str, seconds: float) -> None:
        """And for so long at another place, where others waited as well. Of who is not known here nothing counts."""
        share = self._shares.get(tenant)
        if share is not None:
            share.elsewhere = min(share.elsewhere + seconds / share.weight, _ELSEWHERE_S)


class Contended:
    """Seconds that tenants were served while others waited, for other places to count: totals, by `<class>/<tenant>`.

    One thread adds, any may read. Who was longest without any is forgotten first, and begins again at 0.
    """

    def __init__(self, tenants: int = TENANTS) -> None:
        self._most = len(Priority) * tenants
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def add(self, priority: Priority, tenant: str, seconds: float) -> None:
        name = f"{priority}/{tenant}"
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._seconds.move_to_end(name)
        if len(self._seconds) > self._most:
            self._seconds.popitem(last=False)

    def told(self) -> Mapping[str, float]:
        return self._seconds.copy()


@dataclass(slots=True)
class Root:
    """A program with its sub-agents: seconds it was served, and how many of its requests wait or run."""

    served: float = 0.0
    here: int = 0


class Roots:
    """The programs of one tenant. Those that began first go first, as then their cells are soon free; but one that has
    had a quantum more than the others waits for them, and of several requests of one program each has its turn with the
    first of the others' programs, the second with their second: a program that opens ten flows is one.
    """

    def __init__(self, quantum_s: float = QUANTUM_S, most: int = _ROOTS) -> None:
        self._quantum_s = quantum_s
        self._most = most
        self._roots: OrderedDict[str, Root] = OrderedDict()
        self._time = 0.0  # virtual: what the latest that began had been served

    def come(self, name: str) -> Turn:
        """A request waits from now on: its turn, the smallest is served next."""
        root = self._of(name)
        root.served = max(root.served, self._time)
        turn = (root.served // self._quantum_s, float(root.here))
        root.here += 1
        return turn

    def begin(self, turn: Turn) -> None:
        """The request with this turn begins."""
        self._time = max(self._time, turn[0] * self._quantum_s)

    def charge(self, name: str, seconds: float) -> None:
        self._of(name).served += seconds

    def leave(self, name: str) -> None:
        """A request neither waits nor runs any more."""
        root = self._of(name)
        root.here = max(0, root.here - 1)

    def _of(self, name: str) -> Root:
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Root(self._time)
            if len(self._roots) > self._most:
                self._roots.popitem(last=False)
        self._roots.move_to_end(name)
        return root


class Classes:
    """Batch goes behind interactive requests. Where those would take all of the time, it is owed `share` of it, and its
    turn comes when that has become worth it. What it had while nobody else wanted any counts for nothing.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed = 0.0
        self.due = False

    def serve(self, interactive_s: float, batch_s: float, *, wanted: bool) -> None:
        """So long was worked for each class; `wanted`: there are requests of batch, waiting or running."""
        if not wanted:
            self._owed, self.due = 0.0, False
            return
        owed = self._owed + self._share * interactive_s - (1.0 - self._share) * batch_s
        self._owed = min(max(owed, 0.0), 2 * _DUE_S)
        self.due = self._owed > 0.0 if self.due else self._owed >= _DUE_S


class Sized(Protocol):
    """Who waits in a queue, with so many tokens in its prompt."""

    @property
    def n_prompt(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a queue takes: so many requests, and so many tokens in their prompts. One alone may have any number."""

    requests: int
    tokens: int

    def room(self, n: int, tokens: int, more: int) -> bool:
        """Whether beside `n` requests of so many tokens in all there is a place for one of `more` tokens."""
        return n < self.requests and (n == 0 or tokens + more <= self.tokens)

    def giving_way(self, lasts: Iterable[T], n: int, tokens: int, more: int) -> list[T] | None:
        """Which of `lasts`, who might leave in this order, have to, so that there is room for one of `more` tokens;
        None where all of them would not be enough.

        Nobody leaves in vain: without any one of those who do there would be no room.
        """
        leaving, others = list[T](), iter(lasts)
        while not self.room(n, tokens, more):
            last = next(others, None)
            if last is None:
                return None
            leaving.append(last)
            n, tokens = n - 1, tokens - last.n_prompt
        needed = list[T]()
        for each in reversed(leaving):  # the later it would have left, the sooner it stays
            if self.room(n + 1, tokens + each.n_prompt, more):
                n, tokens = n + 1, tokens + each.n_prompt
            else:
                needed.append(each)
        return needed[::-1]
