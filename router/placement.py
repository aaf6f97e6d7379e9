"""Which replica serves a turn, from counters that are kept as they change. Pure: no waiting, no clock, no Ray.

A turn goes where its first token is expected soonest:

    expected work = (turns * turn_tokens + tokens of the prompt that are not held there + cells that it takes from
                    programs in their pauses) * seconds per token
    turns         = turns in hand + half the square of those above the mean of all replicas; at a parent's, of those
                    above crowded_load times the mean

A beginning that several replicas hold is worth no more than shared_turns turns: so many want it that another copy is
soon paid for by those that come next.

A program's next turn goes home, to the replica that holds its state, unless that is so crowded that computing it all
again elsewhere is clearly less. A new program may go where its prompt's beginning is held, where its parent is, or
where there is least to do. Remembering homes and waiting for room are `affinity`'s.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.stats import LoadReport
from holdfast.router.ring import Ring

CANDIDATES = 8  # replicas that are looked at of those that hold a prefix
FEW = 2  # turns in hand are no crowd anywhere
PREFIXES = 65536  # that are remembered


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """How far affinity goes. Counts are in programs, requests and tokens, times in seconds."""

    pins: int = 65536  # programs remembered with their replica; the least recently routed is forgotten first
    patience_s: float = 10.0  # at most so long a program waits for its own full replica; less where computing is less
    turn_tokens: int = 1200  # tokens to compute that a turn in hand counts as
    shared_turns: float = 6.0  # turns in hand that a beginning which several replicas hold is worth at most
    crowded_load: float = 1.5  # above so many times the mean of turns in hand its parent's replica is crowded
    move_factor: float = 4.0  # a program leaves a crowded replica where that saves so many times what it computes again
    report_s: float = 1.0  # between two reports of a replica to the routers
    silent_s: float = 6.0  # a replica that reports nothing, or accepts no call, for so long is passed by
    accept_s: float = 3.0  # a replica that neither accepts a call nor reports for so long is passed by for silent_s
    no_replica_s: float = 60.0  # how long a request waits while there is no replica at all
    max_waiting: int = 4096  # requests that wait for a replica with room; one more is refused, or one of a lower class
    max_waiting_tokens: int = 1 << 22  # tokens in their prompts, likewise
    queue_timeout_s: float = 300.0  # a request that waited this long is refused
    foretold_s: float = 1.0  # when a replica refuses a request by its deadline, so are others like it for so long

    def __post_init__(self) -> None:
        for name in ("pins", "turn_tokens", "max_waiting", "max_waiting_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", name)
        if self.crowded_load < 1:
            raise ConfigError(f"crowded_load must be at least 1, not {self.crowded_load}", "crowded_load")
        for name in ("shared_turns", "patience_s", "move_factor", "no_replica_s", "queue_timeout_s", "foretold_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}", name)
        if self.report_s <= 0:
            raise ConfigError(f"report_s must be positive, not {self.report_s}", "report_s")
        if self.accept_s <= 0:
            raise ConfigError(f"accept_s must be positive, not {self.accept_s}", "accept_s")
        if self.silent_s < 3 * self.report_s:
            raise ConfigError(f"silent_s must be three times report_s or more, not {self.silent_s}", "silent_s")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning of a prompt, with its length in tokens as far as it is known."""

    digest: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn that is to be placed: a prompt of so many `tokens`. `home` holds `held` of them for its program.

    It begins with `prefixes`, the longest first, and that of a new program may be wanted `near` a replica: where its
    parent is, which has what the last of them names. With
    a `name` nothing is known of it that other routers could know, so that name decides, for all of them alike.
    One that is `bound` can be served at its home alone.
    """

    tokens: int = 0
    prefixes: tuple[Prefix, ...] = ()
    home: str | None = None
    held: int = 0
    near: str | None = None
    name: str = ""
    bound: bool = False


class Reason(StrEnum):
    """Why a turn went where it went."""

    HOME = "home"  # its program's state is there
    PREFIX = "prefix"  # what its prompt begins with is there
    NEAR = "near"  # its parent is there
    HASH = "hash"  # its program's name points there
    LOAD = "load"  # least to do
    CROWDED = "crowded"  # it left its home, which had too much to do
    WAITED = "waited"  # it left its home, which had no room for too long
    LOST = "lost"  # its home is there no more


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a turn goes, and why."""

    replica_id: str
    reason: Reason


