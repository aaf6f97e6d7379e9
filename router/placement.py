"""Chooses the replica for a turn: filter the candidates, score each, pick the cheapest. Pure.

    affinity    a program's next turn goes to its home, the replica that holds its state, unless that is far too busy
    filter      a new program: its parent's replica, some holders of its prompt's prefix, the least loaded replica
    score       (queue + prefill + eviction) * seconds per token: the expected time to the first token
    pick        a replica with room before a full one, then the lowest score

Each signal is a function below, and `Weights` says how much it counts. `affinity` remembers homes; `dispatch_queue`
makes requests wait for room.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.stats import LoadReport

HOLDERS = 8  # replicas scored of those that hold a prefix of the prompt
PREFIXES = 65536  # prefixes remembered; the one used least recently is forgotten first


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight of each signal. Chosen in the simulator (docs/scheduling.md)."""

    turn_tokens: int = 1200  # queue: one turn in hand costs as much as computing so many tokens
    few_turns: int = 2  # queue: so many turns in hand are never a crowd
    crowded: float = 1.0  # queue: turns above so many times the mean of all replicas are a crowd
    crowded_parent: float = 1.5  # queue: the same at the replica of the program's parent
    shared_turns: float = 6.0  # prefill: a prefix on several replicas saves at most so many turns; it can be copied
    move_factor: float = 4.0  # affinity: moving must save so many times the tokens that it computes again
    patience_s: float = 10.0  # affinity: a turn waits for its full home at most so long


WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """When the router gives up on a replica, and how many requests may wait for one. Times in seconds."""

    silent_s: float = 6.0  # a replica that reports nothing, or accepts no call, for so long gets no requests
    no_replica_s: float = 60.0  # a request waits so long while there is no replica at all
    max_waiting: int = 4096  # requests that wait for a replica with room; further ones are refused (429)
    queue_timeout_s: float = 300.0  # a request that has waited so long is refused (429)

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting must be at least 1, not {self.max_waiting}", "max_waiting")
        for name in ("no_replica_s", "queue_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}", name)
        if self.silent_s < 3:
            raise ConfigError(f"silent_s must be at least 3, three reports, not {self.silent_s}", "silent_s")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The digest of a prompt's beginning, and its tokens as far as the router knows them."""

    digest: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A turn to place: a prompt of `tokens`, of which the program's `home` holds `held`."""

    tokens: int = 0
    prefixes: tuple[Prefix, ...] = ()  # longest first
    home: str | None = None  # the replica that served the program last
    held: int = 0
    parent: str | None = None  # the replica of the parent program; it holds the last of `prefixes`
    name: str = ""  # set while Redis is away: routers that share nothing agree by a hash of the program's name
    bound: bool = False  # only `home` can serve it


class Reason(StrEnum):
    """The reason for a turn's replica."""

    HOME = "home"  # the replica holds the program's state
    PREFIX = "prefix"  # it holds a prefix of the prompt
    NEAR = "near"  # it holds the parent's state
    HASH = "hash"  # the hash of the program's name, while Redis is away
    LOAD = "load"  # it has the least to do
    CROWDED = "crowded"  # the program left its home, which had too much to do
    WAITED = "waited"  # the program left its home, which had no room for too long
    LOST = "lost"  # the program's home is gone


@dataclass(frozen=True, slots=True)
class Decision:
    """A turn's replica."""

    replica_id: str
    reason: Reason


@dataclass(slots=True)
class ReplicaLoad:
    """This router's view of a replica: its own turns exactly, the rest from the replica's latest report."""

    capacity: int  # turns that it takes at once
    last_sent: float  # order of the latest turn sent; the least recent of equally loaded replicas comes first
    sent: int = 0  # turns in hand that this router sent
    others: int = 0  # turns in hand of other routers
    seconds_per_token: float = 0.0  # 0: unknown
    free_cells: int | None = None  # cells that no paused program keeps; None: unknown
    reported: Mapping[str, int] = field(default_factory=dict)  # tokens by prefix, from the latest report

    @property
    def turns(self) -> int:
        return self.sent + self.others

    @property
    def full(self) -> bool:
        return self.turns >= self.capacity


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that passed the filter."""

    replica_id: str
    reason: Reason
    load: ReplicaLoad
    held: int  # tokens of the prompt that need not be computed there


# ---- signals: each in tokens to compute ----


def queue(candidate: Candidate, mean_turns: float, weights: Weights) -> float:
    """The turns in hand, plus half the square of those that are a crowd.

    A parent's replica may be busier: only the parent's sub-agents profit from its prefix.
    """
    limit = weights.crowded_parent if candidate.reason is Reason.NEAR else weights.crowded
    turns = candidate.load.turns
    crowd = max(0.0, turns - max(limit * mean_turns, weights.few_turns))
    return (turns + crowd**2 / 2) * weights.turn_tokens


def prefill(candidate: Candidate, request: PlacementRequest) -> float:
    """The prompt's tokens that the replica does not hold."""
    return request.tokens - min(candidate.held, request.tokens)


