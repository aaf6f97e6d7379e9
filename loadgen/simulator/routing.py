"""Which replica a turn goes to: the router's own placement, and what others do, behind one Protocol.

    round-robin       one after the other, whoever asks
    two-choices       the less loaded of two drawn at random (Mitzenmacher 2001)
    consistent-hash   the program's place on a ring (Karger et al. 1997), 100 points for each replica
    bounded-hash      the same, past replicas that have 1.25 times the mean in hand (Mirrokni et al. 2018)
    prefix            where the longest beginning of the prompt was sent last, else the least loaded
    ours              the router's: it knows what it sent, and what replicas tell once a second

The others see all that they would like to at once: one router, and a turn counts from the moment it is sent to the
moment it ends. No replica refuses a turn here, so nothing waits in the router.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil, inf
from typing import Protocol

from holdfast.loadgen.simulator.programs import Program
from holdfast.loadgen.simulator.replica import Replica
from holdfast.replicas.errors import ConfigError
from holdfast.router.placement import Group, PlacementConfig, ReplicaView, rank

_CAPACITY = 1 << 30
_POINTS = 100  # of each replica on the ring
_BOUND = 1.25  # times the mean


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn that is to be placed: turn `at` of `program`, which was last served at `home`. `near`: the name of the
    program that it is to be served with, and where that was last.
    """

    program: Program
    at: int
    tokens: int
    home: int | None
    near: tuple[str, int | None] | None
    now: float


class Routing(Protocol):
    """Places turns on replicas, which are numbers. `every`: how often replicas tell how they are, in seconds."""

    every: float

    def place(self, asked: Asked) -> int: ...

    def ended(self, replica: int, program: Program, at: int) -> None:
        """A turn that was placed has ended."""

    def report(self, number: int, replica: Replica, now: float) -> None:
        """A replica tells how it is."""


class InHand:
    """How many turns each replica has in hand; the least loaded one is found without a search of all."""

    def __init__(self, replicas: int) -> None:
        self.turns = [0] * replicas
        self.total = 0
        self._heap = [(0, number) for number in range(replicas)]

    def add(self, replica: int, turns: int) -> None:
        self.turns[replica] += turns
        self.total += turns
        heapq.heappush(self._heap, (self.turns[replica], replica))

    def least(self) -> int:
        """A replica with the fewest."""
        while self._heap[0][0] != self.turns[self._heap[0][1]]:
            heapq.heappop(self._heap)  # it has changed since
        return self._heap[0][1]


class Counting:
    """What places by counts of its own: a turn counts from when it is placed until it ends."""

    every = inf

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.hand = InHand(replicas)

    def place(self, asked: Asked) -> int:
        chosen = self.choose(asked)
        self.hand.add(chosen, 1)
        return chosen

    def choose(self, asked: Asked) -> int:
        raise NotImplementedError

    def ended(self, replica: int, program: Program, at: int) -> None:
        self.hand.add(replica, -1)

    def report(self, number: int, replica: Replica, now: float) -> None:
        pass


class RoundRobin(Counting):
    """One after the other."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._next = -1

    def choose(self, asked: Asked) -> int:
        self._next = (self._next + 1) % self.replicas
        return self._next


class TwoChoices(Counting):
    """The less loaded of two."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._rng = random.Random("two choices")

    def choose(self, asked: Asked) -> int:
        two = self._rng.sample(range(self.replicas), min(2, self.replicas))
        return min(two, key=self.hand.turns.__getitem__)


class ConsistentHash(Counting):
    """A program's place on the ring, past replicas that are over the bound."""

    bound = inf

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        ring = sorted((_hash(f"{number}/{point}"), number) for number in range(replicas) for point in range(_POINTS))
        self._points = [point for point, _ in ring]
        self._owners = [number for _, number in ring]

    def choose(self, asked: Asked) -> int:
        at = bisect_left(self._points, _hash(asked.program.name))
        room = inf if self.bound == inf else ceil(self.bound * (self.hand.total + 1) / self.replicas)
        while self.hand.turns[owner := self._owners[at % len(self._owners)]] >= room:
            at += 1
        return owner


class BoundedHash(ConsistentHash):
    """The same with a bound."""

    bound = _BOUND


class LongestPrefix(Counting):
    """Where the longest beginning went last."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._sent: dict[str, int] = {}

    def choose(self, asked: Asked) -> int:
        known = asked.program.known(asked.at)
        chosen = next((self._sent[name] for name in known if name in self._sent), None)
        chosen = self.hand.least() if chosen is None else chosen
        self._sent |= dict.fromkeys((*known, asked.program.standing(asked.at)), chosen)
        return chosen


class Ours(Counting):
    """The router's placement."""

    def __init__(self, replicas: int, config: PlacementConfig | None = None) -> None:
        super().__init__(replicas)
        self._config = config or PlacementConfig()

    def choose(self, asked: Asked) -> int:
        if asked.home is not None:
            return asked.home  # what `rank` says of a program whose replica has room
        views = [ReplicaView(str(number), turns, _CAPACITY) for number, turns in enumerate(self.hand.turns)]
        group = None
        if asked.near is not None:
            group = Group(asked.near[0], None if asked.near[1] is None else str(asked.near[1]))
        return int(rank(asked.program.name, views, None, 0.0, self._config, group)[0])


ROUTINGS: dict[str, Callable[[int], Routing]] = {
    "ours": Ours,
    "round-robin": RoundRobin,
    "two-choices": TwoChoices,
    "consistent-hash": ConsistentHash,
    "bounded-hash": BoundedHash,
    "prefix": LongestPrefix,
}


def routing(name: str) -> Callable[[int], Routing]:
    """What places turns under that name. Raises ConfigError."""
    if name not in ROUTINGS:
        raise ConfigError(f"there is no placement {name!r}; there are {', '.join(ROUTINGS)}", "placement")
    return ROUTINGS[name]


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
