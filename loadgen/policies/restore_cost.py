"""The classic rule for an unknown pause: keep the cells as long as restoring them takes."""

from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.retention.policy import Conditions, Pause, RetentionPolicy


class RestoreTime(RetentionPolicy):
    """Costs at most twice as much as knowing the length of the pause beforehand would."""

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return conditions.restore.seconds(pause.cells)