class Holders:
    """The replicas that hold one prefix, each with how many tokens of it; 0: not known."""

    __slots__ = ("_known", "ids")

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._known: dict[str, tuple[int, int]] = {}  # where each stands in that list, and the tokens

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, replica_id: str) -> int | None:
        """None: it is none of them."""
        known = self._known.get(replica_id)
        return known[1] if known else None

    def put(self, replica_id: str, tokens: int) -> None:
        known = self._known.get(replica_id)
        if known is None:
            self._known[replica_id] = len(self.ids), tokens
            self.ids.append(replica_id)
        elif tokens:
            self._known[replica_id] = known[0], tokens

    def remove(self, replica_id: str) -> None:
        known = self._known.pop(replica_id, None)
        if known is None:
            return
        last = self.ids.pop()
        if last != replica_id:
            self.ids[known[0]] = last
            self._known[last] = known[0], self._known[last][1]

    def some(self, most: int, rng: random.Random) -> list[str]:
        """At most so many of them, by chance where there are more."""
        return self.ids if len(self.ids) <= most else rng.sample(self.ids, most)


class Placement:
    """Where turns go. A choice costs O(log replicas), and one for a program with a home less.

    Turns in hand are those that this router sent and that have not ended, and what a replica's latest report says of
    others'. What replicas hold is known from their reports, and until the next one from what this router sent.
    """

    def __init__(self, config: PlacementConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._capacity: dict[str, int] = {}
        self._ring = Ring()
        self._sent: dict[str, int] = {}
        self._others: dict[str, int] = {}
        self._token_s: dict[str, float] = {}
        self._room: dict[str, int] = {}  # cells that no program in its pause keeps, as told last
        self._told: dict[str, Mapping[str, int]] = {}  # the prefixes that a replica told of last
        self._holders: OrderedDict[str, Holders] = OrderedDict()  # by prefix
        self._held: dict[str, set[str]] = {}  # by replica, of which prefixes it is among the holders
        self._total = 0  # turns in hand of all replicas
        self._stamps: dict[str, float] = {}  # of equal ones the one that got no turn for longest comes first
        self._last = 1.0
        self._order: list[tuple[bool, int, float, str]] = []

    def update(self, capacity: Mapping[str, int]) -> None:
        """These are the replicas from now on, each with the turns that it takes at once."""
        for gone in self._capacity.keys() - capacity.keys():
            for digest in self._held.get(gone, ()):
                self._holders[digest].remove(gone)
            for known in (self._sent, self._others, self._token_s, self._room, self._told, self._stamps, self._held):
                known.pop(gone, None)
        self._capacity = dict(capacity)
        self._ring.keep(capacity.keys())
        for replica_id in capacity:
            self._sent.setdefault(replica_id, 0)
            self._others.setdefault(replica_id, 0)
            # Routers that know the same must not all choose the same replica: they begin in different orders.
            self._stamps.setdefault(replica_id, self._rng.random())
        self._total = sum(map(self._turns, capacity))
        self._sort()

    def report(self, replica_id: str, report: LoadReport) -> None:
        """A replica has told how it is."""
        if replica_id not in self._capacity:
            return
        self.ongoing(replica_id, report.running + report.waiting)
        if report.seconds_per_token > 0:
            self._token_s[replica_id] = report.seconds_per_token
        if report.cells_total:
            self._room[replica_id] = report.cells_total - report.cells_pinned
        self._told_of(replica_id, report.prefixes)

    def ongoing(self, replica_id: str, turns: int) -> None:
        """A replica has said how many turns it has, of all routers."""
        if replica_id in self._sent:
            others = max(0, turns - self._sent[replica_id])
            self._total += others - self._others[replica_id]
            self._others[replica_id] = others
            self._changed(replica_id)

    def holds(self, replica_id: str, prefixes: Sequence[Prefix]) -> None:
        """A turn was let in there: the replica will have what its prompt begins with."""
        for prefix in prefixes:
            self._hold(replica_id, prefix.digest, 0)

    def sent(self, replica_id: str) -> None:
        """A turn was sent there."""
        if replica_id in self._sent:
            self._sent[replica_id] += 1
            self._total += 1
            self._last += 1.0
            self._stamps[replica_id] = self._last
            self._changed(replica_id)

    def ended(self, replica_id: str) -> None:
        """A turn that was sent there has ended."""
        if self._sent.get(replica_id):
            self._sent[replica_id] -= 1
            self._total -= 1
            self._changed(replica_id)

    def choose(self, ask: Ask) -> Choice | None:
        """The replica for a turn; None where there is no replica."""
        least = self._least()
        if least is None:
            return None
        if ask.home is None:
            return self._place(ask, least)
        if ask.home not in self._capacity:
            return replace(self._place(ask, least), reason=Reason.LOST)
        if ask.bound:
            return Choice(ask.home, Reason.HOME)
        saved = (self._turns(ask.home) - self._turns(least)) * self._config.turn_tokens
        # A short history is soon computed again, but turns come and go: one or two more are no crowd.
        if saved > self._config.move_factor * (ask.held + self._config.turn_tokens):
            return Choice(least, Reason.CROWDED)
        return Choice(ask.home, Reason.HOME)

    def elsewhere(self, ask: Ask) -> Choice | None:
        """The replica for a turn that has waited for its home long enough."""
        choice = self.choose(replace(ask, home=None))
        return choice if choice is None or choice.replica_id == ask.home else replace(choice, reason=Reason.WAITED)

    def patience(self, ask: Ask) -> float:
        """Seconds for which a turn waits for its full home: as long as computing there what home holds would take."""
        token_s = self._token_s.get(ask.home or "")
        most = self._config.patience_s
        return most if token_s is None else min(most, ask.held * token_s)

    @property
    def balance(self) -> float:
        """Turns in hand of the replica with most of them, over the mean; 1 where there is nothing to do."""
        turns = [self._turns(replica_id) for replica_id in self._capacity]
        return max(turns) * len(turns) / sum(turns) if any(turns) else 1.0

    # ---- parts ----

    def _place(self, ask: Ask, least: str) -> Choice:
        """A new program's replica: of a bounded number that may suit it the one with the least expected work."""
        if ask.name:
            return Choice(self._ring.owner(ask.name), Reason.HASH)
        known = [(each, holders) for each in ask.prefixes if (holders := self._holders.get(each.digest))]

        # Of a parent's history no other program than its sub-agents will want a copy.
        shared = ask.tokens if ask.near is not None else int(self._config.shared_turns * self._config.turn_tokens)

        def held_at(replica_id: str) -> int:
            for each, holders in known:
                if (told := holders.tokens(replica_id)) is not None:
                    return min(told or each.tokens, shared if len(holders) > 1 else ask.tokens)
            return 0

        mean = self._total / len(self._capacity)

        def cost(choice: Choice) -> tuple[bool, float]:
            held = held_at(choice.replica_id)
            if choice.reason is Reason.NEAR and ask.prefixes:
                held = max(held, ask.prefixes[-1].tokens)
            taken = max(0, ask.tokens - self._room.get(choice.replica_id, ask.tokens))
            turns = self._turns(choice.replica_id)
            # A beginning that many share is worth another copy, for those that come next find that, too. What a parent
            # has is of use to its sub-agents alone.
            load = self._config.crowded_load if choice.reason is Reason.NEAR else 1.0
            crowd = max(0.0, turns - max(load * mean, FEW))
            work = (turns + crowd**2 / 2) * self._config.turn_tokens + ask.tokens - min(held, ask.tokens) + taken
            return turns >= self._capacity[choice.replica_id], work * self._token_s.get(choice.replica_id, 1.0)

        drawn: dict[str, None] = {}
        for _, holders in known:
            for each in holders.some(CANDIDATES, self._rng):
                if len(drawn) < CANDIDATES:
                    drawn[each] = None
        found = [Choice(ask.near, Reason.NEAR)] if ask.near is not None and ask.near in self._capacity else []
        found += [Choice(each, Reason.PREFIX) for each in drawn]
        found.append(Choice(least, Reason.PREFIX if held_at(least) else Reason.LOAD))
        return min(found, key=cost)

    def _turns(self, replica_id: str) -> int:
        return self._sent[replica_id] + self._others[replica_id]

    def _told_of(self, replica_id: str, prefixes: Mapping[str, int]) -> None:
        """A replica holds these beginnings, and of what it told of before no others."""
        for digest in self._told.get(replica_id, {}).keys() - prefixes.keys():
            if digest in self._holders:
                self._holders[digest].remove(replica_id)
                self._held[replica_id].discard(digest)
        for digest, tokens in prefixes.items():
            holders = self._holders.get(digest)
            if tokens and holders is not None and holders.tokens(replica_id) == tokens:
                self._holders.move_to_end(digest)
            else:
                self._hold(replica_id, digest, tokens)
        self._told[replica_id] = prefixes

    def _hold(self, replica_id: str, digest: str, tokens: int) -> None:
        if replica_id not in self._capacity:
            return
        if digest not in self._holders:
            self._holders[digest] = Holders()
        self._holders.move_to_end(digest)
        self._holders[digest].put(replica_id, tokens)
        self._held.setdefault(replica_id, set()).add(digest)
        if len(self._holders) > PREFIXES:
            forgotten, holders = self._holders.popitem(last=False)
            for each in holders.ids:
                self._held[each].discard(forgotten)

    def _changed(self, replica_id: str) -> None:
        heapq.heappush(self._order, self._entry(replica_id))
        if len(self._order) > 8 * len(self._capacity) + 64:
            self._sort()

    def _sort(self) -> None:
        self._order = [self._entry(replica_id) for replica_id in self._capacity]
        heapq.heapify(self._order)

    def _entry(self, replica_id: str) -> tuple[bool, int, float, str]:
        turns = self._turns(replica_id)
        return turns >= self._capacity[replica_id], turns, self._stamps[replica_id], replica_id

    def _least(self) -> str | None:
        """The replica with the fewest turns in hand, those with room first."""
        while self._order:
            replica_id = self._order[0][-1]
            if replica_id in self._capacity and self._order[0] == self._entry(replica_id):
                return replica_id
            heapq.heappop(self._order)  # it has changed since, and stands elsewhere as well
        return None
