"""Fair sharing between the two classes, between tenants by weight, and between a tenant's programs. No clock, no queue.

    classes    interactive requests first; batch gets at least a part of the time (`Classes`)
    tenants    the tenant that was served least for its weight (`Shares`)
    programs   the root program that began first, until it has had a quantum more than the others (`Roots`)
    bounds     where a queue is full, which requests leave it for a new one (`Bounds`)

`FairShares` has the tenants and programs of all classes. An engine shares the seconds of its steps this way (`queue`),
a router the slots of its replicas (`router/lines`).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from holdfast.replicas.types import Priority

Turn: TypeAlias = tuple[float, float]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T", bound="Sized")

TENANTS = 65_536  # remembered; the one served least recently is forgotten first
_ROOTS = 4096  # of a tenant
_MANY = 1000  # requests over which the time of a request is averaged
_ELSEWHERE_S = 10.0  # of service elsewhere count between two requests of a tenant, at most
_DUE_S = 0.5  # seconds that batch must be owed before its turn comes
BATCH_SHARE = 0.05  # of the time, for batch where interactive requests would take all of it
QUANTUM_S = 20.0  # of service within which the earlier program of a tenant goes first


class LatestUsed(OrderedDict[K, V]):
    """The values of the `most` keys used last."""

    def __init__(self, most: int, make: Callable[[], V]) -> None:
        super().__init__()
        self._most = most
        self._make = make

    def use(self, key: K) -> V:
        """The value of a key, made if there is none. The key used least recently may be forgotten for it."""
        value = self.get(key)
        if value is None:
            value = self[key] = self._make()
            if len(self) > self._most:
                self.popitem(last=False)
        self.move_to_end(key)
        return value


@dataclass(slots=True)
class Share:
    """One tenant's seconds of service divided by its weight, its running requests, and its weight.

    `elsewhere`: service at other places that is not counted yet.
    """

    served: float = 0.0
    running: int = 0
    weight: float = 1.0
    elsewhere: float = 0.0


class Shares:
    """The tenant that was served least for its weight comes first: start-time fair queueing (Goyal et al. 1996) of
    virtual token counters (Sheng et al. 2024).

    Running requests are charged in advance with the average time of a request, so that slots which become free
    together go to several tenants. The virtual time is the least service of any waiting tenant; where none waits, the
    most service of any running one. A returning tenant begins there at least: absence earns nothing, and no tenant
    waits for ever. A tenant that used all the time while no other wanted any does not pay for it later.

    Service elsewhere counts once a request of the tenant has started here, up to a bound: the tenant is overtaken, but
    not for ever (distributed start-time fair queueing, Wang and Merchant 2007).
    """

    def __init__(self, tenants: int = TENANTS) -> None:
        self._shares: LatestUsed[str, Share] = LatestUsed(tenants, lambda: Share(self._time))
        self.of = self._shares.use  # the share of a tenant, marked as used
        self._busy: dict[str, Share] = {}  # tenants with running requests
        self._time = 0.0  # virtual
        self._started = 0.0  # started requests, older ones count less
        self._spent = 0.0  # seconds of their service

    def on_arrive(self, tenant: str, weight: float, *, alone: bool) -> None:
        """A request of a tenant begins to wait. `alone`: no other request waits."""
        if alone:
            self._time = max([self._time, *(share.served for share in self._busy.values())])
        share = self.of(tenant)
        share.weight = weight
        share.served = max(share.served, self._time)

    @property
    def usual(self) -> float:
        """Average seconds of a request."""
        return self._spent / max(self._started, 1.0)

    def first(self, tenants: Iterable[str]) -> list[int]:
        """Places, in `tenants`, of the waiting tenants that were served least; several if they are equal. The caller
        serves one of them next.
        """
        # They arrived lately, so they are marked as used.
        shares = [self._shares.get(tenant) or self.of(tenant) for tenant in tenants]
        self._time = max(self._time, min([each.served for each in shares]))
        if len(shares) == 1:
            return [0]
        usual = self.usual
        standings = [(each.served + (n := each.running / each.weight) * usual, n) for each in shares]
        least = min(standings)
        return [place for place, standing in enumerate(standings) if standing == least]

    def on_start(self, tenant: str) -> Share:
        """A request of a tenant starts."""
        self._started += 1
        share = self.runs(tenant)
        share.served += share.elsewhere
        share.elsewhere = 0.0
        return share

    def runs(self, tenant: str) -> Share:
        """One more request of a tenant runs; `on_start` has counted it already."""
        share = self._busy[tenant] = self.of(tenant)
        share.running += 1
        return share

    def on_end(self, tenant: str) -> None:
        """A request of a tenant has ended."""
        share = self._busy[tenant]
        share.running -= 1
        if not share.running:
            del self._busy[tenant]

    def reset(self) -> None:
        """Count no request as running until the next calls of `runs`."""
        for share in self._busy.values():
            share.running = 0
        self._busy.clear()

    def charge(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for its service."""
        share = self.of(tenant)
        share.served += seconds / share.weight
        self._spent += seconds
        if self._started > _MANY:
            self._started, self._spent = self._started / 2, self._spent / 2

    def elsewhere(self, tenant: str, seconds: float) -> None:
        """Note service of a tenant at another place, while others waited there. Unknown tenants do not count."""
        share = self._shares.get(tenant)
        if share is not None:
            share.elsewhere = min(share.elsewhere + seconds / share.weight, _ELSEWHERE_S)


