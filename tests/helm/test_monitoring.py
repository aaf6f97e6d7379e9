"""Dashboards and rules as the chart brings them: unchanged, allowed by the schema, links where they are told."""

import json

from helm_chart import CHART, render
from kubernetes_schemas import problems

from helm.build.dashboards import BOARDS
from helm.build.rules import ALERTS

ON = ("monitoring.rules.enabled=true", "monitoring.dashboards.enabled=true")


def test_dashboards_arrive_as_they_are() -> None:
    maps = {each["metadata"]["name"]: each for each in render("", ON) if each["kind"] == "ConfigMap"}
    for board in BOARDS:
        found = maps[f"demo-holdfast-dashboard-{board.name}"]
        file = f"{board.name}.json"
        assert json.loads(found["data"][file]) == json.loads((CHART / "files" / "dashboards" / file).read_text())
        assert problems(found) == []


def test_alerts_link_to_the_runbook_that_is_named() -> None:
    address = "https://wiki.example.com/holdfast"
    rules = [
        each for each in render("", (*ON, f"monitoring.rules.runbook={address}")) if each["kind"] == "PrometheusRule"
    ]
    assert [problem for each in rules for problem in problems(each)] == []
    alerts = [rule for each in rules for group in each["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert {each["alert"]: each["annotations"]["runbook_url"] for each in alerts} == {
        each.name: f"{address}#{each.name.lower()}" for each in ALERTS
    }


def test_numbers_of_an_alert_may_be_others() -> None:
    own = (
        "{HoldfastFirstTokenSlow: {threshold: 2.5},"
        " HoldfastMetricsMissing: {for: 15m}, HoldfastNoReplica: {threshold: 2, for: 3m}}"
    )
    before, after = (
        {
            rule["alert"]: rule
            for each in render("", ON, more)
            if each["kind"] == "PrometheusRule"
            for group in each["spec"]["groups"]
            for rule in group["rules"]
            if "alert" in rule
        }
        for more in ("", f"monitoring: {{rules: {{alerts: {own}}}}}")
    )
    name = "HoldfastFirstTokenSlow"
    assert before[name]["expr"].endswith(" > 5")
    assert after[name] == before[name] | {"expr": before[name]["expr"].removesuffix("5") + "2.5"}
    assert after["HoldfastMetricsMissing"] == before["HoldfastMetricsMissing"] | {"for": "15m"}
    assert after["HoldfastNoReplica"]["expr"] == before["HoldfastNoReplica"]["expr"].removesuffix("1") + "2"
    assert after["HoldfastNoReplica"]["for"] == "3m"
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"HoldfastFirstTokenSlow", "HoldfastMetricsMissing", "HoldfastNoReplica"}


def test_braces_of_prometheus_are_left_alone() -> None:
    rules = [each for each in render("", ON) if each["kind"] == "PrometheusRule"]
    assert "{{ $labels.model }}" in json.dumps(rules)
