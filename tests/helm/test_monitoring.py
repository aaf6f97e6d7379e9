"""Dashboards and rules as the chart brings them: unchanged, allowed by the schema, links where they are told."""

from helm_chart import render
from kubernetes_schemas import problems

from helm.build.rules import ALERTS

ON = ("monitoring.rules.enabled=true", "monitoring.dashboards.enabled=true")


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
