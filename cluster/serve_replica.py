"""What is changed in Serve's replica, in whose process a router or an engine runs. Two things:

The gRPC server by which replicas talk to each other asks for no key and runs what it is sent, and Serve has its address
in its source: every interface. Whoever calls it does so at the address of its node; where that is loopback, on a
cluster of one machine, nothing else is listened on.

A router that Serve stops by itself, for an upgrade or because its machine is drained, is not told of it, and what is
not over in time is cut off. Here it is told first, so that it can end what runs with an error that says so.

No other file uses these private names; `tests/cluster/test_serve_replica.py` checks that they are still there.
"""

from collections.abc import Callable
from functools import wraps
from ipaddress import ip_address
from typing import Any

import ray
from ray.serve._private import replica

EVERYWHERE = "[::]:"
TOLD: list[Callable[[], object]] = []  # called when Serve begins to stop this process's replica


def install(on_stop: Callable[[], object] | None = None) -> None:
    """Change Serve's replica, which this process must be about to start as. A second call does nothing more."""
    replica.add_port_to_grpc_server = _bound
    replica.Replica._perform_graceful_shutdown = _stopped
    if on_stop is not None:
        TOLD.append(on_stop)


_serves_address = replica.add_port_to_grpc_server
_serves_stop = replica.Replica._perform_graceful_shutdown


@wraps(_serves_address)
def _bound(server: Any, address: str) -> Any:
    node = ray.util.get_node_ip_address()
    if address.startswith(EVERYWHERE) and ip_address(node).is_loopback:
        address = f"{node}:{address.removeprefix(EVERYWHERE)}"
    return _serves_address(server, address)


@wraps(_serves_stop)
async def _stopped(self: Any) -> None:
    for tell in TOLD:
        tell()
    await _serves_stop(self)
