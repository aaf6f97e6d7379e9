"""The embedded Redis is a real server on a private socket that goes with its owner; an outside one must answer."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from refused import refused

from holdfast.cluster.redis import EmbeddedRedis, inspect, ping, without_password
from holdfast.replicas.errors import ConfigError


def test_it_keeps_values_and_ends_with_its_context(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, megabytes=16) as server:
        client = redis.Redis.from_url(server.url)
        client.set("a", b"1")
        assert client.get("a") == b"1"
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("maxmemory") == {"maxmemory": str(16 * 2**20)}
        client.close()
        assert server.alive
    assert not server.alive
    with pytest.raises(ConfigError):
        ping(server.url, 0.5)


def test_what_has_a_folder_is_there_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for kept, before in ((None, []), (tmp_path / "kept", [0, 1])):
        for n in before or [0, 0]:
            with EmbeddedRedis(tmp_path / "run", 16, kept) as server, redis.Redis.from_url(server.url) as client:
                assert client.xlen("usage") == n
                client.xadd("usage", {"tenant": "acme"})


def test_a_killed_one_comes_back_with_what_was_written_a_second_ago(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, 16, tmp_path / "kept") as server, redis.Redis.from_url(server.url) as client:
        client.set("a", b"1")
        assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
        assert server._process is not None
        server._process.kill()
        server._process.wait()
        server.start()
        assert client.get("a") == b"1"


def test_it_dies_with_a_killed_owner(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from holdfast.cluster.redis import EmbeddedRedis\n"
        "with EmbeddedRedis(Path(sys.argv[1]), 16) as server:\n"
        "    print(server._process.pid, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        server = int(owner.stdout.readline())
        gone = os.pidfd_open(server)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    import select

    assert select.select([gone], [], [], 60.0)[0]
    os.close(gone)


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "redis.sock").mkdir()
    with refused("redis.url", "did not start"), EmbeddedRedis(tmp_path, 16):
        pass


@pytest.mark.parametrize("url", ["nonsense", "http://localhost", "redis://127.0.0.1:1", "unix:///nowhere/redis.sock"])
def test_a_url_that_does_not_answer_is_named(url: str) -> None:
    with refused("redis.url", url):
        ping(url, 0.5)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@127.0.0.1:1/0",
        "redis://user:s3cret@127.0.0.1:no-port/0",
        "redis://:s3cret/more@127.0.0.1:1",
        "redis://127.0.0.1:1/0?password=s3cret&db=1",
        "unix://s3cret@/nowhere/redis.sock",
        "user:s3cret@127.0.0.1",
    ],
)
def test_a_password_is_in_no_message(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inspect(url, 0.5)
    assert "s3cret" not in caught.value.message
    assert without_password(url) in caught.value.message


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, refused("redis.url"):
        ping(f"redis://127.0.0.1:{silent.getsockname()[1]}", 0.2)
