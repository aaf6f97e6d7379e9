"""That Serve still binds its gRPC servers where ours is put. What a whole cluster listens on: `test_serving`."""

import inspect
from typing import Any

import pytest
import ray
from ray.serve._private import replica

from holdfast.cluster import grpc_address


class Server:
    """Of gRPC what is used of it."""

    def add_insecure_port(self, address: str) -> str:
        return address


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "add_port_to_grpc_server", grpc_address._serves_own)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    grpc_address.install()
    grpc_address.install()


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
