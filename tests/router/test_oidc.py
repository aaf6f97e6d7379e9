"""Tokens of an identity provider, with keys made here and a provider on loopback."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from holdfast.replicas.errors import ConfigError
from holdfast.router.config import Oidc
from holdfast.router.oidc import IdentityTokens
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import Caller, Scope, Tenant, TenantDirectory, hash_key

jwt = pytest.importorskip("jwt")
ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
ISSUER, AUDIENCE = "https://id.example", "holdfast"


class Provider:
    """Its public keys over HTTP; `keys` are private ones by id."""

    def __init__(self):
        self.keys = {"k1": ec.generate_private_key(ec.SECP256R1())}
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(provider.document())

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}/jwks"

    def document(self):
        algorithm = jwt.algorithms.ECAlgorithm
        rows = [{**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid} for kid, key in self.keys.items()]
        return json.dumps({"keys": rows}).encode()

    def token(self, kid="k1", key=None, algorithm="ES256", **claims):
        told = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "sub": "ann", "tenant": "acme", **claims}
        told = {name: value for name, value in told.items() if value is not None}
        return jwt.encode(told, key or self.keys[kid], algorithm, headers={"kid": kid})


@pytest.fixture(scope="module")
def provider():
    provider = Provider()
    yield provider
    provider.server.shutdown()


def directory(provider):
    tokens = IdentityTokens(Oidc(ISSUER, AUDIENCE, provider.url))
    asyncio.run(tokens.refresh())
    return TenantDirectory([Tenant("acme"), Tenant("other", (hash_key("key"),))], exposed=True, tokens=tokens), tokens


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
