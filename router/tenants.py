"""Tenants, and the tenant of each caller. Their limits are applied in `quotas`."""

import hashlib
import ipaddress
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.types import CellLimits, Priority
from holdfast.router.config import KEY_HASH
from holdfast.router.protocol.errors import Refusal, RefusedError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # no "/": names are the first part of scoped keys


def hash_key(key: str) -> str:
    """`sha256:<hex>`, the form of API keys in a configuration."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class Scope(StrEnum):
    """The purpose of a key."""

    INFER = "infer"  # everything that serves programs
    USAGE = "usage"  # its tenant's usage
    OPERATE = "operate"  # metrics and status of the whole cluster


SCOPES: tuple[Scope, ...] = (Scope.INFER, Scope.USAGE)  # of a key that names none


def make_key() -> str:
    """A new API key."""
    return f"hf-{secrets.token_urlsafe(32)}"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of all routers together. None: no limit. A call beyond one is refused (429)."""

    requests_per_minute: int | None = None  # calls of every kind
    input_tokens_per_minute: int | None = None  # prompts, cached or not
    uncached_tokens_per_minute: int | None = None  # the part of prompts that no cache has
    output_tokens_per_minute: int | None = None  # generated
    max_concurrent: int | None = None  # generation requests that run
    max_programs: int | None = None  # programs that have not ended
    units_per_day: float | None = None  # usage times `router.prices`, in a day of UTC
    units_per_month: float | None = None  # and in a month

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not 1 <= value < math.inf:
                raise ConfigError(f"{name} must be at least 1, not {value}", name)

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return any(getattr(self, name) is not None for name in self.__dataclass_fields__)

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters how long a request is."""
        return any(
            getattr(self, name) is not None for name in self.__dataclass_fields__ if "token" in name or "unit" in name
        )


@dataclass(frozen=True, slots=True)
class TenantCache:
    """A tenant's options for the response cache."""

    enabled: bool = True  # off: no answer is kept or found for it
    ttl_s: float | None = None  # an answer is forgotten after this; null: as `router.cache_ttl_s`
    bytes: int | None = None  # of its answers in Redis; null: as `router.cache_tenant_bytes`

    def __post_init__(self) -> None:
        for name in ("ttl_s", "bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive, not {value}", name)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key of a tenant, by its hash."""

    id: str  # the name in lists, records and logs; not secret
    hash: str  # `sha256:` and 64 hex digits, as `holdfast key` prints them
    scopes: tuple[Scope, ...] = SCOPES  # what it is for
    expires: float | None = None  # seconds since 1970 in UTC from which on it is refused; null: never

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.id):
            raise ConfigError(f"the id of a key {self.id!r} is not {NAME.pattern}", "id")
        if not KEY_HASH.fullmatch(self.hash):
            raise ConfigError(f"key {self.id!r} is not 'sha256:' and 64 hex digits; see `holdfast key`", "hash")
        if not self.scopes:
            raise ConfigError(f"key {self.id!r} has no scope", "scopes")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, whose usage is counted and limited. An `operator` may read the metrics of all tenants."""

    name: str  # letters, digits, `.`, `_` and `-`; a label of metrics
    key_hashes: tuple[str, ...] = ()  # `sha256:` and the hash of each of its keys, as `holdfast key` prints them
    weight: float = 1.0  # its share of time and of full replicas' slots against the others', with `engine.order: fair`
    keys: tuple[ApiKey, ...] = ()  # more of them, each with what it is for and when it expires
    limits: TenantLimits = TenantLimits()
    cache: TenantCache = TenantCache()
    cells: CellLimits = field(default_factory=CellLimits)
    operator: bool = False  # may read the metrics and the status of the whole cluster
    priority: Priority = Priority.INTERACTIVE  # the class of a request that asks for none
    priorities: tuple[Priority, ...] = tuple(Priority)  # the classes that its requests may ask for
    prompt_seed: bool = True  # a request without a seed gets its prompt's, and the same answer each time; off: a random

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"tenant name {self.name!r} is not {NAME.pattern}", "name")
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"weight of tenant {self.name!r} must be positive, not {self.weight}", "weight")
        for value in self.key_hashes:
            if not KEY_HASH.fullmatch(value):
                message = f"tenant {self.name!r} has a key that is not 'sha256:' and 64 hex digits; see `holdfast key`"
                raise ConfigError(message, "key_hashes")
        ids = {key.id: key.hash for key in self.all_keys}
        if any(ids[key.id] != key.hash for key in self.all_keys):
            raise ConfigError(f"two keys of tenant {self.name!r} have the same id", "keys")

    def class_of(self, requested: Priority | None) -> Priority:
        """The class of a request that asks for `requested`. Raises RefusedError (403) where it may not."""
        if requested is None or requested is self.priority:
            return self.priority
        if requested not in self.priorities:
            raise RefusedError(Refusal.FORBIDDEN, f"This tenant has no requests of the class '{requested}'", "priority")
        return requested

    @property
    def all_keys(self) -> tuple[ApiKey, ...]:
        """`keys`, and `key_hashes` with the first digits of each hash as its id."""
        return (*(ApiKey(value.removeprefix("sha256:")[:8], value) for value in self.key_hashes), *self.keys)


