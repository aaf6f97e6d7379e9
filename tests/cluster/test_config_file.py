"""The configuration: everything written is read back, the later source wins, and every fault is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

from holdfast.cluster import cli, config, config_file
from holdfast.cluster.config import RedisConfig, ReplicasConfig, ServerConfig, Settings
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


@settings(max_examples=25)
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
        ("tenants: &all\n  - *all", "config", "'all' contains itself"),
        ("server: &all {port: *all}", "config", "'all' contains itself"),
        (f"tenants: {'[' * 1000}{']' * 1000}", "config", "too deeply"),
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
        ("router: {cache_tenant_bytes: 0}", "router.cache_tenant_bytes", "positive"),
        ("router: {cache_memory: 9}", "router.cache_memory", "Redis alone"),
        ("- a", "config", "list"),
        ("a: [", "config", "YAML"),
    ],
)
def test_what_is_wrong_is_named(text: str, field: str, said: str) -> None:
    with refused(field, said):
        config_file.parse(text)


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


def test_flags_are_above_the_file(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.yaml"
    file.write_text("server: {port: 8, routers: 2}")
    settings = config_file.load(file, {}, {"server.port": 9, "engine.model": "m", "replicas.count": 3}).settings
    assert (settings.server.port, settings.engine.model, settings.replicas.count) == (9, "m", 3)
    assert (settings.server.host, settings.server.routers) == (Settings().server.host, 2)
    for key, flag in (("server.routers", "--routers"), ("server.port", "--port")):
        with refused(key, flag):
            config_file.load(file, {}, {key: 0})


@pytest.mark.parametrize(("cores", "replicas", "threads"), [(8, 2, 4), (2, 3, 1), (7, 2, 3), (1, 1, 1)])
def test_cores_are_shared_out(cores: int, replicas: int, threads: int) -> None:
    settings = Settings(replicas=ReplicasConfig(count=replicas))
    assert config.share_threads(settings, cores).engine.threads == threads
    chosen = replace(settings, engine=EngineConfig(threads=5))
    assert config.share_threads(chosen, cores).engine.threads == 5


def test_headers_that_name_programs_are_names_of_headers() -> None:
    found = config_file.parse("router: {program_headers: [x-mine], parent_headers: []}").router
    assert (found.program_headers, found.parent_headers) == (("x-mine",), ())
    with refused("router.program_headers"):
        config_file.parse("router: {program_headers: ['x mine']}")
    with refused("router.program_ttl_s"):
        config_file.parse("router: {program_ttl_s: 0}")


def test_a_server_open_to_others_needs_keys() -> None:
    with refused("server.host"):
        config.check_tenants(Settings(server=ServerConfig(host="0.0.0.0")))
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


# ---- where values come from, and what a check of a file says ----

FILE = """# a comment
server:
  port: 9000
  host: 127.0.0.1
engine: {page_size: 32, retention: {policy: none}}
tenants:
  - name: acme
    key_hashes: ['%s']
redis:
  url: redis://:hunter2@db:6379/0
