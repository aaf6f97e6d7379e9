"""The resources that this process gets from the operating system: cores, open files, ports, environment variables.

Only this file reads the environment.
"""

import errno
import os
import random
import resource
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.replicas.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOADING = "loading"  # the name of the folder in which replicas write how far they are with their weights
FILES = 65536  # open files of a process, where it is allowed so many
# Below the range from which Linux gives ports to outgoing connections, above the ports that people choose by hand.
FIRST_PORT, LAST_PORT = 20000, 32000
ROUTER_PORTS = 40  # ports kept for routers


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits that the operating system sets for this process."""

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
    """The number of files that a server process may have open after `raise_files`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if unlimited in (soft, hard):
        return FILES if soft == unlimited else max(soft, FILES)
    return max(soft, min(hard, FILES))


def raise_files() -> None:
    """Let this process and its children have `files` open. Shells often set 1,024 and allow far more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (files(), hard))


def free_port(host: str, port: int) -> bool:
    """Whether a server could listen there. Raises OSError where `host` is no address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            return False
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def check_port(host: str, port: int, field: str = "server.port") -> None:
    """Raises ConfigError naming the field when `host` and `port` cannot be served on."""
    try:
        if free_port(host, port):
            return
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}", "server.host") from error
    raise ConfigError(f"port {port} on {host} is in use or not allowed; choose another one", field)


def internal_ports(rng: random.Random) -> InternalPorts:
    """A run of free ports, from a random place so that servers beside each other do not meet."""
    needed = 3 + ROUTER_PORTS
    for _ in range(100):
        start = rng.randrange(FIRST_PORT, LAST_PORT - needed)
        if all(free_port("0.0.0.0", port) for port in range(start, start + needed)):
            return InternalPorts(start, start + 1, start + 2, start + 3, start + needed - 1)
    raise ConfigError(f"no {needed} free ports in a row between {FIRST_PORT} and {LAST_PORT}", "server.port")


def api_key() -> str:
    """The key for commands on a running server; "" where none is set."""
    return os.environ.get("HOLDFAST_API_KEY", "")


def admin_key() -> str:
    """The key for `holdfast tenants`; "" where none is set."""
    return os.environ.get("HOLDFAST_ADMIN_KEY", "")


def hub_offline() -> str:
    """Whether the cluster looks for models on the hub: "1" (offline) unless the user says otherwise."""
    return os.environ.get("HF_HUB_OFFLINE", "1")


def loading_folder() -> Path | None:
    """The folder in which a replica writes its loading progress; None: nobody reads it."""
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
