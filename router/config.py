"""Settings of the router. Frozen; `cluster` composes them with the other folders'."""

import ipaddress
import math
import re
from dataclasses import dataclass, field, fields
from typing import ClassVar

from holdfast.replicas.errors import ConfigError

KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")
HEADER = re.compile(r"[a-zA-Z0-9_-]+")
WARM_UP_HEADER = "x-holdfast-warm-up"  # of the request that `holdfast serve` sends itself; it counts as nobody's
PROGRAM_HEADERS = (
    "x-program-id",
    "x-session-id",
    "x-session-affinity",
    "x-claude-code-session-id",  # Claude Code
    "x-opencode-session",  # OpenCode; to other providers than its own it sends the two further up
    "session-id",  # Codex CLI
    "session_id",  # and its older releases
    "conversation_id",
)
DEADLINE_HEADERS = (
    "x-stainless-timeout",  # OpenAI's and Anthropic's clients: seconds
    "request-timeout",  # seconds
    "x-request-timeout",
    "grpc-timeout",  # a number and a unit
    "x-envoy-expected-rq-timeout-ms",  # milliseconds, as all that end so
)
PARENT_HEADERS = ("x-parent-session-id", "x-codex-parent-thread-id")
PLACEMENT_HEADERS = (*PARENT_HEADERS, "x-correlation-id")


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of a request in units, in which a tenant's budgets are counted. By default a token is one unit."""

    input: float = 1.0  # of a prompt's token that was computed
    cached_input: float = 1.0  # of one that was found in the cache
    output: float = 1.0  # of a drawn token
    request: float = 0.0  # of the request itself
    repeat: float = 0.0  # part of all this that an answer from the response cache costs, and counts against limits

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}", name)


