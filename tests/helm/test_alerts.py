"""When alerts fire, told by promtool on made-up series: not before, then, and with what they say."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_server import found

from helm.build.rules import ALERTS, RUNBOOK, Alert, files


@dataclass(frozen=True)
class Case:
    """When an alert is quiet, when it fires, with which labels, and the value as its text has it."""

    quiet: str
    fires: str
    labels: Mapping[str, str] = field(default_factory=dict)
    shown: str = ""


# By alert: the case, and series in promtool's notation, a value a minute.
CASES = """
HoldfastMetricsMissing:
  case: {quiet: 4m, fires: 6m}
HoldfastNoReplica:
  case: {quiet: 9m, fires: 12m, labels: {job: h, router: i}}
  'holdfast_replicas{job="h", router="i"}': "2x9 0x20"
HoldfastReplicasLost:
  case: {quiet: 9m, fires: 20m, labels: {job: h}, shown: "3"}
  'holdfast_replicas_lost_total{job="h", router="i"}': "0x9 3x20"
HoldfastErrorBudgetBurnsFast:
  case: {quiet: 66m, fires: 130m, labels: {job: h, model: m}, shown: "10%"}
  'holdfast_requests_total{job="h", model="m", outcome="completed"}': "0+90x200"
  'holdfast_requests_total{job="h", model="m", outcome="failed"}': "0x60 0+10x140"
HoldfastErrorBudgetBurnsSlowly:
  case: {quiet: 70m, fires: 450m, labels: {job: h, model: m}, shown: "1%"}
  'holdfast_requests_total{job="h", model="m", outcome="completed"}': "0+99x500"
  'holdfast_requests_total{job="h", model="m", outcome="failed"}': "0x60 0+1x440"
HoldfastFirstTokenBudgetBurnsFast:
  case: {quiet: 66m, fires: 130m, labels: {job: h, model: m}, shown: "90%"}
  'holdfast_time_to_first_token_seconds_bucket{job="h", model="m", le="5.0"}': "0+100x60 6000+10x140"
  'holdfast_time_to_first_token_seconds_count{job="h", model="m"}': "0+100x200"
HoldfastFirstTokenBudgetBurnsSlowly:
  case: {quiet: 70m, fires: 450m, labels: {job: h, model: m}, shown: "50%"}
  'holdfast_time_to_first_token_seconds_bucket{job="h", model="m", le="5.0"}': "0+100x60 6000+50x440"
  'holdfast_time_to_first_token_seconds_count{job="h", model="m"}': "0+100x500"
HoldfastReplicaSilent:
  case: {quiet: 4m, fires: 6m, labels: {job: h}, shown: "1"}
  'holdfast_replicas{job="h", router="i"}': "2x40"
  'holdfast_sequences_running{job="h", model="m", replica="r"}': "1x40"
HoldfastKeysRefused:
  case: {quiet: 10m, fires: 25m, labels: {job: h}, shown: "2"}
  'holdfast_request_errors_total{job="h", reason="invalid_api_key"}': "0x10 0+120x30"
HoldfastOverloaded:
  case: {quiet: 10m, fires: 30m, labels: {job: h}, shown: "5%"}
  'holdfast_requests_total{job="h", model="m", outcome="rejected"}': "0+100x40"
  'holdfast_request_errors_total{job="h", reason="overloaded"}': "0x10 0+5x30"
HoldfastEngineHangs:
  case: {quiet: 10m, fires: 16m, labels: {job: h, model: m, replica: r}}
  'holdfast_engine_steps_total{job="h", model="m", replica="r"}': "0+60x10 600x20"
  'holdfast_sequences_running{job="h", model="m", replica="r"}': "3x30"
HoldfastStepsFailing:
  case: {quiet: 9m, fires: 10m, labels: {job: h, model: m, replica: r}, shown: "1"}
  'holdfast_engine_steps_failed_total{job="h", model="m", replica="r"}': "0x9 1x5"
HoldfastPinsMissed:
  case: {quiet: 20m, fires: 70m, labels: {job: h, model: m}, shown: "75%"}
  'holdfast_pin_hits_total{job="h", model="m"}': "0+1x80"
  'holdfast_pin_misses_total{job="h", model="m"}': "0x10 0+3x70"
