"""What the cluster uses of Ray and Serve though they do not promise it. On what a cluster listens: `test_serving`."""

import asyncio
import inspect
import os
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve._private import replica

from holdfast.cluster import environment, serve_private


class Server:
    """Of gRPC what is used of it."""

    def add_insecure_port(self, address: str) -> str:
        return address


@pytest.fixture(autouse=True)
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Serve's replica, patched twice, and what happens when it stops."""
    seen: list[str] = []

    async def serves_own(self: Any) -> None:
        seen.append("waits")

    # `setattr` puts Serve's own back after the test.
    monkeypatch.setattr(replica, "add_port_to_grpc_server", inspect.unwrap(replica.add_port_to_grpc_server))
    monkeypatch.setattr(replica.Replica, "_perform_graceful_shutdown", serves_own)
    monkeypatch.setattr(serve_private, "_ON_STOP", [])
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    serve_private.patch_replica(lambda: seen.append("told"))
    serve_private.patch_replica()
    return seen


def bound(monkeypatch: pytest.MonkeyPatch, node: str, address: str) -> Any:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    return replica.add_port_to_grpc_server(Server(), address)


def test_on_a_cluster_of_one_machine_they_listen_on_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound(monkeypatch, "127.0.0.1", "[::]:0") == "127.0.0.1:0"
    assert bound(monkeypatch, "127.0.0.1", "10.0.0.1:5") == "10.0.0.1:5"


def test_where_other_machines_call_they_listen_as_serve_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound(monkeypatch, "10.0.0.1", "[::]:0") == "[::]:0"


def test_serve_binds_them_by_that_function_to_every_interface() -> None:
    started = inspect.getsource(replica.Replica._on_initialized)
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in started


def test_a_stop_is_told_once_before_serve_waits_for_requests(happened: list[str]) -> None:
    """By the one way in which Serve stops a replica, whoever asks for it."""

    async def scenario() -> None:
        made = replica.Replica.__new__(replica.Replica)
        made._event_loop, made._graceful_shutdown_task = asyncio.get_running_loop(), None
        await made.perform_graceful_shutdown()
        await made.perform_graceful_shutdown()

    asyncio.run(scenario())
    assert happened == ["told", "waits"]


def test_an_engine_that_stops_takes_calls_after_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router asks then what was done for requests that it cut off."""
    assert "self.get_num_ongoing_requests()" in inspect.getsource(replica.Replica._drain_ongoing_requests)
    now, requests = 100.0, [0, 1, 0, 0, 1, 0, 0]
    monkeypatch.setattr(serve_private, "time", SimpleNamespace(monotonic=lambda: now))
    ongoing = serve_private._with_late_calls(lambda: requests.pop(0))
    counts = []
    for seconds in (0.0, 0.2, 0.2, 1.7, 0.2, 1.9, 0.2):
        now += seconds
        counts.append(ongoing())
    assert counts == [0, 1, 1, 1, 1, 1, 0]


def test_the_token_in_the_users_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster has a token of its own, in a file. `test_serving` calls with it, and without."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    environment.apply({})
    assert "RAY_AUTH_TOKEN" not in os.environ
