"""serveConfigV2: what Ray reads is what was meant, and the configuration in it is the one of `holdfast serve`."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import VALUES, Object, containers, find, pod_templates, render, serve_config
from ray.autoscaler._private.kuberay.autoscaling_config import _get_ray_resources_from_group_spec
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.build_app import build_app
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from holdfast.cluster import config_file, serve_private
from holdfast.cluster import serve_config as builder
from holdfast.cluster.autoscaling import Demand
from holdfast.cluster.environment import InternalPorts
from holdfast.router.tenants import hash_key

TWO = (
    "models.second.config.engine.page_size=8",
    "models.second.config.replicas.count=2",
    "models.main.autoscaling.enabled=true",
    "config.engine.max_sequences=32",
    "config.router.max_body_bytes=33554432",
)
PART = ("modelDefaults.gpuResource=nvidia.com/mig-3g\\.40gb", "modelDefaults.autoscaling.enabled=true")
HAPROXY_LIMIT_S = (2**31 - 1) // 1000  # it counts milliseconds, and refuses a configuration with more
CASES = [("", ()), ("", PART), *((values, ()) for values in VALUES), ("", TWO)]


def unknown(given: Any, read: Any, path: str = "") -> list[str]:
    """Paths of keys that were given and that are not in what was read; Ray's models pass over them without a word."""
    if isinstance(given, list):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(given, read, strict=True))]
    elif isinstance(given, dict):
        pairs = [(key, given[key], read[key]) for key in given if key in read]
    else:
        return []
    missing = [f"{path}.{key}" for key in given if key not in read] if isinstance(given, dict) else []
    return missing + [found for key, a, b in pairs for found in unknown(a, b, f"{path}.{key}")]


def application(objects: tuple[Object, ...], name: str = "main") -> Object:
    return next(each for each in serve_config(objects)["applications"] if each["name"] == name)


@pytest.mark.parametrize(("values", "settings"), CASES)
def test_ray_knows_every_key(values: str, settings: tuple[str, ...]) -> None:
    given = serve_config(render(values, settings))
    read = ServeDeploySchema(**given)
    assert unknown(given, read.model_dump(mode="json", exclude_unset=True)) == []


def test_a_misspelt_key_is_found() -> None:
    given = serve_config(render())
    given["applications"][0]["deployments"][0]["num_replica"] = 1
    read = ServeDeploySchema(**given)
    assert unknown(given, read.model_dump(exclude_unset=True)) == [".applications.0.deployments.0.num_replica"]


def test_a_models_own_configuration_lies_over_the_common_one() -> None:
    objects = render("", TWO)
    main, second = (
        config_file.parse(yaml.safe_dump(application(objects, name)["args"]["config"])) for name in ("main", "second")
    )
    assert (main.engine.max_sequences, main.engine.page_size) == (32, 16)
    assert (second.engine.max_sequences, second.engine.page_size) == (32, 8)
    assert main.router.max_body_bytes == 33554432  # and not 3.3554432e+07
    assert [each["route_prefix"] for each in serve_config(objects)["applications"]] == ["/main", "/second"]


