"""Answers to exact repeats of a request, a tenant's own: in this process, behind it in the store, or being computed.

    near     what this process had lately, bounded in bytes
    far      what any router of the cluster had
    flights  what somebody computes now, here or at another router: it is waited for

A request's noise is keyed by its prompt, so a repeat gives the same answer at any temperature and an answer may be
kept whatever the sampling is. What does not decide the answer (streaming, program, metadata) is not in the key.

Who computes for the cluster has a short lease in the store, and renews it as long as it is at it. The others look for
the answer again and again, with growing pauses; where the lease has run out, or was given back without an answer, the
first of them that looks has it. Without the store each router is for itself.
"""

import asyncio
import hashlib
import logging
import math
import re
import secrets
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from holdfast.replicas.requests import Answer, Timing, Work
from holdfast.router.answers import decode_answer, encode_answer
from holdfast.router.background import Background
from holdfast.router.config import RouterConfig
from holdfast.router.flights import Flights
from holdfast.router.flights import Lead as LeadOf
from holdfast.router.lru import Lru
from holdfast.router.protocol.turn import Turn
from holdfast.router.seal import Seal
from holdfast.router.store import Store
from holdfast.router.tenants import Tenant

log = logging.getLogger(__name__)

FORMAT = 5  # of stored answers; part of every key
MADE = struct.Struct(">d")  # before each stored answer: when it was computed, seconds since the epoch
MAX_AGE = re.compile(r"max-age\s*=\s*\"?(\d{1,9})\"?")
PAUSE_S = (0.01, 0.25)  # least and most between two looks for another router's answer: a tenth of the time waited
PURGE_S = 60.0  # for which one router deletes what was purged, and no other


class CacheResult(StrEnum):
    """What became of the look-up: the value of the header `x-holdfast-cache`."""

    HIT = "hit"
    JOINED = "joined"  # somebody else was computing it
    MISS = "miss"
    BYPASS = "bypass"


@dataclass(frozen=True, slots=True)
class Found:
    """An answer that was computed `age_s` ago, for another request. All of its prompt tokens count as cached."""

    answer: Answer
    age_s: float = 0.0
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants of the cache: an answer that is no older than `max_age_s`; `fresh`: none, but to keep its
    own.
    """

    key: str
    tenant: Tenant
    max_age_s: float
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer in this process, and when it was computed, in seconds since the epoch."""

    answer: Answer
    made: float


Lead: TypeAlias = LeadOf[Found]
Wait: TypeAlias = Callable[[Coroutine[Any, Any, Found | Lead | None]], Awaitable[Found | Lead | None]]


