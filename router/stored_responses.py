"""Responses that were stored, a tenant's own: in the store, each with a time to live, together bounded in bytes.

A record has what its request added, the response, and the ids of those before it. So what a chain takes grows with its
length and not with its square. It is three lines: the ids, so that a chain is read in one trip, which also makes all of
it live on; the items; and the rest of the response, mostly tools, which is not parsed for a conversation.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from holdfast.replicas.errors import UnavailableError
from holdfast.router.config import RouterConfig
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.seal import ItemSeal, Seal
from holdfast.router.store import Put, Store, not_found

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """What a conversation has of a response: `input` are its request's own items, `output` its; `chain` the ids before,
    the oldest first; `program` its key.
    """

    id: str
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]
    chain: list[str]
    program: str

    @property
    def items(self) -> list[dict[str, Any]]:
        return [*self.input, *self.output]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and what a conversation that goes on with it has of it."""

    response: dict[str, Any]
    turn: StoredTurn


class StoredResponses:
    """`Seal`ed where the configuration names a key file, as cached answers are."""

    def __init__(self, store: Store, config: RouterConfig) -> None:
        self._store = store
        self._config = config
        self._seal = Seal(Path(config.cache_key_file)) if config.cache_key_file else None
        self.items = ItemSeal(store, config.cache_key_file)

    async def keep(self, tenant: str, stored: StoredResponse) -> bool:
        """Whether it is kept: it is not where the tenant has stored as much as it may."""
        key = _key(tenant, stored.turn.id)
        record = orjson.dumps(stored.turn) + b"\n" + orjson.dumps({**stored.response, "output": []})
        record = self._seal.close(key, record) if self._seal else record
        value = " ".join(stored.turn.chain).encode() + b"\n" + record
        config = self._config
        owner = f"responses/{tenant}"
        put = await self._store.set_shared(key, value, config.response_ttl_s, owner, config.response_tenant_bytes)
        if put is not Put.DONE:
            log.warning("a response of tenant %s is not stored: its responses take response_tenant_bytes", tenant)
        return put is Put.DONE

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises RefusedError (404) where it is not there or another tenant's, UnavailableError while Redis is away."""
        key = _key(tenant, response_id)
        [value] = await self._store.renew([key], self._config.response_ttl_s)
        found = None if value is None else self._opened(key, value)
        if found is None:
            message = f"Response with id '{response_id}' not found: never stored, deleted, or expired"
            raise not_found(self._store, RefusedError(Refusal.NO_RESPONSE, message))
        turn, response = found
        return StoredResponse({**orjson.loads(response), "output": turn.output}, turn)

    async def conversation(self, tenant: str, response_id: str, field: str) -> list[StoredTurn]:
        """The response, which the request names in `field`, and all before it, the oldest first.

        Raises RefusedError (400) where it, or one before it, is not there or another tenant's, UnavailableError where
        it is not here and Redis is away.
        """
        values = await self._store.follow(_key(tenant, response_id), self._config.response_ttl_s)
        if values:
            ids = values[-1].partition(b"\n")[0].decode().split()
            together = self._turns(tenant, [*ids, response_id], values)
            if together is not None and together[-1].chain == ids:
                return together
        # It may be in two places: what was stored while Redis was away is in this process.
        found = await self._read(tenant, [response_id])
        before = None if found is None else await self._read(tenant, found[0].chain)
        if found is None or before is None:
            message = f"Previous response with id '{response_id}' not found: it, or one before it, is not stored"
            raise not_found(self._store, RefusedError(Refusal.NO_PREVIOUS, message, field))
        return [*before, *found]

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises as `find`. Those that go on with it cannot be continued any more."""
        await self.find(tenant, response_id)
        await self._store.delete(_key(tenant, response_id))
        if self._store.degraded:
            raise UnavailableError("Redis does not answer, and may still have the response; retry")

    async def _read(self, tenant: str, ids: Sequence[str]) -> list[StoredTurn] | None:
        """All of these; None where one of them is not there."""
        if not ids:
            return []
        keys = [_key(tenant, each) for each in ids]
        return self._turns(tenant, ids, await self._store.renew(keys, self._config.response_ttl_s))

    def _turns(self, tenant: str, ids: Sequence[str], values: Sequence[bytes | None]) -> list[StoredTurn] | None:
        """What these records have; None where one of them is not there, or cannot be read."""
        turns = []
        for response_id, value in zip(ids, values, strict=True):
            found = None if value is None else self._opened(_key(tenant, response_id), value)
            if found is None:
                return None
            turns.append(found[0])
        return turns

    def _opened(self, key: str, value: bytes) -> tuple[StoredTurn, bytes] | None:
        """A record, with the rest of its response as it stands; None for one that cannot be read."""
        try:
            record = value[value.index(b"\n") + 1 :]
            record = self._seal.open(key, record) if self._seal else record
            turn, _, response = record.partition(b"\n")
            return StoredTurn(**orjson.loads(turn)), response
        except (ValueError, TypeError):  # another version's, or with another key: as good as absent
            return None


def _key(tenant: str, response_id: str) -> str:
    return f"responses/{tenant}/{response_id}"
