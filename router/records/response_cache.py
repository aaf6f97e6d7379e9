"""Answers to exact repeats of a request, a tenant's own.

    l1             what this router had lately, bounded in bytes
    l2             what any router of the cluster had, in Redis
    single flight  what this router computes for another request now: it is waited for

A request's noise is keyed by its prompt, so a repeat gives the same answer at any temperature, and an answer may be
kept whatever the sampling is. What does not decide the answer (streaming, program, metadata) is not in the key. While
Redis is away each router goes by what it had.
"""

import asyncio
import hashlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar

import orjson
from pydantic import ConfigDict, TypeAdapter

from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.requests import Answer, Timing, Work
from holdfast.router.background import Background
from holdfast.router.config import RouterConfig
from holdfast.router.protocol.errors import ClientGoneError
from holdfast.router.protocol.turn import Turn
from holdfast.router.records.lru import Lru
from holdfast.router.records.store import PutResult, Records
from holdfast.router.tenants import Tenant

log = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT = 6  # of stored answers; part of every key
MAX_AGE = re.compile(r"max-age\s*=\s*\"?(\d{1,9})\"?")


class CacheResult(StrEnum):
    """The result of a look-up: the value of the header `x-holdfast-cache`."""

    HIT = "hit"
    JOINED = "joined"  # another request was computing it
    MISS = "miss"
    BYPASS = "bypass"


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer that was computed `age_s` ago, for another request. All of its prompt tokens count as cached."""

    answer: Answer
    age_s: float = 0.0
    joined: bool = False


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """A request's look-up: an answer no older than `max_age_s` will do. `fresh`: none will, and its own is stored."""

    key: str
    tenant: Tenant
    max_age_s: float
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An answer as it is kept, and when it was computed, in seconds since the epoch."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")
    answer: Answer
    made: float


STORED = TypeAdapter(CacheEntry)


# ---- single flight ----


class Unresolved(Enum):
    """The reason why a leader ended without a result."""

    FAILED = "failed"
    LEFT = "left"


class SingleFlight(Generic[T]):
    """Of several requests for one answer in this router, one computes it and the others wait for it. One event loop.

    A request whose leader left tries again: the first that does leads, and the others follow it. So work for a client
    ends with its client, and no tenant pays for another one. When a leader fails, each follower computes for itself:
    they would fail alike, and one after the other they would wait long for it.
    """

    def __init__(self) -> None:
        self.leaders: dict[str, Leader[T]] = {}
        self.waiting = 0
        self.left = 0  # leaders that left while others waited
        self.failed = 0  # followers whose leader failed

    def lead(self, key: str) -> "Leader[T] | None":
        """The caller computes it; None: another request does, and `follow` waits for that."""
        if key in self.leaders:
            return None
        leader = self.leaders[key] = Leader(self, key)
        return leader

    async def follow(self, key: str) -> T | Unresolved:
        """The result of the request that leads now."""
        leader = self.leaders[key]
        self.waiting += 1
        leader.followers += 1
        try:
            return await asyncio.shield(leader.result)
        finally:
            self.waiting -= 1
            leader.followers -= 1


