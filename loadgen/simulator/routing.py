"""Which replica a turn goes to: the router's own placement, and what others do, behind one Protocol.

    round-robin       one after the other, whoever asks
    two-choices       the less loaded of two random replicas (Mitzenmacher 2001)
    consistent-hash   the program's place on a ring (Karger et al. 1997), 100 points for each replica
    bounded-hash      the same, past replicas that have 1.25 times the mean in hand (Mirrokni et al. 2018)
    prefix            where the longest beginning of the prompt was sent last, else the least loaded
    ours              the router's: it knows what it sent, and what replicas report once a second
    ours-4-routers    four routers that take turns; each knows what it sent itself, and what replicas report

The others know everything at once: they have one router, and a turn counts from the moment it is sent to the moment it
ends. No replica refuses a turn here, so nothing waits in the router.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import ceil, inf
from typing import Protocol

from holdfast.loadgen.program import Program
from holdfast.loadgen.simulator.replica import Replica
from holdfast.loadgen.simulator.workloads import tokens_of
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.stats import LoadReport
from holdfast.replicas.types import TokenIds
from holdfast.router.placement import WEIGHTS, Placement, PlacementRequest, Prefix, Weights

_CAPACITY = 1 << 30
REPORT_S = 1.0
REPORTED = 32  # beginnings in a replica's report, the latest
_POINTS = 100  # of each replica on the ring
_BOUND = 1.25  # times the mean


@dataclass(frozen=True, slots=True)
class Placing:
    """Turn `at` of `program` is to be placed, with a prompt of `tokens`; `home` served its previous turn.

    `near`: the name of its parent program, and where that was last.
    """

    program: Program
    at: int
    tokens: int
    home: int | None
    near: tuple[str, int | None] | None

    @property
    def known(self) -> tuple[str, ...]:
        """Names of the beginnings of its prompt that another prompt may have too, longest first."""
        begins = self.program.begins
        return (self.program.standing(self.at - 1), begins) if self.at else (begins,)


class Routing(Protocol):
    """Places turns on replicas, which are numbers. `every`: seconds between a replica's reports."""

    every: float

    def place(self, turn: Placing) -> int: ...

    def ended(self, replica: int, program: Program, at: int) -> None:
        """A turn that was placed has ended."""

    def report(self, number: int, replica: Replica) -> None:
        """A replica reports its load."""


class Counting:
    """A way that counts turns itself: a turn counts from when it is placed until it ends."""

    every = inf

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.turns = [0] * replicas  # in hand

    def place(self, turn: Placing) -> int:
        replica = self.choose(turn)
        self.turns[replica] += 1
        return replica

    def choose(self, turn: Placing) -> int:
        raise NotImplementedError

    def ended(self, replica: int, program: Program, at: int) -> None:
        self.turns[replica] -= 1

    def report(self, number: int, replica: Replica) -> None:
        pass


class RoundRobin(Counting):
    """One after the other."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._next = -1

    def choose(self, turn: Placing) -> int:
        self._next = (self._next + 1) % self.replicas
        return self._next


class TwoChoices(Counting):
    """The less loaded of two."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._rng = random.Random("two choices")

    def choose(self, turn: Placing) -> int:
        two = self._rng.sample(range(self.replicas), min(2, self.replicas))
        return min(two, key=self.turns.__getitem__)


class ConsistentHash(Counting):
    """A program's place on the ring, past replicas that are over the bound."""

    bound = inf

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        ring = sorted((_hash(f"{number}/{point}"), number) for number in range(replicas) for point in range(_POINTS))
        self._points = [point for point, _ in ring]
        self._owners = [number for _, number in ring]

    def choose(self, turn: Placing) -> int:
        at = bisect_left(self._points, _hash(turn.program.id))
        room = inf if self.bound == inf else ceil(self.bound * (sum(self.turns) + 1) / self.replicas)
        while self.turns[owner := self._owners[at % len(self._owners)]] >= room:
            at += 1
        return owner


class BoundedHash(ConsistentHash):
    """The same with a bound."""

    bound = _BOUND


