"""Continuum's simplified retention (section 4.5): the same time for all quick tools."""

from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.retention.policy import Conditions, Pause, RetentionPolicy

TTL_S = 6.0  # Sutradhara's baseline with a time to live


class Fixed(RetentionPolicy):
    """Keeps cells for `limit_s` seconds, unless the mean interval of the tools is longer. Unknown tools are quick."""

    def __init__(self, limit_s: float = 2.0) -> None:
        self._limit_s = limit_s

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return self._limit_s if latency.of(pause.tenant, pause.tools).mean <= self._limit_s else 0.0


class SutradharaTtl(Fixed):
    """The time to live of Sutradhara's baseline."""

    def __init__(self) -> None:
        super().__init__(TTL_S)


SUTRADHARA_TTL = f"{__name__}:{SutradharaTtl.__name__}"
