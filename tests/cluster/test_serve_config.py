"""The configuration of an application in a Serve config file."""

from pathlib import Path

import pytest
import yaml
from doc_commands import blocks
from pydantic import ValidationError
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.build_app import build_app
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, ServeDeploySchema
from refused import refused

from holdfast.cluster import application, serve_config
from holdfast.cluster.application import REPLICAS, ROUTER
from holdfast.cluster.serve_config import STARTS, Arguments, settings
from holdfast.replicas.errors import ConfigError
from holdfast.router.records.store import RedisAddress
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
    assert found.redis.url == REDIS["url"]


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
    with refused(field):
        settings(Arguments(config=config))


def test_a_file_of_tenants_holds_nothing_else(tenants_file: Path) -> None:
    tenants_file.write_text(tenants_file.read_text() + "engine:\n  page_size: 8\n")
    with pytest.raises(ConfigError, match="nothing else"):
        settings(Arguments(config={"redis": REDIS}, tenants_file=tenants_file))


def test_tenants_stand_in_one_place(tenants_file: Path) -> None:
    with pytest.raises(ConfigError, match="tenants must be in"):
        settings(Arguments(config={"redis": REDIS, "tenants": [{"name": "b"}]}, tenants_file=tenants_file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with refused("redis_password_file"):
        settings(Arguments(config={"redis": REDIS}, redis_password_file=tmp_path / "none"))


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(ValidationError):
        Arguments.model_validate({"konfig": {}})


@pytest.mark.parametrize("starts", [1, STARTS])
def test_on_a_cluster_one_engine_that_does_not_start_is_not_the_end(starts: int) -> None:
    arguments = Arguments(config={"redis": REDIS})
    found = settings(arguments)
    alone = application.build(found, RedisAddress(found.redis.url), gpus=0)
    built = build_app(alone if starts == 1 else serve_config.application(arguments), name="a")
    (engines,) = [each for each in built.deployments if each.name == REPLICAS]
    assert engines._deployment_config.max_constructor_retry_count == starts


def test_the_file_of_the_operating_page_is_one_that_serve_takes(tmp_path: Path, tenants_file: Path) -> None:
    (text,) = [block.text for block in blocks("deploy.md") if block.language == "yaml" and block.cluster]
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "holdfast.cluster.serve_config:application"
    password = tmp_path / "password"
    password.write_text("p")
    arguments = Arguments.model_validate(application.args)
    own = {"tenants_file": tenants_file, "redis_password_file": password}
    built = settings(arguments.model_copy(update=own))
    assert built.server.host == "0.0.0.0"
    assert {each.name for each in application.deployments} == {REPLICAS, ROUTER}


def test_the_scaling_of_the_operating_page_is_one_that_serve_takes() -> None:
    (text,) = [block.text for block in blocks("deploy.md") if "autoscaling_config" in block.text]
    (deployment,) = yaml.safe_load(text)
    read = DeploymentSchema(**deployment)
    assert read.autoscaling_config == deployment["autoscaling_config"]
    policy = AutoscalingConfig(**deployment["autoscaling_config"]).policy
    _resolve_policy_callable(policy)  # as Serve's controller does
