"""What a machine may run out of, or lose, under load: memory, disk, the time of day, Ray's head. About six minutes:

HOLDFAST_TEST_FAILURES=1 .venv/bin/pytest -s tests/cluster/test_losses.py
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos import (
    ADMIN,
    CONTROLLER,
    OPERATOR,
    RECOVERED_ANSWERS,
    REPLICA,
    SETTINGS,
    TENANTS,
    Clients,
    Failure,
    Journal,
    World,
    end,
    run,
    within,
)
from chaos_books import Books
from redis_server import RedisServer

pytestmark = pytest.mark.skipif(not os.environ.get("HOLDFAST_TEST_FAILURES"), reason="set HOLDFAST_TEST_FAILURES=1")
CLOCK = Path(__file__).parents[1] / "support" / "clock"
Start = Callable[..., Any]


def survive_all(start: Start, folder: Path, *failures: Failure, store: RedisServer | None = None) -> None:
    """Run the failures one after the other; all outcomes are allowed and the books balance."""
    journal = Journal(folder / "journal.jsonl")
    run(start, folder, iter(failures), journal, store=store)
    assert not journal.faults


# ---- memory ----


def test_steps_that_find_no_memory(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every engine: requests end with an error, nothing is lost with them, and what was drawn is in the books."""
    file = tmp_path / "starved"
    monkeypatch.setenv("HOLDFAST_TEST_STARVED", str(file))
    may = frozenset({"500", "error"})
    failure = Failure(
        "no memory for steps", lambda _: file.touch(), may, lambda _: file.unlink(), seconds=5.0, counted=True
    )
    survive_all(partial(start, replica="starved:StarvedReplica"), tmp_path, failure)


# ---- disk ----


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 512 MiB for all that the server writes: logs, sockets, the proxy's configuration."""
    folder = Path("/tmp", f"d{os.getpid() % 10**5}")  # Trap: sockets' paths must be short
    folder.mkdir()
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

    failures = Failure("the disk full", fill, undo=room, seconds=15.0, counted=True)
    survive_all(start, tmp_path, failures, Failure("an engine killed, the disk full", kill, undo=room, seconds=20.0))


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
        Failure("Serve's controller killed, the clock set back", by(-3600), undo=controller, seconds=2.0, counted=True),
    )
    survive_all(start, tmp_path, *failures, store=SetBack(tmp_path))


def controller(world: World) -> None:
    world.kill(CONTROLLER, 1)


# ---- Ray's head ----


@pytest.mark.parametrize("head", ["gcs_server", "sockets/raylet"])
def test_without_its_head_what_is_there_serves_on_and_ends_with_the_next_loss(
    start: Start, tmp_path: Path, head: str
) -> None:
    """Ray keeps its state in memory here, and starts nothing again. The next server has the books."""
    store = RedisServer(tmp_path)
    store.start()
    settings = SETTINGS.format(url=store.url)
    server = start(tmp_path, settings, "--replicas", "2", "--routers", "2")
    try:
        world, clients = World(server, store), Clients(server.url, 0.5)
        with clients.at_work():
            within(lambda: len(clients.results) > RECOVERED_ANSWERS)
            at = time.monotonic()
            world.kill(head, 1)
            within(lambda: "goes on serving" in server.output.read_text() or server.process.poll() is not None)
            known = time.monotonic()
            if head == "gcs_server":
                within(lambda: len(clients.since(known)) > 3 * RECOVERED_ANSWERS)
                assert {each.outcome for each in clients.since(at)} <= {"answered", "limited"}
            world.kill(REPLICA, 1)  # the daemon may have taken an engine or a router along, and so the server
            assert server.process.wait(120.0) != 0
            print(f"known after {known - at:.1f} s; the server ended {time.monotonic() - at:.1f} s after {head} died")
        assert server.processes() == {}
        server = start(tmp_path, settings, "--replicas", "2", "--routers", "2")
        books = Books(World(server, store).get, ADMIN, OPERATOR, TENANTS)
        assert books.faults(clients.results, counted=False) == []
        server.stop(signal.SIGINT)
    finally:
        end(server)
        store.kill()
