"""Tokens of an identity provider in place of API keys: JWTs, by PyJWT, which is imported only where there is an issuer.

A token must be signed by one of the issuer's public keys, name the issuer and our audience, and not have expired. A
claim names its tenant, which must exist. The public keys are read every `REFRESH_S`, and soon after a token names an
unknown one. No request waits for the provider.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx

from holdfast.replicas.errors import ConfigError
from holdfast.router.background import forever, stop
from holdfast.router.config import Oidc
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import SCOPES, Scope

log = logging.getLogger(__name__)

REFRESH_S = 300.0  # between two looks at the public keys
AGAIN_S = 5.0  # between two looks for an unknown key, at least
TIMEOUT_S = 5.0
LEEWAY_S = 30.0  # by which clocks may differ
LONGEST = 16384  # characters of a token


class IdentityTokens:
    """Reads tokens for `TenantDirectory`. Raises ConfigError where PyJWT is missing."""

    def __init__(self, config: Oidc, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            import jwt
        except ImportError as error:
            raise ConfigError("tokens of an issuer need the package PyJWT", "router.oidc.issuer") from error
        self._jwt: Any = jwt
        self._config = config
        self._clock = clock
        self._keys: dict[str, Any] = {}
        self._refreshed_at = -AGAIN_S
        self._refresh_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys now and at intervals. If the provider is away, try again."""
        await self.refresh()
        refreshing = forever(self._refresh_when_due, 0.0, "reading the issuer's keys")
        self._task = asyncio.get_running_loop().create_task(refreshing)

    async def close(self) -> None:
        await stop(self._task)

    def read(self, token: str) -> tuple[str, str, tuple[Scope, ...]] | None:
        """The token's tenant, subject and scopes; None for a text that is not a JWT.

        Raises RefusedError (401) for a token that is not valid.
        """
        if token.count(".") != 2 or len(token) > LONGEST:
            return None
        jwt, config = self._jwt, self._config
        try:
            head = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError:
            return None
        key = self._keys.get(str(head.get("kid", "")))
        if key is None:
            if self._clock() - self._refreshed_at >= AGAIN_S:
                self._refresh_due.set()
            raise RefusedError(Refusal.UNAUTHENTICATED, "The token is signed with an unknown key; try again")
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=list(config.algorithms),
                issuer=config.issuer,
                audience=config.audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.InvalidTokenError as error:
            raise RefusedError(Refusal.UNAUTHENTICATED, f"The token is not valid: {error}") from None
        return str(claims.get(config.tenant_claim, "")), f"jwt-{claims.get('sub', '')}"[:64], self._scopes(claims)

    async def refresh(self) -> None:
        """Read the keys. If the provider does not answer properly, the known keys stay."""
        self._refreshed_at = self._clock()
        self._refresh_due.clear()
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                answer = await client.get(self._config.keys_url)
            answer.raise_for_status()
            key_set = self._jwt.PyJWKSet.from_dict(answer.json())
            self._keys = {str(each.key_id or ""): each.key for each in key_set.keys}
        except (httpx.HTTPError, ValueError, TypeError, self._jwt.PyJWTError) as error:
            log.error("the keys of %s cannot be read: %s", self._config.issuer, error)

    def _scopes(self, claims: dict[str, Any]) -> tuple[Scope, ...]:
        claim = claims.get(self._config.scope_claim)
        if claim is None:
            return SCOPES
        words = claim.split() if isinstance(claim, str) else [str(each) for each in claim]
        return tuple(scope for scope in Scope if scope.value in words)

    async def _refresh_when_due(self) -> None:
        try:
            async with asyncio.timeout(REFRESH_S):
                await self._refresh_due.wait()
        except TimeoutError:
            pass
        await asyncio.sleep(max(0.0, AGAIN_S - (self._clock() - self._refreshed_at)))
        await self.refresh()
