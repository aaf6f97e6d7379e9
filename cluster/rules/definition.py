"""What a rule is. Nothing of the files that Prometheus reads."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    CRITICAL = "critical"  # requests fail, or soon will: now
    WARNING = "warning"  # slower or dearer than it should be: today
    INFO = "info"  # worth knowing when something is looked at


@dataclass(frozen=True, slots=True)
class Recording:
    """`name` is level:metric:operation, as Prometheus' own guide has it."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires where `value` has met `condition` for `lasting`. In the texts `$labels` and `$value` are Prometheus'.

    `absent` alerts have no condition: they fire where `value` has no series at all.
    """

    name: str
    severity: Severity
    value: str
    condition: str
    lasting: str
    summary: str
    description: str

    @property
    def absent(self) -> bool:
        return not self.condition

    @property
    def expression(self) -> str:
        return f"absent({self.value})" if self.absent else f"{self.value} {self.condition}"
