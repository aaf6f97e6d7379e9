"""Answers to requests that their clients have named by an `Idempotency-Key`: the same request gets the same answer.

They stand in the store for an hour, a tenant's own, together bounded in bytes. What is kept is the answer as its client
got it, with its ids; of a longer one than `router.cache_answer_bytes` only what was asked. Operations of sessions are
named by the same header and done once; that is the sessions' own.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from holdfast.router.config import RouterConfig
from holdfast.router.http import IDEMPOTENCY, retry_of
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.seal import Seal
from holdfast.router.store import Store

KEPT_S = 3600.0
TENANT_BYTES = 16 * 2**20  # that one tenant may put in this time


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """`key` is where its answer is kept, and `asks` a digest of its path and body under that name."""

    tenant: str
    key: str
    asks: str


def named(tenant: str, request: Request) -> NamedRequest | None:
    """A request whose body was read, as its client has named it; None: it has no name."""
    asks = retry_of(request, IDEMPOTENCY)
    if not asks:
        return None
    name = hashlib.sha256(request.headers[IDEMPOTENCY].encode()).hexdigest()
    return NamedRequest(tenant, f"idempotency/{tenant}/{name}", asks)


class KeptAnswers:
    """`Seal`ed where the configuration names a key file, as all that is stored of answers is."""

    def __init__(self, store: Store, config: RouterConfig) -> None:
        self._store = store
        self._most = config.cache_answer_bytes
        self._seal = Seal(Path(config.cache_key_file)) if config.cache_key_file else None

    async def find(self, request: NamedRequest) -> bytes | None:
        """The answer to this request; None: there is none, or it is gone.

        Raises RefusedError (422) where another request was answered under the same name.
        """
        value = await self._store.get(request.key)
        if value is None:
            return None
        try:
            asks, _, answer = (self._seal.open(request.key, value) if self._seal else value).partition(b"\n")
        except ValueError:  # with another key: as good as absent
            return None
        if asks.decode() != request.asks:
            message = f"'{IDEMPOTENCY}': another request, with another path or body, was answered under this key"
            raise RefusedError(Refusal.KEY_REUSED, message, IDEMPOTENCY)
        return answer or None

    async def keep(self, request: NamedRequest, answer: bytes) -> None:
        """Keep it, unless the tenant has put as much as it may."""
        value = request.asks.encode() + b"\n" + (answer if len(answer) <= self._most else b"")
        sealed = self._seal.close(request.key, value) if self._seal else value
        await self._store.set_shared(request.key, sealed, KEPT_S, f"idempotency/{request.tenant}", TENANT_BYTES)
