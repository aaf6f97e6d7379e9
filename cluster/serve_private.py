"""Undocumented parts of Ray and Serve that the cluster uses. `tests/cluster/test_serve_private.py` checks each.

    variables        Serve takes these settings from the environment only. HAProxy with user code on the replica's own
                     loop costs 2.3-2.8 ms a request instead of 12.9-17.4 by Serve's defaults; the rest keeps strangers
                     off its ports, and busy machines from losing processes
    start            private arguments of `ray.init`: loopback, memory, folder and metrics port
    patch_replica    a router that Serve stops tells its clients before they are cut off; an engine outlives its last
                     request by two seconds, so that usage of cut-off requests is booked; on one machine the gRPC
                     server of a replica listens on loopback instead of every interface
    replicas_up, dead_process   the public `serve.status` waits for ever once Ray has died
    delete           the public `serve.delete` raises TimeoutError after a minute, and a drain may take longer

`haproxy` rewrites the configuration that Serve writes for HAProxy; it runs without Ray. What the router uses is in
`router/dispatch/serve_private.py`. Nothing imports Ray here before `variables` are set.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from holdfast.cluster import environment
from holdfast.cluster.environment import LOADING, InternalPorts

TOKEN = "ray-token"  # the name of the file
HARD_STOP_S = 120  # Serve's default
LONGEST_STOP_S = 2147483  # HAProxy refuses times of more than 2^31 - 1 ms
OBJECT_STORE = 128 * 2**20  # bytes; requests do not pass through it, and Ray would take a third of memory
LATE_CALLS_S = 2.0  # an engine that stops takes calls for so long after its last request ended
STATUS_S = 30.0  # for Serve's controller to answer
CONTROL_PROCESSES = ("gcs_server", "raylet")  # Ray's processes without which nothing is started again


def variables(
    ports: InternalPorts,
    folder: Path,
    metrics: bool = False,
    drain_s: float = 0.0,
    proxy: Path | None = None,
    alone: bool = False,
    colours: bool = True,
) -> Mapping[str, str]:
    """Variables for Ray and Serve, to be set before Ray is imported.

    `folder` is this cluster's alone. `metrics`: whether Ray collects its own. `drain_s`: how long a request may go on
    while the cluster stops. `proxy`: the program to start as HAProxy; None: the one that comes with Ray. `alone`: Ray
    listens on this machine only. `colours`: whether Ray may colour what it prints.
    """
    return {
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
        # Trap: Ray replaces loopback by another address of this machine and listens on all, unless there can be no
        # clusters; the variable is named after the systems where that is the default.
        **({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if alone else {}),
        # Trap: Ray writes colour codes into files and pipes, too.
        **({} if colours else {"RAY_COLOR_PREFIX": "0"}),
        # Trap: HAProxy is started anew when a router comes or goes; the old one cuts its streams after this.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(min(LONGEST_STOP_S, max(HARD_STOP_S, math.ceil(drain_s)))),
        # Trap: stopping a router takes 31 s unless it may stop draining earlier.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # Trap: a proxy that is not ready within 5 s, three times, is killed; on a busy machine it takes longer.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # Trap: a dead proxy is started again after three checks, which are ten seconds apart by default.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # Trap: Ray's and Serve's own ports run pickled code for anyone who can connect; with a token, only for us.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / TOKEN),
        # Trap: where memory runs out, Ray ends Serve's controller first. `MemoryGuard` ends an engine instead.
        "RAY_memory_monitor_refresh_ms": "0",
        # Trap: gRPC refuses messages of more than 4 MiB. Requests may have `router.max_body_bytes`, 32 MiB by default.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 2**20),
        # Trap: Serve keeps back a thousand log lines before it writes them. At WARNING there are few.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # Trap: workers, the proxy among them, run at niceness 15: anything else on the machine goes first.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": str(int(metrics)),
        "RAY_DEDUP_LOGS": "0",
        "HOLDFAST_LOADING": str(folder / LOADING),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": environment.hub_offline(),
    }


def start(memory: int, address: str, folder: Path, metrics_port: int) -> None:
    """Start Ray on this machine. `memory`: the bytes that actors may ask for; `metrics_port` 0: none."""
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=OBJECT_STORE,
        _memory=memory,
        _node_ip_address=address,
        _temp_dir=str(folder),
        _metrics_export_port=metrics_port or None,
    )


_ON_STOP: list[Callable[[], object]] = []  # called when Serve begins to stop this process's replica


def patch_replica(on_stop: Callable[[], object] | None = None) -> None:
    """Patch Serve's replica before this process starts as one. A second call only adds its `on_stop`."""
    from ray.serve._private import replica

    if on_stop is not None:
        _ON_STOP.append(on_stop)
    if hasattr(replica.add_port_to_grpc_server, "__wrapped__"):
        return
    add_port, stop = replica.add_port_to_grpc_server, replica.Replica._perform_graceful_shutdown

    @wraps(add_port)
    def add_port_on_loopback(server: Any, address: str) -> Any:
        import ray

        node = ray.util.get_node_ip_address()
        if address.startswith("[::]:") and ip_address(node).is_loopback:
            address = f"{node}:{address.removeprefix('[::]:')}"
        return add_port(server, address)

    @wraps(stop)
    async def tell_and_stop(self: Any) -> None:
        for tell in _ON_STOP:
            tell()
        if not _ON_STOP:  # an engine
            self.get_num_ongoing_requests = _with_late_calls(self.get_num_ongoing_requests)
        await stop(self)

    replica.add_port_to_grpc_server = add_port_on_loopback
    replica.Replica._perform_graceful_shutdown = tell_and_stop


def _with_late_calls(ongoing: Callable[[], int]) -> Callable[[], int]:
    """`ongoing`, which is at least 1 for `LATE_CALLS_S` after the last request ended.

    Trap: Serve closes a replica's port as soon as no request runs. Routers ask after that for the usage of requests
    that they cut off.
    """
    busy_at = -math.inf

    def with_late_calls() -> int:
        nonlocal busy_at
        count, now = ongoing(), time.monotonic()
        if count:
            busy_at = now
        return max(count, int(now - busy_at < LATE_CALLS_S))

    return with_late_calls


def replicas_up(application: str) -> Mapping[str, int]:
    """Running replicas by deployment; empty where Serve's controller does not answer."""
    import ray
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeInstanceDetails

    with suppress(Exception):  # a supervisor's: a dying cluster raises anything
        details = _get_global_client()._controller.get_serve_instance_details.remote()
        status = ServeInstanceDetails(**ray.get(details, timeout=STATUS_S))._get_status().applications[application]
        return {name: each.replica_states.get("RUNNING", 0) for name, each in status.deployments.items()}
    return {}


def dead_process() -> str:
    """The name of a dead process of Ray's that nothing starts again; "" while all live."""
    from ray._private import worker

    node = worker._global_node
    return next((name for name, _ in node.dead_processes() if name in CONTROL_PROCESSES), "") if node else ""


def delete(application: str) -> None:
    """Begin to delete an application, and do not wait for its end."""
    from ray import serve

    serve.delete(application, _blocking=False)
