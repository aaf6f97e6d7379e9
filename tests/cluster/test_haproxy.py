"""HAProxy as it is started for Ray Serve: what Serve writes for it, shaped by us, and a real one among rude clients."""

import http.client
import json
import os
import random
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import machines
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from waiting import until, until_read

from holdfast.cluster import environment, haproxy, serve_private
from holdfast.cluster.config import ServerConfig as Server
from holdfast.cluster.config import Settings
from holdfast.cluster.environment import InternalPorts
from holdfast.cluster.haproxy import Limits
from holdfast.cluster.serve import _limits
from holdfast.router.config import RouterConfig

PORTS = InternalPorts(1, 2, 3, 4, 5)
PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
PATIENT = 60.0  # seconds a slow machine may take
CHUNK = b"x" * 65536


def test_the_script_is_haproxy_without_splicing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = tmp_path / "an echo"
    echo.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    echo.chmod(0o755)
    monkeypatch.setenv(PATH, str(echo))
    script = haproxy.write(tmp_path / "haproxy")
    assert script is not None
    done = subprocess.run([script, "-f", "a file"], capture_output=True, text=True, check=True)
    assert done.stdout == "-dS|-f|a file|"


def test_the_one_that_comes_with_ray_knows_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATH, raising=False)
    script = haproxy.write(tmp_path / "haproxy")
    assert script is not None
    assert "HAProxy" in subprocess.run([script, "-v"], capture_output=True, text=True, check=True).stdout
    assert "-dS" in subprocess.run([script, "-h"], capture_output=True, text=True, check=False).stderr


def test_without_a_haproxy_there_is_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH, str(tmp_path / "nowhere"))
    assert haproxy.write(tmp_path / "haproxy") is None


def test_ray_is_told_of_the_script_where_there_is_one(tmp_path: Path) -> None:
    assert PATH not in serve_private.variables(PORTS, tmp_path)
    assert serve_private.variables(PORTS, tmp_path, proxy=tmp_path / "haproxy")[PATH] == str(tmp_path / "haproxy")


def test_a_configuration_that_looks_different_is_not_taken_for_a_shaped_one(tmp_path: Path) -> None:
    text = written(tmp_path, 1, [])
    shaped = haproxy.shape(haproxy.shape(text, Limits(), tmp_path), Limits(), tmp_path)
    assert shaped.count("track-sc0") == shaped.count("backend bodies") == 1
    assert "splice" not in shaped  # HAProxy keeps files for it, also where it is switched off
    for line in ("frontend http_frontend\n", "defaults\n", "listen stats\n"):
        with pytest.raises(ValueError, match="HAProxy's configuration has"):
            haproxy.shape(text.replace(line, "other\n"), Limits(internal_host="127.0.0.1"), tmp_path)


def test_a_router_that_vanishes_is_found_within_five_seconds(tmp_path: Path) -> None:
    limits = Limits()
    shaped = haproxy.shape(written(tmp_path, 1, [2]), limits, tmp_path)
    (server,) = [line for line in shaped.splitlines() if line.startswith("    server s0 ")]
    assert server.endswith(f" tcp-ut {limits.check_s * haproxy.CHECK_FAILS * 1000:g}ms")
    assert all(f"    srvtcpka-{line}\n" in shaped for line in ("idle 1s", "intvl 1s", "cnt 3"))
    (every,) = [line for line in shaped.splitlines() if "default-server" in line]
    assert every.split().count("inter") == every.split().count("fall") == 1
    assert every.endswith(f"inter {limits.check_s * 1000:g}ms fall {haproxy.CHECK_FAILS}")
    assert "fastinter 250ms" in every
    assert limits.check_s * 2 + (haproxy.CHECK_FAILS - 1) * (limits.check_s + 0.25) < 5
    assert f"timeout connect {haproxy.CONNECT_S * 1000:g}ms" in shaped
    assert "retry-on conn-failure empty-response\n" in shaped


def test_the_limits_are_the_configurations() -> None:
    router = RouterConfig(body_timeout_s=4.0, max_body_bytes=1000)
    settings = Settings(server=Server(idle_s=3.0), router=router)
    assert _limits(settings, files=1_000_000) == Limits(30.0, 3.0, 4.0, 1000, 16384, "127.0.0.1")
    assert _limits(settings, files=4096).connections == 1792


