"""Tenants, and who a request's API key belongs to. Limits are applied in `limits`."""

import hashlib
import hmac
import ipaddress
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.replicas.errors import ConfigError
from holdfast.router.protocol.errors import Refusal, RefusedError

KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # no "/": names are the first part of scoped keys


def hash_key(key: str) -> str:
    """`sha256:<hex>`, the form in which API keys stand in a configuration."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: no limit."""

    requests_per_minute: int | None = None  # requests beyond it are refused with 429
    max_concurrent: int | None = None  # requests being served at once; one more is refused with 429

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "max_concurrent"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}", name)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays. An `operator` may read the metrics of all tenants."""

    name: str  # letters, digits, `.`, `_` and `-`; a label of metrics
    key_hashes: tuple[str, ...] = ()  # `sha256:` and the hash of each of its keys, as `holdfast key` prints them
    weight: float = 1.0  # its share of time and of full replicas' slots against the others', with `engine.order: fair`
    limits: TenantLimits = TenantLimits()
    operator: bool = False  # may read the metrics and the status of the whole cluster
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


DEFAULT_TENANT = Tenant("default")


@dataclass(frozen=True, slots=True)
class Caller:
    """What authentication may look at: the key, and where the connection comes from.

    `peer` and `server` are the two addresses of the connection, `forwarded` the value of `X-Forwarded-For`; `host` is
    the name that the request calls, `origin` the page that a browser sends it for.
    """

    authorization: str | None
    peer: str | None
    server: str | None
    forwarded: str | None
    host: str | None = None
    origin: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the connection, and every hop a proxy tells of, comes from this machine."""
        if self.peer is None or not (_is_loopback(self.peer) or self.peer == self.server):
            return False
        return all(_is_loopback(hop.strip()) for hop in (self.forwarded or "").split(",") if hop.strip())


class TenantDirectory:
    """Maps API keys to tenants; without any keys there is one tenant, for local callers only.

    `exposed` says that a proxy in front listens on an address that others can reach. Such a proxy hides where a
    request comes from, so without keys nobody is served then. Requests without a key must call this machine by its own
    name, or by one of `hosts`: a browser on it calls for any page, also under a name that the page's owner points here.
    Pages of `origins`, named one by one, may call.
    """

    def __init__(
        self,
        tenants: Sequence[Tenant] = (),
        exposed: bool = False,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> None:
        self._exposed = exposed
        self._origins = frozenset(origins)
        self._hosts = frozenset(name.lower() for name in hosts)
        self._told: list[Callable[[Sequence[Tenant]], None]] = []
        self.replace(tenants)

    def replace(self, tenants: Sequence[Tenant]) -> None:
        """From now on these are the tenants. Raises ConfigError for some that clash, and leaves those there are."""
        names = [tenant.name for tenant in tenants]
        if len(set(names)) < len(names):
            raise ConfigError("two tenants have the same name", "tenants")
        by_key = {value: tenant for tenant in tenants for value in tenant.key_hashes}
        if len(by_key) < sum(len(tenant.key_hashes) for tenant in tenants):
            raise ConfigError("two tenants have the same API key", "tenants")
        if tenants and not by_key:
            raise ConfigError("there are tenants, but none has an API key", "tenants")
        self._by_key = by_key
        self.tenants = tuple(tenants) or (DEFAULT_TENANT,)
        for tell in self._told:
            tell(self.tenants)

    def watch(self, tell: Callable[[Sequence[Tenant]], None]) -> None:
        """Tell of the tenants there are, now and whenever there are others."""
        self._told.append(tell)
        tell(self.tenants)

    @property
    def has_keys(self) -> bool:
        return bool(self._by_key)

    def authenticate(self, caller: Caller) -> Tenant:
        """The tenant of `caller`. Raises RefusedError: 401 for its key, 403 for its address."""
        if not self._by_key:
            self._require_local(caller)
            return DEFAULT_TENANT
        scheme, _, key = (caller.authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise RefusedError(Refusal.UNAUTHENTICATED, "Give your API key in a header: 'Authorization: Bearer KEY'")
        found = self._find(hash_key(key))
        if found is None:
            raise RefusedError(Refusal.UNAUTHENTICATED, "Incorrect API key provided")
        return found

    def authorize_metrics(self, caller: Caller) -> None:
        """Metrics tell of every tenant: for local callers and operators. Raises RefusedError."""
        if caller.is_local and not self._exposed and self._foreign(caller) is None:
            return
        if not self.authenticate(caller).operator:
            raise RefusedError(Refusal.FORBIDDEN, "Metrics need the API key of a tenant with 'operator: true'")

    def _find(self, hashed: str) -> Tenant | None:
        found = None
        for value, tenant in self._by_key.items():  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(value, hashed):
                found = tenant
        return found

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
        """The name in `Host` or `Origin` that is none of this machine's; None where there is none."""
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


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return bool((mapped or parsed).is_loopback)
