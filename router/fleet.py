"""What replicas tell routers of themselves, and routers replicas, over channels of Redis.

    replica -> routers   how it is (`LoadReport`), once in `report_s`: by that turns are placed, and it is seen to live
    router  -> replica   that the next turn of a program waits for it in line, so that its pin does not expire meanwhile

`FLEET` is what this process knows of the replicas. Losing Redis loses nothing but freshness: routers go on with what
they sent themselves, and no replica counts as silent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Protocol
from weakref import WeakSet

import orjson

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import GenerateRequest
from holdfast.replicas.stats import LoadReport
from holdfast.replicas.types import Priority
from holdfast.router.background import Background, forever
from holdfast.router.records import Records

log = logging.getLogger(__name__)

REPORTS = "reports"
QUIET_S = 15.0  # without a message after which a channel is opened anew
MOST_SENT = 32768  # requests whose replica is known: of those that run, and of those that have ended


class Watcher(Protocol):
    """Who places turns."""

    def told(self, replica_id: str, report: LoadReport) -> None:
        """A replica has told how it is."""

    def replicas_changed(self) -> None:
        """A replica has fallen silent, or is heard again."""


@dataclass(frozen=True, slots=True)
class Expected:
    """When a replica refused a request of at most so many tokens, and in how many seconds it expected the answer."""

    at: float
    seconds: float
    tokens: float


class Fleet:
    """Times are of the monotonic clock. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._watchers: WeakSet[Watcher] = WeakSet()
        self._reports: dict[str, tuple[float, LoadReport]] = {}
        self._silent: set[str] = set()
        self._passed_by: dict[str, float] = {}  # until when
        self._expected: dict[tuple[str, Priority, bool], Expected] = {}
        self._running: dict[str, str] = {}  # replicas of requests
        self._ended: dict[str, str] = {}  # likewise
        self.expect: Callable[[str, str, str, float], None] = lambda replica_id, scope, program_id, seconds: None

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` what there is to tell, as long as it lives."""
        self._watchers.add(watcher)

    def tell(self, replica_id: str, report: LoadReport) -> None:
        """A replica has told how it is."""
        self._reports[replica_id] = self.clock(), report
        for watcher in self._watchers:
            watcher.told(replica_id, report)
        if replica_id in self._silent:
            self._silent.discard(replica_id)
            self._changed()

    def latest(self, replica_id: str) -> LoadReport | None:
        """What a replica told last."""
        known = self._reports.get(replica_id)
        return known[1] if known else None

    def quiet_s(self, replica_id: str) -> float:
        """Seconds since a replica told how it is; infinite where it never did."""
        known = self._reports.get(replica_id)
        return self.clock() - known[0] if known else math.inf

    def sent(self, request_id: str, replica_id: str) -> None:
        """A request is sent to a replica."""
        _put(self._running, request_id, replica_id)

    def ended(self, request_id: str) -> None:
        """Nobody waits for a request any more, but its usage may be asked for."""
        replica_id = self._running.pop(request_id, None)
        if replica_id is not None:
            _put(self._ended, request_id, replica_id)

    def replica_of(self, request_id: str) -> str | None:
        """Where a request was sent last; None where it was sent to no replica."""
        return self._running.get(request_id) or self._ended.get(request_id)

    def refused(self, replica_id: str, request: GenerateRequest, error: ErrorInfo) -> None:
        """A replica has refused a request, of whose time so much is left, perhaps because its answer would be late."""
        if request.foretellable and error.kind is ErrorKind.DEADLINE and error.retry_after_s is not None:
            expected = Expected(self.clock(), request.within_s + error.retry_after_s, request.most_tokens)
            self._expected[replica_id, request.priority, request.begins] = expected

    def expected_s(self, replica_id: str, request: GenerateRequest, lasts_s: float) -> float:
        """In how many seconds at least a request's answer is to be expected, as its replica has refused another within
        the last `lasts_s`; 0 where it has refused none that asked for as little.

        What was before that one is before this one, but for what there has been time for.
        """
        known = self._expected.get((replica_id, request.priority, request.begins))
        if known is None or not request.foretellable or request.most_tokens < known.tokens:
            return 0.0
        since = self.clock() - known.at
        return max(known.seconds - since, 0.0) if since <= lasts_s else 0.0

    def keep(self, replica_ids: set[str]) -> None:
        """These are the replicas there are: what others told is forgotten."""
        for gone in self._reports.keys() - replica_ids:
            del self._reports[gone]
            self._silent.discard(gone)
        for key in [key for key in self._expected if key[0] not in replica_ids]:
            del self._expected[key]
        for gone in self._passed_by.keys() - replica_ids:
            del self._passed_by[gone]

    def silent(self, replica_id: str) -> bool:
        """Whether a replica that used to tell how it is does so no more, though others may, or does not take calls."""
        return replica_id in self._silent or replica_id in self._passed_by

    def pass_by(self, replica_id: str, seconds: float) -> None:
        """A replica has not taken a call: for so long it counts as silent, whatever it tells."""
        self._passed_by[replica_id] = until = self.clock() + seconds
        log.warning("replica %s takes no calls; it is passed by for %g s", replica_id, seconds)
        asyncio.get_running_loop().call_later(seconds, self._again, replica_id, until)
        self._changed()

    def look(self, silent_s: float, heard_s: float) -> None:
        """Replicas that told nothing for `silent_s` are silent. What was told has been heard for the last `heard_s`."""
        now = self.clock()
        found = {each for each, (at, _) in self._reports.items() if min(now - at, heard_s) > silent_s}
        if found - self._silent:
            log.warning("replicas that tell nothing any more: %s", ", ".join(sorted(found - self._silent)))
            self._silent |= found
            self._changed()

    def _again(self, replica_id: str, until: float) -> None:
        if self._passed_by.get(replica_id) == until:
            del self._passed_by[replica_id]
            self._changed()

    def _changed(self) -> None:
        for watcher in list(self._watchers):
            watcher.replicas_changed()


def _put(requests: dict[str, str], request_id: str, replica_id: str) -> None:
    """The latest `MOST_SENT` are kept."""
    requests.pop(request_id, None)
    requests[request_id] = replica_id
    if len(requests) > MOST_SENT:
        del requests[next(iter(requests))]


# Trap: Serve copies the module of its request router into the process by value, so this stands in another one.
FLEET = Fleet()


class Reporter:
    """A replica's end: tells `how` it is once in `every_s`, and hears which programs wait for it.

    Where `how` has nothing to tell, it counts as silent after a while. Create it on the event loop that it is to run
    on. `expect` gets scope, program and seconds.
    """

    def __init__(
        self,
        store: Records,
        replica_id: str,
        every_s: float,
        how: Callable[[], LoadReport | None],
        expect: Callable[[str, str, float], None],
    ) -> None:
        self._store = store
        self._id = replica_id
        self._how = how
        self._expect = expect
        loop = asyncio.get_running_loop()
        self._tasks = {
            loop.create_task(forever(self._report, every_s, "reporting the load")),
            loop.create_task(forever(self._hear, every_s, "hearing of waiting programs")),
        }

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _report(self) -> None:
        if (report := self._how()) is not None:
            await self._store.publish(REPORTS, encode(self._id, report))

    async def _hear(self) -> None:
        """Read the channel until it is lost."""
        async with aclosing(self._store.listen(waiting_for(self._id), QUIET_S)) as messages:
            async for message in messages:
                if message:
                    self._expect(*orjson.loads(message))


class Listener:
    """A router's end: what replicas tell goes to `fleet`, and what waits for them to them.

    Create it on the event loop that it is to run on.
    """

    def __init__(self, store: Records, fleet: Fleet, every_s: float, silent_s: float) -> None:
        self._store = store
        self._fleet = fleet
        self._every_s = every_s
        self._silent_s = silent_s
        self._background = Background()
        self._open: float | None = None  # since when the channel is
        self._looked = fleet.clock()
        fleet.expect = self._wait
        loop = asyncio.get_running_loop()
        self._tasks = {
            loop.create_task(forever(self._listen, every_s, "listening to replicas")),
            loop.create_task(forever(self._look, every_s, "looking for silent replicas")),
        }

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def _wait(self, replica_id: str, scope: str, program_id: str, seconds: float) -> None:
        message = orjson.dumps([scope, program_id, seconds])
        self._background.start(self._store.publish(waiting_for(replica_id), message))

    async def _listen(self) -> None:
        """Read the channel until it is lost."""
        try:
            async with aclosing(self._store.listen(REPORTS, max(QUIET_S, 2 * self._silent_s))) as messages:
                async for message in messages:
                    if message:
                        self._fleet.tell(*decode(message))
                    else:
                        self._open = self._fleet.clock()
        finally:
            self._open = None

    async def _look(self) -> None:
        before, now = self._looked, self._fleet.clock()
        self._looked = now
        late = now - before > 2 * self._every_s  # what was told meanwhile is yet to be read
        if self._open is not None and (late or self._store.degraded):
            self._open = now
        elif self._open is not None:
            self._fleet.look(self._silent_s, now - self._open)


def waiting_for(replica_id: str) -> str:
    """The channel on which a replica hears what waits for it."""
    return f"waiting/{replica_id}"


def encode(replica_id: str, report: LoadReport) -> bytes:
    return orjson.dumps([replica_id, asdict(report)])


def decode(message: bytes) -> tuple[str, LoadReport]:
    replica_id, fields = orjson.loads(message)
    return replica_id, LoadReport(**{name: fields[name] for name in LoadReport.__slots__ if name in fields})
