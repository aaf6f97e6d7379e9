"""What a start refuses before anything runs: model, port, address, Redis."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from refused import refused

from holdfast.cluster import doctor, environment, model_files
from holdfast.cluster.config import RedisConfig, ServerConfig, Settings
from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.errors import ConfigError
from holdfast.router.tenants import Tenant


def fingerprint(folder: Path, version: str = "1.0", **engine: Any) -> str:
    return model_files.fingerprint(folder, EngineConfig(**engine), version)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_folder_with_a_model_is_found(model: Path) -> None:
    assert model_files.model_folder(str(model)) == model


def test_a_cached_hub_name_is_found_in_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "models--no--such"
    snapshot = cached / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model_files.model_folder("no/such") == snapshot


@pytest.mark.parametrize("name", ["/nowhere", "no/such-model", "no such model", "a/b/c"])
def test_a_missing_model_is_named(name: str) -> None:
    with refused("engine.model", name):
        model_files.model_folder(name)


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        (EngineConfig(order="no_such_module:Order"), "engine.order"),
        (EngineConfig(retention=RetentionConfig("no_such_module:Policy")), "engine.retention.policy"),
    ],
)
def test_a_policy_that_cannot_be_imported_is_named(engine: EngineConfig, field: str) -> None:
    with pytest.raises(ConfigError, match="No module named 'no_such_module'") as caught:
        doctor.check_policies(engine)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field} cannot be no_such_module:")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        model_files.model_folder(str(tmp_path))


def test_the_fingerprint_changes_with_the_model(model: Path) -> None:
    first = fingerprint(model)
    assert fingerprint(model) == first
    (model / "weights").write_text("1")
    second = fingerprint(model)
    (model / "weights").write_text("2")
    assert len({first, second, fingerprint(model)}) == 3


def test_the_fingerprint_changes_with_the_chat_template(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("templates") / "a.jinja"
    found = {fingerprint(model)}
    for text in ("a", "b"):
        file.write_text(text)
        found.add(fingerprint(model, chat_template=str(file)))
    assert len(found) == 3


def test_the_fingerprint_of_large_files_is_of_both_their_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "SAMPLE", 2)
    found = set()
    for content in ("abcdef", "xbcdef", "abcdex", "abcdefg"):
        (model / "weights").write_text(content)
        found.add(fingerprint(model))
    assert len(found) == 4


def test_the_fingerprint_of_a_copy_is_the_same(model: Path) -> None:
    first = fingerprint(model)
    os.utime(model / "config.json", (1, 1))
    assert fingerprint(model) == first


def test_the_fingerprint_changes_with_the_settings_that_decide_answers_and_with_the_version(model: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"dtype": "float32"},
        {"device": "cpu"},
        {"decoder": "own"},
        {"context_length": 512},
        {"prompt_seed": False},
        {"early_stop": False},
        {"tool_format": "hermes"},
        {"tools_guarantee": "names"},
    ]
    assert [name for change in changes for name in change] == list(model_files.ANSWERING)
    found = {fingerprint(model), fingerprint(model, "2.0"), *(fingerprint(model, **change) for change in changes)}
    assert len(found) == 2 + len(changes)
    assert fingerprint(model, max_sequences=17, order="fair", threads=2) == fingerprint(model)


def test_a_dead_redis_is_named(model: Path) -> None:
    server = ServerConfig(port=environment.internal_ports(random.Random(1)).fallback)
    redis = RedisConfig(url="redis://127.0.0.1:1", timeout_s=0.5)
    with refused("redis.url"):
        doctor.check(Settings(server=server, engine=EngineConfig(model=str(model)), redis=redis))


def test_tenants_that_clash_are_refused() -> None:
    with pytest.raises(ConfigError):
        doctor.check(Settings(tenants=(Tenant("a"), Tenant("a"))))


def test_internal_ports_are_free_and_differ() -> None:
    found = environment.internal_ports(random.Random(3))
    singles = [found.fallback, found.stats, found.metrics]
    assert len(set(singles)) == 3
    assert not set(singles) & set(range(found.replica_first, found.replica_last + 1))
    assert all(environment.free_port("127.0.0.1", port) for port in singles)
