"""The scripts that the chart brings along: draining a worker, and `helm test`."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import pytest
from helm_chart import CHART, containers, load, pod_templates, render


@pytest.fixture(scope="module")
def drain() -> ModuleType:
    return load(CHART / "files" / "drain.py")


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    return load(CHART / "files" / "smoke.py")


def node(address: str, state: int) -> SimpleNamespace:
    return SimpleNamespace(node_manager_address=address, state=state)


def test_the_living_node_of_an_address_is_found(drain: ModuleType) -> None:
    nodes = {b"\1": node("10.0.0.1", 1), b"\2": node("10.0.0.1", 0), b"\3": node("10.0.0.2", 0)}
    assert drain.node_id(nodes, "10.0.0.1") == "02"
    assert drain.node_id(nodes, "10.0.0.9") is None


def test_replicas_are_counted_by_the_names_of_their_processes(drain: ModuleType, tmp_path: Path) -> None:
    names = {"1": b"ray::ServeReplica:main:replicas", "2": b"ray::ProxyActor", "3": b"python\0x", "self": b"ray::Serve"}
    for name, command in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cmdline").write_bytes(command)
    (tmp_path / "4").mkdir()  # a process that has ended in between
    assert drain.replicas(tmp_path) == 1


def test_connections_are_counted_in_the_kernels_table(drain: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert drain.connections(port=port) == 0  # who listens is not connected
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            assert drain.connections(port=port) == 1


@pytest.mark.parametrize(("ends_at", "waited", "result"), [(0.0, 0.0, True), (3.0, 3.0, True), (99.0, 10.0, False)])
def test_waiting_ends_when_all_is_idle_or_in_time(
    drain: ModuleType, ends_at: float, waited: float, result: bool
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    assert drain.wait(10.0, lambda: now[0], sleep, lambda: now[0] < ends_at) is result
    assert now[0] == waited


def test_without_ray_clients_still_have_their_time(drain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    waited = []
    monkeypatch.setattr(drain, "wait", lambda deadline, busy: waited.append(busy))
    drain.main(5.0)
    assert waited == [drain.connections]


def test_ray_has_what_the_script_uses() -> None:
    """Private names, used in a pod that is about to be stopped, where nobody would see them fail."""
    from ray._raylet import InnerGcsClient  # what GcsClient passes calls on to
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    assert callable(InnerGcsClient.drain_node)
    assert callable(InnerGcsClient.get_all_node_info)
    assert DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    assert GcsNodeInfo.GcsNodeState.ALIVE == 0


def test_the_operator_and_the_pod_say_what_the_script_reads() -> None:
    worker = dict(pod_templates(render()))["worker main"]
    source = (CHART / "files" / "drain.py").read_text()
    assert "POD_IP" in {each["name"] for each in containers(worker)[-1]["env"]}
    assert source.count("os.environ") == 2  # the other one, RAY_ADDRESS, is the operator's


ANSWERS = {
    "/v1/models": {"data": [{"id": "m"}]},
    "/v1/chat/completions": {
        "choices": [{"message": {"tool_calls": [{"function": {"name": "get_weather", "arguments": "{}"}}]}}]
    },
}


@pytest.fixture
def server() -> Iterator[str]:
    """Answers below `/good` for the key `k`, and with errors everywhere else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            found = self.path.startswith("/good/") and self.headers["authorization"] == "Bearer k"
            self.send_response(200 if found else 503)
            self.end_headers()
            if found:
                self.wfile.write(json.dumps(ANSWERS[self.path.removeprefix("/good")]).encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_the_chart_s_test_passes_when_every_model_calls_a_tool(
    smoke: ModuleType, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("k\n")
    smoke.main(tmp_path / "key", [f"{server}/good"])
    assert capsys.readouterr().out == f"m at {server}/good: get_weather({{}})\n"
    with pytest.raises(httpx.HTTPStatusError):
        smoke.main(tmp_path / "key", [f"{server}/good", f"{server}/bad"])
