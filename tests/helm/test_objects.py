"""Every object that the chart can make is valid, by the schemas of whoever will read it."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, VALUES, Object, containers, find, helm, parsed, pod_templates, render, serve_config
from kubernetes_schemas import VERSIONS, problems

# Every switch and choice, in a few renderings, for each costs half a second.
DIGEST = f"sha256:{'0' * 64}"
MATRIX = {
    "everything on": """
ingress:
  enabled: true
  className: nginx
  hosts: [a.example.com, b.example.com]
  tls: [{secretName: tls, hosts: [a.example.com]}]
httpRoute: {enabled: true, parentRefs: [{name: public}], hostnames: [a.example.com]}
networkPolicy:
  egress: {enabled: true, allow: [{ports: [{port: 443}]}]}
  clients: [{ipBlock: {cidr: 10.0.0.0/8}}]
monitoring:
  podMonitor: {enabled: true, labels: {release: prometheus}}
  rules: {enabled: true}
  dashboards: {enabled: true}
image: {pullSecrets: [registry], digest: DIGEST}
hub: {token: hf_x}
serviceAccounts: {worker: {annotations: {role: x}}}
modelDefaults:
  router: &pod
    volumes: [{name: cache, emptyDir: {sizeLimit: 1Gi}}]
    volumeMounts: &mounts [{name: cache, mountPath: /cache}]
    initContainers: [{name: first, image: docker.io/library/busybox:1.37, volumeMounts: *mounts}]
    sidecars: [{name: beside, image: docker.io/library/busybox:1.37, volumeMounts: *mounts}]
    env: [{name: A, value: b}]
    tolerations: [{key: own, operator: Exists}]
  worker: {<<: *pod, runtimeClassName: nvidia, priorityClassName: high, podAnnotations: {a: b}, podLabels: {a: b}}
  routers: 2
  autoscaling: {enabled: true}
  source: {type: hub, hub: {repository: org/model, revision: abc, exclude: ['*.pth']}}
  volume: {type: pvc, storageClass: fast}
head: {<<: *pod, minAvailable: 1}
""",
    "everything off": """
redis: {enabled: false, external: {address: 'rediss://store:6380', username: holdfast}}
networkPolicy: {enabled: false}
gcsFaultTolerance: false
tenants: {firstKey: {enabled: false}, existingSecret: tenants}
""",
    "two models": """
models:
  main: {config: {replicas: {count: 3}}}
  second:
    routePrefix: /other
    gpus: 0
    autoscaling: {enabled: true}
    source:
      type: init
      init: {image: 'docker.io/amazon/aws-cli:2.31.0', command: [sh, -c, x], envFromSecrets: [s3]}
upgrade: {strategy: NewClusterWithIncrementalUpgrade, gatewayClassName: istio}
redis: {persistence: {enabled: false}}
fullnameOverride: a-name-that-is-really-much-too-long-for-the-operator
""",
    "a model in an image": """
modelDefaults: {source: {type: image, path: weights, image: {reference: 'registry.example.com/models/qwen@DIGEST'}}}
""",
    "a copy on the machine's own disk": """
modelDefaults:
  source: {type: hub, hub: {repository: org/model}}
  volume: {type: hostPath, hostPath: /mnt/nvme/models}
""",
}
EXTRA = """
extraObjects:
  - {apiVersion: v1, kind: ConfigMap, metadata: {name: plain}}
  - |
    apiVersion: v1
    kind: ConfigMap
    metadata: {name: '{{ .Release.Name }}-text'}
"""
NOTES = """
extraObjects:
  - |
    apiVersion: v1
    kind: ConfigMap
    metadata: {name: demo-holdfast-notes}
    data:
      notes: {{ include (print .Template.BasePath "/NOTES.txt") . | toJson }}
"""
EACH_CASE = pytest.mark.parametrize("case", ["defaults", *VALUES, *MATRIX])


def rendered(case: str) -> tuple[Object, ...]:
    """The objects with the default values, those of a file, or those of `MATRIX`."""
    if case in MATRIX:
        without_password = ("redis.auth.password=",) if case == "everything off" else ()
        return render("", without_password, MATRIX[case].replace("DIGEST", DIGEST))
    return render("" if case == "defaults" else case)


@EACH_CASE
def test_every_object_is_valid(case: str) -> None:
    wrong = {
        f"{version} {each['kind']} {each['metadata']['name']}": found
        for each in rendered(case)
        for version in VERSIONS
        if (found := problems(each, version))
    }
    assert wrong == {}


@EACH_CASE
def test_every_pod_is_valid_for_kubernetes_itself(case: str) -> None:
    """The operator's schema knows fewer rules for pods than Kubernetes does."""
    for where, pod in pod_templates(rendered(case)):
        assert problems({"apiVersion": "v1", "kind": "PodTemplate", "template": pod}) == [], where
        mounted = {mount["name"] for each in containers(pod) for mount in each["volumeMounts"]}
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        assert mounted - volumes <= {"data"}, where  # the claim of the StatefulSet
        assert volumes <= mounted, where


@EACH_CASE
def test_names_are_unique_and_short_enough(case: str) -> None:
    objects = rendered(case)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    assert [name for _, name in names if len(name) > 63] == []
    assert len(find(objects, "RayService")["metadata"]["name"]) <= 35  # the operator makes longer ones from it


def test_what_is_switched_on_is_there_and_what_is_off_is_not() -> None:
    on = {each["kind"] for each in rendered("everything on")}
    off = {each["kind"] for each in rendered("everything off")}
    switched = {"Ingress", "HTTPRoute", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "StatefulSet", "Secret"}
    switched |= {"PersistentVolumeClaim", "Service", "Pod"}
    assert switched <= on
    assert off == {"RayService", "ConfigMap", "ServiceAccount"}