class LongestPrefix(Counting):
    """The replica that last got the longest known prefix."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._replica_of: dict[str, int] = {}

    def choose(self, turn: Placing) -> int:
        names = turn.known
        replica = next((self._replica_of[name] for name in names if name in self._replica_of), None)
        replica = self.turns.index(min(self.turns)) if replica is None else replica
        self._replica_of |= dict.fromkeys((*names, turn.program.standing(turn.at)), replica)
        return replica


class Ours:
    """The router's placement, one for each of `routers`, which take turns.

    They share the program table: each knows where a program and its parent were last. Beside that each knows what it
    sent itself, and what every replica reports once in `every` seconds.
    """

    every = REPORT_S

    def __init__(self, replicas: int, weights: Weights = WEIGHTS, routers: int = 1) -> None:
        self._names = [str(number) for number in range(replicas)]
        self._routers = [Placement(random.Random(f"router {i}"), weights) for i in range(routers)]
        for router in self._routers:
            router.update(dict.fromkeys(self._names, _CAPACITY))
        self._served_prefixes = [ServedPrefixes() for _ in range(replicas)]
        self._by: dict[tuple[int, int], Placement] = {}  # the router that sent a turn of a program
        self._next = 0

    def place(self, turn: Placing) -> int:
        router = self._routers[self._next % len(self._routers)]
        self._next += 1
        program, home = turn.program, turn.home
        beginning = Prefix(program.begins, program.beginning.tokens)
        parent = None if turn.near is None or turn.near[1] is None else self._names[turn.near[1]]
        held_tokens, home_id = turn.tokens - program.turns[turn.at].added, None if home is None else self._names[home]
        choice = router.choose(PlacementRequest(turn.tokens, (beginning,), home_id, held_tokens, parent))
        assert choice is not None
        router.sent(choice.replica_id)
        router.holds(choice.replica_id, (beginning, Prefix(program.standing(turn.at), turn.tokens)))
        self._by[program.number, turn.at] = router
        return int(choice.replica_id)

    def ended(self, replica: int, program: Program, at: int) -> None:
        self._by.pop((program.number, at)).ended(self._names[replica])
        self._served_prefixes[replica].served(program)

    def report(self, number: int, replica: Replica) -> None:
        cells = replica.engine.occupancy()
        report = LoadReport(
            running=replica.ongoing,
            cells_total=cells.cells_total,
            cells_pinned=cells.cells_pinned,
            prefixes=self._served_prefixes[number].still(replica),
        )
        for router in self._routers:
            router.report(self._names[number], report)


class ServedPrefixes:
    """Beginnings of prompts that a replica served lately, and which of them its cache still has."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[str, tuple[str, TokenIds]] = OrderedDict()

    def served(self, program: Program) -> None:
        if program.begins not in self._prefixes:
            self._prefixes[program.begins] = program.tenant, tokens_of(program)[: program.beginning.tokens + 1]
        self._prefixes.move_to_end(program.begins)
        if len(self._prefixes) > REPORTED:
            self._prefixes.popitem(last=False)

    def still(self, replica: Replica) -> dict[str, int]:
        """Tokens of the beginnings that are there whole, by name."""
        cache = replica.engine.cache
        return {
            name: len(tokens) - 1
            for name, (scope, tokens) in self._prefixes.items()
            if cache.peek(scope, tokens) == len(tokens) - 1
        }


ROUTINGS: dict[str, Callable[[int], Routing]] = {
    "ours": Ours,
    "ours-4-routers": partial(Ours, routers=4),
    "round-robin": RoundRobin,
    "two-choices": TwoChoices,
    "consistent-hash": ConsistentHash,
    "bounded-hash": BoundedHash,
    "prefix": LongestPrefix,
}


def routing(name: str) -> Callable[[int], Routing]:
    """The placement of that name. Raises ConfigError."""
    if name not in ROUTINGS:
        raise ConfigError(f"there is no placement {name!r}; there are {', '.join(ROUTINGS)}", "placement")
    return ROUTINGS[name]


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
