"""The process environment: the one file that reads it, and what Ray is told through it.

Ray Serve takes many settings only from environment variables, read when it is first imported; its workers inherit
them. So `for_ray` is computed first, put into `os.environ`, and only then is `ray` imported.
"""

import math
import os
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
TOKEN = "ray-token"  # the name of the file
LOADING = "loading"  # the name of the folder in which replicas write how far they are with their weights
HARD_STOP_S = 120  # Serve's own
LONGEST_STOP_S = 2147483  # HAProxy refuses times of more than 2^31 - 1 ms
FILES = 65536  # that a process of a server may have open, where it is allowed so many


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use, as the operating system says."""

    cores: int
    temporary: Path
    files: int  # that a process may have open


@dataclass(frozen=True, slots=True)
class InternalPorts:
    """Ports of Serve's own servers; none of them is for clients. `replica_first` to `replica_last` are a range."""

    fallback: int
    stats: int
    metrics: int
    replica_first: int
    replica_last: int


def machine() -> Machine:
    return Machine(len(os.sched_getaffinity(0)), Path(tempfile.gettempdir()), files())


def files() -> int:
    """How many files a process of a server may have open, once `raise_files` has been called."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if unlimited in (soft, hard):
        return FILES if soft == unlimited else max(soft, FILES)
    return max(soft, min(hard, FILES))


def raise_files() -> None:
    """Let this process, and those that it starts, have `files` open: shells often say 1,024 and allow far more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (files(), hard))


def for_ray(
    ports: InternalPorts,
    folder: Path,
    metrics: bool = False,
    drain_s: float = 0.0,
    proxy: Path | None = None,
    alone: bool = False,
    colours: bool = True,
) -> Mapping[str, str]:
    """Variables for Ray and Serve. `folder` is this cluster's alone; `TOKEN` in it keeps strangers off Ray's ports.

    `metrics`: whether Ray collects its own. `drain_s`: how long a request may go on while the cluster stops. `proxy`:
    what to start as HAProxy; None: what comes with Ray. `alone`: nothing of Ray is to listen beyond this machine.
    `colours`: whether Ray may colour what it prints on our console.
    """
    return {
        # HAProxy in front and user code on the replica's own loop: a request costs 3 ms less than by the defaults.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Trap: HAProxy's metrics and statistics have fixed ports by default.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.metrics),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.replica_first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.replica_last),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "log.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        **({"RAY_SERVE_HAPROXY_BINARY_PATH": str(proxy)} if proxy else {}),
        # Trap: Ray takes a loopback address for another one of this machine, and listens on all, unless told that there
        # are no clusters; the name is that of the systems where it does so by default.
        **({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if alone else {}),
        # Trap: Ray writes colour codes into files and pipes, too.
        **({} if colours else {"RAY_COLOR_PREFIX": "0"}),
        # Trap: HAProxy is started anew when an ingress comes or goes; so long after that the old one cuts its streams.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(min(LONGEST_STOP_S, max(HARD_STOP_S, math.ceil(drain_s)))),
        # Trap: stopping an ingress takes 31 s unless it may stop draining earlier.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # Trap: a proxy that is not ready within 5 s, three times, is killed; on a busy machine it takes longer.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # Trap: one that has died is started again after three looks, which are ten seconds apart by default.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # Trap: Ray's and Serve's own ports run pickled code for anyone who can connect; with a token, only for us.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / TOKEN),
        # Trap: where memory runs out Ray ends Serve's controller first; who is to go is `memory_guard`'s to say.
        "RAY_memory_monitor_refresh_ms": "0",
        # Trap: gRPC refuses messages of more than 4 MiB. Requests may have `router.max_body_bytes`, 32 MiB by default;
        # an answer of some thousand tokens with 20 logprobs each is as long.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 2**20),
        # Trap: Serve keeps back a thousand log lines before it writes them. At WARNING there are few.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # Trap: workers run at niceness 15, the proxy with them, so that anything else on the machine goes first.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": str(int(metrics)),
        "RAY_DEDUP_LOGS": "0",
        "HOLDFAST_LOADING": str(folder / LOADING),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }


def api_key() -> str:
    """The key that commands show to a running server, "" where none is set."""
    return os.environ.get("HOLDFAST_API_KEY", "")


def admin_key() -> str:
    """The key that `holdfast tenants` shows to a running server, "" where none is set."""
    return os.environ.get("HOLDFAST_ADMIN_KEY", "")


def loading_folder() -> Path | None:
    """Where a replica writes how far it is with its weights; None: nobody looks there."""
    folder = os.environ.get("HOLDFAST_LOADING")
    return Path(folder) if folder else None


def settings_variables() -> Mapping[str, str]:
    """Variables that set a key of the configuration: `HOLDFAST_SERVER__PORT` sets `server.port`."""
    return {name: value for name, value in os.environ.items() if name.startswith("HOLDFAST_") and "__" in name}


def apply(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    # A cluster of the user's must not be joined by mistake.
    os.environ.pop("RAY_ADDRESS", None)
    # Trap: it counts more than the file does, and the user's file at home is written where there is neither.
    os.environ.pop("RAY_AUTH_TOKEN", None)
