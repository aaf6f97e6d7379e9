"""What an upgrade takes over from the cluster that is there, as `helm upgrade` finds it: a server stands in for it."""

from typing import Any

import pytest
from helm_chart import CHART, find, fixed, helm, parsed, serve_config
from kubernetes_api import serving

SCALED = ("modelDefaults.autoscaling.enabled=true", "modelDefaults.autoscaling.maxReplicas=8")


def cluster(name: str, groups: dict[str, int], release: str = "demo-holdfast") -> dict[str, Any]:
    """A RayCluster as the operator makes it for a RayService; the autoscaler has set the replicas of its groups."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": name,
            "namespace": "agents",
            "labels": {"ray.io/originated-from-cr-name": release, "ray.io/originated-from-crd": "RayService"},
        },
        "spec": {"workerGroupSpecs": [{"groupName": group, "replicas": n} for group, n in groups.items()]},
    }


MAIN = cluster("a", {"main": 5, "main-routers": 7})
# By what decides: the clusters that are there, the settings, and with how many engines the next one begins (the pods,
# and the replicas that Serve is told, if any).
CASES: dict[str, tuple[list[dict[str, Any]], tuple[str, ...], tuple[int, int | None]]] = {
    "the engines that run": ([MAIN], SCALED, (5, 5)),
    "the larger of two clusters, during another upgrade": (
        [cluster("a", {"main": 6}), cluster("b", {"main": 1})],
        SCALED,
        (6, 6),
    ),
    "the most that may be": ([cluster("a", {"main": 20})], SCALED, (8, 8)),
    "the fewest that may be": (
        [cluster("a", {"main": 1})],
        (*SCALED, "modelDefaults.autoscaling.minReplicas=3"),
        (3, 3),
    ),
    "no cluster": ([], SCALED, (1, None)),
    "a cluster of another release": ([cluster("a", {"main": 5}, release="another")], SCALED, (1, None)),
    "engines of another model": ([cluster("a", {"other": 5})], SCALED, (1, None)),
    "a value": ([MAIN], (*SCALED, "modelDefaults.autoscaling.initialReplicas=2"), (2, 2)),
    "a number that is not scaled": ([MAIN], ("config.replicas.count=3",), (3, None)),
}


@pytest.mark.parametrize(("clusters", "settings", "begins"), CASES.values(), ids=CASES)
def test_a_new_cluster_begins_with_as_many_engines(
    clusters: list[dict[str, Any]], settings: tuple[str, ...], begins: tuple[int, int | None]
) -> None:
    sets = [f"--set={each}" for each in (*fixed(""), *settings)]
    with serving(clusters) as address:
        where = ("--dry-run=server", f"--kube-apiserver={address}", "--namespace=agents")
        done = helm("template", "demo", str(CHART), *where, *sets)
    assert done.status == 0, done.errors
    objects = tuple(parsed(done.output))
    (application,) = serve_config(objects)["applications"]
    pods = find(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"]
    scaling = application["deployments"][0].get("autoscaling_config", {})
    assert (pods, scaling.get("initial_replicas")) == begins
