"""What `holdfast serve` says of processes that die and come back."""

from pathlib import Path

import pytest

from holdfast.cluster.redis import EmbeddedRedis, ping
from holdfast.cluster.serve import _look_after, changes, replaced
from holdfast.replicas.errors import ConfigError


def test_what_dies_and_what_is_back_is_said_once() -> None:
    both = {"replicas": 2, "router": 1}
    assert list(changes(both, both)) == []
    assert list(changes({}, both)) == []  # the first look
    [line] = changes(both, {"replicas": 1, "router": 1})
    assert line.startswith("1 of 2 process(es) of 'replicas' died")
    [line] = changes({"replicas": 1, "router": 1}, both)
    assert line == "1 process(es) of 'replicas' serve again: 2 in all"


def test_serves_own_processes_are_told_by_their_ids() -> None:
    """Another one may be there already at the next look."""
    there = {"controller": {5}, "proxy": {7}}
    assert list(replaced(there, there)) == []
    assert list(replaced({}, there)) == []
    assert list(replaced(there, {"controller": set(), "proxy": {7}})) == [
        "Serve's controller died; it is started again"
    ]
    assert list(replaced({"controller": set(), "proxy": {7}}, there)) == ["Serve's controller is there again"]
    died, back = replaced(there, {"controller": {5}, "proxy": {8}})
    assert died.startswith("Serve's proxy died")
    assert back == "Serve's proxy is there again"


def test_a_redis_that_has_ended_is_started_again_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with EmbeddedRedis(tmp_path, 16) as server:
        assert _look_after(server, True, said.append)
        assert said == []
        assert server._process is not None
        server._process.kill()
        server._process.wait()
        monkeypatch.setattr(EmbeddedRedis, "start", _fails)
        assert not _look_after(server, True, said.append)
        assert not _look_after(server, False, said.append)
        ended, why = said
        assert ended.startswith("the embedded Redis has ended")
        assert why.startswith("no room")
        monkeypatch.undo()
        assert _look_after(server, False, said.append)
        assert said[-1] == "the embedded Redis serves again"
        ping(server.url, 5.0)


def _fails(server: EmbeddedRedis) -> None:
    raise ConfigError("no room", "redis.url")
