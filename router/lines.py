"""Requests that wait for a replica, each line in order, all lines together bounded. Pure: who is next, not when.

A request waits for its program's replica, or for any. A replica with room takes the first of its own line and the line
for any, whichever comes first; so among those that it could serve, nobody of one class is overtaken. Batch waits behind
interactive requests. Where tenants share the slots by their weights each has lines of its own, and whose turn it is
comes first (`SlotShares`).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from holdfast.replicas.errors import OverloadedError
from holdfast.replicas.scheduling.shares import BATCH_SHARE, Bounds, Classes, FairShares, Roots, Turn
from holdfast.replicas.types import Priority

T = TypeVar("T")
Key: TypeAlias = tuple[float, ...]

_SLACK = 64  # places that were given up may stay in a line of any length


class Line(NamedTuple):
    """Requests of one tenant and class wait in one line."""

    tenant: str
    priority: Priority = Priority.INTERACTIVE


@dataclass(frozen=True, slots=True)
class Payer:
    """What a request counts for: a tenant, its class, and the program of the tenant's; "": none."""

    tenant: str
    weight: float = 1.0
    priority: Priority = Priority.INTERACTIVE
    root: str = ""

    @property
    def line(self) -> Line:
        return Line(self.tenant, self.priority)


NOBODY = Payer("")  # whose requests go before those of all tenants, and count for none


@dataclass(slots=True, eq=False)
class Place(Generic[T]):
    """One request's place; `home` None: any replica will do."""

    key: Key
    waiter: T
    home: str | None
    line: Line = NOBODY.line
    n_prompt: int = 0  # tokens
    gone: bool = False


class SlotShares:
    """Who gets the next slot: the classes in turn, in each of them tenants, and their programs, by the rule of
    `engine.order: fair`, over the seconds that they have slots. What is nobody's goes first in its class, and its
    programs have no turns. Times are of one clock that does not go back.
    """

    def __init__(self, batch_share: float = BATCH_SHARE) -> None:
        self._classes = Classes(batch_share)
        self._fair = FairShares()
        self._counted: dict[Line, float] = {}  # until when, of those that have slots
        self._looked = 0.0  # when the classes were told last
        self._running: Counter[Priority] = Counter()  # slots
        self._waiting: Counter[Priority] = Counter()  # requests

    def come(self, payer: Payer, now: float) -> Turn:
        """A request waits from now on: its turn among its tenant's."""
        alone = not self._waiting[payer.priority]
        self._waiting[payer.priority] += 1
        return self._come(payer, now, alone=alone)

    def leave(self, payer: Payer) -> None:
        """It waits no longer, and has no slot."""
        self._waiting[payer.priority] -= 1
        if payer.root:
            self._roots_of(payer.line).on_end(payer.root)

    def take(self, payer: Payer, now: float, turn: Turn | None = None) -> None:
        """A request has got a slot, with the turn that it waited with, or at once."""
        self._tell_classes(now)
        self._running[payer.priority] += 1
        if turn is None:
            turn = self._come(payer, now, alone=not self._waiting[payer.priority])
        else:
            self._waiting[payer.priority] -= 1
        if not payer.tenant:
            return
        self._count(payer.line, now)
        self._fair.of_class[payer.priority].on_start(payer.tenant).weight = payer.weight
        self._roots_of(payer.line).on_start(turn)
        self._counted[payer.line] = now

    def give_back(self, payer: Payer, now: float, seconds: float = 0.0) -> None:
        """A request has no slot any more, which it had for so long."""
        self._tell_classes(now)
        self._running[payer.priority] -= 1
        if not payer.tenant:
            return
        self._count(payer.line, now)
        shares = self._fair.of_class[payer.priority]
        shares.on_end(payer.tenant)
        if payer.root:
            self._roots_of(payer.line).charge(payer.root, seconds)
            self._roots_of(payer.line).on_end(payer.root)
        if not shares.of(payer.tenant).running:
            del self._counted[payer.line]

    def first(self, lines: Sequence[Line], now: float) -> Line:
        """Whose turn it is of these, of whom there is one at least."""
        self._tell_classes(now)
        wanted = Priority.BATCH if self._classes.due else Priority.INTERACTIVE
        lines = [line for line in lines if line.priority is wanted] or lines
        nobody = next((line for line in lines if line.tenant == NOBODY.tenant), None)
        if nobody is not None:
            return nobody
        for line in lines:
            self._count(line, now)
        shares = self._fair.of_class[lines[0].priority]
        return lines[shares.first([line.tenant for line in lines])[0]]

    def crowds(self, waiting: Mapping[Line, int], payer: Payer) -> Line | None:
        """Who has most of a full line for its weight, more than `payer` had with one more; None where nobody has.

        For an interactive request batch gives way, whoever's.
        """
        batch = {line: n for line, n in waiting.items() if line.priority is Priority.BATCH}
        if payer.priority is Priority.INTERACTIVE and batch:
            return max(batch, key=batch.__getitem__)
        shares = self._fair.of_class[payer.priority]
        counts = {
            line: n / shares.of(line.tenant).weight
            for line, n in waiting.items()
            if line.tenant and line.priority is payer.priority
        }
        most = max(counts, key=counts.__getitem__, default=None)
        if not payer.tenant or most is None or counts[most] <= (waiting.get(payer.line, 0) + 1) / payer.weight:
            return None
        return most

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        """So many seconds more tenants had slots of other routers, by the names that `contended` has."""
        self._fair.learn(elsewhere)

    @property
    def contended(self) -> Mapping[str, float]:
        """Seconds of slots while others waited, by class and tenant, for other routers to count."""
        return self._fair.contended

    def _come(self, payer: Payer, now: float, *, alone: bool) -> Turn:
        if not payer.tenant:
            return (0.0, 0.0)
        for line in list(self._counted):
            self._count(line, now)
        self._fair.of_class[payer.priority].on_arrive(payer.tenant, payer.weight, alone=alone)
        return self._roots_of(payer.line).on_arrive(payer.root) if payer.root else (0.0, 0.0)

    def _count(self, line: Line, now: float) -> None:
        """Charge a tenant for the slots it has had since that was done last."""
        since = self._counted.get(line)
        if since is None or since == now:
            return
        seconds = self._fair.of_class[line.priority].of(line.tenant).running * (now - since)
        self._fair.charge(line.priority, line.tenant, seconds, contended=self._waiting[line.priority] > 0)
        self._counted[line] = now

    def _tell_classes(self, now: float) -> None:
        seconds, self._looked = now - self._looked, now
        batch, slots = self._running[Priority.BATCH], self._running.total()
        wanted = batch > 0 or self._waiting[Priority.BATCH] > 0
        part = batch / slots if slots else 0.0
        self._classes.serve(seconds * (1.0 - part) if slots else 0.0, seconds * part, wanted=wanted)

    def _roots_of(self, line: Line) -> Roots:
        return self._fair.roots.use((line.priority, line.tenant))


