"""The script that Ray starts as HAProxy, and that Ray is told of it."""

import subprocess
from pathlib import Path

import pytest

from holdfast.cluster import environment, haproxy
from holdfast.cluster.environment import InternalPorts
from holdfast.router.config import RouterConfig

PORTS = InternalPorts(1, 2, 3, 4, 5)
PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"


def test_the_script_is_haproxy_without_splicing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    echo = tmp_path / "an echo"
    echo.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    echo.chmod(0o755)
    monkeypatch.setenv(PATH, str(echo))
    script = haproxy.unspliced(tmp_path / "haproxy")
    assert script is not None
    done = subprocess.run([script, "-f", "a file"], capture_output=True, text=True, check=True)
    assert done.stdout == "-dS|-f|a file|"


def test_the_one_that_comes_with_ray_knows_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATH, raising=False)
    script = haproxy.unspliced(tmp_path / "haproxy")
    assert script is not None
    assert "HAProxy" in subprocess.run([script, "-v"], capture_output=True, text=True, check=True).stdout
    assert "-dS" in subprocess.run([script, "-h"], capture_output=True, text=True, check=False).stderr


def test_without_a_haproxy_there_is_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH, str(tmp_path / "nowhere"))
    assert haproxy.unspliced(tmp_path / "haproxy") is None


def test_ray_is_told_of_the_script_where_there_is_one(tmp_path: Path) -> None:
    assert PATH not in environment.for_ray(PORTS, "t", tmp_path)
    assert environment.for_ray(PORTS, "t", tmp_path, proxy=tmp_path / "haproxy")[PATH] == str(tmp_path / "haproxy")


def test_messages_between_router_and_engine_hold_the_longest_request(tmp_path: Path) -> None:
    longest = int(environment.for_ray(PORTS, "t", tmp_path)["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"])
    assert longest >= 4 * RouterConfig().max_body_bytes
