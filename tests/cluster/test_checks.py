"""What a start refuses before anything runs: model, port, address, Redis."""

import random
import socket
from pathlib import Path

import pytest

from holdfast.cluster import checks, ports
from holdfast.cluster.config import RedisConfig, ServerConfig, Settings
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.router.tenants import Tenant


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_folder_with_a_model_is_found(model: Path) -> None:
    assert checks.model_folder(str(model)) == model


@pytest.mark.parametrize("name", ["/nowhere", "no/such-model", "no such model", "a/b/c"])
def test_a_missing_model_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.model_folder(name)
    assert caught.value.field == "engine.model"
    assert name in caught.value.message


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config\\.json"):
        checks.model_folder(str(tmp_path))


def test_the_fingerprint_changes_with_the_model(model: Path) -> None:
    first = checks.fingerprint(model, "auto")
    assert checks.fingerprint(model, "auto") == first
    assert checks.fingerprint(model, "float32") != first
    (model / "weights").write_text("1")
    assert checks.fingerprint(model, "auto") != first


def test_a_port_in_use_is_named(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(ConfigError) as caught:
            checks.check(Settings(server=server, engine=EngineConfig(model=str(model))))
    assert caught.value.field == "server.port"
    assert str(server.port) in caught.value.message


def test_a_port_in_use_for_ray_s_metrics_is_named(model: Path) -> None:
    free = ports.internal(random.Random()).stats
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ServerConfig(port=free, ray_metrics_port=taken.getsockname()[1])
        with pytest.raises(ConfigError) as caught:
            checks.check(Settings(server=server, engine=EngineConfig(model=str(model))))
    assert caught.value.field == "server.ray_metrics_port"


@pytest.mark.parametrize("host", ["203.0.113.77", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_named(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ports.check(host, 18999)
    assert caught.value.field == "server.host"


def test_a_dead_redis_is_named(model: Path) -> None:
    server = ServerConfig(port=ports.internal(random.Random(1)).fallback)
    redis = RedisConfig(url="redis://127.0.0.1:1", timeout_s=0.5)
    with pytest.raises(ConfigError) as caught:
        checks.check(Settings(server=server, engine=EngineConfig(model=str(model)), redis=redis))
    assert caught.value.field == "redis.url"


def test_tenants_that_clash_are_refused() -> None:
    with pytest.raises(ConfigError):
        checks.check(Settings(tenants=(Tenant("a"), Tenant("a"))))


def test_internal_ports_are_free_and_differ() -> None:
    found = ports.internal(random.Random(3))
    singles = [found.fallback, found.stats, found.metrics]
    assert len(set(singles)) == 3
    assert not set(singles) & set(range(found.replica_first, found.replica_last + 1))
    assert all(ports.free("127.0.0.1", port) for port in singles)
