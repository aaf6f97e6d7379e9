"""Tracks which replicas answer. Each reports its load over a Redis channel once a second. Routers eject silent ones.

Losing Redis loses only freshness: routers go on with what they sent themselves, and no replica counts as silent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Protocol
from weakref import WeakSet

import orjson

from holdfast.replicas.stats import LoadReport
from holdfast.router.background import forever, stop
from holdfast.router.dispatch.dispatch_queue import QueueStats
from holdfast.router.records import Lru, Records

log = logging.getLogger(__name__)

CHANNEL = "reports"
REPORT_S = 1.0  # between two reports of a replica
QUIET_S = 15.0  # a channel without a message for so long is opened anew
REQUESTS = 32768  # requests whose replica is remembered: of the running ones, and of the ended ones


class RequestRouter(Protocol):
    """A request router, as far as health and metrics need it."""

    @property
    def stats(self) -> QueueStats: ...

    def on_report(self, replica_id: str, report: LoadReport) -> None:
        """A replica reported its load."""

    def on_replicas_changed(self) -> None:
        """A replica was ejected, or answers again."""


class ReplicaHealth:
    """One process's view of the replicas, for its request routers. Times are of `clock`; used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.routers: WeakSet[RequestRouter] = WeakSet()  # told of changes; each joins by itself
        self._reports: dict[str, tuple[float, LoadReport]] = {}
        self._silent: set[str] = set()
        self._ejected: dict[str, float] = {}  # until when
        self._running: Lru[str] = Lru(REQUESTS)  # replicas by request
        self._ended: Lru[str] = Lru(REQUESTS)

    @property
    def queue_stats(self) -> QueueStats:
        """Those of all request routers of this process."""
        return QueueStats.total(router.stats for router in self.routers)

    def report(self, replica_id: str, report: LoadReport) -> None:
        """Take in a replica's report."""
        self._reports[replica_id] = self.clock(), report
        for router in self.routers:
            router.on_report(replica_id, report)
        if replica_id in self._silent:
            self._silent.discard(replica_id)
            self._changed()

    def latest(self, replica_id: str) -> LoadReport | None:
        """A replica's latest report."""
        report = self._reports.get(replica_id)
        return report[1] if report else None

    def quiet_s(self, replica_id: str) -> float:
        """Seconds since a replica's latest report; infinite without one."""
        report = self._reports.get(replica_id)
        return self.clock() - report[0] if report else math.inf

    def unresponsive(self, replica_id: str) -> bool:
        """Whether a replica stopped reporting while others go on, or was ejected."""
        return replica_id in self._silent or replica_id in self._ejected

    def eject(self, replica_id: str, seconds: float) -> None:
        """A replica did not take a call: send it nothing for `seconds`, whatever it reports."""
        self._ejected[replica_id] = until = self.clock() + seconds
        log.warning("replica %s takes no calls; it gets no requests for %g s", replica_id, seconds)
        asyncio.get_running_loop().call_later(seconds, self._readmit, replica_id, until)
        self._changed()

    def check(self, silent_s: float, open_s: float) -> None:
        """Find the replicas without a report for `silent_s`. The channel has been open for `open_s`."""
        now = self.clock()
        silent = {each for each, (at, _) in self._reports.items() if min(now - at, open_s) > silent_s}
        if new := silent - self._silent:
            log.warning("replicas that report nothing any more: %s", ", ".join(sorted(new)))
            self._silent |= new
            self._changed()

    def keep(self, replica_ids: set[str]) -> None:
        """Set the replicas: forget what others reported."""
        for replica_id in self._reports.keys() - replica_ids:
            del self._reports[replica_id]
            self._silent.discard(replica_id)
        for replica_id in self._ejected.keys() - replica_ids:
            del self._ejected[replica_id]

    def on_send(self, request_id: str, replica_id: str) -> None:
        """A request is sent to a replica."""
        self._running.put(request_id, replica_id, math.inf)

    def on_end(self, request_id: str) -> None:
        """A request has ended; the router may still ask for its usage."""
        replica_id = self._running.get(request_id, 0.0)
        if replica_id is not None:
            self._running.remove(request_id)
            self._ended.put(request_id, replica_id, math.inf)

    def replica_of(self, request_id: str) -> str | None:
        """The replica that got a request last; None: none did."""
        return self._running.get(request_id, 0.0) or self._ended.get(request_id, 0.0)

    def _readmit(self, replica_id: str, until: float) -> None:
        if self._ejected.get(replica_id) == until:
            del self._ejected[replica_id]
            self._changed()

    def _changed(self) -> None:
        for router in list(self.routers):
            router.on_replicas_changed()


# Serve makes the request routers, out of reach of the ingress: they meet here. There is no other such object.
# Trap: Serve copies the module of the router class into the process by value, so it stands in this one.
HEALTH = ReplicaHealth()


class Reporter:
    """Runs in a replica: publishes what `load` returns; None: nothing, and the replica soon counts as silent.

    Create it on the event loop that it is to run on.
    """

    def __init__(
        self, store: Records, replica_id: str, load: Callable[[], LoadReport | None], every_s: float = REPORT_S
    ) -> None:
        self._store = store
        self._id = replica_id
        self._load = load
        self._task = asyncio.get_running_loop().create_task(forever(self._report, every_s, "reporting the load"))

    async def close(self) -> None:
        await stop(self._task)

    async def _report(self) -> None:
        if (report := self._load()) is not None:
            await self._store.publish(CHANNEL, encode(self._id, report))


class Listener:
    """Runs in a router: passes the replicas' reports to `health`. Create it on the event loop that it is to run on."""

    def __init__(self, store: Records, health: ReplicaHealth, silent_s: float, every_s: float = REPORT_S) -> None:
        self._store = store
        self._health = health
        self._every_s = every_s
        self._silent_s = silent_s
        self._open: float | None = None  # since when the channel is open
        self._checked = health.clock()
        loop = asyncio.get_running_loop()
        self._tasks = {
            loop.create_task(forever(self._listen, every_s, "listening to replicas")),
            loop.create_task(forever(self._check, every_s, "looking for silent replicas")),
        }

    async def close(self) -> None:
        await stop(*self._tasks)

    async def _listen(self) -> None:
        """Read the channel until it is lost."""
        try:
            async with aclosing(self._store.listen(CHANNEL, max(QUIET_S, 2 * self._silent_s))) as messages:
                async for message in messages:
                    if message:
                        self._health.report(*decode(message))
                    else:
                        self._open = self._health.clock()
        finally:
            self._open = None

    async def _check(self) -> None:
        before, now = self._checked, self._health.clock()
        self._checked = now
        late = now - before > 2 * self._every_s  # this process stood still: reports are yet to be read
        if self._open is not None and (late or self._store.degraded):
            self._open = now
        elif self._open is not None:
            self._health.check(self._silent_s, now - self._open)


def encode(replica_id: str, report: LoadReport) -> bytes:
    return orjson.dumps([replica_id, asdict(report)])


def decode(message: bytes) -> tuple[str, LoadReport]:
    """Fields that a newer release added are left out."""
    replica_id, fields = orjson.loads(message)
    return replica_id, LoadReport(**{name: fields[name] for name in LoadReport.__slots__ if name in fields})