def expect_floors(tenants: Iterable[Tenant]) -> None:
    """Raises ConfigError where tenants are promised more cells than there are."""
    floors = math.fsum(tenant.cells.floor for tenant in tenants)
    if floors > 1 + 1e-9:
        raise ConfigError(f"the floors of all tenants come to {floors:g} of an engine's cells", "cells.floor")


DEFAULT_TENANT = Tenant("default")


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller: a tenant, the key that was used, and its scopes."""

    tenant: Tenant
    key_id: str = ""  # "": by the address
    scopes: tuple[Scope, ...] = SCOPES

    def allows(self, scope: Scope) -> bool:
        return scope in self.scopes or (scope is Scope.OPERATE and self.tenant.operator)


@dataclass(frozen=True, slots=True)
class Caller:
    """The facts that authentication checks: the key, and the source of the connection.

    `peer` and `server` are the two addresses of the connection, `forwarded` is the value of `X-Forwarded-For`. `host`
    is the server's name in the request, `origin` the page for which a browser sends it.
    """

    authorization: str | None
    peer: str | None
    server: str | None
    forwarded: str | None
    host: str | None = None
    origin: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the connection, and every hop that a proxy names, comes from this machine."""
        if self.peer is None or not (_is_loopback(self.peer) or self.peer == self.server):
            return False
        return all(_is_loopback(hop.strip()) for hop in (self.forwarded or "").split(",") if hop.strip())

    def address(self, proxies: Sequence[Network] = ()) -> str:
        """The address of the last hop that is no proxy of this machine or of `proxies`; "" where it has none.

        A client may have written the hops before that into `X-Forwarded-For` itself.
        """
        hops = [hop.strip() for hop in (self.forwarded or "").split(",") if hop.strip()]
        address = self.peer or ""
        while hops and (_is_loopback(address) or _is_in(address, proxies)) and _parsed(hops[-1]) is not None:
            address = hops.pop()
        return address


ReadToken = Callable[[str], tuple[str, str, tuple[Scope, ...]] | None]
"""The tenant's name, the subject and its scopes of an identity provider's token (`oidc`); None for a text that is none.
Raises RefusedError."""


