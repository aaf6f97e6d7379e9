"""Stored responses of the Responses API, a tenant's own, and the encryption of items that clients keep.

A record has what its request added, the response, and the ids of the responses before it. So what a chain takes grows
with its length and not with its square. The response is a line of its own, because a conversation does not need it.
"""

import base64
import hashlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from holdfast.replicas.errors import UnavailableError
from holdfast.router.config import RouterConfig
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.records.store import KEY_BYTES, Encryption, PutResult, Record, Records

log = logging.getLogger(__name__)

OPAQUE = "hf1."
ITEM_KEY = "items/key"
ITEM_KEY_S = 400 * 86400.0  # seconds that it is kept after its last use
KNOWN_KEYS = 4
# KEYS: the shared key's. ARGV: the key where there is none yet, its TTL in ms. Returns the key.
_SHARE_KEY = """
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return {redis.call('GETEX', KEYS[1], 'PX', ARGV[2])}
"""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A response as conversations use it: the items of its request, its own, and the key of its `program`.

    `chain` has the ids before it, the oldest first.
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
    """A response, and its part in a conversation that continues it."""

    response: dict[str, Any]
    turn: StoredTurn


class StoredResponses:
    """By tenant and id. Reading one makes it live on."""

    def __init__(self, records: Records, config: RouterConfig) -> None:
        self._records = records
        self._config = config
        self.items = ItemEncryption(records, config.cache_key_file)

    async def keep(self, tenant: str, stored: StoredResponse) -> bool:
        """Whether it is stored. It is not while Redis is away, and where the tenant's responses take their limit."""
        config = self._config
        value = orjson.dumps(stored.turn) + b"\n" + orjson.dumps({**stored.response, "output": []})
        key = _key(tenant, stored.turn.id)
        try:
            result = await self._records.put(key, value, config.response_ttl_s, config.response_tenant_bytes)
        except UnavailableError:
            log.warning("a response of tenant %s is not stored: Redis is away", tenant)
            return False
        if result is PutResult.FULL:
            log.warning("a response of tenant %s is not stored: its responses take response_tenant_bytes", tenant)
        return result is PutResult.STORED

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises RefusedError (404) where it is absent or another tenant's, and UnavailableError."""
        stored = _parsed(await self._records.get(_key(tenant, response_id), self._config.response_ttl_s))
        if stored is None:
            message = f"Response with id '{response_id}' not found: never stored, deleted, or expired"
            raise RefusedError(Refusal.NO_RESPONSE, message)
        turn, response = stored
        return StoredResponse({**orjson.loads(response), "output": turn.output}, turn)

    async def conversation(self, tenant: str, response_id: str, field: str) -> list[StoredTurn]:
        """The response, which the request names in `field`, and all before it, the oldest first.

        Raises RefusedError (400) where it, or one before it, is absent or another tenant's, and UnavailableError.
        """
        latest = await self._turns(tenant, [response_id])
        before = await self._turns(tenant, latest[0].chain) if latest is not None else None
        if latest is None or before is None:
            message = f"Previous response with id '{response_id}' not found: it, or one before it, is not stored"
            raise RefusedError(Refusal.NO_PREVIOUS, message, field)
        return [*before, *latest]

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises as `find`. Responses that continue it cannot be continued any more."""
        await self.find(tenant, response_id)
        await self._records.delete(_key(tenant, response_id))

    async def _turns(self, tenant: str, ids: Sequence[str]) -> list[StoredTurn] | None:
        """All of these; None where one of them is absent."""
        keys = [_key(tenant, each) for each in ids]
        stored = [_parsed(record) for record in await self._records.get_all(keys, self._config.response_ttl_s)]
        turns = [each[0] for each in stored if each is not None]
        return turns if len(turns) == len(ids) else None


class AnotherTenantsError(ValueError):
    """An item was encrypted for another tenant."""


class ItemEncryption:
    """Encrypts items that a client of a tenant keeps and sends back: `hf1.DATA.TENANT`, the last a digest of its name.

    By the first key of `router.cache_key_file`. Without a file by a key that the routers make once and share in Redis;
    while that is away, by the key that this router knows. A Redis that lost the key gets it back from a router.
    """

    def __init__(self, records: Records, key_file: str) -> None:
        self._records = records
        self._fixed = Encryption(Path(key_file)) if key_file else None
        self._keys = [
            secrets.token_bytes(KEY_BYTES)
        ]  # the first encrypts; this router encrypted with the others before

    async def prepare(self) -> None:
        """Call this before `encrypt` and `decrypt`: the routers agree on a key."""
        if self._fixed is not None:
            return
        shared = await self._records.try_script(_SHARE_KEY, [ITEM_KEY], [self._keys[0], int(ITEM_KEY_S * 1000)])
        if shared is not None and shared[0] != self._keys[0]:
            self._keys = [shared[0], *(key for key in self._keys if key != shared[0])][:KNOWN_KEYS]

    def encrypt(self, tenant: str, text: str) -> str:
        data = self._encryption.encrypt(f"items/{tenant}", text.encode())
        return f"{OPAQUE}{base64.b64encode(data).decode()}.{_tag(tenant)}"

    def decrypt(self, tenant: str, item: str) -> str | None:
        """The text. None where nobody here can read it: it is another server's, or its key is gone.

        Raises AnotherTenantsError.
        """
        if not item.startswith(OPAQUE):
            return None
        data, _, owner = item.removeprefix(OPAQUE).partition(".")
        if owner and owner != _tag(tenant):
            raise AnotherTenantsError("encrypted for another tenant")
        try:
            return self._encryption.decrypt(f"items/{tenant}", base64.b64decode(data, validate=True)).decode()
        except ValueError:  # not base64, not ours, or by a key that is gone
            return None

    @property
    def _encryption(self) -> Encryption:
        return self._fixed or Encryption(keys=self._keys)


def _parsed(record: Record | None) -> tuple[StoredTurn, bytes] | None:
    """The turn and the response of a record; None where it cannot be read."""
    if record is None:
        return None
    try:
        turn, _, response = record.value.partition(b"\n")
        return StoredTurn(**orjson.loads(turn)), response
    except (ValueError, TypeError):  # another version's: as good as absent
        return None


def _tag(tenant: str) -> str:
    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()


def _key(tenant: str, response_id: str) -> str:
    return f"responses/{tenant}/{response_id}"
