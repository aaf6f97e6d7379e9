"""Where the gRPC servers of routers and engines listen, by which Serve has them talk to each other.

They ask for no key and run what they are sent, and Serve has their address in its source: every interface. Whoever
calls one does so at the address of its node; where that is loopback, on a cluster of one machine, nothing else has to
be listened on. There is one place where Serve binds them, in the process of each replica, and that is changed here. No
other file uses a private name of it; `tests/cluster/test_grpc_address.py` checks that it is still there.
"""

from functools import wraps
from ipaddress import ip_address
from typing import Any

import ray
from ray.serve._private import replica

EVERYWHERE = "[::]:"


def install() -> None:
    """Make Serve's replica, which this process must be about to start as, listen so. A second call does nothing."""
    if replica.add_port_to_grpc_server is not _bound:
        replica.add_port_to_grpc_server = _bound


_serves_own = replica.add_port_to_grpc_server


@wraps(_serves_own)
def _bound(server: Any, address: str) -> Any:
    node = ray.util.get_node_ip_address()
    if address.startswith(EVERYWHERE) and ip_address(node).is_loopback:
        address = f"{node}:{address.removeprefix(EVERYWHERE)}"
    return _serves_own(server, address)
