"""Retention policies for tests, by the names that a configuration gives them."""

from math import inf

from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.retention.policy import Conditions, Continuum, Pause, RetentionPolicy


class Keep(RetentionPolicy):
    """Every program's cells for `retention.most_s`."""

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return inf


class QuickContinuum(Continuum):
    """Knows a tool after three calls."""

    TRUSTED = 3


KEEP = f"{__name__}:{Keep.__name__}"
QUICK_CONTINUUM = f"{__name__}:{QuickContinuum.__name__}"
