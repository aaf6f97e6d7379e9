"""What tenants were served while others waited, told among those that serve: a sum for all of them, in Redis.

    replicas   seconds of steps, by class and tenant: a tenant served by several replicas has its share of all of them
    routers    seconds of slots, so that a tenant that comes by several routers has its share of all

Each adds what is new of its own and reads the sums, in one script once in a while. What a sum has grown by beyond that
was served elsewhere. Losing Redis loses that and nothing else: each shares what it has by what it knows itself, and
what it served meanwhile is added once Redis is back. An answer that is lost may count twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from holdfast.router.background import forever
from holdfast.router.records import Records

TTL_S = 3600  # after which sums that nobody adds to are forgotten
IDLE = 60  # looks after the last of which a tenant that was not served here is of no interest
MOST = 1024  # names of one look, those served last
_NOTHING = 1e-5  # seconds: texts have six digits

_ADD = """
local found = {}
for i = 2, #ARGV, 2 do found[#found + 1] = redis.call('HINCRBYFLOAT', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return found
"""


class Sharing(Protocol):
    """Who shares something among tenants. Names are `<class>/<tenant>`."""

    @property
    def contended(self) -> Mapping[str, float]:
        """Seconds that it has served while others waited. Who is forgotten there begins again at 0."""
        ...

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        """So many more were served elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class News:
    """What one who shares has to tell: `seconds` are new, and `own` is all that it has served."""

    seconds: Mapping[str, float]
    own: Mapping[str, float]


class Ledger:
    """One participant's view of the sums. Pure: what is to be told, and what an answer means."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}  # of its own, what the sums have
        self._sums: dict[str, float] = {}
        self._idle: dict[str, int] = {}  # looks since each was served here

    def news(self, own: Mapping[str, float]) -> News:
        """What is new of its `own`, with those that it wants to know of though they have nothing new."""
        for name in self._idle.keys() - own.keys():
            self._told.pop(name, None)
            del self._idle[name]
        # Less than was told: it was forgotten since, and begins again.
        self._told = {name: min(seconds, own[name]) for name, seconds in self._told.items()}
        new = {name: seconds - self._told.get(name, 0.0) for name, seconds in own.items()}
        for name, seconds in new.items():
            self._idle[name] = 0 if seconds > 0 or name not in self._idle else self._idle[name] + 1
        names = sorted((name for name in new if self._idle[name] < IDLE), key=self._idle.__getitem__)[:MOST]
        for name in self._sums.keys() - set(names):
            del self._sums[name]  # what comes meanwhile is not counted
        return News({name: new[name] for name in names}, own)

    def answered(self, news: News, sums: Iterable[float]) -> Mapping[str, float]:
        """What the others have added since the last answer, by the sums with the news in them."""
        elsewhere = {}
        for (name, new), now in zip(news.seconds.items(), sums, strict=True):
            self._told[name] = news.own[name]
            before = self._sums.get(name)
            # Less than before: Redis has lost what it had.
            if before is not None and (more := now - before - new) > _NOTHING:
                elsewhere[name] = more
            self._sums[name] = now
        return elsewhere


class Sums:
    """The sums of `what`, in Redis, for one participant."""

    def __init__(self, scripts: Records, what: str) -> None:
        self._scripts = scripts
        self._key = f"served/{what}"
        self._ledger = Ledger()

    async def look(self, own: Mapping[str, float]) -> Mapping[str, float]:
        """Add what is new of its `own`; what the others have added since the last look."""
        news = self._ledger.news(own)
        if not news.seconds:
            return {}
        arguments = [each for name, seconds in news.seconds.items() for each in (name, f"{seconds:.6f}")]
        found = await self._scripts.try_script(_ADD, [self._key], [TTL_S, *arguments])
        return {} if found is None else self._ledger.answered(news, map(float, found))


class Served:
    """Looks once in `every_s`, for one that shares. Create it on the event loop that it is to run on."""

    def __init__(self, scripts: Records, what: str, sharing: Sharing, every_s: float) -> None:
        self._sums = Sums(scripts, what)
        self._sharing = sharing
        watching = forever(self._look, every_s, "reading what others have served")
        self._task = asyncio.get_running_loop().create_task(watching)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _look(self) -> None:
        if elsewhere := await self._sums.look(self._sharing.contended):
            self._sharing.learn(elsewhere)


class Lines:
    """All that share slots in this process, as one. Serve makes request routers out of reach of whoever asks."""

    def __init__(self) -> None:
        self._all: WeakSet[Sharing] = WeakSet()

    def add(self, sharing: Sharing) -> None:
        """Count it in, as long as it lives."""
        self._all.add(sharing)

    @property
    def contended(self) -> Mapping[str, float]:
        total: dict[str, float] = {}
        for each in self._all:
            for name, seconds in each.contended.items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        for each in self._all:
            each.learn(elsewhere)


LINES = Lines()
