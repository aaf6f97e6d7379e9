"""Ports of this machine: whether one is free, and a set for Serve's own servers. No HTTP."""

import errno
import random
import socket

from holdfast.cluster.environment import InternalPorts
from holdfast.replicas.errors import ConfigError

# Below the range from which Linux gives ports to outgoing connections, above what people choose by hand.
FIRST, LAST = 20000, 32000
REPLICAS = 40  # ports kept for ingress replicas


def free(host: str, port: int) -> bool:
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


def check(host: str, port: int, field: str = "server.port") -> None:
    """Raises ConfigError naming the field when `host` and `port` cannot be served on."""
    try:
        if free(host, port):
            return
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}", "server.host") from error
    raise ConfigError(f"port {port} on {host} is in use or not allowed; choose another one", field)


def internal(rng: random.Random) -> InternalPorts:
    """A run of free ports, from a random place so that servers beside each other do not meet."""
    needed = 3 + REPLICAS
    for _ in range(100):
        start = rng.randrange(FIRST, LAST - needed)
        if all(free("0.0.0.0", port) for port in range(start, start + needed)):
            return InternalPorts(start, start + 1, start + 2, start + 3, start + needed - 1)
    raise ConfigError(f"no {needed} free ports in a row between {FIRST} and {LAST}", "server.port")