class ResponseCache:
    """`fingerprint` names everything outside a request that decides its answer: model, settings, release.

    `now` is the time of day: answers carry it from router to router.
    """

    def __init__(
        self,
        store: Store,
        config: RouterConfig,
        fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._config = config
        self._fingerprint = fingerprint
        self._clock = clock
        self._now = now
        self._near: Lru[Kept] = Lru(config.cache_entries, config.cache_memory, config.cache_share)
        self._seal = Seal(Path(config.cache_key_file)) if config.cache_key_file else None
        self._background = Background()
        self._purges: dict[str, str] | None = None
        self.flights: Flights[Found] = Flights(self._flight_ended)
        self._leases = Leases(store, config.cache_lease_s, self._background)

    @property
    def degraded(self) -> bool:
        """Whether answers are kept in this process although they should be shared."""
        return self._store.degraded

    @property
    def weight(self) -> int:
        """Bytes of the answers in this process."""
        return self._near.weight

    # ---- what a request wants ----

    def key(self, tenant: str, turn: Turn) -> str:
        """Where the answer to `turn` is kept: a SHA-256 over everything that decides it."""
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
        purge = (self._purges or {}).get(tenant, "")  # what was there before has other keys
        return f"cache/{tenant}/{purge}{hashlib.sha256(canonical).hexdigest()}"

    def ask(self, tenant: Tenant, turn: Turn, cache_control: str | None) -> Ask | None:
        """None where the request goes past the cache: that is off, for its tenant or for all, or it says `no-store`.

        `no-cache` wants no answer that is there, but keeps its own; so does `max-age=0`.
        """
        if not (self._config.response_cache and tenant.cache.enabled):
            return None
        words = (cache_control or "").lower()
        if "no-store" in words:
            return None
        ttl_s = self._ttl_s(tenant)
        found = MAX_AGE.search(words)
        # RFC 9111, 4.2.1: what cannot be read counts as the strictest.
        given = float(found[1]) if found else 0.0 if "max-age" in words else math.inf
        return Ask(self.key(tenant.name, turn), tenant, min(ttl_s, given), "no-cache" in words or given == 0.0)

    # ---- finding ----

    async def find(self, ask: Ask) -> Found | None:
        """The answer that is kept, or None. Waits for nobody."""
        near = self._find_near(ask)
        if near is not None or ask.fresh:
            return near
        value = await self._store.get(ask.key)
        return None if value is None else self._read(ask, value)

    async def seek(self, ask: Ask, wait: Wait, adopt: Callable[[Lead], None]) -> Found | Lead | None:
        """The answer that is kept, or is being computed.

        A Lead where it is the caller's to compute, who says with `keep` or otherwise how that ended; `adopt` is told of
        it in that moment. None where the caller computes for itself. What may take long is done by `wait`, which may be
        cancelled: so a follower whose client leaves is none any more.
        """
        if (near := self._find_near(ask)) is not None or ask.fresh:
            return near
        if not self._config.single_flight:
            return await self.find(ask)
        joined = self.flights.join(ask.key)
        if isinstance(joined, LeadOf):
            adopt(joined)
            told: Found | Lead | None = joined
        else:
            told = await wait(self.flights.follow(joined, adopt))
            if isinstance(told, Found):
                return told if told.age_s <= ask.max_age_s else None
            if told is None:
                return None
        assert isinstance(told, LeadOf)
        found = await self._look(ask, told)
        return found if found is not None else await wait(self._watch(ask, told))

    def _find_near(self, ask: Ask) -> Found | None:
        kept = None if ask.fresh else self._near.get(ask.key, self._clock())
        if kept is None:
            return None
        age_s = max(0.0, self._now() - kept.made)
        return Found(kept.answer, age_s) if age_s <= ask.max_age_s else None

    async def _look(self, ask: Ask, lead: Lead) -> Found | Lead | None:
        """What the store has, for all who want it, or the lead with its lease; None: another router computes."""
        told = await self._leases.take(ask.key, _lease(ask.key))
        if isinstance(told, bool):
            return lead if told else None
        found = self._read(ask, told)
        if found is None:  # too old for this one, or not to be read: there is no lease to be had, and no need of one
            return lead
        lead.land(found)
        return found

    async def _watch(self, ask: Ask, lead: Lead) -> Found | Lead:
        """As `_look`, until there is something."""
        began = self._clock()
        while True:
            waited = self._clock() - began
            await asyncio.sleep(min(max(PAUSE_S[0], waited / 10), PAUSE_S[1]))
            found = await self._look(ask, lead)
            if found is not None:
                return replace(found, joined=True) if isinstance(found, Found) else found

    def _read(self, ask: Ask, value: bytes) -> Found | None:
        try:
            opened = self._seal.open(ask.key, value) if self._seal else value
            (made,) = MADE.unpack_from(opened)
            answer = decode_answer(opened[MADE.size :])
        except (ValueError, struct.error):  # written by another version, or with another key: as good as absent
            return None
        age_s = max(0.0, self._now() - made)
        repeat = self._remember(ask, answer, made, len(value))
        return Found(repeat, age_s) if age_s <= ask.max_age_s else None

    # ---- keeping ----

    def keep(self, ask: Ask, answer: Answer, lead: Lead | None = None) -> None:
        """Remember a complete answer and give it to those who wait for `lead`. The store gets it in the background.

        What is too long is not remembered. What cannot be stored is not given to others either.
        """
        made = self._now()
        try:
            value = encode_answer(answer)
        except (TypeError, ValueError):  # half a surrogate pair, say
            log.warning("an answer cannot be stored; it is computed again for each request", exc_info=True)
            if lead is not None:
                lead.fail()
            return
        fits = len(value) <= self._config.cache_answer_bytes
        repeat = self._remember(ask, answer, made, len(value)) if fits else _repeat(answer)
        if lead is not None:
            lead.land(Found(repeat, joined=True))
        # Others look for the answer until the lease has gone: it goes once the answer is there.
        lease = _lease(ask.key) if lead is not None else ""
        if not (fits and self._background.start(self._put(ask, MADE.pack(made) + value, lease))):
            self._leases.give_back(lease)

    def drop(self, ask: Ask) -> None:
        """Forget an answer that is of no use, here and in the store."""
        self._near.remove(ask.key)
        self._background.start(self._store.delete(ask.key))

    async def _put(self, ask: Ask, value: bytes, lease: str) -> None:
        sealed = self._seal.close(ask.key, value) if self._seal else value
        tenant, config = ask.tenant, self._config
        try:
            most = tenant.cache.bytes or config.cache_tenant_bytes
            await self._store.set_shared(ask.key, sealed, self._ttl_s(tenant), tenant.name, most)
        finally:
            self._leases.give_back(lease)

    def _remember(self, ask: Ask, answer: Answer, made: float, size: int) -> Answer:
        repeat, tenant = _repeat(answer), ask.tenant
        left_s = self._ttl_s(tenant) - max(0.0, self._now() - made)
        self._near.put(ask.key, Kept(repeat, made), self._clock() + left_s, size, tenant.name, tenant.cache.bytes)
        return repeat

    def _ttl_s(self, tenant: Tenant) -> float:
        return tenant.cache.ttl_s or self._config.cache_ttl_s

    def _flight_ended(self, key: str, made: bool) -> None:
        if not made:
            self._leases.give_back(_lease(key))

    # ---- purging ----

    def purged(self, purges: Mapping[str, str]) -> None:
        """Each tenant's latest purge, by a word that no other one has: what was kept before is not found any more."""
        before, self._purges = self._purges, dict(purges)
        if before is None:  # this router has just begun
            return
        for tenant, purge in purges.items():
            if before.get(tenant) != purge:
                for key in [key for key, _ in self._near.latest(self._clock()) if _tenant(key) == tenant]:
                    self._near.remove(key)
                self._background.start(self._forget(tenant, purge))

    async def _forget(self, tenant: str, purge: str) -> None:
        """One router deletes what nobody would find, for all."""
        mark = f"purge/{tenant}/{purge}"
        if await self._store.take(mark, mark, self._leases.owner, PURGE_S) is True:
            await self._store.forget(f"cache/{tenant}/")
            await self._store.delete(f"put/{tenant}")

    async def drain(self) -> None:
        """Wait until the store has everything."""
        await self._background.drain()

    async def close(self) -> None:
        await self._leases.close()
        await self.drain()


class Leases:
    """Those that this process has in the store, renewed until they are given back."""

    def __init__(self, store: Store, lease_s: float, background: Background) -> None:
        self.owner = secrets.token_hex(8)
        self._store = store
        self._lease_s = lease_s
        self._background = background
        self._held: set[str] = set()
        self._renews: asyncio.Task[None] | None = None

    async def take(self, key: str, lease: str) -> bytes | bool:
        """As the store's."""
        told = await self._store.take(key, lease, self.owner, self._lease_s)
        if told is not True:
            self._held.discard(lease)
            return told
        self._held.add(lease)
        if self._renews is None:
            self._renews = asyncio.get_running_loop().create_task(self._renew())
        return True

    def give_back(self, lease: str) -> None:
        if lease in self._held:
            self._held.discard(lease)
            self._background.start(self._store.extend([lease], self.owner))  # dropped: it runs out

    async def close(self) -> None:
        if self._renews is not None:
            self._renews.cancel()
            await asyncio.wait({self._renews})

    async def _renew(self) -> None:
        try:
            while self._held:
                await asyncio.sleep(self._lease_s / 3)
                await self._store.extend(tuple(self._held), self.owner, self._lease_s)
        finally:
            self._renews = None


def _repeat(answer: Answer) -> Answer:
    """`answer` as others have it: no engine worked for it."""
    usage = replace(answer.usage, cached=answer.usage.prompt, work=Work())
    return replace(answer, usage=usage, timing=Timing(arrived=0.0))


def _lease(key: str) -> str:
    return f"flight/{key}"


def _tenant(key: str) -> str:
    """Whose answer is kept under `key`."""
    return key.partition("/")[2].partition("/")[0]


def _plain(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not part of a request")
