"""Contended service of tenants in seconds of steps, summed over all replicas in Redis, so shares hold cluster-wide.

Each replica adds its new seconds and reads the sums, in one script. The growth of a sum beyond its own seconds was
served elsewhere. While Redis is away each replica uses its own counts, and adds them later. If a reply of Redis is
lost, its seconds may count twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from holdfast.router.background import forever, stop
from holdfast.router.records import Records

KEY = "served/steps"
TTL_S = 3600  # sums that nobody adds to are forgotten after this
IDLE = 60  # looks without service here, after which a tenant's sum is no longer read
MOST = 1024  # tenants in one look, those served last
_ROUNDING = 1e-5  # seconds: the script's numbers have six digits

_ADD = """
local sums = {}
for i = 2, #ARGV, 2 do sums[#sums + 1] = redis.call('HINCRBYFLOAT', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return sums
"""


class Sharing(Protocol):
    """Something shared among tenants. Names are `<class>/<tenant>`."""

    @property
    def contended(self) -> Mapping[str, float]:
        """Seconds served here while others waited. A forgotten name begins again at 0."""
        ...

    def learn(self, elsewhere: Mapping[str, float]) -> None:
        """Add seconds that were served elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class Delta:
    """The update from one replica: `seconds` are new, `total` is all that it has served."""

    seconds: Mapping[str, float]
    total: Mapping[str, float]


class Ledger:
    """One replica's view of the sums. Pure."""

    def __init__(self) -> None:
        self._added: dict[str, float] = {}  # seconds of its own that are in the sums
        self._sums: dict[str, float] = {}
        self._idle: dict[str, int] = {}  # looks since each tenant was served here

    def delta(self, total: Mapping[str, float]) -> Delta:
        """The seconds to add; 0 for tenants whose sums are only read."""
        for name in self._idle.keys() - total.keys():
            self._added.pop(name, None)
            del self._idle[name]
        # A total below what was added began again at 0.
        self._added = {name: min(seconds, total[name]) for name, seconds in self._added.items()}
        new = {name: seconds - self._added.get(name, 0.0) for name, seconds in total.items()}
        for name, seconds in new.items():
            self._idle[name] = 0 if seconds > 0 or name not in self._idle else self._idle[name] + 1
        names = sorted((name for name in new if self._idle[name] < IDLE), key=self._idle.__getitem__)[:MOST]
        for name in self._sums.keys() - set(names):
            del self._sums[name]  # growth until it is read again does not count
        return Delta({name: new[name] for name in names}, total)

    def elsewhere(self, delta: Delta, sums: Iterable[float]) -> Mapping[str, float]:
        """Seconds that others added since the last sync, from the sums after `delta`."""
        elsewhere = {}
        for (name, new), now in zip(delta.seconds.items(), sums, strict=True):
            self._added[name] = delta.total[name]
            before = self._sums.get(name)
            # Negative where Redis lost its sum.
            if before is not None and (served := now - before - new) > _ROUNDING:
                elsewhere[name] = served
            self._sums[name] = now
        return elsewhere


class FairShareSync:
    """Syncs `sharing` with the sums once in `every_s`, once it is started on an event loop."""

    def __init__(self, scripts: Records, sharing: Sharing) -> None:
        self._scripts = scripts
        self._sharing = sharing
        self._ledger = Ledger()
        self._task: asyncio.Task[object] | None = None

    def start(self, every_s: float) -> None:
        self._task = asyncio.get_running_loop().create_task(forever(self.sync, every_s, "sharing among tenants"))

    async def close(self) -> None:
        await stop(self._task)

    async def sync(self) -> None:
        """Add what is new and learn what others added."""
        delta = self._ledger.delta(self._sharing.contended)
        if not delta.seconds:
            return
        arguments = [each for name, seconds in delta.seconds.items() for each in (name, f"{seconds:.6f}")]
        sums = await self._scripts.try_script(_ADD, [KEY], [TTL_S, *arguments])
        if sums is not None and (elsewhere := self._ledger.elsewhere(delta, map(float, sums))):
            self._sharing.learn(elsewhere)
