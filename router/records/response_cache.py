"""Answers to exact repeats of a request, a tenant's own, in Redis for all routers.

A request's noise is keyed by its prompt, so a repeat gives the same answer at any temperature, and an answer may be
kept whatever the sampling is. What does not decide the answer (streaming, program, metadata) is not in the key. While
Redis is away nothing is found or kept.
"""

import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import orjson
from pydantic import ConfigDict, TypeAdapter

from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.requests import Answer, Timing, Work
from holdfast.router.background import Background
from holdfast.router.config import RouterConfig
from holdfast.router.protocol.turn import Turn
from holdfast.router.records.store import PutResult, Records
from holdfast.router.tenants import Tenant

log = logging.getLogger(__name__)

FORMAT = 6  # of stored answers; part of every key
MAX_AGE = re.compile(r"max-age\s*=\s*\"?(\d{1,9})\"?")


class CacheResult(StrEnum):
    """The result of a look-up: the value of the header `x-holdfast-cache`."""

    HIT = "hit"
    MISS = "miss"
    BYPASS = "bypass"


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer that was computed `age_s` ago, for another request. All of its prompt tokens count as cached."""

    answer: Answer
    age_s: float = 0.0


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
        now: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._config = config
        self._fingerprint = fingerprint
        self._now = now
        self._background = Background()
        self._purges: dict[str, str] | None = None

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

    # ---- finding and storing ----

    async def find(self, query: CacheQuery) -> CachedAnswer | None:
        """The stored answer, or None."""
        record = None
        if not query.fresh:
            with suppress(UnavailableError):
                record = await self._records.get(query.key)
        if record is None:
            return None
        try:
            entry = STORED.validate_json(record.value)
        except ValueError:  # written by another version: counts as absent
            return None
        age_s = max(0.0, self._now() - entry.made)
        return CachedAnswer(entry.answer, age_s) if age_s <= query.max_age_s else None

    def keep(self, query: CacheQuery, answer: Answer) -> None:
        """Store a complete answer, in the background. An answer that is too long is not stored."""
        try:
            value = STORED.dump_json(CacheEntry(_repeat(answer), self._now()), exclude_defaults=True)
        except ValueError:  # half a surrogate pair, say
            log.warning("an answer cannot be stored; it is computed again for each request", exc_info=True)
            return
        if len(value) <= self._config.cache_answer_bytes:
            self._background.start(_if_available(self._put(query, value)))

    async def _put(self, query: CacheQuery, value: bytes) -> None:
        tenant = query.tenant
        limit = tenant.cache.bytes or self._config.cache_tenant_bytes
        if await self._records.put(query.key, value, self._ttl_s(tenant), limit) is PutResult.FULL:
            await self._records.delete(query.key)  # the answer that this one replaces

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
                self._background.start(_if_available(self._records.delete_owner(f"cache/{tenant}", purge)))

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
