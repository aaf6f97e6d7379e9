"""Where values come from, which of them wins, and what a check of a file says."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster import cli, config_commands, config_file, sources
from holdfast.cluster.config import Overrides, Settings
from holdfast.replicas.errors import ConfigError
from holdfast.router.tenants import hash_key

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
    loaded = sources.load(file, variables, Overrides(host="localhost"))
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
    loaded = sources.load(None, {}, Overrides())
    assert loaded.settings == Settings()
    assert {loaded.origin(key) for key, _ in sources.keys(loaded.settings)} == {"default"}


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
    with pytest.raises(ConfigError) as caught:
        sources.load(None, {name: value}, Overrides())
    assert caught.value.field == field
    assert name in caught.value.message


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
    assert {key for key, _ in sources.keys(again)} == {key for key, _ in sources.keys(Settings())}


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
    return [(fault.line, fault.field) for fault in config_commands.check(path)]


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


@given(st.dictionaries(st.sampled_from(["cells", "page_size", "threads"]), st.integers(1, 99)))
def test_any_variables_are_found_in_the_settings(values: dict[str, int]) -> None:
    variables = {f"HOLDFAST_ENGINE__{name.upper()}": str(value) for name, value in values.items()}
    engine = sources.load(None, variables, Overrides()).settings.engine
    assert {name: getattr(engine, name) for name in values} == values
