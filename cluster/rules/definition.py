"""What a rule is. Nothing of the files that Prometheus reads."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    CRITICAL = "critical"  # requests fail, or soon will: now
    WARNING = "warning"  # slower or dearer than it should be: today
    INFO = "info"  # worth knowing when something is looked at


def rollout(window: str) -> str:
    """Applications that were replaced in the last `window`: 3 is Serve's UPDATING (`DeploymentStatus.to_numeric`)."""
    updating = 'ray_serve_deployment_status{deployment=~"replicas|router"} == bool 3'
    return f"max by (application) (max_over_time(({updating})[{window}:1m])) > 0"


@dataclass(frozen=True, slots=True)
class Recording:
    """`name` is level:metric:operation, as Prometheus' own guide has it."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires where `value` has met `condition` for `lasting`. In the texts `$labels` and `$value` are Prometheus'.

    A condition is a comparison and its threshold. `absent` alerts have none: they fire where there is no series that
    `value` selects. With `after_rollout` an alert keeps quiet while Serve replaces replicas of the same application and
    so long after, as far as Ray's metrics are scraped; `HoldfastRolloutStuck` looks after those that never end.
    """

    name: str
    severity: Severity
    value: str
    condition: str
    lasting: str
    summary: str
    description: str
    after_rollout: str = ""

    @property
    def absent(self) -> bool:
        return not self.condition

    @property
    def expression(self) -> str:
        value = f"absent({self.value})" if self.absent else self.value
        if self.after_rollout:
            labels = "" if self.absent else "application"
            value = f"({value} unless on ({labels}) ({rollout(self.after_rollout)}))"
        return f"{value} {self.condition}".rstrip()
