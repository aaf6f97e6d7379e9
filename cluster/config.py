"""Every setting of a cluster, composed from the folders' own: frozen data. Reading YAML is `config_file`'s."""

import math
from dataclasses import dataclass, field, replace

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.logs import LoggingConfig
from holdfast.router.config import RouterConfig
from holdfast.router.entry import IdentityTokens
from holdfast.router.placement import PlacementConfig
from holdfast.router.tenants import Tenant, TenantDirectory
from holdfast.router.tracing import TracingConfig

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost"})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The address that the cluster listens on, and its time limits in seconds."""

    host: str = "127.0.0.1"  # the address to listen on; any but this machine's own needs tenants
    port: int = 8000  # for clients
    routers: int = 1  # processes that take requests; they share what they know of programs through Redis
    ready_timeout_s: float = 300.0  # the start fails if the replicas are not up by then
    drain_s: float = 30.0  # running requests have this long to end when a router or replica is stopped
    ray_metrics_port: int = 0  # port with the metrics of Ray and Serve, for Prometheus; 0: none
    idle_s: float = 60.0  # a connection without a request is closed after this
    tenants_file: str = ""  # YAML with `tenants` and nothing else, read again when it changes; instead of the section
    refuse: bool = True  # do not start what `holdfast doctor` says would fail; false: start it all the same

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port must be from 1 to 65535, not {self.port}", "port")
        if not 0 <= self.ray_metrics_port <= 65535:
            raise ConfigError(f"ray_metrics_port must be from 0 to 65535: {self.ray_metrics_port}", "ray_metrics_port")
        if self.ray_metrics_port == self.port:
            raise ConfigError(f"ray_metrics_port must not be that of the server: {self.port}", "ray_metrics_port")
        if self.routers < 1:
            raise ConfigError(f"routers must be at least 1, not {self.routers}", "routers")
        if not self.host or ":" in self.host:
            raise ConfigError(f"host must be a name or an IPv4 address, not {self.host!r}", "host")
        if not 0 < self.idle_s < math.inf:
            raise ConfigError(f"idle_s must be positive, not {self.idle_s}", "idle_s")

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in LOOPBACK_HOSTS


@dataclass(frozen=True, slots=True)
class ReplicasConfig:
    """The number of engines, and the limit of requests in each (running and in its own queue)."""

    count: int = 1  # engines; a CPU's cores are shared out among them, a GPU takes one
    max_ongoing_requests: int = 1024  # of one engine, running and in its queue; beyond it requests wait in the router

    def __post_init__(self) -> None:
        for name in ("count", "max_ongoing_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", name)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """The Redis of the cluster. `url` empty: an embedded server, which only this machine reaches."""

    url: str = ""  # redis://USER:PASSWORD@HOST:PORT/DB, rediss:// with TLS, or unix://PATH; several machines need one
    ca_file: str = ""  # certificates that the server's must be signed with; empty: those that the system trusts
    timeout_s: float = 2.0  # of the check before a start
    memory_mb: int = 512  # MiB of the embedded server at most; then what was used least recently is forgotten
    folder: str = ""  # where the embedded server keeps what it has, over a stop; empty: in memory alone
    namespace: str = "holdfast"  # begins every key; deployments that share a server and a model need two

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, not {self.timeout_s}", "timeout_s")
        if not self.namespace:
            raise ConfigError("namespace must not be empty", "namespace")
        if self.ca_file and not self.url.startswith("rediss://"):
            raise ConfigError("ca_file is for a server with TLS, whose url begins with rediss://", "ca_file")
        if self.folder and self.url:
            raise ConfigError("folder is for the embedded server, and there is a url", "folder")
        if self.memory_mb < 1:
            raise ConfigError(f"memory_mb must be at least 1, not {self.memory_mb}", "memory_mb")


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration; a section is a key of the YAML file."""

    server: ServerConfig = field(default_factory=ServerConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    tenants: tuple[Tenant, ...] = ()
    redis: RedisConfig = field(default_factory=RedisConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)


def check_tenants(settings: Settings) -> None:
    """Raises ConfigError for tenants that clash, and for a server open to others without any key."""
    read_token = IdentityTokens(settings.router.oidc).read if settings.router.oidc.issuer else None
    if settings.tenants and settings.server.tenants_file:
        message = f"tenants must be in {settings.server.tenants_file} only"
        raise ConfigError(message, "server.tenants_file")
    elsewhere = settings.router.admin_key_hashes or settings.server.tenants_file
    has_keys = TenantDirectory(settings.tenants, read_token=read_token).has_keys or elsewhere
    if not has_keys and not settings.server.local:
        message = f"listening on {settings.server.host} needs 'tenants' with API keys (see `holdfast key`)"
        raise ConfigError(message, "server.host")


def choose_order(settings: Settings, *, live: bool) -> Settings:
    """`settings` with the order of requests, if `engine.order` leaves that open. Tenants share if there is more than
    one, or if a file (`live`) or an administrator may add some later. Engines keep their order.
    """
    if settings.engine.order != "auto":
        return settings
    shared = live or len(settings.tenants) > 1 or bool(settings.router.admin_key_hashes)
    return replace(settings, engine=replace(settings.engine, order="fair" if shared else "program"))


def share_threads(settings: Settings, cores: int) -> Settings:
    """`settings` with the cores dealt out to the replicas, where `engine.threads` leaves that open."""
    if settings.engine.threads:
        return settings
    threads = max(1, cores // settings.replicas.count)
    return replace(settings, engine=replace(settings.engine, threads=threads))
