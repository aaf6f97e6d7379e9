"""Answers to requests that their clients named by an `Idempotency-Key`: the same request gets the same answer.

They are kept for an hour. What is kept is the answer as its client got it, with its ids; of a longer one than
`router.cache_answer_bytes` only the request's digest. While Redis is away nothing is found or kept, and requests are
served. Session operations use the same header; the sessions themselves run each named operation once.
"""

import hashlib
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import Request

from holdfast.replicas.errors import UnavailableError
from holdfast.router.config import RouterConfig
from holdfast.router.entry.http import IDEMPOTENCY, retry_of
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.records import Records

KEPT_S = 3600.0
TENANT_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """`key` is where its answer is kept, and `digest` that of its path and body under that name."""

    key: str
    digest: str


def named(tenant: str, request: Request) -> NamedRequest | None:
    """A request whose body was read, as its client named it; None: it has no name."""
    digest = retry_of(request, IDEMPOTENCY)
    if not digest:
        return None
    name = hashlib.sha256(request.headers[IDEMPOTENCY].encode()).hexdigest()
    return NamedRequest(f"idempotency/{tenant}/{name}", digest)


class KeptAnswers:
    """Answers by the names of their requests."""

    def __init__(self, records: Records, config: RouterConfig) -> None:
        self._records = records
        self._most = config.cache_answer_bytes

    async def find(self, request: NamedRequest) -> bytes | None:
        """The answer to this request; None: there is none, it is gone, or Redis is away.

        Raises RefusedError (422) where another request was answered under the same name.
        """
        record = None
        with suppress(UnavailableError):
            record = await self._records.get(request.key)
        if record is None:
            return None
        digest, _, answer = record.value.partition(b"\n")
        if digest.decode() != request.digest:
            message = f"'{IDEMPOTENCY}': another request, with another path or body, was answered under this key"
            raise RefusedError(Refusal.KEY_REUSED, message, IDEMPOTENCY)
        return answer or None

    async def keep(self, request: NamedRequest, answer: bytes) -> None:
        """Keep the answer, unless the tenant's limit is reached, or Redis is away."""
        value = request.digest.encode() + b"\n" + (answer if len(answer) <= self._most else b"")
        with suppress(UnavailableError):
            await self._records.put(request.key, value, KEPT_S, TENANT_BYTES)
