"""What `holdfast serve` says of processes that die and come back."""

import signal
import sys
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest

from holdfast.cluster import serve
from holdfast.cluster.redis import EmbeddedRedis, ping
from holdfast.cluster.serve import Running, Signals, _look_after, _watch, changes, replaced
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


def test_a_signal_that_finds_the_thread_in_a_finalizer_stops_the_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints what is raised there and drops it."""
    dropped: list[type[BaseException]] = []
    looks = iter([_nothing_up, _interrupted_in_a_callback])  # a third look is one too many
    monkeypatch.setattr(sys, "unraisablehook", lambda found: dropped.append(found.exc_type))
    monkeypatch.setattr(serve, "WATCH_S", 0.0)
    monkeypatch.setattr(serve, "_up", lambda: next(looks)())
    monkeypatch.setattr(serve, "_serves", dict)
    with Signals() as signals, pytest.raises(KeyboardInterrupt):
        _watch(Running("", "", redis=None), signals, Mock())
    assert dropped == [KeyboardInterrupt]


def _nothing_up() -> dict[str, int]:
    return {}


def _interrupted_in_a_callback() -> dict[str, int]:
    goes = Mock()
    watched = weakref.ref(goes, lambda _: signal.raise_signal(signal.SIGINT))
    del goes
    assert watched() is None
    return {}


def _fails(server: EmbeddedRedis) -> None:
    raise ConfigError("no room", "redis.url")