class TenantDirectory:
    """Maps API keys and tokens to tenants. Without any there is one tenant, for local callers only.

    `exposed`: the proxy in front listens on an address that others can reach. It hides where a request comes from, so
    without keys nobody is served then. A request without a key must call this machine by its own name or by one of
    `hosts`: a browser calls for any page, also under a name that the page's owner points here. Pages of `origins` may
    call.

    A key is looked up by its hash, so the time that this takes does not help to guess a key.
    """

    def __init__(
        self,
        tenants: Sequence[Tenant] = (),
        exposed: bool = False,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        read_token: ReadToken | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._exposed = exposed
        self._origins = frozenset(origins)
        self._hosts = frozenset(name.lower() for name in hosts)
        self._read_token = read_token
        self._clock = clock
        self._listeners: list[Callable[[Sequence[Tenant]], None]] = []
        self._added: Sequence[Tenant] = ()
        self.used: dict[tuple[str, str], float] = {}  # when a key, by tenant and id, was used last
        self.replace(tenants)

    def replace(self, tenants: Sequence[Tenant]) -> None:
        """From now on these are the configured tenants. Raises ConfigError, and changes nothing, where some clash."""
        self._set(tenants, self._added)

    def add(self, tenants: Sequence[Tenant]) -> None:
        """From now on there are these besides the configured ones. Of a tenant that is configured only its new keys
        count. Raises ConfigError where some clash among themselves.
        """
        self._set(self.configured, tenants)

    def _set(self, configured: Sequence[Tenant], added: Sequence[Tenant]) -> None:
        tenants = {tenant.name: tenant for tenant in configured}
        if len(tenants) < len(configured):
            raise ConfigError("two tenants have the same name", "tenants")
        by_key = _by_key(configured)
        if configured and not by_key and not added and self._read_token is None:
            raise ConfigError("there are tenants, but none has an API key", "tenants")
        for tenant in added:
            existing = tenants.get(tenant.name)
            ids = {key.id for key in existing.all_keys} if existing else set()
            fresh = [key for key in tenant.all_keys if key.hash not in by_key and key.id not in ids]
            tenants[tenant.name] = existing or tenant
            by_key.update({key.hash: (tenant.name, key) for key in fresh})
        expect_floors(tenants.values())
        self.configured, self._added, self._by_key = tuple(configured), tuple(added), by_key
        self._by_name = tenants
        self.tenants = tuple(tenants.values()) or (DEFAULT_TENANT,)
        for tell in self._listeners:
            tell(self.tenants)

    def watch(self, tell: Callable[[Sequence[Tenant]], None]) -> None:
        """Call `tell` with the tenants, now and after each change."""
        self._listeners.append(tell)
        tell(self.tenants)

    @property
    def has_keys(self) -> bool:
        return bool(self._by_key) or self._read_token is not None

    def named(self, name: str) -> Tenant | None:
        return self._by_name.get(name)

    def authenticate(self, caller: Caller) -> Principal:
        """The principal of `caller`. Raises RefusedError: 401 for its key, 403 for its address."""
        if not self.has_keys:
            self._require_local(caller)
            return Principal(DEFAULT_TENANT, scopes=tuple(Scope))
        key = key_of(caller)
        if not key:
            raise RefusedError(Refusal.UNAUTHENTICATED, "Give your API key in a header: 'Authorization: Bearer KEY'")
        entry = self._by_key.get(hash_key(key))
        if entry is None:
            return self._by_token(key)
        name, api_key = entry
        now = self._clock()
        if api_key.expires is not None and now >= api_key.expires:
            raise RefusedError(Refusal.UNAUTHENTICATED, "This API key has expired")
        self.used[name, api_key.id] = now
        return Principal(self._by_name[name], api_key.id, api_key.scopes)

    def authorize_metrics(self, caller: Caller) -> None:
        """Metrics show every tenant: only for local callers and operators. Raises RefusedError."""
        if caller.is_local and not self._exposed and self._foreign(caller) is None:
            return
        if not self.authenticate(caller).allows(Scope.OPERATE):
            message = "Metrics need a key with the scope 'operate', or of a tenant with 'operator: true'"
            raise RefusedError(Refusal.FORBIDDEN, message)

    def _by_token(self, key: str) -> Principal:
        read = self._read_token(key) if self._read_token is not None else None
        if read is None:
            raise RefusedError(Refusal.UNAUTHENTICATED, "Incorrect API key provided")
        name, subject, scopes = read
        tenant = self._by_name.get(name)
        if tenant is None:
            raise RefusedError(Refusal.FORBIDDEN, "The token's tenant is unknown")
        return Principal(tenant, subject, scopes)

    def _require_local(self, caller: Caller) -> None:
        if self._exposed:
            message = (
                "No API keys are configured and this server listens beyond this machine, so it serves nobody. "
                "Configure 'tenants' with 'key_hashes' (made by `holdfast key`), or listen on 127.0.0.1"
            )
            raise RefusedError(Refusal.FORBIDDEN, message)
        if not caller.is_local:
            message = (
                "No API keys are configured, so only callers on this machine are served. "
                "Configure 'tenants' with 'key_hashes' (made by `holdfast key`)"
            )
            raise RefusedError(Refusal.FORBIDDEN, message)
        if (foreign := self._foreign(caller)) is not None:
            message = (
                f"Without API keys only programs on this machine are served, not '{foreign}'. Call it localhost, "
                "name the host in 'router.hosts', or configure 'tenants' with 'key_hashes'"
            )
            raise RefusedError(Refusal.FORBIDDEN, message)

    def _foreign(self, caller: Caller) -> str | None:
        """The name in `Host` or `Origin` that is not this machine's; None where there is none."""
        if caller.host is not None and not self._own(caller.host):
            return caller.host
        origin = caller.origin
        if origin is not None and origin not in self._origins and not self._own(origin.partition("://")[2]):
            return origin
        return None

    def _own(self, authority: str) -> bool:
        name = _without_port(authority).lower()
        return name == "localhost" or name.endswith(".localhost") or name in self._hosts or _is_loopback(name)


def _without_port(authority: str) -> str:
    name, colon, port = authority.rpartition(":")
    return name if colon and port.isdigit() and (name.endswith("]") or ":" not in name) else authority


def _parsed(address: str) -> Address | None:
    try:
        parsed = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed  # ::ffff:127.0.0.1


def _is_loopback(address: str) -> bool:
    parsed = _parsed(address)
    return parsed is not None and parsed.is_loopback


def _is_in(address: str, networks: Sequence[Network]) -> bool:
    parsed = _parsed(address)
    return parsed is not None and any(parsed in network for network in networks)


def key_of(caller: Caller) -> str:
    """The caller's key; "" for none."""
    scheme, _, key = (caller.authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _by_key(tenants: Sequence[Tenant]) -> dict[str, tuple[str, ApiKey]]:
    """The name of the tenant and the key, by its hash. Raises ConfigError where two have the same."""
    keys = {key.hash: (tenant.name, key) for tenant in tenants for key in tenant.all_keys}
    if len(keys) < sum(len(tenant.all_keys) for tenant in tenants):
        raise ConfigError("two tenants have the same API key", "tenants")
    return keys
