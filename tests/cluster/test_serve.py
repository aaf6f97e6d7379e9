"""A Ray that does not come up: one more try, with nothing left of the first, then a typed error."""

import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray

from holdfast.cluster import processes, serve
from holdfast.cluster.config import ServerConfig, Settings
from holdfast.replicas.errors import UnavailableError


class Starts:
    """Stands in for `ray.init`: so many starts fail, and each leaves a process behind."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.left: list[subprocess.Popen[bytes]] = []

    def __call__(self, **options: Any) -> None:
        assert options["_memory"] > 0
        assert all(each.poll() is not None for each in self.left), "what the first try left is gone"
        self.left.append(subprocess.Popen(["sleep", "600"]))
        if len(self.left) <= self.failures:
            raise Exception("The current node timed out during startup.\nMore of it")


@pytest.fixture
def other() -> Any:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: int, said: list[str]) -> Starts:
    starts = Starts(failures)
    monkeypatch.setattr(ray, "init", starts)
    before = processes.descendants()
    try:
        serve._init_ray(Settings(), tmp_path, said.append)
    finally:
        processes.kill_but(before)
        for each in starts.left:
            each.wait()
    return starts


def test_ray_is_tried_once_more_where_it_does_not_come_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Any
) -> None:
    said: list[str] = []
    assert len(start(monkeypatch, tmp_path, 0, said).left) == 1
    assert not said
    assert len(start(monkeypatch, tmp_path, 1, said).left) == 2
    assert said == ["Ray did not come up (The current node timed out during startup.); trying once more"]
    assert other.poll() is None, "what was there before is left alone"


def test_after_a_second_failure_it_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(UnavailableError, match=r"two attempts.*timed out during startup"):
        start(monkeypatch, tmp_path, 2, said)
    assert len(said) == 1


def test_a_server_looks_after_the_machines_memory_as_long_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looking: list[bool] = []

    def start(*_: Any) -> None:
        looking.append("memory" in {thread.name for thread in threading.enumerate()})
        raise UnavailableError("that is all")

    monkeypatch.setattr(serve, "_start", start)
    monkeypatch.setattr(serve, "_leave_nothing", lambda say: nullcontext())
    monkeypatch.setattr(serve.processes, "adopt_orphans", lambda: None)
    monkeypatch.setattr(serve.environment, "raise_files", lambda: None)
    with pytest.raises(UnavailableError):
        serve.run(Settings(server=ServerConfig(refuse=False)), print)
    assert looking == [True]
    assert "memory" not in {thread.name for thread in threading.enumerate()}
