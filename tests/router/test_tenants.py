from dataclasses import replace

import pytest
from fake_backend import World, chat_body

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.types import CellLimits
from holdfast.router.config import RouterConfig
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import Caller, Tenant, TenantDirectory, TenantLimits, hash_key

ACME = Tenant("acme", (hash_key("key-a"), hash_key("key-b")))
OPS = Tenant("ops", (hash_key("key-ops"),), operator=True)


def come(authorization=None, peer="127.0.0.1", server="127.0.0.1", forwarded=None):
    return Caller(authorization, peer, server, forwarded)


def refusal(directory, caller):
    with pytest.raises(RefusedError) as refused:
        directory.authenticate(caller)
    return refused.value.refusal


@pytest.mark.parametrize("header", ["Bearer key-a", "bearer key-b", "BEARER  key-a "])
def test_any_of_a_tenants_keys_names_it(header):
    assert TenantDirectory([ACME, OPS]).authenticate(come(header, peer="203.0.113.9")).tenant is ACME


WRONG = (None, "", "Bearer", "Bearer ", "Basic key-a", "key-a", "Bearer key-c", "Bearer Key-a")


@pytest.mark.parametrize("header", [*WRONG, f"Bearer {hash_key('key-a')}"])
def test_a_missing_or_unknown_key_is_refused(header):
    assert refusal(TenantDirectory([ACME]), come(header)) is Refusal.UNAUTHENTICATED


LOCAL = ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")
SAME = (come(peer="10.0.0.5", server="10.0.0.5"), come(forwarded="127.0.0.1, ::1"))


@pytest.mark.parametrize("caller", [*(come(peer=peer) for peer in LOCAL), *SAME])
def test_without_keys_a_caller_on_this_machine_is_the_default_tenant(caller):
    assert TenantDirectory().authenticate(caller).tenant.name == "default"


@pytest.mark.parametrize(
    "caller",
    [
        come(peer="203.0.113.9"),
        come(peer="10.0.0.6", server="10.0.0.5"),
        come(peer="::ffff:203.0.113.9"),
        come(peer="localhost.evil.example"),
        come(peer=None, server=None),
        come(forwarded="203.0.113.9"),
        come(forwarded="127.0.0.1, 203.0.113.9"),
        come(forwarded="unknown"),
        come("Bearer anything", peer="203.0.113.9"),
    ],
)
def test_without_keys_nobody_else_is_served(caller):
    assert refusal(TenantDirectory(), caller) is Refusal.FORBIDDEN


def test_without_keys_an_exposed_server_serves_nobody_and_says_what_to_configure():
    with pytest.raises(RefusedError, match="key_hashes") as refused:
        TenantDirectory(exposed=True).authenticate(come())
    assert refused.value.refusal is Refusal.FORBIDDEN


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tenant("a/b"),
        lambda: Tenant(""),
        lambda: Tenant("a", ("plain-key",)),
        lambda: Tenant("a", weight=0.0),
        lambda: Tenant("a", weight=float("nan")),
        lambda: Tenant("a", weight=float("inf")),
        lambda: TenantLimits(max_concurrent=0),
        lambda: TenantDirectory([ACME, Tenant("acme")]),
        lambda: TenantDirectory([ACME, Tenant("other", ACME.key_hashes[:1])]),
        lambda: TenantDirectory([Tenant("a")]),
        lambda: TenantDirectory([replace(ACME, cells=CellLimits(0.6)), Tenant("b", cells=CellLimits(0.5))]),
    ],
)
def test_configurations_that_make_no_sense(make):
    with pytest.raises(ConfigError):
        make()


def test_hash_key_is_plain_sha256():
    assert hash_key("abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("127.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("127.0.0.1", "127.0.0.1, 203.0.113.9", "203.0.113.9"),  # the client says that it is local
        ("127.0.0.1", "203.0.113.9, 10.1.2.3", "203.0.113.9"),  # through a proxy that is known
        ("::ffff:10.1.2.3", "203.0.113.9", "203.0.113.9"),
        ("198.51.100.1", "203.0.113.9", "198.51.100.1"),  # nobody who is believed
        ("127.0.0.1", "203.0.113.9, junk", "127.0.0.1"),
        (None, "203.0.113.9", ""),
    ],
)
def test_an_address_is_what_the_last_believed_proxy_says(peer, forwarded, address):
    assert come(peer=peer, forwarded=forwarded).address(RouterConfig(proxies=("10.0.0.0/8",)).networks()) == address


def test_proxies_that_are_no_addresses_are_refused():
    with pytest.raises(ConfigError) as refused:
        RouterConfig(proxies=("proxy.example",))
    assert refused.value.field == "proxies"


def test_requests_tell_engines_what_their_tenant_may_have_of_the_cells():
    tenants = TenantDirectory([replace(ACME, cells=CellLimits(0.2, 0.5))], exposed=True)
    world = World(tenants=tenants)
    headers = {"authorization": "Bearer key-a"}
    assert world.call("POST", "/v1/chat/completions", json=chat_body(), headers=headers).status_code == 200
    assert world.backend.requests[-1].cells == CellLimits(0.2, 0.5)
    tenants.replace([ACME])
    world.call("POST", "/v1/chat/completions", json=chat_body(seed=1), headers=headers)
    assert world.backend.requests[-1].cells == CellLimits(), "they are told when they are gone, too"