def test_a_server_takes_as_many_files_as_it_is_allowed() -> None:
    """A shell's soft limit is often 1,024; the hard one is what counts, as far as a server has use for it."""
    script = (
        "import resource\n"
        "from holdfast.cluster import environment\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))\n"
        "told = environment.machine().files\n"
        "environment.raise_files()\n"
        "print(told, *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    told, soft, hard = map(int, subprocess.check_output([sys.executable, "-c", script]).split())
    assert told == soft == (environment.FILES if hard == resource.RLIM_INFINITY else min(hard, environment.FILES))


# ---- a real one ----


class Behind(BaseHTTPRequestHandler):
    """Stands for the router."""

    protocol_version = "HTTP/1.1"
    flooded = threading.Event()  # a client's stream was cut

    def do_GET(self) -> None:
        if self.path != "/flood":
            self.answer(b"ok", 401 if self.path.endswith("/refused") else 200)
            return
        self.begin()
        try:
            while True:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
        except OSError:
            self.close_connection = True
            self.flooded.set()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b"served")

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


class Telling(Behind):
    """Notes who asks and under which name, and ends the first connection without an answer."""

    told: ClassVar[list[tuple[str | None, str]]] = []

    def do_POST(self) -> None:
        hops = ", ".join(self.headers.get_all("X-Forwarded-For", []))
        self.told.append((self.headers["X-Holdfast-Delivery"], hops))
        if len(self.told) == 1:
            self.close_connection = True
        else:
            super().do_POST()


class Streaming(Behind):
    """Begins an answer and ends it when it is told to."""

    end = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.begin()
        self.wfile.write(b"6\r\nbegun\n\r\n")
        self.end.wait(PATIENT)
        self.wfile.write(b"6\r\nended\n\r\n0\r\n\r\n")


# Stands for a router in a process of its own that ends when it has read a request, or whose machine is heard no more.
LOST = """
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Lost(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if sys.argv[2:]:
            subprocess.run(["ip", "address", "flush", "dev", sys.argv[2]], check=True)
            print("silent", flush=True)
        else:
            os._exit(1)
    def log_message(self, *_):
        pass

server = ThreadingHTTPServer((sys.argv[1], 0), Lost)
print(server.server_port, flush=True)
server.serve_forever()
"""