def test_what_values_add_to_a_pod_is_in_each_of_rays() -> None:
    """And nothing of it in place of what is there: the Ray container stays the first, the downloads' volume its own."""
    plain = dict(
        pod_templates(render("", ("modelDefaults.source.type=hub", "modelDefaults.source.hub.repository=a/b")))
    )
    for where, pod in pod_templates(rendered("everything on")):
        if where in ("redis", "test"):
            continue
        spec, before = pod["spec"], plain[where]["spec"]
        ray, beside = spec["containers"]
        assert (ray["name"], beside["name"]) == (before["containers"][0]["name"], "beside"), where
        assert spec["initContainers"][0]["name"] == "first", where
        assert [each["name"] for each in spec["initContainers"][1:]] == (["model"] if where == "worker main" else []), (
            where
        )
        assert {"name": "A", "value": "b"} in ray["env"], where
        assert {"name": "cache", "mountPath": "/cache"} in ray["volumeMounts"], where
        assert {"key": "own", "operator": "Exists"} in spec["tolerations"], where
        assert {each["name"] for each in before["volumes"]} | {"cache"} == {each["name"] for each in spec["volumes"]}, (
            where
        )


def test_extra_objects_are_rendered() -> None:
    names = {each["metadata"]["name"] for each in render("", (), EXTRA)}
    assert {"plain", "demo-text"} <= names


def test_where_a_model_comes_from() -> None:
    """Engines alone have it, and may not write to it; what downloads it may."""

    def pods(objects: tuple[Object, ...]) -> tuple[Any, Any, str]:
        found = dict(pod_templates(objects))
        engine = serve_config(objects)["applications"][0]["args"]["config"]["engine"]
        assert not [each for each in found["router main-routers"]["spec"]["volumes"] if each["name"] == "models"]
        spec = found["worker main"]["spec"]
        mount = next(each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "models")
        assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}
        return next(each for each in spec["volumes"] if each["name"] == "models"), spec, engine["model"]

    image, spec, model = pods(rendered("a model in an image"))
    reference = f"registry.example.com/models/qwen@{DIGEST}"
    assert image == {"name": "models", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
    assert (model, "initContainers" in spec) == ("/models/weights", False)
    disk, spec, model = pods(rendered("a copy on the machine's own disk"))
    assert disk == {"name": "models", "hostPath": {"path": "/mnt/nvme/models", "type": "Directory"}}
    assert spec["initContainers"][0]["command"][:5] == ["hf", "download", "org/model", "--local-dir", model]
    more = "modelDefaults: {source: {type: pvc, path: a/b}, volume: {type: pvc, existingClaim: c}}"
    claim, spec, model = pods(render("", (), more))
    assert claim["persistentVolumeClaim"] == {"claimName": "c", "readOnly": True}
    assert (model, "initContainers" in spec) == ("/models/a/b", False)


def test_rules_and_dashboards_are_the_files_of_their_folders(tmp_path: Path) -> None:
    """Which may be none. Braces in them are Prometheus' and Grafana's, not helm's."""
    switches = ("monitoring.rules.enabled=true", "monitoring.dashboards.enabled=true")
    files = sum(1 for _ in (CHART / "files").glob("rules/*.yaml")) + sum(
        1 for _ in (CHART / "files").glob("dashboards/*.json")
    )
    assert len(render("", switches)) == len(render()) + files
    chart = shutil.copytree(CHART, tmp_path / "holdfast")
    rule = {"alert": "A", "expr": "up == 0", "annotations": {"summary": "{{ $labels.pod }}"}}
    (chart / "files" / "rules" / "own.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    (chart / "files" / "dashboards" / "own.json").write_text('{"legend": "{{pod}}"}')
    done = helm("template", "demo", str(chart), *(f"--set={each}" for each in switches))
    objects = {each["metadata"]["name"]: each for each in parsed(done.output)}
    rules, dashboard = objects["demo-holdfast-own"], objects["demo-holdfast-dashboard-own"]
    assert problems(rules) == problems(dashboard) == []
    assert rules["spec"]["groups"][0]["rules"] == [rule]
    assert json.loads(dashboard["data"]["own.json"]) == {"legend": "{{pod}}"}
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize("values", ["", *VALUES])
def test_helm_finds_nothing_to_complain_of(values: str) -> None:
    files = [f"--values={CHART / f'values-{values}.yaml'}"] if values else []
    done = helm("lint", "--strict", str(CHART), *files)
    assert done.status == 0, done.output + done.errors


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("RayService", ("spec",)),
        ("RayService", ("spec", "rayClusterConfig", "headGroupSpec")),
        ("RayService", ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0)),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "securityContext")),
        ("NetworkPolicy", ("spec", "ingress", 0)),
        ("HTTPRoute", ("spec", "rules", 0)),
        ("PodMonitor", ("spec",)),
    ],
)
def test_a_misspelt_field_is_found(kind: str, path: tuple[Any, ...]) -> None:
    """The checks above can fail."""
    obj = copy.deepcopy(next(each for each in rendered("everything on") if each["kind"] == kind))
    inner = obj
    for step in path:
        inner = inner[step]
    inner["misspelt"] = True
    assert any("misspelt" in problem for problem in problems(obj))


@pytest.mark.parametrize("values", ["", *VALUES])
def test_the_notes_say_what_to_type(values: str) -> None:
    """`helm template` does not print them, so an extra object holds them."""
    notes = find(render(values, (), NOTES), "ConfigMap", "-notes")["data"]["notes"]
    assert "kubectl -n agents wait rayservice/demo-holdfast" in notes
    assert ("helm -n agents test demo" in notes) == (values != "production")
    assert "http://127.0.0.1:8000/v1/models" in notes
