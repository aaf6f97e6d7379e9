"""The Redis of the chart: its command and configuration under a real server, with paths and port of this machine."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from helm_chart import containers, find, pod_templates, render
from redis.backoff import NoBackoff
from redis.retry import Retry
from waiting import until

from holdfast.cluster.redis import server_binary

PASSWORD = "p:a$s"


@pytest.fixture(params=["true", "false"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Where the server listens; the parameter is whether data is kept."""
    objects = render("", (f"redis.persistence.enabled={request.param}", "redis.maxMemory=64mb"))
    folders = {"/run/redis": tmp_path / "run", "/data": tmp_path / "data", "/etc/redis": tmp_path / "etc"}
    for folder in folders.values():
        folder.mkdir()

    def here(text: str) -> str:
        for path, folder in folders.items():
            text = text.replace(path, str(folder))
        return text

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = find(objects, "ConfigMap", "-redis")["data"]["redis.conf"]
    (tmp_path / "etc" / "redis.conf").write_text(here(config) + f"port {port}\nbind 127.0.0.1\n")
    command = [here(word) for word in containers(dict(pod_templates(objects))["redis"])[0]["command"]]
    environment = {**os.environ, "PATH": f"{server_binary().parent}:{os.environ['PATH']}", "REDIS_PASSWORD": PASSWORD}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    until(lambda: process.poll() is not None or answers(port))
    yield port
    process.terminate()
    assert process.wait(60) == 0


def answers(port: int) -> bool:
    try:
        return bool(connect(port).ping())
    except redis.AuthenticationError:
        return True
    except redis.ConnectionError:
        return False


def connect(port: int, password: str | None = None) -> redis.Redis:
    return redis.Redis("127.0.0.1", port, password=password, retry=Retry(NoBackoff(), 0), decode_responses=True)


def test_it_runs_asks_for_the_password_and_keeps_the_clusters_state(port: int, tmp_path: Path) -> None:
    with pytest.raises(redis.AuthenticationError):
        connect(port).get("x")
    with connect(port, PASSWORD) as client:
        settings = client.config_get("*")
    assert settings["maxmemory"] == str(64 * 2**20)
    assert settings["maxmemory-policy"] == "volatile-lru"  # what has no end of life, as Ray's keys, is never evicted
    assert settings["dir"] == str(tmp_path / "data")
    assert any((tmp_path / "data").iterdir()) == (settings["appendonly"] == "yes")
    assert (tmp_path / "run" / "password.conf").stat().st_mode & 0o077 == 0