@dataclass(frozen=True, slots=True)
class Oidc:
    """Tokens of an identity provider, taken where API keys are: signed JWTs. `issuer` empty: none are."""

    issuer: str = ""  # the value that `iss` must have
    audience: str = ""  # that `aud` must have, or be among
    jwks_url: str = ""  # where the issuer's public keys are; empty: `<issuer>/.well-known/jwks.json`
    tenant_claim: str = "tenant"  # the claim that names the tenant, which must be among `tenants`
    scope_claim: str = "scope"  # what it may do, as `infer`, `usage`, `operate`; absent: `infer` and `usage`
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")  # signatures that are taken

    def __post_init__(self) -> None:
        if self.issuer and not self.audience:
            raise ConfigError("an issuer needs an audience: tokens for other audiences are not accepted", "audience")
        if any(name == "none" or name.startswith("HS") for name in self.algorithms) or not self.algorithms:
            raise ConfigError(f"algorithms must be those of public keys, not {list(self.algorithms)}", "algorithms")

    @property
    def keys_url(self) -> str:
        return self.jwks_url or f"{self.issuer.rstrip('/')}/.well-known/jwks.json"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The options of the HTTP layer, and the fixed values beside them. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 32 * 2**20  # a larger request body is refused (413). All at once may be 4 times as much
    max_in_flight: int = 4096  # requests of all tenants at once; one more is refused (429). Half are shared by weight
    body_timeout_s: float = 60.0  # a request body that has not come in this time is refused (408)
    hosts: tuple[str, ...] = ()  # without keys: names besides this machine's own by which requests may call it
    proxies: tuple[str, ...] = ()  # addresses or networks whose `X-Forwarded-For` is believed, besides this machine's
    cors_origins: tuple[str, ...] = ()  # web pages that may call, as `https://chat.example`; `*`: all that have a key
    model_defaults: bool = True  # the model's generation_config.json says how to sample where a request does not

    page: bool = True  # the page at `/`, and `/v1/live`, which it shows

    response_cache: bool = True  # exact repeats are answered without an engine
    cache_ttl_s: float = 3600.0  # an answer is forgotten after this
    cache_tenant_bytes: int = 2**26  # of the answers of one tenant that Redis has
    cache_key_file: str = ""  # keys to encrypt stored answers with, 32 bytes in base64 a line; empty: not encrypted

    response_ttl_s: float = 86400.0  # a stored response is forgotten so long after it was made or continued last
    response_tenant_bytes: int = 2**27  # of the responses that one tenant may store in `response_ttl_s`
    prefill_tenant_bytes: int = 2**25  # of the prompts that one tenant has computed ahead, put while one of them lives
    session_tenant_bytes: int = 2**25  # of the histories of one tenant's sessions that are kept; 0: none, none moves

    program_ttl_s: float = 86400.0  # a program is forgotten so long after its last turn
    program_headers: tuple[str, ...] = PROGRAM_HEADERS  # name the program where its body does not; the first counts
    parent_headers: tuple[str, ...] = PARENT_HEADERS  # name the program that a new one counts with, as its sub-agent
    deadline_headers: tuple[str, ...] = DEADLINE_HEADERS  # say how long a client waits, beside `timeout` in a body

    store_timeout_s: float = 1.0  # of one Redis operation; a longer one counts as failed
    admin_key_hashes: tuple[str, ...] = ()  # of keys for `/v1/admin` and `holdfast tenants`, as `holdfast key` prints
    oidc: Oidc = field(default_factory=Oidc)

    prices: Prices = field(default_factory=Prices)
    usage_records: int = 10000  # of one tenant in Redis, the latest; the older ones are in the sums alone
    usage_days: int = 400  # sums of days and months are kept so long
    metrics_tenants: int = 200  # tenants with series of their own; the others are counted together, as "other"

    # ---- fixed: no operator can choose these better ----

    max_body_values: ClassVar[int] = 2**17  # a body with more JSON values is refused (413): each takes time to parse
    stall_s: ClassVar[float] = 30.0  # a stream whose client takes nothing for so long is ended
    cache_answer_bytes: ClassVar[int] = 256 * 2**10  # a longer answer is not cached
    prefill_s: ClassVar[float] = 60.0  # for which a prefill is kept where its client does not say
    prefill_most_s: ClassVar[float] = 600.0  # and at most
    program_entries: ClassVar[int] = 65536  # programs in this process
    program_tenant_entries: ClassVar[int] = 65536  # programs of one tenant in Redis
    program_rest_s: ClassVar[float] = 3600.0  # after a longer pause a program begins anew in the order of programs
    placement_headers: ClassVar[tuple[str, ...]] = PLACEMENT_HEADERS  # name the program near which a new one is placed
    store_retry_s: ClassVar[float] = 1.0  # between attempts to reach a Redis that was lost
    tool_latency_s: ClassVar[float] = 0.5  # between two looks of a replica at the cluster's tool latencies
    audit_records: ClassVar[int] = 10000  # acts of administration in Redis, and as many refusals

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if name == "session_tenant_bytes" and value == 0:
                continue
            if name == "admin_key_hashes":
                if not all(KEY_HASH.fullmatch(each) for each in value):
                    raise ConfigError(f"{name} must be 'sha256:' and 64 hex digits each; see `holdfast key`", name)
            elif name == "proxies":
                self.networks()
            elif name.endswith("_headers"):
                if not all(HEADER.fullmatch(each) for each in value):
                    raise ConfigError(f"{name} must be names of headers, not {list(value)}", name)
            elif isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"{name} must be positive, not {value}", name)

    @property
    def body_memory(self) -> int:
        """Bytes of all bodies that are read or parsed at once; more is refused (429). Half is shared by weight."""
        return 4 * self.max_body_bytes

    @property
    def stored_by_tenant(self) -> dict[str, int]:
        """Bytes that one tenant may have in Redis, by the option that allows them."""
        names = ("cache_tenant_bytes", "response_tenant_bytes", "prefill_tenant_bytes", "session_tenant_bytes")
        return {name: getattr(self, name) for name in names if name != "cache_tenant_bytes" or self.response_cache}

    def crowded(self, memory: int) -> str:
        """A warning where a Redis of `memory` bytes has no room for what one tenant may put there; else ""."""
        allowed = self.stored_by_tenant
        if sum(allowed.values()) <= memory:
            return ""
        named = ", ".join(f"router.{name} {size / 2**20:g}" for name, size in allowed.items())
        allowance = f"one tenant may put {sum(allowed.values()) / 2**20:g} MiB into Redis ({named})"
        return f"{allowance}, which has {memory / 2**20:g}: what other tenants have there is evicted"

    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """`proxies`, parsed. Raises ConfigError."""
        try:
            return tuple(map(ipaddress.ip_network, self.proxies))
        except ValueError as error:
            raise ConfigError(f"proxies must be addresses or networks, as 10.0.0.0/8: {error}", "proxies") from error
