"""Who may connect to whom under a set of NetworkPolicies, as Kubernetes reads them. Ingress only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pod:
    """A pod by its labels and those of its namespace; `ports` are the names that its container gives to ports."""

    labels: dict[str, str]
    namespace: dict[str, str] = field(default_factory=lambda: {"kubernetes.io/metadata.name": "agents"})
    ports: dict[str, int] = field(default_factory=dict)


def allowed(policies: Sequence[dict[str, Any]], source: Pod, target: Pod, port: int) -> bool:
    """Whether `source` may open a TCP connection to `port` of `target`. No policy for a pod: all may."""
    about = [
        each["spec"]
        for each in policies
        if "Ingress" in each["spec"]["policyTypes"] and selects(each["spec"]["podSelector"], target.labels)
    ]
    rules = [rule for spec in about for rule in spec.get("ingress", [])]
    return not about or any(_from(rule, source, target) and _port(rule, target, port) for rule in rules)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector takes something with `labels`."""
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True


def _from(rule: dict[str, Any], source: Pod, target: Pod) -> bool:
    return "from" not in rule or any(_peer(peer, source, target) for peer in rule["from"])


def _peer(peer: dict[str, Any], source: Pod, target: Pod) -> bool:
    if "namespaceSelector" in peer:
        near = selects(peer["namespaceSelector"], source.namespace)
    else:
        near = source.namespace == target.namespace
    return near and selects(peer.get("podSelector", {}), source.labels)


def _port(rule: dict[str, Any], target: Pod, port: int) -> bool:
    return "ports" not in rule or port in {target.ports.get(each["port"], each["port"]) for each in rule["ports"]}