""" % hash_key("x")  # noqa: UP031


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "holdfast.yaml"
    path.write_text(FILE)
    return path


def test_the_later_wins_and_each_value_knows_what_set_it(file: Path) -> None:
    variables = {"HOLDFAST_SERVER__PORT": "9001", "HOLDFAST_ENGINE__RETENTION__SHARE": "0.25"}
    loaded = config_file.load(file, variables, {"server.host": "localhost", "server.port": None})
    settings = loaded.settings
    assert (settings.server.port, settings.server.host) == (9001, "localhost")
    assert (settings.engine.page_size, settings.engine.retention.policy, settings.engine.retention.share) == (
        32,
        "none",
        0.25,
    )
    assert loaded.origin("server.port") == "HOLDFAST_SERVER__PORT"
    assert loaded.origin("server.host") == "--host"
    assert loaded.origin("engine.page_size") == f"{file}:5"
    assert loaded.origin("engine.retention.share") == "HOLDFAST_ENGINE__RETENTION__SHARE"
    assert loaded.origin("tenants") == f"{file}:6"
    assert loaded.origin("redis.url") == f"{file}:10"
    assert loaded.origin("tracing.endpoint") == "default"
    assert loaded.origin("redis.memory_mb") == "default"


def test_without_anything_there_are_the_defaults() -> None:
    loaded = config_file.load(None, {}, {})
    assert loaded.settings == Settings()
    assert {loaded.origin(key) for key, _ in config_file.keys(loaded.settings)} == {"default"}


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("HOLDFAST_SERVER__PROT", "1", "server.prot"),
        ("HOLDFAST_SERVER__PORT", "many", "server.port"),
        ("HOLDFAST_ENGINE__PAGE_SIZE", "0", "engine.page_size"),
        ("HOLDFAST_ENGINE__PAGE_SIZE", "{", "environment"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, field: str) -> None:
    with refused(field, name):
        config_file.load(None, {name: value}, {})


def test_show_prints_every_key_with_its_origin_and_no_password(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ENGINE__ORDER", "request")
    assert cli.main(["config", "show", "--config", str(file), "--replicas", "2"]) == 0
    printed = capsys.readouterr().out
    rows = [line.rpartition("  # ") for line in printed.splitlines()]
    assert f"  port: 9000{' ' * 10}" in printed
    origins = {text.strip().split(":")[0]: origin for text, _, origin in rows if origin}
    assert origins["port"] == f"{file}:3"
    assert origins["count"] == "--replicas"
    assert origins["order"] == "HOLDFAST_ENGINE__ORDER"
    assert origins["admission_ceiling"] == "default"
    assert "hunter2" not in printed
    assert "redis://db:6379/0" in printed
    again = config_file.parse(printed)
    assert again.engine.order == "request"
    assert again.tenants[0].name == "acme"
    assert {key for key, _ in config_file.keys(again)} == {key for key, _ in config_file.keys(Settings())}


def test_config_alone_and_serve_read_the_environment_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER__PORT", "0")
    for command in (["config"], ["serve"], ["doctor"]):
        assert cli.main(command) == cli.MISUSE
        assert "HOLDFAST_SERVER__PORT" in capsys.readouterr().err


KEYED = f"- name: a\n  key_hashes: ['sha256:{0:064x}']\n"


def check(tmp_path: Path, text: str) -> list[tuple[int, str]]:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return [(fault.line, fault.field) for fault in config_file.check(path)]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", []),
        ("server:\n  port: 1\n", []),
        ("server:\n  prot: 1\n", [(2, "server.prot")]),
        ("sever: {}\nengine:\n\n  page_size: 0\n", [(1, "sever"), (4, "engine.page_size")]),
        ("engine:\n  cells: 5\n  retention:\n    policy: best\n", [(4, "engine.retention.policy")]),
        ("engine:\n  session_rows: 64\n", [(2, "engine.session_rows")]),
        ("engine:\n  max_sequences: 2\n", [(1, "engine.session_rows")]),
        ("tenants:\n  - name: a\n  - name: 'b/c'\n", [(3, "tenants.1.name")]),
        ("tenants:\n- name: a\n- name: b\n  wieght: 2\n", [(4, "tenants.1.wieght")]),
        ("server:\n  host: 0.0.0.0\n", [(2, "server.host")]),
        ("server:\n  prot: 1\n  port: 0\n", [(2, "server.prot"), (3, "server.port")]),
        (
            "server:\n  port: 0\n  drain_s: x\n  host: ''\n",
            [(2, "server.port"), (3, "server.drain_s"), (4, "server.host")],
        ),
        (
            "engine:\n  page_size: 0\n  dtype: 8\n"
            "  retention:\n    share: 2\n    police: a\n    policy: best\n"
            "  cells: -1\n",
            [
                (2, "engine.page_size"),
                (3, "engine.dtype"),
                (5, "engine.retention.share"),
                (6, "engine.retention.police"),
                (7, "engine.retention.policy"),
                (8, "engine.cells"),
            ],
        ),
        (
            "tenants:\n- name: 7\n- weight: 0\n  name: a\n- limits:\n    max_concurrent: 0\n  nam: b\n",
            [
                (2, "tenants.0.name"),
                (3, "tenants.1.weight"),
                (5, "tenants.2.name"),
                (6, "tenants.2.limits.max_concurrent"),
                (7, "tenants.2.nam"),
            ],
        ),
        (f"engine:\n  page_size: 0\ntenants:\n{KEYED}{KEYED}", [(2, "engine.page_size"), (3, "tenants")]),
        (f"tenants:\n{KEYED}{KEYED}- name: c\n  weight: 0\n", [(1, "tenants"), (7, "tenants.2.weight")]),
        ("engine:\n  page_size: 0\nserver:\n  host: 0.0.0.0\n", [(2, "engine.page_size"), (4, "server.host")]),
        ("server:\n  host: 0.0.0.0\ntenants:\n- name: c\n  weight: 0\n", [(5, "tenants.0.weight")]),
        ("server: [1, 2\n", [(2, "")]),
        ("engine:\n  threads: 4\n  threads: 8\n", [(3, "")]),
        ("server:\n  port: 1\n7: {}\n", [(3, "")]),
        ("- 1\n", [(1, "")]),
    ],
)
def test_a_check_names_field_and_line_of_every_fault(tmp_path: Path, text: str, faults: list[tuple[int, str]]) -> None:
    assert check(tmp_path, text) == faults


def test_the_check_command(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file} is a valid configuration\n"
    bad = tmp_path / "bad.yaml"
    bad.write_text("server: {prot: 1}\n")
    assert cli.main(["config", "check", str(bad)]) == cli.MISUSE
    assert capsys.readouterr().out.startswith(f"{bad}:1: unknown key 'server.prot'; the nearest known one is 'port'")
    assert cli.main(["config", "check", "--json", str(bad)]) == cli.MISUSE
    assert json.loads(capsys.readouterr().out)["faults"][0]["line"] == 1
    assert cli.main(["config", "check", str(tmp_path / "none.yaml")]) == cli.MISUSE


@settings(max_examples=15)
@given(st.dictionaries(st.sampled_from(["cells", "page_size", "threads"]), st.integers(1, 99)))
def test_any_variables_are_found_in_the_settings(values: dict[str, int]) -> None:
    variables = {f"HOLDFAST_ENGINE__{name.upper()}": str(value) for name, value in values.items()}
    engine = config_file.load(None, variables, {}).settings.engine
    assert {name: getattr(engine, name) for name in values} == values


# ---- the page of options ----

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "options"]) == 0
    assert (ROOT / "docs" / "options.md").read_text() == capsys.readouterr().out, "run `make options`"


def test_every_option_is_on_it_and_described() -> None:
    found = [option for _, _, options in config_file.options() for option in options]
    expected = {key for key, _ in config_file.keys(Settings())} - {"tenants"}
    assert {option.key for option in found if not option.key.startswith("tenants")} == expected
    assert [option.key for option in found if not option.text] == []
    assert [name for name, about, _ in config_file.options() if not about] == []
    assert not any("|" in option.text for option in found)


def test_defaults_and_kinds_are_those_of_the_classes() -> None:
    found = {option.key: option for _, _, options in config_file.options() for option in options}
    assert found["engine.page_size"].default == "`16`"
    assert found["engine.page_size"].kind == "whole number"
    assert found["server.host"].default == '`"127.0.0.1"`'
    assert found["engine.tools_guarantee"].kind == "`names`, `schema`, `off`"
    assert found["tenants[].limits.max_concurrent"].kind == "whole number, null"
    assert found["router.response_cache"].kind == "true, false"