@dataclass(slots=True)
class Root:
    """A program with its sub-agents: seconds of service, and requests that wait or run."""

    served: float = 0.0
    requests: int = 0


class Roots:
    """The programs of one tenant. Earlier programs go first, so that their cells are free soon. A program that had a
    quantum more than the others waits for them. The second request of a program takes its turn with the second ones
    of other programs: ten parallel requests of a program count as one program.
    """

    def __init__(self, quantum_s: float = QUANTUM_S, most: int = _ROOTS) -> None:
        self._quantum_s = quantum_s
        self._roots: LatestUsed[str, Root] = LatestUsed(most, lambda: Root(self._time))
        self._time = 0.0  # virtual: the service of the latest program that started

    def on_arrive(self, name: str) -> Turn:
        """A request begins to wait. Returns its turn; the smallest turn is served next."""
        root = self._roots.use(name)
        root.served = max(root.served, self._time)
        root.requests += 1
        return root.served // self._quantum_s, root.requests - 1.0

    def on_start(self, turn: Turn) -> None:
        """The request with this turn starts."""
        self._time = max(self._time, turn[0] * self._quantum_s)

    def charge(self, name: str, seconds: float) -> None:
        self._roots.use(name).served += seconds

    def on_end(self, name: str) -> None:
        """A request has ended, or left the queue."""
        root = self._roots.use(name)
        root.requests = max(0, root.requests - 1)


class FairShares:
    """The tenants of each class, the programs of each tenant, and the service that other places must count.

    One thread writes; any may read `contended`.
    """

    def __init__(self, tenants: int = TENANTS) -> None:
        self.of_class = {each: Shares(tenants) for each in Priority}
        self.roots: LatestUsed[tuple[Priority, str], Roots] = LatestUsed(tenants, Roots)
        self._contended: OrderedDict[str, float] = OrderedDict()
        self._most = len(Priority) * tenants

    def charge(self, priority: Priority, tenant: str, seconds: float, *, contended: bool) -> None:
        """Charge a tenant for its service. `contended`: others of the class waited meanwhile."""
        self.of_class[priority].charge(tenant, seconds)
        if contended:
            name = f"{priority}/{tenant}"
            self._contended[name] = self._contended.get(name, 0.0) + seconds
            self._contended.move_to_end(name)
            if len(self._contended) > self._most:
                self._contended.popitem(last=False)

    @property
    def contended(self) -> Mapping[str, float]:
        """Seconds of contended service by `<class>/<tenant>`. A tenant that was forgotten begins again at 0."""
        return self._contended.copy()

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        """Count seconds of contended service at other places, by the names of `contended`."""
        for name, seconds in elsewhere.items():
            priority, _, tenant = name.partition("/")
            if priority in tuple(Priority):
                self.of_class[Priority(priority)].elsewhere(tenant, seconds)


class Classes:
    """Batch goes behind interactive requests. While those take all of the time, batch is owed `share` of it, and its
    turn comes when it is owed enough. Service while no interactive request waited does not count.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed = 0.0
        self.due = False

    def serve(self, interactive_s: float, batch_s: float, *, wanted: bool) -> None:
        """Charge the seconds of each class. `wanted`: batch requests wait or run."""
        if not wanted:
            self._owed, self.due = 0.0, False
            return
        owed = self._owed + self._share * interactive_s - (1.0 - self._share) * batch_s
        self._owed = min(max(owed, 0.0), 2 * _DUE_S)
        self.due = self._owed > 0.0 if self.due else self._owed >= _DUE_S


class Sized(Protocol):
    """A request in a queue."""

    @property
    def n_prompt(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """A queue holds at most `requests` requests and `tokens` tokens in their prompts; a single one may have more."""

    requests: int
    tokens: int

    def room(self, n: int, tokens: int, more: int) -> bool:
        """Whether a request of `more` tokens fits beside `n` requests of `tokens` tokens in all."""
        return n < self.requests and (n == 0 or tokens + more <= self.tokens)

    def giving_way(self, lasts: Iterable[T], n: int, tokens: int, more: int) -> list[T] | None:
        """The requests of `lasts`, in this order, that must leave so that a request of `more` tokens fits. None: all
        are not enough.

        Each of them is needed: if one stayed, there would be no room.
        """
        leaving, candidates = list[T](), iter(lasts)
        while not self.room(n, tokens, more):
            last = next(candidates, None)
            if last is None:
                return None
            leaving.append(last)
            n, tokens = n - 1, tokens - last.n_prompt
        needed = list[T]()
        for each in reversed(leaving):  # the last to leave is the first to stay
            if self.room(n + 1, tokens + each.n_prompt, more):
                n, tokens = n + 1, tokens + each.n_prompt
            else:
                needed.append(each)
        return needed[::-1]
