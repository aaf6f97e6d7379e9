"""Answers to exact repeats of a request, a tenant's own, in this process and behind it in the store.

A request's noise is keyed by its prompt, so a repeat gives the same answer at any temperature and an answer may be
kept whatever the sampling is. What does not decide the answer (streaming, program, metadata) is not in the key.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import orjson

from holdfast.replicas.events import Timing
from holdfast.replicas.requests import Answer
from holdfast.router.answers import decode_answer, encode_answer
from holdfast.router.background import Background
from holdfast.router.config import RouterConfig
from holdfast.router.lru import Lru
from holdfast.router.protocol.turn import Turn
from holdfast.router.seal import Seal
from holdfast.router.store import Store

FORMAT = 3  # of stored answers; part of every key


class CacheResult(StrEnum):
    """What became of the look-up: the value of the header `x-holdfast-cache`."""

    HIT = "hit"
    MISS = "miss"
    BYPASS = "bypass"


class ResponseCache:
    """`fingerprint` names everything outside a request that decides its answer: model, settings, release."""

    def __init__(
        self, store: Store, config: RouterConfig, fingerprint: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._config = config
        self._fingerprint = fingerprint
        self._clock = clock
        self._near: Lru[Answer] = Lru(config.cache_entries, config.cache_memory, config.cache_share)
        self._seal = Seal(Path(config.cache_key_file)) if config.cache_key_file else None
        self._background = Background()

    @property
    def degraded(self) -> bool:
        """Whether answers are kept in this process although they should be shared."""
        return self._store.degraded

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
            turn.fits,
        ]
        # Keys are left in the client's order: templates write tools and arguments in it.
        canonical = orjson.dumps(decides, default=_plain, option=orjson.OPT_NON_STR_KEYS)
        return f"cache/{tenant}/{hashlib.sha256(canonical).hexdigest()}"

    def bypassed(self, cache_control: str | None) -> bool:
        """Whether to neither read nor keep.

        True where the cache is off, and for a request with `Cache-Control: no-cache` or `no-store`.
        """
        words = (cache_control or "").lower()
        return not self._config.response_cache or "no-cache" in words or "no-store" in words

    async def find(self, key: str) -> Answer | None:
        """The answer under `key`, or None. All of its prompt tokens count as cached: none was computed."""
        near = self._near.get(key, self._clock())
        if near is not None:
            return near
        value = await self._store.get(key)
        if value is None:
            return None
        try:
            answer = decode_answer(self._seal.open(key, value) if self._seal else value)
        except ValueError:  # written by another version, or with another key: as good as absent
            return None
        return self._remember(key, answer, len(value))

    def keep(self, key: str, answer: Answer) -> None:
        """Remember a complete answer, unless it is too long. The store gets it in the background."""
        value = encode_answer(answer)
        if len(value) > self._config.cache_answer_bytes:
            return
        self._remember(key, answer, len(value))
        config = self._config
        value = self._seal.close(key, value) if self._seal else value
        put = self._store.set_shared(key, value, config.cache_ttl_s, _tenant(key), config.cache_tenant_bytes)
        self._background.start(put)

    async def drain(self) -> None:
        """Wait until the store has everything."""
        await self._background.drain()

    def _remember(self, key: str, answer: Answer, size: int) -> Answer:
        usage = replace(answer.usage, cached=answer.usage.prompt)
        repeat = replace(answer, usage=usage, timing=Timing(arrived=0.0))  # no engine worked for it
        self._near.put(key, repeat, self._clock() + self._config.cache_ttl_s, size, _tenant(key))
        return repeat


def _tenant(key: str) -> str:
    """Whose answer is kept under `key`."""
    return key.partition("/")[2].partition("/")[0]


def _plain(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not part of a request")
