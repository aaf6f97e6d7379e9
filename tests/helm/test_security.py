"""What pods may do, what they are told, and who may reach them."""

import copy

import pytest
import yaml
from helm_chart import VALUES, Object, containers, find, pod_templates, render, serve_config
from network_policies import Pod, allowed

from holdfast.cluster import environment

SECRETS = (
    "tenants.firstKey.key=SECRETKEY",
    "redis.auth.password=SECRETPASS",
    "hub.token=SECRETTOKEN",
    "monitoring.podMonitor.enabled=true",
    "monitoring.podMonitor.apiKey.key=SECRETMETRICS",
)
HUB = ("modelDefaults.source.type=hub", "modelDefaults.source.hub.repository=org/model")

# GCS, client, dashboard, its agent, HAProxy's statistics, Serve's fallback proxy and replicas, Ray's workers.
INNER_PORTS = (6379, 10001, 8265, 52365, 8404, 8500, 30000, 30999, 10002, 19999)
METRICS_PORTS = (8080, 9101)
API_PORT = 8000

STRANGER = Pod({"app": "web"}, {"kubernetes.io/metadata.name": "elsewhere"})
NEIGHBOUR = Pod({"app": "web"})
PROMETHEUS = Pod({"app.kubernetes.io/name": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
OPERATOR = Pod({"app.kubernetes.io/name": "kuberay-operator"}, {"kubernetes.io/metadata.name": "operators"})


def pods(objects: tuple[Object, ...]) -> dict[str, Pod]:
    """The pods of a rendering with the labels that they have, and those that the operator adds."""
    found = {}
    for where, template in pod_templates(objects):
        ports = {each["name"]: each["containerPort"] for each in containers(template)[-1].get("ports", [])}
        labels = template["metadata"]["labels"] | {"ray.io/group": where.partition(" ")[2]}
        found[where.partition(" ")[0]] = Pod(labels, ports=ports)
    return found


def policies(objects: tuple[Object, ...]) -> list[Object]:
    return [each for each in objects if each["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("values", ["", *VALUES])
def test_containers_have_no_rights_that_they_do_not_need(values: str) -> None:
    for where, template in pod_templates(render(values, HUB if not values else ())):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], where
        assert spec["securityContext"]["runAsUser"] > 0, where
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), where
        assert not [each for each in spec["volumes"] if "hostPath" in each], where
        for each in containers(template):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, where
            assert {"cpu", "memory"} <= each["resources"]["requests"].keys(), where
            assert "memory" in each["resources"]["limits"], where


@pytest.mark.parametrize("values", ["", *VALUES])
def test_what_is_written_to_is_a_volume(values: str) -> None:
    """Ray and HAProxy write below /tmp, compilers and caches below the home folder, the object store to /dev/shm."""
    for where, template in pod_templates(render(values)):
        if where in ("redis", "test"):
            continue
        mounts = {each["mountPath"] for each in containers(template)[-1]["volumeMounts"] if not each.get("readOnly")}
        assert {"/tmp", "/home/holdfast", "/dev/shm"} == mounts, where
        assert next(each for each in containers(template)[-1]["env"] if each["name"] == "HOME")["value"] in mounts


def test_only_the_head_of_a_scaling_cluster_has_a_token() -> None:
    for values in ("", "production"):
        objects = render(values)
        accounts = [each for each in objects if each["kind"] == "ServiceAccount"]
        assert all(each["automountServiceAccountToken"] is False for each in accounts)
        for where, template in pod_templates(objects):
            expected = where == "head" and values == "production"
            assert template["spec"]["automountServiceAccountToken"] is expected, where
    assert not [each for each in render() if each["kind"] in ("Role", "ClusterRole", "RoleBinding")]


def test_secrets_stand_in_secrets_only() -> None:
    for each in render("", SECRETS + HUB):
        text = yaml.safe_dump(each)
        assert each["kind"] == "Secret" or "SECRET" not in text, each["metadata"]["name"]
    assert "SECRET" not in yaml.safe_dump(find(render("", SECRETS), "Secret", "-tenants"))  # hashes alone


def test_existing_secrets_are_used_and_none_is_made() -> None:
    settings = ("redis.auth.existingSecret=r", "tenants.existingSecret=t", "tenants.firstKey.enabled=false")
    objects = render("", (*settings, "hub.existingSecret=h", *HUB))
    assert [each for each in objects if each["kind"] == "Secret"] == []
    named = yaml.safe_dump(list(objects))
    assert all(f"secretName: {name}\n" in named for name in ("r", "t"))
    assert "name: h\n" in named


def test_the_hubs_token_is_told_to_what_downloads_and_to_nothing_else() -> None:
    """From the chart's own Secret, or one that is there."""
    for settings, name in ((("hub.token=SECRETTOKEN",), "demo-holdfast-hub"), (("hub.existingSecret=h",), "h")):
        told = {
            (where, container["name"]): each
            for where, pod in pod_templates(render("", settings + HUB))
            for container in containers(pod)
            for each in container.get("env", [])
            if each["name"] == "HF_TOKEN"
        }
        source = {"secretKeyRef": {"name": name, "key": "token"}}
        assert told == {("worker main", "model"): {"name": "HF_TOKEN", "valueFrom": source}}


def test_ray_asks_for_a_token() -> None:
    assert find(render(), "RayService")["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("values", ["", *VALUES])
def test_inner_ports_are_open_to_the_cluster_alone(values: str) -> None:
    objects = render(values)
    known = pods(objects)
    for target in (known["head"], known["worker"], known["router"]):
        for port in (*INNER_PORTS, *METRICS_PORTS):
            for source in (STRANGER, NEIGHBOUR):
                assert not allowed(policies(objects), source, target, port), port
            for source in (known["head"], known["worker"], known["router"]):
                assert allowed(policies(objects), source, target, port), port
        for port in METRICS_PORTS:
            assert allowed(policies(objects), PROMETHEUS, target, port), port
        for port in INNER_PORTS:
            assert not allowed(policies(objects), PROMETHEUS, target, port), port
            assert allowed(policies(objects), OPERATOR, target, port) == (port == 8265 and target is known["head"])


def test_the_api_is_open_to_clients() -> None:
    target = pods(render())["worker"]
    assert allowed(policies(render()), STRANGER, target, API_PORT)
    objects = render("", ("networkPolicy.clients[0].namespaceSelector.matchLabels.gate=yes",))
    assert not allowed(policies(objects), STRANGER, target, API_PORT)
    assert allowed(policies(objects), Pod({}, {"gate": "yes"}), target, API_PORT)
    for source in (pods(objects)["test"], PROMETHEUS, OPERATOR):
        assert allowed(policies(objects), source, target, API_PORT)


def test_redis_is_open_to_ray_alone() -> None:
    objects = render()
    known = pods(objects)
    for source in (STRANGER, NEIGHBOUR, PROMETHEUS, OPERATOR, known["test"]):
        assert not allowed(policies(objects), source, known["redis"], 6379)
    for source in (known["head"], known["worker"], known["router"]):
        assert allowed(policies(objects), source, known["redis"], 6379)


def test_without_policies_everything_is_open() -> None:
    """The evaluation above can tell the difference."""
    objects = render("", ("networkPolicy.enabled=false",))
    assert policies(objects) == []
    assert allowed([], STRANGER, pods(objects)["head"], 8404)


def test_labels_that_the_operator_selects_by_are_left_to_it() -> None:
    """Its Service of the head takes pods whose `app.kubernetes.io/name` is its own value."""
    for where, template in pod_templates(render()):
        if where not in ("redis", "test"):
            assert "app.kubernetes.io/name" not in template["metadata"]["labels"], where


def test_disruption_budgets_hold_back_pods_that_have_no_scale() -> None:
    """A share, or `maxUnavailable`, would need one, and the operator's pods have none."""
    budgets = [each for each in render("production") if each["kind"] == "PodDisruptionBudget"]
    assert [each["spec"]["minAvailable"] for each in budgets] == [1, 1]
    pods = dict(pod_templates(render("production")))
    for budget, (kind, group) in zip(budgets, (("worker", "main"), ("router", "main-routers")), strict=True):
        labels = pods[f"{kind} {group}"]["metadata"]["labels"] | {"ray.io/group": group}
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert [each for each in render() if each["kind"] == "PodDisruptionBudget"] == []  # one worker alone may go


def test_no_engine_or_router_runs_beside_rays_control_plane() -> None:
    head = find(render(), "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in head
    engines, routers = serve_config(render())["applications"][0]["deployments"]
    assert engines["ray_actor_options"]["resources"] == {"model_main": 0.001}
    assert routers["ray_actor_options"]["resources"] == {"router_main": 1}


@pytest.mark.parametrize("values", ["", *VALUES])
def test_engines_alone_see_a_gpu(values: str) -> None:
    """A container that is not told otherwise sees all of a machine's, where its image asks for them."""
    for where, template in pod_templates(render(values, HUB if not values else ())):
        if where in ("redis", "test"):
            continue
        for each in containers(template):
            limits = each["resources"].get("limits", {})
            given = "nvidia.com/gpu" in limits
            told = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in each["env"]
            assert given != told, (where, each["name"])
            assert not given or (where, each["name"]) == ("worker main", "ray-worker")
    autoscaler = find(render("production"), "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in autoscaler["env"]


def test_routers_are_spread_one_a_machine() -> None:
    """As far as there are machines; the pods of the cluster that goes do not count."""
    template = dict(pod_templates(render("production")))["router main-routers"]
    (spread,) = copy.deepcopy(template["spec"]["topologySpreadConstraints"])
    labels = template["metadata"]["labels"] | {"ray.io/group": "main-routers"}
    assert spread.pop("labelSelector")["matchLabels"].items() <= labels.items()
    assert spread == {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "matchLabelKeys": ["ray.io/cluster"],
    }


def test_engines_are_spread_as_values_say() -> None:
    values = ("topologyKey=zone", "maxSkew=2", "whenUnsatisfiable=ScheduleAnyway")
    objects = render("", tuple(f"modelDefaults.worker.topologySpread[0].{each}" for each in values))
    template = dict(pod_templates(objects))["worker main"]
    (spread,) = copy.deepcopy(template["spec"]["topologySpreadConstraints"])
    labels = template["metadata"]["labels"] | {"ray.io/group": "main"}
    assert spread.pop("labelSelector")["matchLabels"].items() <= labels.items()
    told = {"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "ScheduleAnyway"}
    assert spread == told | {"matchLabelKeys": ["ray.io/cluster"]}


def test_the_environment_names_no_machine() -> None:
    values = {
        each.get("value") for _, pod in pod_templates(render()) for c in containers(pod) for each in c.get("env", [])
    }
    assert environment.LOOPBACK not in values