class Leader(Generic[T]):
    """A request that computes for others. The first `end` counts.

    At the exit of an `ExitStack` it leaves with a client that is gone, and fails with any other end.
    """

    def __init__(self, flights: SingleFlight[T], key: str) -> None:
        self._flights = flights
        self._key = key
        self.result: asyncio.Future[T | Unresolved] = asyncio.get_running_loop().create_future()
        self.followers = 0

    def end(self, result: T | Unresolved) -> None:
        if self.result.done():
            return
        flights = self._flights
        del flights.leaders[self._key]
        flights.left += result is Unresolved.LEFT and self.followers > 0
        flights.failed += self.followers if result is Unresolved.FAILED else 0
        self.result.set_result(result)

    def leave(self) -> None:
        self.end(Unresolved.LEFT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        client_left = isinstance(error, ClientGoneError | asyncio.CancelledError)
        self.end(Unresolved.LEFT if client_left else Unresolved.FAILED)


AnswerLeader: TypeAlias = Leader[CachedAnswer]
Wait: TypeAlias = Callable[[Coroutine[Any, Any, CachedAnswer | Unresolved]], Awaitable[CachedAnswer | Unresolved]]


# ---- the cache ----


class ResponseCache:
    """`fingerprint` names everything outside a request that decides its answer: model, settings, release.

    `now` is the time of day: answers carry it from router to router.
    """

    def __init__(
        self,
        records: Records,
        config: RouterConfig,
        fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._config = config
        self._fingerprint = fingerprint
        self._clock = clock
        self._now = now
        self._l1: Lru[CacheEntry] = Lru(config.cache_entries, config.cache_memory, config.cache_share)
        self._background = Background()
        self._purges: dict[str, str] | None = None
        self.flights: SingleFlight[CachedAnswer] = SingleFlight()

    @property
    def weight(self) -> int:
        """Bytes of the answers in this router."""
        return self._l1.weight

    # ---- a request's query ----

    def key(self, tenant: str, turn: Turn) -> str:
        """The key of the answer to `turn`: a SHA-256 over everything that affects the answer."""
        decides = [
            FORMAT,
            self._fingerprint,
            turn.model.name,
            type(turn.prompt).__name__,
            turn.prompt,
            turn.sampling,
            turn.stop,
        ]
        if turn.cache_salt:
            decides.append(turn.cache_salt)
        # Keys are left in the client's order: templates write tools and arguments in it.
        canonical = orjson.dumps(decides, default=_plain, option=orjson.OPT_NON_STR_KEYS)
        purge = (self._purges or {}).get(tenant, "")  # a purge changes the keys
        return f"cache/{tenant}/{purge}{hashlib.sha256(canonical).hexdigest()}"

    def query(self, tenant: Tenant, turn: Turn, cache_control: str | None) -> CacheQuery | None:
        """None where the request goes past the cache: that is off, for its tenant or for all, or it says `no-store`.

        `no-cache` wants no answer that is there, but stores its own; so does `max-age=0`.
        """
        if not (self._config.response_cache and tenant.cache.enabled):
            return None
        words = (cache_control or "").lower()
        if "no-store" in words:
            return None
        match = MAX_AGE.search(words)
        # RFC 9111, 4.2.1: an unreadable value counts as the strictest.
        max_age_s = float(match[1]) if match else 0.0 if "max-age" in words else math.inf
        fresh = "no-cache" in words or max_age_s == 0.0
        return CacheQuery(self.key(tenant.name, turn), tenant, min(self._ttl_s(tenant), max_age_s), fresh)

    # ---- finding ----

    async def find(self, query: CacheQuery) -> CachedAnswer | None:
        """The stored answer, or None. Waits for no other request."""
        cached = self._find_l1(query)
        if cached is not None or query.fresh:
            return cached
        record = None
        with suppress(UnavailableError):
            record = await self._records.get(query.key)
        if record is None:
            return None
        try:
            entry = STORED.validate_json(record.value)
        except ValueError:  # written by another version: counts as absent
            return None
        self._remember(query, entry, len(record.value))
        return self._aged(query, entry)

    async def seek(
        self, query: CacheQuery, wait: Wait, adopt: Callable[[AnswerLeader], None]
    ) -> CachedAnswer | AnswerLeader | None:
        """The answer that is stored, or that another request computes.

        A Leader where the caller is to compute it for all, and says with `keep` or otherwise how that ended; `adopt` is
        called with it in the same moment. None where the caller computes for itself. `wait` waits for another request
        and may be cancelled: so a follower whose client leaves is none any more.
        """
        cached = self._find_l1(query)
        if cached is not None or query.fresh:
            return cached
        while (leader := self.flights.lead(query.key)) is None:
            result = await wait(self.flights.follow(query.key))
            if isinstance(result, CachedAnswer):
                return result if result.age_s <= query.max_age_s else None
            if result is Unresolved.FAILED:
                return None
        adopt(leader)
        cached = await self.find(query)
        if cached is None:
            return leader
        leader.end(cached)
        return cached

    def _find_l1(self, query: CacheQuery) -> CachedAnswer | None:
        entry = None if query.fresh else self._l1.get(query.key, self._clock())
        return None if entry is None else self._aged(query, entry)

    def _aged(self, query: CacheQuery, entry: CacheEntry) -> CachedAnswer | None:
        age_s = max(0.0, self._now() - entry.made)
        return CachedAnswer(entry.answer, age_s) if age_s <= query.max_age_s else None

    # ---- storing ----

    def keep(self, query: CacheQuery, answer: Answer, leader: AnswerLeader | None = None) -> None:
        """Remember a complete answer and give it to the followers of `leader`. Redis gets it in the background.

        An answer that is too long is not remembered. One that cannot be stored is not given to others either.
        """
        entry = CacheEntry(_repeat(answer), self._now())
        try:
            value = STORED.dump_json(entry, exclude_defaults=True)
        except ValueError:  # half a surrogate pair, say
            log.warning("an answer cannot be stored; it is computed again for each request", exc_info=True)
            if leader is not None:
                leader.end(Unresolved.FAILED)
            return
        fits = len(value) <= self._config.cache_answer_bytes
        if leader is not None:
            leader.end(CachedAnswer(entry.answer, joined=True))
        if fits:
            self._remember(query, entry, len(value))
            self._background.start(_if_available(self._put(query, value)))

    async def _put(self, query: CacheQuery, value: bytes) -> None:
        tenant = query.tenant
        limit = tenant.cache.bytes or self._config.cache_tenant_bytes
        if await self._records.put(query.key, value, self._ttl_s(tenant), limit) is PutResult.FULL:
            await self._records.delete(query.key)  # the answer that this one replaces

    def _remember(self, query: CacheQuery, entry: CacheEntry, size: int) -> None:
        tenant = query.tenant
        deadline = self._clock() + self._ttl_s(tenant) - max(0.0, self._now() - entry.made)
        self._l1.put(query.key, entry, deadline, size, tenant.name, tenant.cache.bytes)

    def _ttl_s(self, tenant: Tenant) -> float:
        return tenant.cache.ttl_s or self._config.cache_ttl_s

    # ---- purging ----

    def purged(self, purges: Mapping[str, str]) -> None:
        """Each tenant's latest purge, a word that no other purge has: answers stored before it are not found."""
        before, self._purges = self._purges, dict(purges)
        if before is None:  # this router has just begun
            return
        for tenant, purge in purges.items():
            if before.get(tenant) != purge:
                owner = f"cache/{tenant}"
                for key in [key for key, _ in self._l1.latest(self._clock()) if key.startswith(f"{owner}/")]:
                    self._l1.remove(key)
                self._background.start(_if_available(self._records.delete_owner(owner, purge)))

    async def drain(self) -> None:
        """Wait until Redis has everything."""
        await self._background.drain()


async def _if_available(work: Coroutine[Any, Any, object]) -> None:
    with suppress(UnavailableError):
        await work


def _repeat(answer: Answer) -> Answer:
    """`answer` for other requests: no engine worked for it."""
    usage = replace(answer.usage, cached=answer.usage.prompt, work=Work())
    return replace(answer, usage=usage, timing=Timing(arrived=0.0))


def _plain(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not part of a request")