HoldfastBubblesLong:
  case: {quiet: 10m, fires: 30m, labels: {job: h, model: m}, shown: "7.5s"}
  'holdfast_bubble_seconds_bucket{job="h", model="m", le="5.0"}': "0x5 0+9x40"
  'holdfast_bubble_seconds_bucket{job="h", model="m", le="10.0"}': "0x5 0+10x40"
  'holdfast_bubble_seconds_bucket{job="h", model="m", le="+Inf"}': "0x5 0+10x40"
HoldfastRedisAway:
  case: {quiet: 9m, fires: 12m, labels: {job: h}}
  'holdfast_store_degraded{job="h", router="i"}': "0x9 1x9"
HoldfastRedisMemoryFull:
  case: {quiet: 15m, fires: 25m, labels: {job: h}, shown: "95%"}
  'holdfast_redis_memory_bytes{job="h", router="i"}': "50x9 95x30"
  'holdfast_redis_memory_limit_bytes{job="h", router="i"}': "100x40"
HoldfastReplicasMissing:
  case: {quiet: 9m, fires: 11m, labels: {job: ray, application: a, deployment: d}, shown: "1"}
  'ray_serve_autoscaling_target_replicas{job="ray", application="a", deployment="d"}': "2x40"
  'ray_serve_deployment_replica_healthy{job="ray", application="a", deployment="d", replica="r"}': "1x40"
HoldfastAutoscalerAtMaximum:
  case: {quiet: 14m, fires: 16m, labels: {job: ray, application: a, deployment: d}, shown: "2"}
  'ray_serve_autoscaling_desired_replicas{job="ray", application="a", deployment="d"}': "6x40"
  'ray_serve_autoscaling_target_replicas{job="ray", application="a", deployment="d"}': "4x40"
HoldfastRolloutStuck:
  case: {quiet: 40m, fires: 42m, labels: {job: ray, application: a}}
  'ray_serve_deployment_status{job="ray", application="a", deployment="replicas"}': "6x10 3x60"
"""
# What must not fire however long it lasts.
CALM = """
a Redis without a limit:
  alert: HoldfastRedisMemoryFull
  'holdfast_redis_memory_bytes{job="h", router="i"}': "1e9x60"
  'holdfast_redis_memory_limit_bytes{job="h", router="i"}': "0x60"
a replica without work:
  alert: HoldfastEngineHangs
  'holdfast_engine_steps_total{job="h", model="m", replica="r"}': "5x60"
  'holdfast_sequences_running{job="h", model="m", replica="r"}': "0x60"
no requests:
  alert: HoldfastErrorBudgetBurnsFast
  'holdfast_requests_total{job="h", model="m", outcome="completed"}': "7x60"
an outage that is over, and nobody asks since:
  alert: HoldfastErrorBudgetBurnsFast
  'holdfast_requests_total{job="h", model="m", outcome="completed"}': "0+100x40 4000x20"
  'holdfast_requests_total{job="h", model="m", outcome="failed"}': "0x20 0+50x20 1000x20"
an engine that is replaced:
  alert: HoldfastNoReplica
  'holdfast_replicas{job="h", application="a", router="i"}': "0x60"
  'ray_serve_deployment_status{job="ray", application="a", deployment="replicas"}': "3x60"
one replica that died, looked at between two scrapes:
  alert: HoldfastReplicasLost
  'holdfast_replicas_lost_total{job="h", router="i"}': "0x9 1x60"
engines that are replaced, one after the other:
  alert: HoldfastReplicasLost
  'holdfast_replicas_lost_total{job="h", application="a", router="i"}': "0+1x60"
  'ray_serve_deployment_status{job="ray", application="a", deployment="replicas"}': "3x60"
engines that have just been replaced:
  alert: HoldfastReplicasLost
  'holdfast_replicas_lost_total{job="h", application="a", router="i"}': "0x2 0+1x5 5x60"
  'ray_serve_deployment_status{job="ray", application="a", deployment="replicas"}': "6x2 3x5 6x60"
