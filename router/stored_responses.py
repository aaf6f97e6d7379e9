"""Responses that were stored, a tenant's own: in the store, each with a time to live, together bounded in bytes.

A record has what its request added, the response, and the ids of those before it. So what a chain takes grows with its
length and not with its square, and it is read in one trip, which also makes all of it live on.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from holdfast.router.config import RouterConfig
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.seal import Seal
from holdfast.router.store import Store

OPAQUE = "hf1."


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`input` are the request's own items; `chain` the ids before, the oldest first; `program` its key."""

    response: dict[str, Any]
    input: list[dict[str, Any]]
    chain: list[str]
    program: str

    @property
    def items(self) -> list[dict[str, Any]]:
        return [*self.input, *self.response["output"]]


class StoredResponses:
    """`Seal`ed where the configuration names a key file, as cached answers are."""

    def __init__(self, store: Store, config: RouterConfig) -> None:
        self._store = store
        self._config = config
        self._seal = Seal(Path(config.cache_key_file)) if config.cache_key_file else None

    async def keep(self, tenant: str, stored: StoredResponse) -> None:
        """Keep it, unless the tenant has stored as much as it may; then it is not found later."""
        key = _key(tenant, stored.response["id"])
        value = orjson.dumps(stored)
        value = self._seal.close(key, value) if self._seal else value
        config = self._config
        owner = f"responses/{tenant}"
        await self._store.set_shared(key, value, config.response_ttl_s, owner, config.response_tenant_bytes)

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises RefusedError (404) where it is not there or another tenant's."""
        found = await self._read(tenant, [response_id])
        if found is None:
            message = f"Response with id '{response_id}' not found: never stored, deleted, or expired"
            raise RefusedError(Refusal.NO_RESPONSE, message)
        return found[0]

    async def conversation(self, tenant: str, response_id: str, field: str) -> list[StoredResponse]:
        """The response, which the request names in `field`, and all before it, the oldest first.

        Raises RefusedError (400) where it, or one before it, is not there or another tenant's.
        """
        found = await self._read(tenant, [response_id])
        before = None if found is None else await self._read(tenant, found[0].chain)
        if found is None or before is None:
            message = f"Previous response with id '{response_id}' not found: it, or one before it, is not stored"
            raise RefusedError(Refusal.NO_PREVIOUS, message, field)
        return [*before, *found]

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises as `find`. Those that go on with it cannot be continued any more."""
        await self.find(tenant, response_id)
        await self._store.delete(_key(tenant, response_id))

    def conceal(self, tenant: str, text: str) -> str:
        """`text` for a client to hand back: encrypted where there is a key, else only in another form."""
        value = text.encode()
        sealed = self._seal.close(f"items/{tenant}", value) if self._seal else value
        return OPAQUE + base64.b64encode(sealed).decode()

    def reveal(self, tenant: str, given: str) -> str | None:
        """What was concealed for this tenant; None for anything else."""
        if not given.startswith(OPAQUE):
            return None
        try:
            value = base64.b64decode(given.removeprefix(OPAQUE), validate=True)
            return (self._seal.open(f"items/{tenant}", value) if self._seal else value).decode()
        except (ValueError, binascii.Error):
            return None

    async def _read(self, tenant: str, ids: Sequence[str]) -> list[StoredResponse] | None:
        """All of these; None where one of them is not there."""
        if not ids:
            return []
        keys = [_key(tenant, each) for each in ids]
        found = await self._store.renew(keys, self._config.response_ttl_s)
        read = []
        for key, value in zip(keys, found, strict=True):
            if value is None:
                return None
            try:
                read.append(StoredResponse(**orjson.loads(self._seal.open(key, value) if self._seal else value)))
            except (ValueError, TypeError):  # another version's, or with another key: as good as absent
                return None
        return read


def _key(tenant: str, response_id: str) -> str:
    return f"responses/{tenant}/{response_id}"
