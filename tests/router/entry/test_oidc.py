"""Tokens of an identity provider, with keys made here and a provider on loopback."""

import asyncio
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from identity_provider import AUDIENCE, ISSUER, IdentityProvider

from holdfast.replicas.errors import ConfigError
from holdfast.router.config import Oidc
from holdfast.router.entry.oidc import IdentityTokens
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import Caller, Scope, Tenant, TenantDirectory, hash_key


@pytest.fixture(scope="module")
def provider():
    provider = IdentityProvider(ISSUER)
    yield provider
    provider.close()


def directory(provider):
    tokens = IdentityTokens(Oidc(ISSUER, AUDIENCE, provider.keys_url))
    asyncio.run(tokens.refresh())
    return TenantDirectory(
        [Tenant("acme"), Tenant("other", (hash_key("key"),))], exposed=True, read_token=tokens.read
    ), tokens


def come(directory, key):
    return directory.authenticate(Caller(f"Bearer {key}", "203.0.113.9", "10.0.0.1", None))


def test_a_token_names_the_tenant_and_what_it_is_for(provider):
    known, _ = directory(provider)
    who = come(known, provider.token())
    assert (who.tenant.name, who.key_id, who.scopes) == ("acme", "jwt-ann", (Scope.INFER, Scope.USAGE))
    assert come(known, provider.token(scope="usage openid")).scopes == (Scope.USAGE,)
    assert come(known, provider.token(scope="openid")).scopes == ()
    assert come(known, "key").tenant.name == "other"


def test_what_does_not_hold_is_refused(provider):
    known, _ = directory(provider)
    strange = ec.generate_private_key(ec.SECP256R1())
    good = provider.token()
    head, body, signature = good.split(".")
    other = provider.token(tenant="other").split(".")[1]
    for token in (
        provider.token(key=strange),
        provider.token(iss="https://evil.example"),
        provider.token(aud="another"),
        provider.token(aud=None),
        provider.token(exp=time.time() - 3600),
        provider.token(exp=None),
        provider.token(key="k" * 32, algorithm="HS256"),
        jwt.encode(
            {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "tenant": "acme"}, None, "none", {"kid": "k1"}
        ),
        f"{head}.{other}.{signature}",
        f"{head}.{body}.",
        "a.b.c",
        "." * 20,
    ):
        with pytest.raises(RefusedError) as refused:
            come(known, token)
        assert refused.value.refusal is Refusal.UNAUTHENTICATED
    for tenant in ("nobody", "", None):
        with pytest.raises(RefusedError) as refused:
            come(known, provider.token(tenant=tenant))
        assert refused.value.refusal is Refusal.FORBIDDEN


def test_a_new_key_of_the_provider_is_known_soon_and_one_that_is_away_takes_none(provider):
    known, tokens = directory(provider)
    provider.keys["k2"] = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(RefusedError):
        come(known, provider.token("k2"))
    asyncio.run(tokens.refresh())
    assert come(known, provider.token("k2")).tenant.name == "acme"
    tokens._config = Oidc(ISSUER, AUDIENCE, "http://127.0.0.1:9/none")
    asyncio.run(tokens.refresh())
    assert come(known, provider.token("k2")).tenant.name == "acme"


@pytest.mark.parametrize(
    "wrong", [{"audience": ""}, {"algorithms": ("HS256",)}, {"algorithms": ("none",)}, {"algorithms": ()}]
)
def test_configurations_that_would_let_anybody_in(wrong):
    with pytest.raises(ConfigError):
        Oidc(**{"issuer": ISSUER, "audience": AUDIENCE, **wrong})
