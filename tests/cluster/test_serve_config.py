"""The configuration of an application in a Serve config file."""

from hashlib import sha256
from pathlib import Path

import pytest
import redis
import yaml
from doc_commands import blocks
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from holdfast.cluster import serve_config
from holdfast.cluster.application import REPLICAS, ROUTER
from holdfast.cluster.serve_config import MOUNT_S, Arguments, await_digest, settings, with_password
from holdfast.replicas.errors import ConfigError
from holdfast.router.tenants import hash_key

REDIS = {"url": "redis://store:6379/1"}


@pytest.fixture
def tenants_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(f"tenants:\n  - name: a\n    key_hashes: ['{hash_key('k')}']\n")
    return path


def test_secrets_come_from_files(tmp_path: Path, tenants_file: Path) -> None:
    password = tmp_path / "password"
    password.write_text("p:a/s@s\n")
    config = {"server": {"host": "0.0.0.0"}, "redis": REDIS, "replicas": {"count": 3}}
    found = settings(Arguments(config=config, tenants_file=tenants_file, redis_password_file=password))
    assert [tenant.name for tenant in found.tenants] == ["a"]
    assert found.replicas.count == 3
    assert redis.Redis.from_url(found.redis.url).connection_pool.connection_kwargs["password"] == "p:a/s@s"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:1/0", "redis://:pw@h:1/0"),
        ("rediss://u@h:1/0", "rediss://u:pw@h:1/0"),
        ("redis://u:old@h", "redis://u:pw@h"),
    ],
)
def test_a_password_goes_into_the_url(url: str, expected: str) -> None:
    assert with_password(url, "pw") == expected


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "redis.url"),
        ({"redis": REDIS, "server": {"host": "0.0.0.0"}}, "server.host"),  # no tenants, and not this machine alone
        ({"redis": REDIS, "engin": {}}, "engin"),
        ({"redis": REDIS, "engine": {"page_size": 0}}, "engine.page_size"),
    ],
)
def test_a_wrong_configuration_names_its_field(config: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(Arguments(config=config))
    assert caught.value.field == field


def test_a_file_of_tenants_holds_nothing_else(tenants_file: Path) -> None:
    tenants_file.write_text(tenants_file.read_text() + "engine:\n  page_size: 8\n")
    with pytest.raises(ConfigError, match="nothing else"):
        settings(Arguments(config={"redis": REDIS}, tenants_file=tenants_file))


def test_an_older_file_of_tenants_is_waited_for(tenants_file: Path) -> None:
    new = "tenants: []"
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] == 3.0:
            tenants_file.write_text(new + "\n")

    await_digest(tenants_file, sha256(new.encode()).hexdigest(), lambda: now[0], sleep)
    assert now[0] == 3.0
    with pytest.raises(ConfigError, match="not the file"):
        await_digest(tenants_file, "0" * 64, lambda: now[0], sleep)
    assert now[0] == 3.0 + MOUNT_S
    await_digest(tenants_file, "", lambda: now[0], sleep)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(Arguments(config={"redis": REDIS}, redis_password_file=tmp_path / "none"))
    assert caught.value.field == "redis_password_file"


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(ValidationError):
        Arguments.model_validate({"konfig": {}})


def test_the_application_is_named_by_its_import_path() -> None:
    built = serve_config.application(Arguments(config={"redis": REDIS}))
    assert type(built).__name__ == "Application"


def test_the_file_of_the_operating_page_is_one_that_serve_takes(tmp_path: Path, tenants_file: Path) -> None:
    (text,) = [block.text for block in blocks("operating.md") if block.language == "yaml" and block.cluster]
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "holdfast.cluster.serve_config:application"
    password = tmp_path / "password"
    password.write_text("p")
    arguments = Arguments.model_validate(application.args)
    own = {"tenants_file": tenants_file, "redis_password_file": password}
    built = settings(arguments.model_copy(update=own))
    assert built.server.host == "0.0.0.0"
    assert {each.name for each in application.deployments} == {REPLICAS, ROUTER}
