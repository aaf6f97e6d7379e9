"""When alerts fire, told by promtool on made-up series: not before, then, and with what they say."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_server import found

from helm.build.rules import ALERTS, RUNBOOK, Alert, files


@dataclass(frozen=True)
class Case:
    """`series`: in promtool's notation, a value a minute. `shown`: the value as the text has it."""

    alert: str
    series: Mapping[str, str]
    quiet: str
    fires: str
    labels: Mapping[str, str]
    shown: str = ""


MODEL = {"job": "h", "model": "m"}
REPLICA = {**MODEL, "replica": "r"}
OF_MODEL, OF_REPLICA = '{job="h", model="m"}', '{job="h", model="m", replica="r"}'
STATUS = 'ray_serve_deployment_status{job="ray", application="a", deployment="replicas"}'
CASES = (
    Case("HoldfastMetricsMissing", {}, "4m", "6m", {}),
    Case(
        "HoldfastNoReplica",
        {'holdfast_replicas{job="h", router="i"}': "2x9 0x20"},
        "9m",
        "12m",
        {"job": "h", "router": "i"},
    ),
    Case(
        "HoldfastReplicasLost",
        {'holdfast_replicas_lost_total{job="h", router="i"}': "0x9 3x20"},
        "9m",
        "20m",
        {"job": "h"},
        "3",
    ),
    Case(
        "HoldfastErrorBudgetBurnsFast",
        {
            'holdfast_requests_total{job="h", model="m", outcome="completed"}': "0+90x200",
            'holdfast_requests_total{job="h", model="m", outcome="failed"}': "0x60 0+10x140",
        },
        "66m",
        "130m",
        MODEL,
        "10%",
    ),
    Case(
        "HoldfastErrorBudgetBurnsSlowly",
        {
            'holdfast_requests_total{job="h", model="m", outcome="completed"}': "0+99x500",
            'holdfast_requests_total{job="h", model="m", outcome="failed"}': "0x60 0+1x440",
        },
        "70m",
        "450m",
        MODEL,
        "1%",
    ),
    Case(
        "HoldfastFirstTokenBudgetBurnsFast",
        {
            'holdfast_time_to_first_token_seconds_bucket{job="h", model="m", le="5.0"}': "0+100x60 6000+10x140",
            'holdfast_time_to_first_token_seconds_count{job="h", model="m"}': "0+100x200",
        },
        "66m",
        "130m",
        MODEL,
        "90%",
    ),
    Case(
        "HoldfastFirstTokenBudgetBurnsSlowly",
        {
            'holdfast_time_to_first_token_seconds_bucket{job="h", model="m", le="5.0"}': "0+100x60 6000+50x440",
            'holdfast_time_to_first_token_seconds_count{job="h", model="m"}': "0+100x500",
        },
        "70m",
        "450m",
        MODEL,
        "50%",
    ),
    Case(
        "HoldfastReplicaSilent",
        {
            'holdfast_replicas{job="h", router="i"}': "2x40",
            f"holdfast_sequences_running{OF_REPLICA}": "1x40",
        },
        "4m",
        "6m",
        {"job": "h"},
        "1",
    ),
    Case(
        "HoldfastKeysRefused",
        {'holdfast_request_errors_total{job="h", reason="invalid_api_key"}': "0x10 0+120x30"},
        "10m",
        "25m",
        {"job": "h"},
        "2",
    ),
    Case(
        "HoldfastOverloaded",
        {
            'holdfast_requests_total{job="h", model="m", outcome="rejected"}': "0+100x40",
            'holdfast_request_errors_total{job="h", reason="overloaded"}': "0x10 0+5x30",
        },
        "10m",
        "30m",
        {"job": "h"},
        "5%",
    ),
    Case(
        "HoldfastEngineHangs",
        {
            f"holdfast_engine_steps_total{OF_REPLICA}": "0+60x10 600x20",
            f"holdfast_sequences_running{OF_REPLICA}": "3x30",
        },
        "10m",
        "16m",
        REPLICA,
    ),
    Case(
        "HoldfastStepsFailing",
        {f"holdfast_engine_steps_failed_total{OF_REPLICA}": "0x9 1x5"},
        "9m",
        "10m",
        REPLICA,
        "1",
    ),
    Case(
        "HoldfastPinsMissed",
        {f"holdfast_pin_hits_total{OF_MODEL}": "0+1x80", f"holdfast_pin_misses_total{OF_MODEL}": "0x10 0+3x70"},
        "20m",
        "70m",
        MODEL,
        "75%",
    ),
    Case(
        "HoldfastBubblesLong",
        {
            'holdfast_bubble_seconds_bucket{job="h", model="m", le="5.0"}': "0x5 0+9x40",
            'holdfast_bubble_seconds_bucket{job="h", model="m", le="10.0"}': "0x5 0+10x40",
            'holdfast_bubble_seconds_bucket{job="h", model="m", le="+Inf"}': "0x5 0+10x40",
        },
        "10m",
        "30m",
        MODEL,
        "7.5s",
    ),
    Case("HoldfastRedisAway", {'holdfast_store_degraded{job="h", router="i"}': "0x9 1x9"}, "9m", "12m", {"job": "h"}),
    Case(
        "HoldfastRedisMemoryFull",
        {
            'holdfast_redis_memory_bytes{job="h", router="i"}': "50x9 95x30",
            'holdfast_redis_memory_limit_bytes{job="h", router="i"}': "100x40",
        },
        "15m",
        "25m",
        {"job": "h"},
        "95%",
    ),
    Case(
        "HoldfastReplicasMissing",
        {
            'ray_serve_autoscaling_target_replicas{job="ray", application="a", deployment="d"}': "2x40",
            'ray_serve_deployment_replica_healthy{job="ray", application="a", deployment="d", replica="r"}': "1x40",
        },
        "9m",
        "11m",
        {"job": "ray", "application": "a", "deployment": "d"},
        "1",
    ),
    Case(
        "HoldfastAutoscalerAtMaximum",
        {
            'ray_serve_autoscaling_desired_replicas{job="ray", application="a", deployment="d"}': "6x40",
            'ray_serve_autoscaling_target_replicas{job="ray", application="a", deployment="d"}': "4x40",
        },
        "14m",
        "16m",
        {"job": "ray", "application": "a", "deployment": "d"},
        "2",
    ),
    Case("HoldfastRolloutStuck", {STATUS: "6x10 3x60"}, "40m", "42m", {"job": "ray", "application": "a"}),
)
# What must not fire however long it lasts.
CALM = {
    "a Redis without a limit": (
        "HoldfastRedisMemoryFull",
        {
            'holdfast_redis_memory_bytes{job="h", router="i"}': "1e9x60",
            'holdfast_redis_memory_limit_bytes{job="h", router="i"}': "0x60",
        },
    ),
    "a replica without work": (
        "HoldfastEngineHangs",
        {f"holdfast_engine_steps_total{OF_REPLICA}": "5x60", f"holdfast_sequences_running{OF_REPLICA}": "0x60"},
    ),
    "no requests": (
        "HoldfastErrorBudgetBurnsFast",
        {'holdfast_requests_total{job="h", model="m", outcome="completed"}': "7x60"},
    ),
    "an outage that is over, and nobody asks since": (
        "HoldfastErrorBudgetBurnsFast",
        {
            'holdfast_requests_total{job="h", model="m", outcome="completed"}': "0+100x40 4000x20",
            'holdfast_requests_total{job="h", model="m", outcome="failed"}': "0x20 0+50x20 1000x20",
        },
    ),
    "an engine that is replaced": (
        "HoldfastNoReplica",
        {'holdfast_replicas{job="h", application="a", router="i"}': "0x60", STATUS: "3x60"},
    ),
    "one replica that died, looked at between two scrapes": (
        "HoldfastReplicasLost",
        {'holdfast_replicas_lost_total{job="h", router="i"}': "0x9 1x60"},
    ),
    "engines that are replaced, one after the other": (
        "HoldfastReplicasLost",
        {'holdfast_replicas_lost_total{job="h", application="a", router="i"}': "0+1x60", STATUS: "3x60"},
    ),
    "engines that have just been replaced": (
        "HoldfastReplicasLost",
        {
            'holdfast_replicas_lost_total{job="h", application="a", router="i"}': "0x2 0+1x5 5x60",
            STATUS: "6x2 3x5 6x60",
        },
    ),
    "a router that is replaced": ("HoldfastMetricsMissing", {STATUS: "3x60"}),
    "a new engine that is counted and not asked yet": (
        "HoldfastReplicaSilent",
        {'holdfast_replicas{job="h", application="a", router="i"}': "1x60", STATUS: "3x60"},
    ),
}


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


def unit_test(case: Case) -> dict[str, Any]:
    alert = next(each for each in ALERTS if each.name == case.alert)
    expected = {
        "exp_labels": {"severity": alert.severity.value, **case.labels},
        "exp_annotations": told(alert, case),
    }
    return {
        "name": case.alert,
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": case.quiet, "alertname": case.alert, "exp_alerts": []},
            {"eval_time": case.fires, "alertname": case.alert, "exp_alerts": [expected]},
        ],
    }


def calm_test(name: str, alert: str, series: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": []} for at in ("10m", "12m30s", "60m")],
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
    assert promtool_test(tmp_path, [unit_test(case) for case in CASES]) == ""


def test_alerts_stay_silent_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert promtool_test(tmp_path, [calm_test(name, *what) for name, what in CALM.items()]) == ""


def test_a_wrong_expectation_is_found(tmp_path: Path) -> None:
    case = CASES[1]
    assert promtool_test(tmp_path, [calm_test("wrong", case.alert, {next(iter(case.series)): "0x60"})]) != ""


def test_every_critical_alert_is_among_the_cases() -> None:
    assert {alert.name for alert in ALERTS if alert.severity == "critical"} <= {case.alert for case in CASES}