class Lines(Generic[T]):
    """Heaps with lazy deletion: every operation costs O(log n), those that look at all tenants as many times as there
    are of them.
    """

    def __init__(self, most: int, most_tokens: int = 1 << 62) -> None:
        self._bounds = Bounds(most, most_tokens)
        self.tokens = 0  # of those that wait
        self._tickets = count()  # breaks ties first-in first-out
        self._lines: dict[str | None, dict[Line, list[tuple[Key, int, Place[T]]]]] = {}  # by home
        self._waiting = 0
        self._of: Counter[Line] = Counter()  # how many wait

    def __len__(self) -> int:
        return self._waiting

    def giving_way(self, lasts: Iterable[Place[T]], tokens: int) -> list[Place[T]] | None:
        """Which of `lasts` have to leave for one of so many tokens that comes; None where all would not be enough."""
        return self._bounds.giving_way(lasts, self._waiting, self.tokens, tokens)

    def enter(self, key: Key, waiter: T, home: str | None, line: Line = NOBODY.line, tokens: int = 0) -> Place[T]:
        """Raises OverloadedError where too much waits already."""
        if not self._bounds.room(self._waiting, self.tokens, tokens):
            raise OverloadedError(f"{self._waiting} requests of {self.tokens} tokens wait for a replica already")
        place = Place(key, waiter, home, line, tokens)
        self._waiting += 1
        self.tokens += tokens
        self._of[line] += 1
        self._push(place)
        return place

    def free(self, place: Place[T]) -> None:
        """Any replica will do from now on."""
        if place.home is not None and not place.gone:
            place.home = None
            self._push(place)

    def leave(self, place: Place[T]) -> None:
        """It waits no longer."""
        if not place.gone:
            place.gone = True
            self._waiting -= 1
            self.tokens -= place.n_prompt
            self._of[place.line] -= 1
            if not self._of[place.line]:
                del self._of[place.line]

    def lines(self, replica_id: str) -> list[Line]:
        """Those with requests that a replica could serve."""
        names = {line: None for home in (replica_id, None) for line in list(self._lines.get(home, ()))}
        return [line for line in names if any(self._heads(replica_id, line))]

    def take(self, replica_id: str, line: Line = NOBODY.line) -> T | None:
        """A line's next for a replica, which leaves its line; None: nobody waits for it."""
        heads = list(self._heads(replica_id, line))
        if not heads:
            return None
        place = min(heads)[2]
        self.leave(place)
        return place.waiter

    def waiting(self) -> Mapping[Line, int]:
        """How many requests wait in each line."""
        return self._of

    def lasts(self, line: Line) -> Iterator[Place[T]]:
        """The places of a line, from the one that would be served last on. Looks at all of them."""
        here = [(home, entry) for home, lines in self._lines.items() for entry in lines.get(line, ())]
        entries = [entry for home, entry in here if not entry[2].gone and entry[2].home == home]
        if entries:
            yield max(entries)[2]  # mostly it is the only one that is asked for
        yield from (entry[2] for entry in sorted(entries, reverse=True)[1:])

    def keep(self, replica_ids: set[str]) -> None:
        """These are the replicas there are: who waited for another one waits for any."""
        for home in [each for each in self._lines if each is not None and each not in replica_ids]:
            for entries in self._lines.pop(home).values():
                for _, _, place in entries:
                    if place.home == home:
                        self.free(place)

    def _push(self, place: Place[T]) -> None:
        entries = self._lines.setdefault(place.home, {}).setdefault(place.line, [])
        if len(entries) > 2 * self._waiting + _SLACK:
            entries[:] = [entry for entry in entries if not entry[2].gone and entry[2].home == place.home]
            heapq.heapify(entries)
        heapq.heappush(entries, (place.key, next(self._tickets), place))

    def _heads(self, replica_id: str, line: Line) -> Iterator[tuple[Key, int, Place[T]]]:
        """The first of a line for a replica, and of the one for any."""
        for home in (replica_id, None):
            lines = self._lines.get(home, {})
            entries = lines.get(line)
            while entries and (entries[0][2].gone or entries[0][2].home != home):
                heapq.heappop(entries)
            if entries:
                yield entries[0]
            elif line in lines:
                del lines[line]
                if not lines:
                    del self._lines[home]
