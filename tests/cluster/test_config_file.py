"""The YAML file: everything written is read back, and what is wrong is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster import config, config_file
from holdfast.cluster.config import Overrides, RedisConfig, ReplicasConfig, ServerConfig, Settings
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.types import CellLimits, Priority
from holdfast.router.config import Oidc, Prices, RouterConfig
from holdfast.router.tenants import ApiKey, Scope, Tenant, TenantCache, TenantLimits, hash_key

names = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
api_keys = st.builds(
    ApiKey,
    id=names,
    hash=st.builds(hash_key, st.text()),
    scopes=st.lists(st.sampled_from(Scope), min_size=1, unique=True).map(tuple),
    expires=st.one_of(st.none(), st.floats(0, 1e12)),
)
tenants = st.builds(
    Tenant,
    name=names,
    key_hashes=st.lists(st.builds(hash_key, st.text()), max_size=2).map(tuple),
    keys=st.lists(api_keys, max_size=2, unique_by=lambda key: key.id).map(tuple),
    limits=st.builds(
        TenantLimits,
        max_concurrent=st.one_of(st.none(), st.integers(1, 99)),
        units_per_month=st.one_of(st.none(), st.floats(1, 1e9)),
    ),
    cache=st.builds(TenantCache, enabled=st.booleans(), ttl_s=st.one_of(st.none(), st.floats(0.1, 1e6))),
    cells=st.builds(CellLimits, floor=st.floats(0, 0.3), ceiling=st.floats(0.3, 1)),
    priority=st.just(Priority.BATCH),
    priorities=st.sampled_from([(Priority.BATCH,), tuple(Priority)]),
)
router = st.builds(
    RouterConfig,
    prices=st.builds(Prices, input=st.floats(0, 9), cached_input=st.floats(0, 9), repeat=st.floats(0, 1)),
    oidc=st.builds(Oidc, issuer=st.just("https://id.example"), audience=names, tenant_claim=names),
)
settings_strategy = st.builds(
    Settings,
    server=st.builds(ServerConfig, host=st.sampled_from(["127.0.0.1", "0.0.0.0"]), port=st.integers(1, 65535)),
    replicas=st.builds(ReplicasConfig, count=st.integers(1, 64)),
    engine=st.builds(EngineConfig, page_size=st.integers(1, 64), kv_memory=st.floats(0.1, 100)),
    redis=st.builds(RedisConfig, url=st.text(max_size=10), memory_mb=st.integers(1, 9999)),
    router=router,
    tenants=st.lists(tenants, max_size=3).map(tuple),
)


@settings(max_examples=25, deadline=None)
@given(settings_strategy)
def test_what_is_written_is_read_back(given_settings: Settings) -> None:
    assert config_file.parse(config_file.dump(given_settings)) == given_settings


@pytest.mark.parametrize("text", ["", "# nothing", "{}"])
def test_an_empty_file_means_the_defaults(text: str) -> None:
    assert config_file.parse(text) == Settings()


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("serve: {}", "serve", "'server'"),
        ("server: {prot: 1}", "server.prot", "'port'"),
        ("engine: {page_sise: 1}", "engine.page_sise", "'page_size'"),
        ("tenants: [{name: a, limits: {max_conccurrent: 1}}]", "tenants.0.limits.max_conccurrent", "'max_concurrent'"),
        ("a: 1\n1: {}", "config", "line 2"),
        ("server:\n  port: 1\n  port: 2", "config", "line 3"),
        ("server: {}\nengine: {}\nserver: {}", "config", "'server' is there twice"),
        ("tenants: [{name: a, name: b}]", "config", "'name'"),
        ("tenants: &all\n  - *all", "config", "'all' holds itself"),
        ("server: &all {port: *all}", "config", "'all' holds itself"),
        (f"tenants: {'[' * 3000}{']' * 3000}", "config", "too deeply"),
        ("tenants: [{name: 2024-13-45}]", "config", "YAML"),
        ("server: {port: x}", "server.port", "'x'"),
        ("server: {port: '80'}", "server.port", "'80'"),
        ("server: {port: 1.5}", "server.port", "1.5"),
        ("server: {port: true}", "server.port", "True"),
        ("server: {port: 70000}", "server.port", "70000"),
        ("server: {ray_metrics_port: 70000}", "server.ray_metrics_port", "70000"),
        ("server: {port: 90, ray_metrics_port: 90}", "server.ray_metrics_port", "90"),
        ("server: {host: ''}", "server.host", "host"),
        ("server: {host: '::1'}", "server.host", "IPv4"),
        ("server: 3", "server", "3"),
        ("server:", "server", "None"),
        ("engine: {dtype: int3}", "engine.dtype", "'int3'"),
        ("engine: {page_size: 0}", "engine.page_size", "at least 1"),
        ("replicas: {count: 0}", "replicas.count", "at least 1"),
        ("redis: {timeout_s: 0}", "redis.timeout_s", "positive"),
        ("tenants: {}", "tenants", "{}"),
        ("tenants: [{}]", "tenants.0.name", "required"),
        ("tenants: [{name: a, key_hashes: [plain]}]", "tenants.key_hashes", "sha256"),
        ("placement: {max_waiting: 0}", "placement.max_waiting", "at least 1"),
        ("placement: {turn_tokens: 900}", "placement.turn_tokens", "always 1200 now"),
        ("server: {connections: 9}", "server.connections", "ulimit"),
        ("router: {cache_memory: 0}", "router.cache_memory", "positive"),
        ("- a", "config", "list"),
        ("a: [", "config", "YAML"),
    ],
)
def test_what_is_wrong_is_named(text: str, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_file.parse(text)
    assert caught.value.field == field
    assert said in caught.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        config_file.read(tmp_path / "no.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.yaml"):
        config_file.read(tmp_path / "bytes.yaml")
    (tmp_path / "bad.yaml").write_text("serve: {}")
    with pytest.raises(ConfigError, match=r"bad\.yaml.*serve") as caught:
        config_file.read(tmp_path / "bad.yaml")
    assert caught.value.field == "serve"


def test_overrides_are_above_the_file() -> None:
    settings = config.apply(Settings(), Overrides(port=9, model="m", replicas=3))
    assert (settings.server.port, settings.engine.model, settings.replicas.count) == (9, "m", 3)
    assert settings.server.host == Settings().server.host
    assert config.apply(Settings(), Overrides(routers=2)).server.routers == 2
    with pytest.raises(ConfigError) as caught:
        config.apply(Settings(), Overrides(routers=0))
    assert caught.value.field == "server.routers"
    with pytest.raises(ConfigError) as caught:
        config.apply(Settings(), Overrides(port=0))
    assert caught.value.field == "server.port"


@pytest.mark.parametrize(("cores", "replicas", "threads"), [(8, 2, 4), (2, 3, 1), (7, 2, 3), (1, 1, 1)])
def test_cores_are_shared_out(cores: int, replicas: int, threads: int) -> None:
    settings = Settings(replicas=ReplicasConfig(count=replicas))
    assert config.share_threads(settings, cores).engine.threads == threads
    chosen = replace(settings, engine=EngineConfig(threads=5))
    assert config.share_threads(chosen, cores).engine.threads == 5


def test_headers_that_name_programs_are_names_of_headers() -> None:
    found = config_file.parse("router: {program_headers: [x-mine], parent_headers: []}").router
    assert (found.program_headers, found.parent_headers) == (("x-mine",), ())
    with pytest.raises(ConfigError) as caught:
        config_file.parse("router: {program_headers: ['x mine']}")
    assert caught.value.field == "router.program_headers"
    with pytest.raises(ConfigError) as caught:
        config_file.parse("router: {program_ttl_s: 0}")
    assert caught.value.field == "router.program_ttl_s"


def test_a_server_open_to_others_needs_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        config.check_tenants(Settings(server=ServerConfig(host="0.0.0.0")))
    assert caught.value.field == "server.host"
    tenant = Tenant("a", (hash_key("k"),))
    config.check_tenants(Settings(server=ServerConfig(host="0.0.0.0"), tenants=(tenant,)))
    config.check_tenants(Settings())


def test_a_key_may_stand_above_one_that_is_merged() -> None:
    text = "tenants:\n  - &a {name: a, weight: 2}\n  - {<<: *a, name: b}\n"
    assert [(each.name, each.weight) for each in config_file.parse(text).tenants] == [("a", 2.0), ("b", 2.0)]


@pytest.mark.parametrize("key", config_file.REMOVED)
def test_a_key_of_an_earlier_version_says_what_replaces_it(key: str) -> None:
    *path, name = key.split(".")
    data: dict[str, Any] = {name: 1}
    for section in reversed(path):
        data = {section: data}
    (fault,) = config_file.unknown(data)
    assert (fault.field, fault.message) == (key, f"unknown key {key!r}; {config_file.REMOVED[key]}")


def test_an_unknown_mechanism_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="the nearest is 'prefix_cache'") as caught:
        config_file.parse("engine: {without: [kv_tags, prefixcache]}")
    assert caught.value.field == "engine.without.1"
    with pytest.raises(ConfigError, match="the nearest is 'prefix_cache'"):
        EngineConfig(without=("prefixcache",))  # type: ignore[arg-type]