def written(folder: Path, port: int, behind: Sequence[int | str], stats: int = 8404, metrics: int = 9101) -> str:
    """What Serve writes for its HAProxy, with the routers of an application behind it or none."""
    file = folder / "haproxy.cfg"
    options = HAProxyConfig(
        socket_path=str(folder / "a.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        metrics_socket_path=str(folder / "m.sock"),
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        stats_port=stats,
        metrics_port=metrics,
        nbthread=1,
        is_head=True,
    )
    places = [each if isinstance(each, str) else f"127.0.0.1:{each}" for each in behind]
    servers = [
        ServerConfig(name=f"s{i}", host=place.partition(":")[0], port=int(place.partition(":")[2]))
        for i, place in enumerate(places)
    ]
    backends = {"app": BackendConfig(name="app", path_prefix="/", app_name="app", servers=servers)} if behind else {}
    api = HAProxyApi(options, backends, str(file))
    api._generate_config_file_internal()
    return file.read_text()


@contextmanager
def running(folder: Path, limits: Limits, behind: Sequence[int | str]) -> Iterator[InternalPorts]:
    """A real HAProxy, started by the script as Ray starts it."""
    taken = environment.internal_ports(random.Random())
    written(folder, taken.fallback, behind, taken.stats, taken.metrics)
    script = haproxy.write(folder / "haproxy", limits)
    assert script is not None
    process = subprocess.Popen([script, "-db", "-f", str(folder / "haproxy.cfg")])
    try:

        def listens() -> bool:
            assert process.poll() is None
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", taken.fallback)).close()
                return True
            return False

        until(listens)
        yield taken
    finally:
        process.kill()
        process.wait()


@pytest.fixture(name="behind")
def behind_fixture() -> Iterator[list[int]]:
    Behind.flooded.clear()
    with router(Behind) as server:
        yield [server.server_port]


@contextmanager
def router(handler: type[Behind]) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One with a short name: sockets stand in it."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def raw(port: int, data: bytes) -> tuple[int, bytes]:
    """Status and body of what is answered to these bytes, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENT) as client:
        client.sendall(data)
        found = b""
        while part := client.recv(65536):
            found += part
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_trickle_are_not_waited_for(folder: Path, behind: list[int], sent: bytes) -> None:
    with running(folder, Limits(header_s=0.3), behind) as taken:
        assert raw(taken.fallback, sent)[0] == 408


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
    ],
)
def test_a_request_whose_head_is_too_long_is_told_in_json(
    folder: Path, behind: list[int], sent: bytes, status: int
) -> None:
    with running(folder, Limits(), behind) as taken:
        found, body = raw(taken.fallback, sent)
    assert (found, json.loads(body)["error"]["type"]) == (status, "invalid_request_error")


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000])
def test_what_is_no_request_is_refused(folder: Path, behind: list[int], sent: bytes) -> None:
    with running(folder, Limits(), behind) as taken, socket.create_connection(("127.0.0.1", taken.fallback)) as client:
        client.sendall(sent)
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_a_reader_that_never_reads_is_cut_off(folder: Path, behind: list[int]) -> None:
    with ExitStack() as stack:
        taken = stack.enter_context(running(folder, Limits(stall_s=0.3), behind))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", taken.fallback)))
        client.sendall(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        assert Behind.flooded.wait(PATIENT)


def held(stack: ExitStack, port: int, count: int, address: str) -> int:
    """How many of so many connections from `address` stay open: those that are refused have ended by themselves."""
    idle = [
        stack.enter_context(socket.create_connection(("127.0.0.1", port), source_address=(address, 0)))
        for _ in range(count)
    ]
    httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)  # it comes after them
    return count - len(select.select(idle, [], [], 0)[0])


def asked(port: int, address: str, path: str, **headers: str) -> int:
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
        return client.get(f"http://127.0.0.1:{port}{path}", headers=headers).status_code


def test_one_address_has_only_so_many_connections_until_a_request_of_it_was_let_in(
    folder: Path, behind: list[int]
) -> None:
    with running(folder, Limits(client_connections=5, connections=40), behind) as taken, ExitStack() as idle:
        port = taken.fallback
        assert held(idle, port, 8, "127.0.0.3") == 5
        with pytest.raises(httpx.TransportError):
            asked(port, "127.0.0.3", "/v1/models", Authorization="Bearer k")  # whatever key it says it has
        assert asked(port, "127.0.0.4", "/v1/models") == 200
        assert held(idle, port, 8, "127.0.0.4") == 8
        assert asked(port, "127.0.0.5", "/health") == 200  # anybody is told that
        assert asked(port, "127.0.0.5", "/v1/refused") == 401
        assert held(idle, port, 8, "127.0.0.5") == 5


def test_no_address_but_this_machines_own_has_more_than_half_of_all_connections(
    folder: Path, behind: list[int]
) -> None:
    with running(folder, Limits(client_connections=1000, connections=20), behind) as taken, ExitStack() as idle:
        assert asked(taken.fallback, "127.0.0.3", "/v1/models") == 200
        assert held(idle, taken.fallback, 14, "127.0.0.3") == 10
    with running(folder, Limits(client_connections=2, connections=20), behind) as taken, ExitStack() as idle:
        assert held(idle, taken.fallback, 14, "127.0.0.1") == 14


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", "Content-Length: 1001", 413),
        ("DELETE", "Content-Length: 99999", 413),
        ("GET", "Transfer-Encoding: chunked", 413),
        ("GET", "Content-Length: 0", 200),
    ],
)
def test_bodies_that_are_too_long_or_not_expected_do_not_get_through(
    folder: Path, behind: list[int], method: str, headers: str, status: int
) -> None:
    with ExitStack() as stack:
        taken = stack.enter_context(running(folder, Limits(body_bytes=1000), behind))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", taken.fallback), timeout=PATIENT))
        client.sendall(f"{method} / HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode())
        assert int(client.recv(4096).split()[1]) == status


def test_without_an_application_it_says_when_to_come_again(folder: Path) -> None:
    with running(folder, Limits(), []) as taken:
        answer = httpx.post(f"http://127.0.0.1:{taken.fallback}/v1/chat/completions", json={}, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) > 0


def test_a_router_that_is_gone_is_told_in_json(folder: Path) -> None:
    with running(folder, Limits(), [environment.internal_ports(random.Random()).stats]) as taken:
        answer = httpx.get(f"http://127.0.0.1:{taken.fallback}/", trust_env=False, timeout=PATIENT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "retry-after" in answer.headers


LOOKS_OFTEN = Limits(check_s=0.2)


@dataclass(frozen=True)
class Lost:
    """A router that is lost with the first request that it reads: its process, or the whole machine."""

    process: subprocess.Popen[str]
    address: str

    @property
    def gone(self) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])  # the last word, or the end of the pipe


@pytest.fixture(params=["killed", "silent"])
def lost(request: pytest.FixtureRequest) -> Iterator[Lost]:
    with ExitStack() as stack:
        if request.param == "killed":
            host, inside, told = "127.0.0.1", [], []
        else:
            host, inside, told = stack.enter_context(another_machine())
        command = [*inside, sys.executable, "-c", LOST, host, *told]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert process.stdout is not None
        yield Lost(process, f"{host}:{int(process.stdout.readline())}")


@contextmanager
def another_machine() -> Iterator[tuple[str, list[str], list[str]]]:
    """Its address, what a command begins with that runs on it, and the name of its one link."""
    if not machines.usable():
        pytest.skip("needs root and network namespaces")
    tag = f"hf{os.getpid()}"
    subnet = f"10.198.{os.getpid() % 256}"
    link = ["ip", "link", "add", f"{tag}a", "type", "veth", "peer", "name", f"{tag}b", "netns", tag]
    try:
        for command in (
            ["ip", "netns", "add", tag],
            link,
            ["ip", "address", "add", f"{subnet}.1/24", "dev", f"{tag}a"],
            ["ip", "link", "set", f"{tag}a", "up"],
            ["ip", "-n", tag, "address", "add", f"{subnet}.2/24", "dev", f"{tag}b"],
            ["ip", "-n", tag, "link", "set", f"{tag}b", "up"],
        ):
            subprocess.run(command, check=True)
        yield f"{subnet}.2", ["ip", "netns", "exec", tag], [f"{tag}b"]
    finally:
        subprocess.run(["ip", "netns", "delete", tag], check=False)
        subprocess.run(["ip", "link", "delete", f"{tag}a"], check=False, capture_output=True)


def clients(taken: InternalPorts, kept: bool) -> Iterator[http.client.HTTPConnection]:
    """Connections for one request after the other: always the same, which had an answer before, or each its own."""
    while True:
        client = http.client.HTTPConnection("127.0.0.1", taken.fallback, timeout=PATIENT)
        if kept:
            client.request("GET", "/")
            assert client.getresponse().read() == b"ok"
        yield client
        while kept:
            yield client
        client.close()


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_lost_router_has_not_begun_to_answer_is_sent_to_another(
    folder: Path, lost: Lost, behind: list[int], kept: bool
) -> None:
    """Also where its body came after its headers, as clients send it that do not wait for one buffer."""
    body = b"x" * 20_000
    with running(folder, LOOKS_OFTEN, [lost.address, *behind]) as taken:
        for client in clients(taken, kept):
            client.putrequest("POST", "/")
            client.putheader("Content-Length", str(len(body)))
            client.endheaders()
            until_read(client.sock)  # the body comes in a read of its own
            client.send(body)
            assert client.getresponse().read() == b"served"
            if lost.gone:
                break


def test_a_request_that_is_sent_again_keeps_its_name_and_tells_who_asks(folder: Path) -> None:
    """Also where clients say both themselves: they choose no name, and hide from nobody."""
    Telling.told.clear()
    with ExitStack() as stack:
        routers = [stack.enter_context(router(Telling)).server_port for _ in range(2)]
        taken = stack.enter_context(running(folder, Limits(), routers))
        client = stack.enter_context(
            httpx.Client(
                transport=httpx.HTTPTransport(local_address="127.0.0.2"),
                base_url=f"http://127.0.0.1:{taken.fallback}",
                headers={"X-Holdfast-Delivery": "mine", "X-Forwarded-For": "192.0.2.1"},
                timeout=PATIENT,
            )
        )
        for _ in range(2):
            assert client.post("/", content=b"x").content == b"served"
    (first, hops), (again, _), (other, _) = Telling.told
    assert first == again
    assert len({"mine", None, first, other}) == 4
    assert hops == "192.0.2.1, 127.0.0.2"


@pytest.mark.parametrize(
    ("lost", "length", "kept"),
    [
        *(("killed", 20_000, False), ("killed", 20_000, True), ("silent", 20_000, True)),
        *(("killed", 3_000_000, False), ("killed", 3_000_000, True), ("silent", 3_000_000, False)),
    ],
    indirect=["lost"],
)
def test_what_no_router_can_have_is_answered_503(folder: Path, lost: Lost, kept: bool, length: int) -> None:
    """A long request, of which the proxy has let go; or any, where no other router is there."""
    with ExitStack() as stack:
        others = [] if length < haproxy.KEPT else [stack.enter_context(router(Behind)).server_port]
        taken = stack.enter_context(running(folder, LOOKS_OFTEN, [lost.address, *others]))
        for client in clients(taken, kept):
            client.request("POST", "/", b"x" * length)
            answer = client.getresponse()
            found = answer.read()
            if answer.status != 200:
                break
        assert (answer.status, json.loads(found)["error"]["code"]) == (503, "unavailable")
        assert int(answer.headers["Retry-After"]) > 0


def test_a_stream_of_a_router_that_takes_nothing_new_goes_on_to_its_end(folder: Path) -> None:
    """A router that stops closes its door before the proxy is told; what it writes must not be cut for that."""
    with router(Streaming) as server, running(folder, LOOKS_OFTEN, [server.server_port]) as taken:
        url = f"http://127.0.0.1:{taken.fallback}/"
        with httpx.stream("POST", url, content=b"x", trust_env=False, timeout=PATIENT) as response:
            lines = response.iter_lines()
            assert next(lines) == "begun"
            server.shutdown()
            server.socket.close()
            until(lambda: httpx.get(url, trust_env=False, timeout=PATIENT).status_code == 503)
            until(lambda: ",DOWN," in httpx.get(f"http://127.0.0.1:{taken.stats}/stats;csv", trust_env=False).text)
            Streaming.end.set()
            assert list(lines) == ["ended"]


def test_requests_of_every_length_are_served(folder: Path, behind: list[int]) -> None:
    with running(folder, Limits(), behind) as taken:
        client = http.client.HTTPConnection("127.0.0.1", taken.fallback, timeout=PATIENT)
        for length in (0, 1, haproxy.KEPT, haproxy.KEPT + 1, haproxy.BUFFER, 3_000_000):
            client.request("POST", "/", b"x" * length)
            assert client.getresponse().read() == b"served", length
        client.close()


def test_long_bodies_come_no_faster_than_one_key_or_one_address_may_send(folder: Path, behind: list[int]) -> None:
    """Half as much again as in a second: however fast this machine is, that takes a part of the next one."""
    length = haproxy.LONG + 1

    def seconds(header: str) -> float:
        client = http.client.HTTPConnection("127.0.0.1", taken.fallback, timeout=PATIENT)
        began = time.monotonic()
        for _ in range(2):
            client.request("POST", "/", b"x" * length, {header: f"by {header}"})
            assert client.getresponse().read() == b"served"
        client.close()
        return time.monotonic() - began

    with running(folder, Limits(body_rate=length * 4 // 3), behind) as taken, ThreadPoolExecutor(3) as pool:
        took = list(pool.map(seconds, ("Authorization", "X-Api-Key", "X-Other")))
    assert min(took) > 0.2


def test_a_body_that_trickles_is_not_waited_for(folder: Path, behind: list[int]) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx"
    with ExitStack() as stack:
        taken = stack.enter_context(running(folder, Limits(body_s=0.3), behind))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", taken.fallback), timeout=PATIENT))
        client.sendall(head)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (408, "request_timeout")


@pytest.mark.parametrize(("host", "reached"), [("127.0.0.1", False), ("", True)])
def test_statistics_and_metrics_listen_where_they_are_told_to(
    folder: Path, behind: list[int], own_address: str, host: str, reached: bool
) -> None:
    def answers(address: str, port: int, path: str) -> bool:
        try:
            return httpx.get(f"http://{address}:{port}{path}", trust_env=False, timeout=PATIENT).status_code == 200
        except httpx.ConnectError:
            return False

    with running(folder, Limits(internal_host=host), behind) as taken:
        for port, path in ((taken.stats, "/stats"), (taken.metrics, "/metrics")):
            assert answers("127.0.0.1", port, path)
            assert answers(own_address, port, path) is reached


def test_idle_connections_keep_nobody_out(folder: Path, behind: list[int]) -> None:
    """As many as one address may have, from another one: who comes after them is served, and they go by themselves."""
    with running(folder, Limits(header_s=0.5, connections=700), behind) as taken:
        url = f"http://127.0.0.1:{taken.fallback}/"
        with ExitStack() as idle:
            clients = [
                idle.enter_context(
                    socket.create_connection(("127.0.0.1", taken.fallback), source_address=("127.0.0.3", 0))
                )
                for _ in range(300)
            ]
            assert httpx.get(url, trust_env=False).status_code == 200
            for client in clients:
                client.settimeout(PATIENT)
                assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_says_nothing_is_no_line_for_serve_to_read(folder: Path, behind: list[int]) -> None:
    """Serve counts requests by the lines of a socket: thousands of idle ones would take it a good part of a second."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lines,
        running(folder, Limits(header_s=0.3), behind) as taken,
    ):
        lines.bind(str(folder / "m.sock"))
        lines.settimeout(PATIENT)
        for sent, status in ((b"", 408), (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200)):
            assert raw(taken.fallback, sent)[0] == status
        assert " status=200 " in lines.recv(8192).decode()