def eviction(candidate: Candidate, request: PlacementRequest) -> float:
    """The cells that the prompt takes from paused programs, which compute them again later."""
    free = candidate.load.free_cells
    return 0.0 if free is None else max(0, request.tokens - free)


def leaves_home(home: ReplicaLoad, least: ReplicaLoad, held: int, weights: Weights) -> bool:
    """Whether the least loaded replica saves clearly more than the program's history costs there.

    One turn is added to the history: one or two turns more are no crowd, and a short history is soon computed.
    """
    saved = (home.turns - least.turns) * weights.turn_tokens
    return saved > weights.move_factor * (held + weights.turn_tokens)


class Placement:
    """Places turns by counters that are kept as they change: a choice costs O(log replicas), by a name O(replicas)."""

    def __init__(self, rng: random.Random, weights: Weights = WEIGHTS) -> None:
        self._rng = rng
        self._weights = weights
        self._loads: dict[str, ReplicaLoad] = {}
        self._prefixes = PrefixIndex(rng)
        self._total = 0  # turns in hand of all replicas
        self._last = 1.0
        self._order: list[tuple[bool, int, float, str]] = []  # a heap of keys, some outdated

    def update(self, capacity: Mapping[str, int]) -> None:
        """Set the replicas, each with the turns that it takes at once."""
        for replica_id in self._loads.keys() - capacity.keys():
            self._prefixes.forget(replica_id)
            del self._loads[replica_id]
        for replica_id, turns in capacity.items():
            # Random, so that routers which know the same do not all choose the same replica.
            self._loads.setdefault(replica_id, ReplicaLoad(turns, self._rng.random())).capacity = turns
        self._total = sum(load.turns for load in self._loads.values())
        self._sort()

    def report(self, replica_id: str, report: LoadReport) -> None:
        """Take in a replica's report."""
        load = self._loads.get(replica_id)
        if load is None:
            return
        self.ongoing(replica_id, report.running + report.waiting)
        if report.seconds_per_token > 0:
            load.seconds_per_token = report.seconds_per_token
        if report.cells_total:
            load.free_cells = report.cells_total - report.cells_pinned
        for digest in load.reported.keys() - report.prefixes.keys():
            self._prefixes.remove(digest, replica_id)
        for digest, tokens in report.prefixes.items():
            self._prefixes.put(digest, replica_id, tokens)
        load.reported = report.prefixes

    def ongoing(self, replica_id: str, turns: int) -> None:
        """Take in a replica's count of the turns that it has in hand, of all routers."""
        load = self._loads.get(replica_id)
        if load is not None:
            others = max(0, turns - load.sent)
            self._total += others - load.others
            load.others = others
            self._changed(replica_id)

    def holds(self, replica_id: str, prefixes: Sequence[Prefix]) -> None:
        """Add the prefixes of a turn that a replica accepted."""
        if replica_id in self._loads:
            for prefix in prefixes:
                self._prefixes.put(prefix.digest, replica_id, 0)

    def sent(self, replica_id: str) -> None:
        """A turn was sent to a replica."""
        load = self._loads.get(replica_id)
        if load is not None:
            load.sent += 1
            self._total += 1
            self._last += 1.0
            load.last_sent = self._last
            self._changed(replica_id)

    def ended(self, replica_id: str) -> None:
        """A turn that was sent to a replica has ended."""
        load = self._loads.get(replica_id)
        if load is not None and load.sent:
            load.sent -= 1
            self._total -= 1
            self._changed(replica_id)

    def choose(self, request: PlacementRequest) -> Decision | None:
        """The replica for a turn; None where there is no replica."""
        least = self._least()
        if least is None:
            return None
        if request.home is None:
            return self._pick(request, least)
        home = self._loads.get(request.home)
        if home is None:
            return replace(self._pick(request, least), reason=Reason.LOST)
        if not request.bound and leaves_home(home, self._loads[least], request.held, self._weights):
            return Decision(least, Reason.CROWDED)
        return Decision(request.home, Reason.HOME)

    def elsewhere(self, request: PlacementRequest) -> Decision | None:
        """The replica for a turn that has waited long enough for its home."""
        decision = self.choose(replace(request, home=None))
        if decision is None or decision.replica_id == request.home:
            return decision
        return replace(decision, reason=Reason.WAITED)

    def patience(self, request: PlacementRequest) -> float:
        """Seconds that a turn waits for its full home: no longer than computing its history elsewhere takes."""
        load = self._loads.get(request.home or "")
        most = self._weights.patience_s
        return min(most, request.held * load.seconds_per_token) if load and load.seconds_per_token else most

    @property
    def balance(self) -> float:
        """Turns in hand of the busiest replica over the mean; 1 where there is nothing to do."""
        turns = [load.turns for load in self._loads.values()]
        return max(turns) * len(turns) / sum(turns) if any(turns) else 1.0

    def _pick(self, request: PlacementRequest, least: str) -> Decision:
        if request.name:
            return Decision(rendezvous(request.name, self._loads), Reason.HASH)
        mean = self._total / len(self._loads)

        def score(candidate: Candidate) -> tuple[bool, float]:
            tokens = queue(candidate, mean, self._weights) + prefill(candidate, request) + eviction(candidate, request)
            return candidate.load.full, tokens * (candidate.load.seconds_per_token or 1.0)

        best = min(self._candidates(request, least), key=score)
        return Decision(best.replica_id, best.reason)

    def _candidates(self, request: PlacementRequest, least: str) -> Iterator[Candidate]:
        """Few replicas, however many there are: the parent's, some that hold a prefix, the least loaded one."""
        known = self._prefixes.known(request.prefixes)
        # Only the parent's sub-agents will want its history, so nothing of that is discounted.
        most = request.tokens
        if request.parent is None:
            most = int(self._weights.shared_turns * self._weights.turn_tokens)

        def held(replica_id: str) -> int:
            return held_tokens(replica_id, request, known, most)

        if request.parent is not None and request.parent in self._loads:
            tokens = request.prefixes[-1].tokens if request.prefixes else 0
            parent = self._loads[request.parent]
            yield Candidate(request.parent, Reason.NEAR, parent, max(held(request.parent), tokens))
        for each in self._prefixes.some(known):
            yield Candidate(each, Reason.PREFIX, self._loads[each], held(each))
        tokens = held(least)
        yield Candidate(least, Reason.PREFIX if tokens else Reason.LOAD, self._loads[least], tokens)

    def _changed(self, replica_id: str) -> None:
        heapq.heappush(self._order, self._key(replica_id))
        if len(self._order) > 8 * len(self._loads) + 64:
            self._sort()

    def _sort(self) -> None:
        self._order = [self._key(replica_id) for replica_id in self._loads]
        heapq.heapify(self._order)

    def _key(self, replica_id: str) -> tuple[bool, int, float, str]:
        load = self._loads[replica_id]
        return load.full, load.turns, load.last_sent, replica_id

    def _least(self) -> str | None:
        """The replica with the fewest turns in hand, replicas with room first."""
        while self._order:
            replica_id = self._order[0][-1]
            if replica_id in self._loads and self._order[0] == self._key(replica_id):
                return replica_id
            heapq.heappop(self._order)  # outdated: the replica's newer key is in the heap as well
        return None


