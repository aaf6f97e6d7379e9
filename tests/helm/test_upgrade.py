"""What an upgrade takes over from the cluster that is there, as `helm upgrade` finds it: a server stands in for it."""

from typing import Any

import pytest
import yaml
from helm_chart import CHART, fixed, helm
from kubernetes_api import serving

SCALED = ("modelDefaults.autoscaling.enabled=true", "modelDefaults.autoscaling.maxReplicas=8")


def cluster(
    name: str, groups: dict[str, int], release: str = "demo-holdfast", namespace: str = "agents"
) -> dict[str, Any]:
    """A RayCluster as the operator makes it for a RayService; the autoscaler has set the replicas of its groups."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"ray.io/originated-from-cr-name": release, "ray.io/originated-from-crd": "RayService"},
        },
        "spec": {"workerGroupSpecs": [{"groupName": group, "replicas": n} for group, n in groups.items()]},
    }


def begins_with(*clusters: dict[str, Any], settings: tuple[str, ...] = SCALED) -> tuple[int, int | None]:
    """Engines that the rendered cluster begins with: pods, and replicas as Serve is told."""
    sets = [f"--set={each}" for each in (*fixed(""), *settings)]
    with serving(clusters) as address:
        where = ("--dry-run=server", f"--kube-apiserver={address}", "--namespace=agents")
        done = helm("template", "demo", str(CHART), *where, *sets)
    assert done.status == 0, done.errors
    service = next(each for each in yaml.safe_load_all(done.output) if each and each["kind"] == "RayService")["spec"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    engines = application["deployments"][0]
    return (
        service["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"],
        engines.get("autoscaling_config", {}).get("initial_replicas"),
    )


def test_a_new_cluster_begins_with_the_engines_that_run() -> None:
    assert begins_with(cluster("a", {"main": 5, "main-routers": 7})) == (5, 5)


def test_of_two_clusters_the_larger_counts() -> None:
    """During another upgrade, where the second one is still coming up."""
    assert begins_with(cluster("a", {"main": 6}), cluster("b", {"main": 1})) == (6, 6)


def test_what_the_values_allow_is_kept_to() -> None:
    assert begins_with(cluster("a", {"main": 20})) == (8, 8)
    assert begins_with(cluster("a", {"main": 1}), settings=(*SCALED, "modelDefaults.autoscaling.minReplicas=3")) == (
        3,
        3,
    )


@pytest.mark.parametrize(
    "clusters",
    [
        [],
        [cluster("a", {"main": 5}, release="another")],
        [cluster("a", {"other": 5})],
    ],
)
def test_without_a_cluster_serve_begins_with_the_fewest(clusters: list[dict[str, Any]]) -> None:
    assert begins_with(*clusters) == (1, None)


def test_a_value_is_above_what_is_found() -> None:
    settings = (*SCALED, "modelDefaults.autoscaling.initialReplicas=2")
    assert begins_with(cluster("a", {"main": 5}), settings=settings) == (2, 2)


def test_what_is_not_scaled_has_its_own_number() -> None:
    assert begins_with(cluster("a", {"main": 5}), settings=("config.replicas.count=3",)) == (3, None)