@pytest.mark.parametrize(("values", "settings"), CASES)
def test_the_application_is_built_by_its_import_path(values: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    """As Serve does it, of a configuration of `holdfast serve`, with the deployments that the file overrides."""
    (tmp_path / "password").write_text("p")
    (tmp_path / "tenants.yaml").write_text(f"tenants: [{{name: a, key_hashes: ['{hash_key('k')}']}}]")
    for each in serve_config(render(values, settings))["applications"]:
        found = config_file.parse(yaml.safe_dump(each["args"]["config"]))
        assert (found.server.host, found.server.port) == ("0.0.0.0", 8000)
        assert found.redis.url == "redis://demo-holdfast-redis:6379/1"
        module, _, name = each["import_path"].partition(":")
        assert (module, name) == (builder.__name__, "application")
        args = each["args"] | {"tenants_file": str(tmp_path / "tenants.yaml")}
        args["redis_password_file"] = str(tmp_path / "password")
        built = build_app(call_user_app_builder_with_args_if_necessary(builder.application, args), name=each["name"])
        assert {deployment.name for deployment in built.deployments} == {d["name"] for d in each["deployments"]}


def test_the_tenants_that_the_chart_makes_are_those_of_its_secret() -> None:
    text = find(render(), "Secret", "-tenants")["stringData"]["tenants.yaml"]
    tenant = config_file.parse(text).tenants[0]
    assert tenant.key_hashes == (hash_key("hf-example"),)


def test_neither_a_tenant_nor_a_password_more_replaces_what_runs() -> None:
    """Serve replaces all replicas of an application whose version is another."""
    more = f"tenants: {{list: [{{name: b, key_hashes: ['{hash_key('x')}']}}]}}"
    renders = [render(), render("", ("redis.auth.password=other",), more)]
    secrets = [find(objects, "Secret", "-tenants") for objects in renders]
    assert secrets[0] != secrets[1]
    first, second = (find(objects, "RayService") for objects in renders)
    assert first == second
    versions = [
        get_app_code_version(ServeDeploySchema(**serve_config(objects)).applications[0])
        for objects in (*renders, render("", ("config.engine.page_size=8",)))
    ]
    assert versions[0] == versions[1] != versions[2]


def test_a_list_of_tenants_is_kept_as_it_was_given() -> None:
    hashed = hash_key("x")
    more = f"tenants: {{list: [{{name: b, key_hashes: ['{hashed}'], operator: true, limits: {{max_concurrent: 3}}}}]}}"
    text = find(render("", (), more), "Secret", "-tenants")["stringData"]["tenants.yaml"]
    tenants = config_file.parse(text).tenants
    assert [(each.name, each.operator, each.limits.max_concurrent) for each in tenants] == [
        ("b", True, 3),
        ("first", False, None),
    ]


@pytest.mark.parametrize("key", ["api-key", "other"])
def test_prometheus_has_the_key_of_a_tenant_who_may_read_metrics_and_little_else(key: str) -> None:
    objects = render("", ("monitoring.podMonitor.enabled=true", f"monitoring.podMonitor.apiKey.secretKey={key}"))
    tenants = config_file.parse(find(objects, "Secret", "-tenants")["stringData"]["tenants.yaml"]).tenants
    metrics = next(each for each in tenants if each.operator)
    assert metrics.limits.requests_per_minute == 1
    (endpoint,) = find(objects, "PodMonitor", "-routers")["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "application", "replacement": "main"}]
    named = endpoint["authorization"]["credentials"]
    secret = next(each for each in objects if each["metadata"]["name"] == named["name"])
    assert metrics.key_hashes == (hash_key(base64.b64decode(secret["data"][named["key"]]).decode()),)
    assert not [each for each in tenants if each is not metrics and each.operator]


@pytest.mark.parametrize(("values", "settings"), CASES)
def test_there_is_a_worker_for_every_engine(values: str, settings: tuple[str, ...]) -> None:
    """What engines ask for, one worker has exactly once."""
    objects = render(values, settings)
    groups = find(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    by_name = {group["groupName"]: group for group in groups}
    applications = serve_config(objects)["applications"]
    assert by_name.keys() == {f"{app['name']}{kind}" for app in applications for kind in ("", "-routers")}
    for app in applications:
        group, beside = by_name[app["name"]], by_name[f"{app['name']}-routers"]
        engines, routers = app["deployments"]
        assert {beside[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {routers["num_replicas"]}
        place = {f"router_{app['name']}": 1}
        assert {name: int(amount) for name, amount in beside["resources"].items()} == place
        assert routers["ray_actor_options"] == {"num_cpus": 0, "resources": place}
        limits = beside["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert not [name for name in limits if name.startswith("nvidia.com/")]
        scaling = engines.get("autoscaling_config")
        least = scaling["min_replicas"] if scaling else engines["num_replicas"]
        most = scaling["max_replicas"] if scaling else engines["num_replicas"]
        assert (group["minReplicas"], group["maxReplicas"]) == (least, most)
        limits = group["template"]["spec"]["containers"][0]["resources"].get("limits", {})
        asked = engines["ray_actor_options"]
        assert float(asked.get("num_gpus", 0)) == sum(n for name, n in limits.items() if name.startswith("nvidia.com/"))
        assert float(asked["num_cpus"]) == float(group["resources"].get("CPU", 0))
        found = _get_ray_resources_from_group_spec(group, False)  # what the autoscaler expects of a new worker
        assert float(asked.get("num_gpus", 0)) == found.get("GPU", 0)
        assert set(asked["resources"]) == {f"model_{group['groupName']}"} <= set(group["resources"])


def test_pods_have_the_environment_of_holdfast_serve(tmp_path: Path) -> None:
    """But for what concerns ports and folders that are shared, and Ray's token, which the operator makes."""
    local = dict(serve_private.variables(InternalPorts(1, 2, 3, 4, 5), tmp_path, drain_s=599.5))
    assert local.pop("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S") == "600"
    endless = serve_private.variables(InternalPorts(1, 2, 3, 4, 5), tmp_path, drain_s=1e300)
    assert endless["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == str(HAPROXY_LIMIT_S)
    for where, pod in pod_templates(render()):
        if where in ("redis", "test"):
            continue
        own = {each["name"]: each.get("value") for each in containers(pod)[-1]["env"]}
        assert {name: own[name] for name in own if name in local} == {n: local[n] for n in own if n in local}, where
        assert {
            "RAY_SERVE_ENABLE_HA_PROXY",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED",
            "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
        } <= own.keys() & local.keys()


@pytest.mark.parametrize(
    ("values", "device"), [("", "cuda"), ("one-gpu", "cuda"), ("production", "cuda"), ("cpu", "cpu")]
)
def test_an_engine_with_a_gpu_serves_from_it_or_not_at_all(values: str, device: str) -> None:
    assert application(render(values))["args"]["config"]["engine"]["device"] == device


def test_a_new_cluster_begins_with_the_engines_there_are() -> None:
    """Said by a value here; what helm finds in a cluster is `test_upgrade`'s."""
    settings = ("modelDefaults.autoscaling.enabled=true", "modelDefaults.autoscaling.maxReplicas=8")
    for initial, expected in (("6", 6), ("20", 8)):
        objects = render("", (*settings, f"modelDefaults.autoscaling.initialReplicas={initial}"))
        scaling = application(objects)["deployments"][0]["autoscaling_config"]
        group = find(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
        assert scaling["initial_replicas"] == group["replicas"] == expected
    plain = render("", settings)
    assert "initial_replicas" not in application(plain)["deployments"][0]["autoscaling_config"]
    assert find(plain, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] == 1


def test_the_autoscaler_is_our_own_with_the_targets_of_the_values() -> None:
    settings = ("modelDefaults.autoscaling.enabled=true", "modelDefaults.autoscaling.targets.waitingTokens=5000000")
    told = application(render("", settings))["deployments"][0]["autoscaling_config"]
    read = AutoscalingConfig(**told)  # imports the policy
    assert read.policy.policy_function == f"{Demand.__module__}:{Demand.__name__}"
    policy = _resolve_policy_callable(read.policy)
    assert type(policy).__name__ == "Demand"
    assert read.policy.policy_kwargs["waiting_tokens"] == 5000000  # and not 5e+06


def test_the_old_cluster_stays_as_long_as_the_longest_request() -> None:
    for settings, seconds in (
        ((), 3600),
        (("httpRoute.timeout=20s", "drainSeconds=600"), 600),
        (("upgrade.deletionDelaySeconds=5",), 5),
        (("upgrade.deletionDelaySeconds=0",), 0),
    ):
        assert find(render("", settings), "RayService")["spec"]["rayClusterDeletionDelaySeconds"] == seconds


def test_pods_have_the_time_that_requests_are_given() -> None:
    objects = render("production")
    drain = application(objects)["args"]["config"]["server"]["drain_s"]
    pod = dict(pod_templates(objects))["worker main"]
    assert containers(pod)[-1]["lifecycle"]["preStop"]["exec"]["command"][-1] == str(drain)
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ((), 3600),
        (("httpRoute.timeout=1h30m",), 5400),
        (("httpRoute.timeout=20s", "drainSeconds=600"), 600),
        (("httpRoute.timeout=20s", "drainSeconds=600", "models.other.config.server.drain_s=700"), 700),
        (("httpRoute.timeout=0s",), 86400),  # which says that there is no limit
        (("httpRoute.timeout=720h",), HAPROXY_LIMIT_S),
        (("drainSeconds=2592000",), HAPROXY_LIMIT_S),
    ],
)
def test_no_stream_is_cut_before_its_time_when_a_router_comes_or_goes(settings: tuple[str, ...], seconds: int) -> None:
    for where, pod in pod_templates(render("", settings)):
        if where not in ("redis", "test"):
            own = {each["name"]: each.get("value") for each in containers(pod)[-1]["env"]}
            assert own["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == str(seconds), where


def test_an_engine_on_the_cpu_keeps_to_its_cpus() -> None:
    """Torch sees the machine's cores and not the container's limit."""
    settings = ("modelDefaults.gpus=0", "modelDefaults.cpus=3", "models.own.config.engine.threads=2")
    objects = render("", (*settings, "models.gpu.gpus=1"))
    found = {each["name"]: each["args"]["config"].get("engine", {}) for each in serve_config(objects)["applications"]}
    assert {name: engine.get("threads") for name, engine in found.items()} == {"main": 3, "own": 2, "gpu": None}


def test_a_pod_may_be_given_no_time() -> None:
    objects = render("", ("config.server.drain_s=0",))
    assert application(objects)["args"]["config"]["server"]["drain_s"] == 0
    assert dict(pod_templates(objects))["worker main"]["spec"]["terminationGracePeriodSeconds"] == 30