Holders = Mapping[str, int]  # tokens of one prefix by replica; 0: the replica has not reported them yet


def held_tokens(
    replica_id: str, request: PlacementRequest, known: Iterable[tuple[Prefix, Holders]], shared: int
) -> int:
    """Tokens of the prompt that a replica holds; of a prefix that several replicas hold at most `shared`."""
    for prefix, holders in known:
        tokens = holders.get(replica_id)
        if tokens is not None:
            return min(tokens or prefix.tokens, shared if len(holders) > 1 else request.tokens)
    return 0


class PrefixIndex:
    """The prefixes that each replica holds: those that it reported last, and those sent to it since."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._holders: OrderedDict[str, dict[str, int]] = OrderedDict()  # by digest, least recently used first

    def put(self, digest: str, replica_id: str, tokens: int) -> None:
        """A replica holds a prefix. `tokens` 0 leaves a known number as it is."""
        holders = self._holders.setdefault(digest, {})
        self._holders.move_to_end(digest)
        holders[replica_id] = tokens or holders.get(replica_id, 0)
        if len(self._holders) > PREFIXES:
            self._holders.popitem(last=False)

    def remove(self, digest: str, replica_id: str) -> None:
        """A replica has evicted a prefix."""
        self._holders.get(digest, {}).pop(replica_id, None)

    def forget(self, replica_id: str) -> None:
        """A replica is gone."""
        for holders in self._holders.values():
            holders.pop(replica_id, None)

    def known(self, prefixes: Iterable[Prefix]) -> list[tuple[Prefix, Holders]]:
        """Those of `prefixes` that any replica holds, in their order."""
        return [(each, holders) for each in prefixes if (holders := self._holders.get(each.digest))]

    def some(self, known: Iterable[tuple[Prefix, Holders]]) -> list[str]:
        """At most `HOLDERS` replicas, holders of the longest prefix first; of too many a random sample."""
        chosen: dict[str, None] = {}
        for _, holders in known:
            replicas = list(holders)
            chosen |= dict.fromkeys(replicas if len(replicas) <= HOLDERS else self._rng.sample(replicas, HOLDERS))
        return list(chosen)[:HOLDERS]


def rendezvous(name: str, replica_ids: Iterable[str]) -> str:
    """The replica that a name hashes to (highest random weight, Thaler and Ravishankar 1998).

    Equal in every process and release. If a replica comes or goes, only the names move that belong to it.
    """
    return max(replica_ids, key=lambda each: blake2b(f"{name}\0{each}".encode(), digest_size=8).digest())
