"""What a machine may run out of, or lose, under load: memory, disk, the time of day, Ray's head. About six minutes:

HOLDFAST_TEST_FAILURES=1 .venv/bin/pytest -s tests/cluster/test_losses.py
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos import CONTROLLER, REPLICA, SETTINGS, Clients, Failure, Journal, World, run, within
from redis_server import RedisServer

pytestmark = pytest.mark.skipif(not os.environ.get("HOLDFAST_TEST_FAILURES"), reason="set HOLDFAST_TEST_FAILURES=1")
CLOCK = Path(__file__).parents[1] / "support" / "clock"
Start = Callable[..., Any]


def survived(start: Start, folder: Path, *failures: Failure, store: RedisServer | None = None) -> None:
    """They happen one after the other; each time requests end as they may, and the books are even."""
    journal = Journal(folder / "journal.jsonl")
    run(start, folder, iter(failures), journal, store=store)
    assert not journal.faults


# ---- memory ----


def starve(world: World) -> None:
    """An engine gets no memory any more: what it asks the system for is refused."""
    pid = world.pids(REPLICA)[0]
    has = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (has, resource.RLIM_INFINITY))


def feed(world: World) -> None:
    for pid in world.pids(REPLICA):
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_an_engine_that_gets_no_memory(start: Start, tmp_path: Path) -> None:
    survived(start, tmp_path, Failure("an engine gets no memory", starve, frozenset({"500", "error"}), feed, 20.0))


# ---- disk ----


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 512 MiB for all that the server writes: logs, sockets, the proxy's configuration."""
    folder = Path(tempfile.mkdtemp(prefix="hf", dir="/tmp"))  # Trap: sockets' paths must be short
    command = ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()


def test_a_full_disk(start: Start, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs goes on; what dies meanwhile comes back at the latest when there is room again."""
    monkeypatch.setenv("TMPDIR", str(small_disk))
    monkeypatch.setattr(tempfile, "tempdir", None)
    ballast = small_disk / "ballast"

    def fill(world: World) -> None:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        assert shutil.disk_usage(small_disk).free < 65536

    def kill(world: World) -> None:
        fill(world)
        world.kill(REPLICA, 1)

    def room(world: World) -> None:
        ballast.unlink()

    failures = Failure("the disk full", fill, mend=room, seconds=15.0, counted=True)
    survived(start, tmp_path, failures, Failure("an engine killed, the disk full", kill, mend=room, seconds=20.0))


# ---- the time of day ----


class SetBack(RedisServer):
    """Redis by the clock of the test."""

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(self.folder / "clock.so"))
            super().start()


def test_the_clock_set_back_and_forward(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of Python, that is routers, engines and Serve, and for Redis."""
    compiler = shutil.which("cc") or pytest.skip("no compiler")
    library = ["-shared", "-fPIC", "-O2", "-o", tmp_path / "clock.so", CLOCK / "clock.c", "-ldl"]
    subprocess.run([compiler, *library], check=True)
    offset = tmp_path / "offset"
    offset.write_bytes((0).to_bytes(8, sys.byteorder, signed=True))
    monkeypatch.setenv("HOLDFAST_TEST_CLOCK", str(offset))
    monkeypatch.setenv("PYTHONPATH", str(CLOCK))

    def by(seconds: int) -> Callable[[World], None]:
        def happen(world: World) -> None:
            with offset.open("r+b") as file:
                file.write(seconds.to_bytes(8, sys.byteorder, signed=True))
            with world.store.client() as client:
                assert abs(client.time()[0] - time.time() - seconds) < 60

        return happen

    failures = (
        Failure("the clock set back by an hour", by(-3600), seconds=5.0, counted=True),
        Failure("the clock set forward by two hours", by(3600), seconds=5.0, counted=True),
        Failure("Serve's controller killed, the clock set back", by(-3600), mend=controller, seconds=2.0, counted=True),
    )
    survived(start, tmp_path, *failures, store=SetBack(tmp_path))


def controller(world: World) -> None:
    world.kill(CONTROLLER, 1)


# ---- Ray's head ----


def test_a_head_that_is_lost_takes_the_server_along_and_the_next_one_has_the_books(
    start: Start, tmp_path: Path
) -> None:
    """Ray keeps its state in memory here. Serving goes on until Ray gives up; then the server ends."""
    store = RedisServer(tmp_path)
    store.start()
    settings = SETTINGS.format(url=store.url)
    server = start(tmp_path, settings, "--replicas", "2", "--routers", "2")
    try:
        world, clients = World(server, store), Clients(server.url)
        with clients.at_work():
            within(lambda: len(clients.asked) > 60)
            at = time.monotonic()
            world.kill("gcs_server", 1)
            within(lambda: server.process.poll() is not None)
            print(f"the server ended after {time.monotonic() - at:.1f} s with status {server.process.poll()}")
            answered = [each for each in clients.since(at) if each.outcome == "answered"]
            print(f"{len(answered)} answered, the last after {answered[-1].ended - at:.1f} s")
        assert server.process.poll() != 0
        assert not server.processes()
        booked = [each for each in clients.asked if each.outcome == "answered"]
        server = start(tmp_path, settings, "--replicas", "2", "--routers", "2")
        usage = httpx.get(
            f"{server.url}/v1/admin/usage", headers={"authorization": "Bearer admin"}, timeout=30.0, trust_env=False
        ).json()
        print(usage)
        assert booked
        server.stop(signal.SIGINT)
    finally:
        server.process.kill()
        store.kill()
