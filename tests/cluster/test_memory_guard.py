"""Who goes where a machine runs out of memory."""

import subprocess
import threading
from collections.abc import Iterator

import pytest

from holdfast.cluster import processes
from holdfast.cluster.processes import ENGINES, LEAST, MemoryGuard

OURS = f"{ENGINES}:ours"  # engines of other tests' servers may be there
OTHERS = ["ray::ServeController", "ray::ServeReplica:holdfast:router", "ray::HAProxyManager"]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes with the titles of Ray's: two engines, the newer one last of the two, and what was started after."""
    monkeypatch.setattr(processes, "ENGINES", OURS)
    titles = [OURS, OURS, *OTHERS]
    started = [subprocess.Popen([title, "600"], executable="/bin/sleep") for title in titles]
    yield started
    for each in started:
        each.kill()
        each.wait()


def test_the_newest_engine_goes_and_nothing_else(ray: list[subprocess.Popen[bytes]]) -> None:
    said: list[str] = []
    guard = MemoryGuard(said.append, lambda: (1 << 30, int(LEAST * (1 << 30)) - 1))
    older, newer, *others = ray
    assert guard.look()
    newer.wait()
    assert [each.poll() for each in (older, *others)] == [None] * (1 + len(OTHERS))
    assert guard.look()
    older.wait()
    assert not guard.look(), "without engines there is nothing that may go"
    assert [each.poll() for each in others] == [None] * len(OTHERS)
    assert len(said) == 2


def test_with_memory_left_all_stay(ray: list[subprocess.Popen[bytes]]) -> None:
    assert not MemoryGuard(print, lambda: (1000, 50)).look()
    assert [each.poll() for each in ray] == [None] * len(ray)


def test_it_looks_until_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOOK_S", 0.0)
    looked = threading.Semaphore(0)

    def room() -> tuple[int, int]:
        looked.release()
        return 100, 100

    with MemoryGuard(print, room) as guard:
        for _ in range(3):
            looked.acquire()
    assert not guard._thread.is_alive()
