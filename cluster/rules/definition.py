"""What a rule is. Nothing of the files that Prometheus reads."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    CRITICAL = "critical"  # requests fail, or soon will: now
    WARNING = "warning"  # slower or dearer than it should be: today
    INFO = "info"  # worth knowing when something is looked at


ROLLOUT = 'max by (application) (ray_serve_deployment_status{deployment=~"replicas|router"} == 3)'
"""Applications that are replaced: 3 is Serve's UPDATING (`DeploymentStatus.to_numeric`)."""


@dataclass(frozen=True, slots=True)
class Recording:
    """`name` is level:metric:operation, as Prometheus' own guide has it."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires where `value` has met `condition` for `lasting`. In the texts `$labels` and `$value` are Prometheus'.

    A condition is a comparison and its threshold. `absent` alerts have none: they fire where there is no series that
    `value` selects. While Serve replaces replicas of the same application, those not `in_rollout` keep quiet, as far
    as Ray's metrics are scraped; `HoldfastRolloutStuck` looks after those that never end.
    """

    name: str
    severity: Severity
    value: str
    condition: str
    lasting: str
    summary: str
    description: str
    in_rollout: bool = True

    @property
    def absent(self) -> bool:
        return not self.condition

    @property
    def expression(self) -> str:
        if self.absent:
            return f"absent({self.value})" if self.in_rollout else f"absent({self.value}) unless on () ({ROLLOUT})"
        value = self.value if self.in_rollout else f"({self.value} unless on (application) ({ROLLOUT}))"
        return f"{value} {self.condition}"
