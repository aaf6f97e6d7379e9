"""The YAML that Prometheus reads: `rule_files` outside of Kubernetes, the `spec` of PrometheusRules inside."""

from collections.abc import Mapping
from typing import Any

import yaml

from holdfast.cluster.rules.alerts import GROUPS
from holdfast.cluster.rules.definition import Alert
from holdfast.cluster.rules.recording import RECORDINGS

RUNBOOK = "docs/runbook.md"  # the chart puts its own address of it here
MADE = "# Made by `make chart` from cluster/rules; do not edit.\n"


def files() -> Mapping[str, str]:
    """Text by file name."""
    recorded = [{"record": each.name, "expr": each.expression} for each in RECORDINGS]
    return {
        "recording.yaml": _text([{"name": "holdfast.recording", "rules": recorded}]),
        "alerts.yaml": _text(
            [{"name": f"holdfast.{name}", "rules": [_alert(each) for each in group]} for name, group in GROUPS.items()]
        ),
    }


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasting,
        "labels": {"severity": alert.severity.value},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{RUNBOOK}#{alert.name.lower()}",
        },
    }


def _text(groups: list[dict[str, Any]]) -> str:
    return MADE + yaml.safe_dump({"groups": groups}, sort_keys=False, width=120)
