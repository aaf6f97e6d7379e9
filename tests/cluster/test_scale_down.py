"""That Serve's scheduler still chooses where ours is put, and what comes of it: against the scheduler itself."""

import inspect
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import DeploymentScheduler

from holdfast.cluster import scale_down

DEPLOYMENT = DeploymentID(name="replicas", app_name="a")
OLD, MIDDLE, NEW, STARTING = (ReplicaID(name, DEPLOYMENT) for name in ("old", "middle", "new", "starting"))


def scheduler(nodes: dict[ReplicaID, str], starting: tuple[ReplicaID, ...] = ()) -> Any:
    """Serve's own, with replicas on nodes, the oldest first, and others that are not up yet."""
    made = DeploymentScheduler.__new__(DeploymentScheduler)
    running: dict[DeploymentID, dict[ReplicaID, str]] = defaultdict(dict)
    running[DEPLOYMENT] |= nodes
    made._running_replicas = running
    made._pending_replicas = defaultdict(dict, {DEPLOYMENT: dict.fromkeys(starting)})
    made._launching_replicas = defaultdict(dict)
    made._recovering_replicas = defaultdict(set)
    made._deployments = {DEPLOYMENT: SimpleNamespace(label_selector=None, bundle_label_selector=None)}
    made._cluster_node_info_cache = SimpleNamespace(get_node_labels=lambda node: {})
    made._head_node_id = "head"
    return made


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeploymentScheduler, "_get_replicas_to_stop", scale_down._serves_own)
    monkeypatch.setattr(scale_down, "LOSSES", {})
    scale_down.install()
    scale_down.install()


def test_serve_takes_the_newest_where_it_knows_nothing_else() -> None:
    """What is changed here; a deployment of somebody else's still goes by it."""
    assert scheduler({OLD: "n", MIDDLE: "n", NEW: "n"})._get_replicas_to_stop(DEPLOYMENT, 1) == {NEW}


def test_the_one_with_the_least_to_lose_goes() -> None:
    scale_down.LOSSES[DEPLOYMENT] = {OLD: (50.0, 9.0), MIDDLE: (10.0, 9.0), NEW: (900.0, 0.0)}
    for nodes in (
        {OLD: "n", MIDDLE: "n", NEW: "n"},
        {OLD: "a", MIDDLE: "b", NEW: "c"},
        {OLD: "a", MIDDLE: "b", NEW: "b"},
    ):
        assert scheduler(nodes)._get_replicas_to_stop(DEPLOYMENT, 1) == {MIDDLE}
        assert scheduler(nodes)._get_replicas_to_stop(DEPLOYMENT, 2) == {MIDDLE, OLD}


def test_of_those_that_keep_alike_the_less_busy_one_goes_and_then_the_newer() -> None:
    scale_down.LOSSES[DEPLOYMENT] = {OLD: (10.0, 1.0), MIDDLE: (10.0, 2.0), NEW: (10.0, 1.0)}
    nodes = {OLD: "n", MIDDLE: "n", NEW: "n"}
    assert scheduler(nodes)._get_replicas_to_stop(DEPLOYMENT, 1) == {NEW}
    assert scheduler(nodes)._get_replicas_to_stop(DEPLOYMENT, 2) == {NEW, OLD}


def test_what_does_not_run_yet_goes_before_all() -> None:
    scale_down.LOSSES[DEPLOYMENT] = {OLD: (0.0, 0.0), NEW: (5.0, 0.0)}
    made = scheduler({OLD: "a", NEW: "b"}, starting=(STARTING,))
    assert made._get_replicas_to_stop(DEPLOYMENT, 1) == {STARTING}
    assert made._get_replicas_to_stop(DEPLOYMENT, 2) == {STARTING, OLD}


def test_serve_asks_in_the_way_that_is_answered() -> None:
    source = inspect.getsource(DeploymentScheduler.schedule)
    assert "self._get_replicas_to_stop(" in source
    assert list(inspect.signature(scale_down._serves_own).parameters)[:3] == [
        "self",
        "deployment_id",
        "max_num_to_stop",
    ]