a router that is replaced:
  alert: HoldfastMetricsMissing
  'ray_serve_deployment_status{job="ray", application="a", deployment="replicas"}': "3x60"
a new engine that is counted and not asked yet:
  alert: HoldfastReplicaSilent
  'holdfast_replicas{job="h", application="a", router="i"}': "1x60"
  'ray_serve_deployment_status{job="ray", application="a", deployment="replicas"}': "3x60"
"""


def told(alert: Alert, case: Case) -> dict[str, str]:
    """Its annotations, as Prometheus fills them in."""

    def filled(text: str) -> str:
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: case.labels[match[1]], text)
        return re.sub(r"\{\{ \$value \| \w+ \}\}", case.shown, text)

    return {
        "summary": alert.summary,
        "description": filled(alert.description),
        "runbook_url": f"{RUNBOOK}#{alert.name.lower()}",
    }


def unit_test(name: str, series: dict[str, Any]) -> dict[str, Any]:
    alert, case = next(each for each in ALERTS if each.name == name), Case(**series.pop("case"))
    expected = {
        "exp_labels": {"severity": alert.severity.value, **case.labels},
        "exp_annotations": told(alert, case),
    }
    wanted: list[tuple[str, list[dict[str, Any]]]] = [(case.quiet, []), (case.fires, [expected])]
    return promtool(name, name, series, wanted)


def calm_test(name: str, series: dict[str, Any]) -> dict[str, Any]:
    alert = series.pop("alert")
    return promtool(name, alert, series, [(at, []) for at in ("10m", "12m30s", "60m")])


def promtool(
    name: str, alert: str, series: Mapping[str, str], wanted: Sequence[tuple[str, list[dict[str, Any]]]]
) -> dict[str, Any]:
    """A test as promtool reads them; `wanted`: which alerts fire at what times."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": alerts} for at, alerts in wanted],
    }


def rules_for(alert: str) -> str:
    """The file of one alert and what is recorded for it: promtool evaluates every rule of a file again and again."""
    groups = [group for text in files().values() for group in yaml.safe_load(text)["groups"]]
    recorded = {rule["record"]: rule["expr"] for group in groups for rule in group["rules"] if "record" in rule}
    wanted = {alert}
    asking = [rule["expr"] for group in groups for rule in group["rules"] if rule.get("alert") == alert]
    while asking:
        expression = asking.pop()
        asked = {name for name in recorded if name in expression} - wanted
        asking += [recorded[name] for name in asked]
        wanted |= asked
    for group in groups:
        group["rules"] = [rule for rule in group["rules"] if {rule.get("alert"), rule.get("record")} & wanted]
    return yaml.safe_dump({"groups": [group for group in groups if group["rules"]]})


def promtool_test(folder: Path, tests: list[dict[str, Any]]) -> str:
    """What promtool says; "" where all is as expected."""
    asked = []
    for number, test in enumerate(tests):
        rules, file = folder / f"rules-{number}.yaml", folder / f"case-{number}.yaml"
        rules.write_text(rules_for(test["alert_rule_test"][0]["alertname"]))
        file.write_text(yaml.safe_dump({"rule_files": [rules.name], "evaluation_interval": "30s", "tests": [test]}))
        asked.append(file)
    done = subprocess.run([found("promtool"), "test", "rules", *asked], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    assert promtool_test(tmp_path, [unit_test(*each) for each in yaml.safe_load(CASES).items()]) == ""


def test_alerts_stay_silent_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert promtool_test(tmp_path, [calm_test(*each) for each in yaml.safe_load(CALM).items()]) == ""


def test_a_wrong_expectation_is_found(tmp_path: Path) -> None:
    wrong = {"alert": "HoldfastNoReplica", 'holdfast_replicas{job="h", router="i"}': "0x60"}
    assert promtool_test(tmp_path, [calm_test("wrong", wrong)]) != ""


def test_every_critical_alert_is_among_the_cases() -> None:
    assert {alert.name for alert in ALERTS if alert.severity == "critical"} <= yaml.safe_load(CASES).keys()
