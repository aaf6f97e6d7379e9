"""Real servers for the tests of this folder: `holdfast serve` in a process of its own, found again by a mark."""

import os
import random
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import replicas_in_serve
from otlp_collector import Collector, collecting
from redis_server import RedisServer
from waiting import PATIENCE_S, until

from holdfast.cluster import environment

MODEL = os.environ.get("HOLDFAST_TEST_MODEL", "pocket")
MARK = "HOLDFAST_TEST_MARK"
START_S = 240.0
STOP_S = 60.0


@dataclass(frozen=True)
class Server:
    """A running `holdfast serve`. Whatever it starts inherits `mark` in its environment."""

    url: str
    port: int
    mark: str
    process: subprocess.Popen[bytes]
    output: Path

    def processes(self) -> dict[int, str]:
        """Command lines of every live process that carries the mark, or whose parent does, by process id.

        Trap: what writes its name over its environment, as Ray's agents and Redis do, carries it no more.
        """
        commands, parents, marked = {}, {}, set()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                pid = int(entry.name)
                commands[pid] = (entry / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
                parents[pid] = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                if f"{MARK}={self.mark}\0".encode() in (entry / "environ").read_bytes():
                    marked.add(pid)
        return {pid: commands[pid] for pid, parent in parents.items() if marked & {pid, parent}}

    def pids(self, words: str) -> list[int]:
        """Processes with these words in their command lines."""
        return sorted(pid for pid, command in self.processes().items() if words in command)

    def stop(self, number: signal.Signals) -> None:
        """Ask it to stop, and hold it to leaving with status 0 and no process."""
        self.process.send_signal(number)
        assert self.process.wait(STOP_S) == 0, self.output.read_text()
        assert self.processes() == {}


def start(folder: Path, settings: str, *arguments: str, replica: str = "") -> Server:
    """Start a server with the YAML text `settings` and wait until it says that it serves.

    `replica`: the class of its replicas, as `replicas_in_serve` takes it.
    """
    port = environment.internal_ports(random.Random()).fallback
    (folder / "holdfast.yaml").write_text(settings)
    output = folder / "output.txt"
    mark = uuid.uuid4().hex
    program = [replicas_in_serve.__file__, replica] if replica else ["-m", "holdfast.cluster.cli"]
    command = [sys.executable, *program, "serve", "--config", str(folder / "holdfast.yaml")]
    command += ["--port", str(port), "--model", MODEL, *arguments]
    with output.open("wb") as written:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=written, stderr=written, env={**os.environ, MARK: mark}
        )
    server = Server(f"http://127.0.0.1:{port}", port, mark, process, output)
    try:
        eventually(lambda: process.poll() is not None or "Holdfast serves" in output.read_text(), START_S)
        assert process.poll() is None, output.read_text()
    except BaseException:
        process.terminate()  # who started it has nothing to stop
        raise
    return server


def eventually(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait for another process to come to a state; fails where it does not."""
    until(condition, within_s, every_s=0.05)


@dataclass(frozen=True)
class Cluster:
    """A server with what it writes to: Redis, a collector of spans, and a file of log lines."""

    server: Server
    redis: RedisServer
    collector: Collector
    log: Path


# A Redis operation may wait for a core: a router that took this for a loss would work from its own memory.
SETTINGS = """
engine: {{threads: 1, kv_memory: 0.1}}
redis: {{url: '{redis}'}}
router: {{store_timeout_s: 5}}
server: {{drain_s: 4}}
logging: {{format: json, level: info, file: {log}}}
tracing: {{endpoint: '{collector}'}}
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two routers and two replicas on loopback without API keys, for all files that `tests/conftest.py` names.

    The last of these files, `test_stopping`, stops the server.
    """
    folder = tmp_path_factory.mktemp("cluster")
    log = folder / "lines.json"
    with RedisServer(folder) as redis, collecting() as collector, ExitStack() as ended:
        settings = SETTINGS.format(redis=redis.url, log=log, collector=collector.url)
        server = start(folder, settings, "--replicas", "2", "--routers", "2")
        ended.callback(server.process.kill)
        yield Cluster(server, redis, collector, log)
        if server.process.poll() is None:
            server.stop(signal.SIGINT)


@pytest.fixture(scope="session")
def server(cluster: Cluster) -> Server:
    return cluster.server


@pytest.fixture(name="eventually", scope="session")
def eventually_fixture() -> Callable[..., None]:
    return eventually


@pytest.fixture(name="start", scope="session")
def start_fixture() -> Callable[..., Server]:
    return start


@pytest.fixture(scope="session")
def own_address() -> str:
    """An address of this machine that is not loopback. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])
