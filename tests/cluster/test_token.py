"""Ray's token: in the cluster's own folder, whatever the user's environment and home say."""

import os
from pathlib import Path

import pytest

from holdfast.cluster import environment, serve_private
from holdfast.cluster.environment import InternalPorts


def test_the_token_is_a_file_of_the_cluster_s(tmp_path: Path) -> None:
    variables = serve_private.variables(InternalPorts(1, 2, 3, 4, 5), tmp_path)
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / serve_private.TOKEN)
    assert "RAY_AUTH_TOKEN" not in variables


def test_ray_colours_nothing_where_nobody_sees_it(tmp_path: Path) -> None:
    ports = InternalPorts(1, 2, 3, 4, 5)
    assert serve_private.variables(ports, tmp_path, colours=False)["RAY_COLOR_PREFIX"] == "0"
    assert "RAY_COLOR_PREFIX" not in serve_private.variables(ports, tmp_path)


def test_a_token_of_the_user_s_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    environment.apply({})
    assert "RAY_AUTH_TOKEN" not in os.environ
