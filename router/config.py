"""Settings of the router. Frozen; `cluster` composes them with the other folders'."""

import ipaddress
import math
import re
from dataclasses import dataclass, field

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
    """What a request costs, in units: a tenant's budgets are counted in them. By default a token is one."""

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
    refresh_s: float = 300.0  # between two looks at the public keys

    def __post_init__(self) -> None:
        if self.issuer and not self.audience:
            raise ConfigError("an issuer needs an audience: its tokens for others are no keys here", "audience")
        if any(name == "none" or name.startswith("HS") for name in self.algorithms) or not self.algorithms:
            raise ConfigError(f"algorithms must be those of public keys, not {list(self.algorithms)}", "algorithms")
        if self.refresh_s <= 0:
            raise ConfigError(f"refresh_s must be positive, not {self.refresh_s}", "refresh_s")

    @property
    def keys_url(self) -> str:
        return self.jwks_url or f"{self.issuer.rstrip('/')}/.well-known/jwks.json"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Every knob of the HTTP layer. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 32 * 2**20  # a larger request body is refused (413)
    max_in_flight: int = 4096  # requests of all tenants at once; one more is refused (429). Half are shared by weight
    body_memory: int = 128 * 2**20  # of all bodies being read or parsed at once; more is refused (429). Shared likewise
    body_timeout_s: float = 60.0  # a request body that has not come in this time is refused (408)
    max_body_values: int = 2**17  # a request body with more JSON values is refused (413): each takes time to parse
    stall_s: float = 30.0  # a stream whose client takes nothing for so long is ended
    hosts: tuple[str, ...] = ()  # without keys: names besides this machine's own by which requests may call it
    proxies: tuple[str, ...] = ()  # addresses or networks whose `X-Forwarded-For` is believed, besides this machine's
    cors_origins: tuple[str, ...] = ()  # web pages that may call, as `https://chat.example`; `*`: all that have a key
    model_defaults: bool = True  # the model's generation_config.json says how to sample where a request does not

    page: bool = True  # the page at `/`, and `/v1/live`, which it shows

    response_cache: bool = True  # exact repeats are answered without an engine
    cache_entries: int = 1024  # answers in this process
    cache_memory: int = 64 * 2**20  # bytes of the answers in this process
    cache_answer_bytes: int = 256 * 2**10  # a longer answer is not cached
    cache_ttl_s: float = 3600.0  # an answer is forgotten after this
    cache_share: float = 0.5  # of this process's answers that one tenant keeps once they are full and others want some
    cache_tenant_bytes: int = 2**26  # of the answers that one tenant may put into Redis in `cache_ttl_s`
    single_flight: bool = True  # of requests for the same answer one is computed, the others wait for it
    cache_lease_s: float = 3.0  # what a router computes for all is left to others so soon after it has died

    cache_key_file: str = ""  # keys to encrypt stored answers with, 32 bytes in base64 a line; empty: as they are

    response_ttl_s: float = 86400.0  # a stored response is forgotten so long after it was made or continued last
    response_tenant_bytes: int = 2**27  # of the responses that one tenant may store in `response_ttl_s`

    prefill_s: float = 60.0  # what is computed ahead for a client is kept so long, where it does not say
    prefill_most_s: float = 600.0  # and at most so long
    prefill_tenant_bytes: int = 2**25  # of the prompts that one tenant has computed ahead, put while one of them lives

    session_tenant_bytes: int = 2**25  # of the histories of one tenant's sessions that are kept; 0: none, none moves

    program_entries: int = 65536  # programs in this process
    program_tenant_entries: int = 65536  # programs of one tenant in Redis; those of the longest ago are forgotten first
    program_ttl_s: float = 86400.0  # a program is forgotten so long after its last turn
    program_rest_s: float = 3600.0  # after a longer rest a program has lost its place in the order: it begins anew
    program_headers: tuple[str, ...] = PROGRAM_HEADERS  # name the program where its body does not; the first counts
    parent_headers: tuple[str, ...] = PARENT_HEADERS  # name the program that a new one counts with, as its sub-agent
    deadline_headers: tuple[str, ...] = DEADLINE_HEADERS  # say how long a client waits, beside `timeout` in a body
    placement_headers: tuple[str, ...] = PLACEMENT_HEADERS  # name what a new program is placed with, no program

    store_timeout_s: float = 1.0  # of one Redis operation; after a longer one a router works from its own memory
    store_retry_s: float = 1.0  # between attempts to reach a Redis that was lost
    tool_latency_s: float = 0.5  # between two looks of a replica at the cluster's tool latencies
    admin_key_hashes: tuple[str, ...] = ()  # of keys for `/v1/admin` and `holdfast tenants`, as `holdfast key` prints
    oidc: Oidc = field(default_factory=Oidc)

    prices: Prices = field(default_factory=Prices)
    output_estimate: int = 512  # tokens that a request without `max_tokens` is taken to draw, until it has
    program_quota_s: float = 600.0  # a program counts against `max_programs` so long after a turn, unless it is over
    usage_records: int = 10000  # of one tenant in Redis, the latest; the older ones are in the sums alone
    usage_days: int = 400  # sums of days and months are kept so long
    audit_records: int = 10000  # in Redis: the latest acts of administration, and as many refusals

    metrics_tenants: int = 200  # tenants with series of their own; the others are counted together, as "other"
    store_entries: int = 65536  # kept in memory where there is no Redis
    store_memory: int = 256 * 2**20  # bytes of what is kept in memory where there is no Redis

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
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
        if self.body_memory < 2 * self.max_body_bytes:  # half of it is kept for tenants
            raise ConfigError(
                f"body_memory must be twice max_body_bytes or more, not {self.body_memory}", "body_memory"
            )

    @property
    def stored_by_tenant(self) -> dict[str, int]:
        """Bytes that one tenant may have in Redis, by the setting that allows them."""
        names = ("cache_tenant_bytes", "response_tenant_bytes", "prefill_tenant_bytes", "session_tenant_bytes")
        return {name: getattr(self, name) for name in names if name != "cache_tenant_bytes" or self.response_cache}

    def crowded(self, memory: int) -> str:
        """What is wrong with a Redis of so many bytes; "" where it has room for what one tenant may put there."""
        allowed = self.stored_by_tenant
        if sum(allowed.values()) <= memory:
            return ""
        named = ", ".join(f"router.{name} {size / 2**20:g}" for name, size in allowed.items())
        told = f"one tenant may put {sum(allowed.values()) / 2**20:g} MiB into Redis ({named})"
        return f"{told}, which has {memory / 2**20:g}: what other tenants have there is evicted"

    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """`proxies`, parsed. Raises ConfigError."""
        try:
            return tuple(map(ipaddress.ip_network, self.proxies))
        except ValueError as error:
            raise ConfigError(f"proxies must be addresses or networks, as 10.0.0.0/8: {error}", "proxies") from error
