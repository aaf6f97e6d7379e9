"""Which engine is stopped when there is one too many: the one with the least to lose.

Serve asks nobody. Of those that run it takes one on a machine with few replicas, and of these a new one; what an engine
keeps for its programs is nothing that it knows. There is one place where it chooses, in its controller, and that is
changed here, once and for whichever deployments `LOSSES` knows. No other file uses a private name of Serve's scheduler;
`tests/cluster/test_scale_down.py` checks that they are still there.
"""

from collections.abc import Mapping, Set
from functools import wraps
from typing import Any, TypeAlias

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import DeploymentScheduler

Loss: TypeAlias = tuple[float, float]  # cells kept for paused programs; requests in hand, which may end before it goes

LOSSES: dict[DeploymentID, Mapping[ReplicaID, Loss]] = {}
"""What goes with each replica of a deployment, as of the last look; one that has not said anything loses nothing."""


def install() -> None:
    """Make Serve's controller, which this process must be, stop replicas by `LOSSES`. A second call does nothing."""
    if DeploymentScheduler._get_replicas_to_stop is not _to_stop:
        DeploymentScheduler._get_replicas_to_stop = _to_stop


_serves_own = DeploymentScheduler._get_replicas_to_stop


@wraps(_serves_own)
def _to_stop(scheduler: Any, deployment: DeploymentID, most: int, *gangs: Any, **more: Any) -> Set[ReplicaID]:
    chosen: Set[ReplicaID] = _serves_own(scheduler, deployment, most, *gangs, **more)
    losses = LOSSES.get(deployment)
    if losses is None:
        return chosen
    running: dict[ReplicaID, str] = scheduler._running_replicas[deployment]  # oldest first
    going = least(list(reversed(running)), losses, len(chosen & running.keys()))
    return (chosen - running.keys()) | set(going)


def least(replicas: list[ReplicaID], losses: Mapping[ReplicaID, Loss], count: int) -> list[ReplicaID]:
    """So many of `replicas`, those that lose least first; of equal ones whichever stands first."""
    return sorted(replicas, key=lambda replica: losses.get(replica, (0.0, 0.0)))[:count]
