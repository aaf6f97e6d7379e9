"""Runs in a worker before it is stopped: Ray is told that this node goes, and requests have time to end.

`drain.py SECONDS`. Serve starts replicas elsewhere, sends no new requests to those here and lets the running ones end;
Kubernetes sends no new connections to the proxy of this pod, whose streams may come from replicas elsewhere. Ends when
both are idle, and always in time, so that the pod is stopped in either case.
"""

import os
import sys
import time
from pathlib import Path

REPLICA = b"ray::ServeReplica:"
PROXY_PORT = 8000
ESTABLISHED = "01"  # in /proc/net/tcp


def node_id(nodes, address):
    """The id (hex) of the living node at `address`, or None; `nodes` as GcsClient.get_all_node_info gives them."""
    for each, info in nodes.items():
        if info.node_manager_address == address and info.state == 0:  # ALIVE
            return each.hex()
    return None


def replicas(processes=Path("/proc")):
    """How many replicas of Serve run in this pod."""
    found = 0
    for entry in processes.iterdir():
        if entry.name.isdigit():
            try:
                found += (entry / "cmdline").read_bytes().startswith(REPLICA)
            except OSError:
                pass  # it has just ended
    return found


def connections(net=Path("/proc/net"), port=PROXY_PORT):
    """How many clients are connected to the proxy of this pod."""
    found = 0
    for table in ("tcp", "tcp6"):
        if (net / table).exists():
            for line in (net / table).read_text().splitlines()[1:]:
                local, _, state = line.split()[1:4]
                found += state == ESTABLISHED and int(local.rpartition(":")[2], 16) == port
    return found


def busy():
    return replicas() + connections() > 0


def wait(deadline, clock=time.monotonic, sleep=time.sleep, busy=busy):
    """Whether everything was idle before `deadline`."""
    while clock() < deadline:
        if not busy():
            return True
        sleep(1.0)
    return False


def drain(seconds):
    """Whether Ray has accepted that this node goes."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    client = GcsClient(address=os.environ["RAY_ADDRESS"])
    found = node_id(client.get_all_node_info(), os.environ["POD_IP"])
    if found is None:
        return False
    until = int((time.time() + seconds) * 1000)
    accepted, _ = client.drain_node(found, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, "the pod is stopped", until)
    return accepted


def main(seconds):
    deadline = time.monotonic() + seconds
    try:
        accepted = drain(seconds)
    except Exception as error:  # whatever Ray's state is, the requests that run here have their time
        print(f"draining: {error!r}", file=sys.stderr)
        accepted = False
    # Replicas that Ray does not know to leave would never do so.
    wait(deadline, busy=busy if accepted else connections)


if __name__ == "__main__":
    main(float(sys.argv[1]))
