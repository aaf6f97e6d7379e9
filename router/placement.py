"""Which replica serves a program: filter, score and pick over snapshots of the replicas. Pure.

Four reasons, strongest first: the program's state is there (affinity); what it is to be placed with is there (a group:
a parent's sub-agents, requests with one cache key), while there is room; the hash of its name points there (so that
routers which know nothing of each other agree, and a change of the replica set moves few programs); it has less to do
(load). Remembering where a program went and waiting for room are `affinity`'s.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, TypeAlias

from holdfast.replicas.errors import ConfigError

CANDIDATES = 8  # replicas that are looked at of those that hold a prefix
HOLDERS = 128  # replicas that are remembered for one prefix, the latest


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """How far affinity goes. Counts are in programs and requests, times in seconds."""

    pins: int = 65536  # programs remembered with their replica; the least recently routed is forgotten first
    patience_s: float = (
        2.0  # how long a program waits in the router for its replica with `max_ongoing_requests` in hand
    )
    imbalance: int = 8  # a new program leaves its hashed replica when that has this many requests more than another
    group_load: float = 1.25  # programs placed together leave a replica with so many times the mean of programs
    no_replica_s: float = 60.0  # how long a request waits while there is no replica at all
    max_waiting: int = 4096  # requests that wait for a replica with room; one more is refused
    queue_timeout_s: float = 300.0  # a request that waited this long is refused

    def __post_init__(self) -> None:
        for name in ("pins", "imbalance", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", name)
        if self.group_load < 1:
            raise ConfigError(f"group_load must be at least 1, not {self.group_load}", "group_load")
        for name in ("patience_s", "no_replica_s", "queue_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}", name)


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts how much where turns are placed."""

    turn_tokens: int = 1200  # tokens to compute that a turn in hand counts as
    crowded_load: float = 1.5  # turns above so many times the mean count more the more there are
    move_factor: float = 4.0  # a program leaves its replica where that saves so many times what it computes again
    prefixes: int = 65536  # beginnings of prompts that are remembered, with who holds them

    def __post_init__(self) -> None:
        for name, least in (("turn_tokens", 1), ("crowded_load", 1), ("move_factor", 0), ("prefixes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}", name)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a replica tells of itself, a moment ago. `prefixes`: tokens of beginnings of prompts that it holds, by their
    digests; `seconds_per_token`: to compute one more token of a prompt, 0 where it is not known yet.
    """

    running: int = 0
    waiting: int = 0
    seconds_per_token: float = 0.0
    prefixes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning of a prompt."""

    digest: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn that is to be placed: a prompt of so many `tokens`. `home` holds `held` of them for its program. A turn of
    a new program has `prefixes`, longest first, and may be wanted `near` a replica: where its parent is.
    """

    tokens: int
    prefixes: tuple[Prefix, ...] = ()
    home: str | None = None
    held: int = 0
    near: str | None = None


Reason: TypeAlias = Literal["home", "crowded", "prefix", "near", "load"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a turn goes, and why: its home, away from a crowded home, to a prefix, to its parent, to the least load."""

    replica_id: str
    reason: Reason


class Placement:
    """Where turns go: to the replica where they are expected to have their first token soonest.

        expected work = (turns * turn_tokens + tokens of the prompt not held there) * its seconds per token
        turns         = turns in hand + half the square of those above crowded_load times the mean of all replicas

    A new program may go to replicas known to hold the longest beginning of its prompt (`CANDIDATES` of them, drawn at
    random where more do), to its parent's, or to the one with the fewest turns in hand. A program with a home leaves
    it only where that saves `move_factor` times what has to be computed again.

    Turns in hand are those that this router sent and that have not ended, and what the replica's latest report says of
    others'. What replicas hold is known from reports, and from what this router sent. A choice costs O(log replicas).
    """

    def __init__(self, weights: Weights, rng: random.Random) -> None:
        self._weights = weights
        self._rng = rng
        self._capacity: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._others: dict[str, int] = {}
        self._token_s: dict[str, float] = {}
        self._holders: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        self._total = 0  # turns in hand of all replicas
        self._order: list[tuple[bool, int, float, str]] = []

    def update(self, capacity: Mapping[str, int]) -> None:
        """These are the replicas from now on, each with the turns that it takes at once."""
        for gone in self._capacity.keys() - capacity.keys():
            self._sent.pop(gone)
            self._others.pop(gone)
            self._token_s.pop(gone, None)
        self._capacity = dict(capacity)
        for replica_id in capacity:
            self._sent.setdefault(replica_id, 0)
            self._others.setdefault(replica_id, 0)
        self._total = sum(map(self._turns, capacity))
        self._sort()

    def report(self, replica_id: str, report: LoadReport) -> None:
        """A replica has told how it is."""
        if replica_id not in self._capacity:
            return
        before = self._turns(replica_id)
        self._others[replica_id] = max(0, report.running + report.waiting - self._sent[replica_id])
        self._total += self._turns(replica_id) - before
        if report.seconds_per_token > 0:
            self._token_s[replica_id] = report.seconds_per_token
        for digest in report.prefixes:
            self._holds(replica_id, digest)
        self._changed(replica_id)

    def sent(self, replica_id: str, prefixes: Sequence[Prefix]) -> None:
        """A turn was sent there: it will hold what the prompt begins with."""
        for prefix in prefixes:
            self._holds(replica_id, prefix.digest)
        if replica_id in self._sent:
            self._sent[replica_id] += 1
            self._total += 1
            self._changed(replica_id)

    def ended(self, replica_id: str) -> None:
        """A turn that was sent there has ended."""
        if replica_id in self._sent:
            self._sent[replica_id] -= 1
            self._total -= 1
            self._changed(replica_id)

    def choose(self, ask: Ask) -> Choice | None:
        """The replica for a turn; None where there is no replica."""
        least = self._least()
        if least is None:
            return None
        if ask.home in self._capacity:
            return self._leave(ask.home, least, ask.held)
        prefix = next((each for each in ask.prefixes if self._holders.get(each.digest)), None)
        held = 0 if prefix is None else prefix.tokens
        holders = [] if prefix is None else [each for each in self._holders[prefix.digest] if each in self._capacity]
        near = ask.near if ask.near in self._capacity else None
        found: list[Choice] = []
        if near is not None:
            found.append(Choice(near, "near"))
            held = max(held, ask.prefixes[0].tokens if ask.prefixes else 0)
        if len(holders) > CANDIDATES:
            drawn = self._rng.sample(holders, CANDIDATES)
        else:
            drawn = holders
        found += [Choice(each, "prefix") for each in drawn if each != near]
        if not any(each.replica_id == least for each in found):
            found.append(Choice(least, "prefix" if least in holders else "load"))
        return min(
            found, key=lambda each: self._cost(each.replica_id, ask.tokens, 0 if each.reason == "load" else held)
        )

    # ---- parts ----

    def _leave(self, home: str, least: str, held: int) -> Choice:
        """Home, or where there is less to do."""
        saved = (self._turns(home) - self._turns(least)) * self._weights.turn_tokens
        if saved > self._weights.move_factor * held + self._weights.turn_tokens:
            return Choice(least, "crowded")
        return Choice(home, "home")

    def _cost(self, replica_id: str, tokens: int, held: int) -> tuple[bool, float]:
        turns = self._turns(replica_id)
        crowd = max(0.0, turns - self._weights.crowded_load * self._total / len(self._capacity))
        work = (turns + crowd**2 / 2) * self._weights.turn_tokens + tokens - min(held, tokens)
        return turns >= self._capacity[replica_id], work * self._token_s.get(replica_id, 1.0)

    def _turns(self, replica_id: str) -> int:
        return self._sent[replica_id] + self._others[replica_id]

    def _holds(self, replica_id: str, digest: str) -> None:
        holders = self._holders.setdefault(digest, OrderedDict())
        self._holders.move_to_end(digest)
        holders[replica_id] = None
        holders.move_to_end(replica_id)
        if len(holders) > HOLDERS:
            holders.popitem(last=False)
        if len(self._holders) > self._weights.prefixes:
            self._holders.popitem(last=False)

    def _changed(self, replica_id: str) -> None:
        heapq.heappush(self._order, self._entry(replica_id))
        if len(self._order) > 8 * len(self._capacity) + 64:
            self._sort()

    def _sort(self) -> None:
        self._order = [self._entry(replica_id) for replica_id in self._capacity]
        heapq.heapify(self._order)

    def _entry(self, replica_id: str) -> tuple[bool, int, float, str]:
        turns = self._turns(replica_id)
        # Routers that know the same must not all choose the same replica: equal ones come in another order in each.
        return turns >= self._capacity[replica_id], turns, self._rng.random(), replica_id

    def _least(self) -> str | None:
        """The replica with the fewest turns in hand, those with room first."""
        while self._order:
            _, turns, _, replica_id = self._order[0]
            if replica_id in self._capacity and turns == self._turns(replica_id):
                return replica_id
            heapq.heappop(self._order)  # it has changed since, and stands elsewhere as well
        return None


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a router knows of a live replica: requests it has in hand, how many it takes at once, and how many programs
    it has served last.
    """

    replica_id: str
    ongoing: int
    capacity: int
    programs: int = 0

    @property
    def full(self) -> bool:
        return self.ongoing >= self.capacity


@dataclass(frozen=True, slots=True)
class Group:
    """What a new program is placed with: by its name, or where that was served last."""

    name: str
    replica_id: str | None = None


def weight(program: str, replica_id: str) -> int:
    """Rendezvous weight of the pair: equal in every process and release (Thaler and Ravishankar, 1998)."""
    return int.from_bytes(blake2b(f"{program}\0{replica_id}".encode(), digest_size=8).digest(), "big")


def rank(
    program: str,
    replicas: Sequence[ReplicaView],
    pinned: str | None,
    waited_s: float,
    config: PlacementConfig,
    group: Group | None = None,
) -> tuple[str, ...]:
    """Ids of the replicas to try, best first; empty only when `replicas` is.

    `pinned` is where the program's state is believed to be; a replica that is not among `replicas` counts as none.
    A program is offered its own replica alone until it has waited `patience_s`, then the others behind it. One that has
    none goes where its `group` is, unless that is crowded or has more than its share of programs. Without a program
    (`""`) only the load decides.
    """
    by_id = {replica.replica_id: replica for replica in replicas}
    home = by_id.get(pinned) if pinned is not None else None
    if home is not None and waited_s < config.patience_s:
        return (home.replica_id,)
    rest = sorted((replica for replica in replicas if replica is not home), key=_load)
    if home is not None:
        rest.insert(0, home)
    elif program:
        rest = _by_hash(program, rest, config.imbalance)
        if group is not None and (together := _of_group(group, replicas, config)) is not None:
            rest.remove(together)
            rest.insert(0, together)
    return tuple(replica.replica_id for replica in rest)


def _by_hash(program: str, replicas: Sequence[ReplicaView], imbalance: int) -> list[ReplicaView]:
    """Highest rendezvous weight first, after those that are far busier than the least busy one."""
    if not replicas:
        return []
    least = min(replica.ongoing for replica in replicas)

    def order(replica: ReplicaView) -> tuple[bool, int]:
        return _crowded(replica, least, imbalance), -weight(program, replica.replica_id)

    return sorted(replicas, key=order)


def _of_group(group: Group, replicas: Sequence[ReplicaView], config: PlacementConfig) -> ReplicaView | None:
    """Where the group is served, if there is room: one name that all use must not bring all to one replica."""
    if not replicas:
        return None
    home = next((each for each in replicas if each.replica_id == group.replica_id), None)
    home = home or max(replicas, key=lambda each: weight(group.name, each.replica_id))
    share = config.group_load * sum(each.programs for each in replicas) / len(replicas)
    least = min(each.ongoing for each in replicas)
    if _crowded(home, least, config.imbalance) or home.programs >= max(share, config.imbalance):
        return None
    return home


def _crowded(replica: ReplicaView, least: int, imbalance: int) -> bool:
    return replica.full or replica.ongoing - least >= imbalance


def _load(replica: ReplicaView) -> tuple[bool, int, str]:
    return replica.full, replica.ongoing, replica.replica_id
