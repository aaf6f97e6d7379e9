"""Recording rules and alerts as data, and the YAML that Prometheus reads.

Prometheus takes the YAML as `rule_files`; on Kubernetes it is the `spec` of PrometheusRules. Each alert has a section
in `docs/runbook.md`: what it means, how to see it, what to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

# ---- definitions ----


class Severity(StrEnum):
    CRITICAL = "critical"  # requests fail, or soon will: act now
    WARNING = "warning"  # slower or more expensive than it should be: act today
    INFO = "info"  # useful context while something else is investigated


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

    A condition is a comparison and its threshold. `absent` alerts have none: they fire if `value` selects no series.
    With `after_rollout` an alert is silent while Serve replaces replicas of the same application, and for that time
    afterwards, if Ray's metrics are scraped. `HoldfastRolloutStuck` covers rollouts that never end.
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


# ---- recording rules: computed often or over long windows; some alerts use them ----


MODEL = "job, model"
TENANT = "job, tenant"


def rate(counter: str, by: str, labels: str = "", window: str = "5m") -> str:
    return f"sum by ({by}) (rate({counter}{labels}[{window}]))"


def p95(histogram: str, by: str) -> str:
    return f"histogram_quantile(0.95, {rate(f'{histogram}_bucket', f'{by}, le')})"


def share(part: str, whole: str) -> str:
    """A ratio: 0 without samples of the part, no sample without samples of the whole."""
    return f"(({part}) or 0 * ({whole})) / (({whole}) > 0)"


def failed(window: str) -> str:
    """Share of the requests in `window` that failed on our side."""
    requests = rate("holdfast_requests_total", MODEL, window=window)
    return share(rate("holdfast_requests_total", MODEL, '{outcome="failed"}', window), requests)


def slow(window: str) -> str:
    """Share of the requests with a token in `window` that waited longer than FIRST_TOKEN_S for it."""
    in_time = rate("holdfast_time_to_first_token_seconds_bucket", MODEL, f'{{le="{FIRST_TOKEN_S}"}}', window)
    return f"1 - {share(in_time, rate('holdfast_time_to_first_token_seconds_count', MODEL, window=window))}"


FIRST_TOKEN_S = "5.0"  # a bucket of the histogram
BURN_WINDOWS = ("5m", "30m", "1h", "6h")  # the pairs of the burn-rate alerts
REQUESTS = rate("holdfast_requests_total", MODEL)
CACHED = rate("holdfast_prompt_tokens_cached_total", MODEL)
COMPUTED = rate("holdfast_prompt_tokens_computed_total", MODEL)
HITS = rate("holdfast_pin_hits_total", MODEL, window="15m")
MISSES = rate("holdfast_pin_misses_total", MODEL, window="15m")

RECORDINGS = (
    Recording("model:holdfast_requests:rate5m", REQUESTS),
    *(Recording(f"model:holdfast_requests_failed:ratio_rate{each}", failed(each)) for each in BURN_WINDOWS),
    *(Recording(f"model:holdfast_first_tokens_slow:ratio_rate{each}", slow(each)) for each in BURN_WINDOWS),
    Recording(
        "model:holdfast_time_to_first_token_seconds:p95_rate5m", p95("holdfast_time_to_first_token_seconds", MODEL)
    ),
    Recording(
        "model:holdfast_time_per_output_token_seconds:p95_rate5m", p95("holdfast_time_per_output_token_seconds", MODEL)
    ),
    Recording("model:holdfast_turn_seconds:p95_rate5m", p95("holdfast_turn_seconds", MODEL)),
    Recording("model:holdfast_program_seconds:p95_rate5m", p95("holdfast_program_seconds", MODEL)),
    Recording("model:holdfast_bubble_seconds:p95_rate5m", p95("holdfast_bubble_seconds", MODEL)),
    Recording("model:holdfast_completion_tokens:rate5m", rate("holdfast_completion_tokens_total", MODEL)),
    Recording("model:holdfast_prompt_tokens_cached:ratio_rate5m", share(CACHED, f"{CACHED} + {COMPUTED}")),
    Recording("model:holdfast_pin_hits:ratio_rate15m", share(HITS, f"{HITS} + {MISSES}")),
    Recording(
        "model:holdfast_cells_held:ratio",
        f'sum by ({MODEL}) (holdfast_cells{{state="held"}}) / sum by ({MODEL}) (holdfast_cell_capacity)',
    ),
    Recording("tenant:holdfast_requests:rate5m", rate("holdfast_requests_total", TENANT)),
    Recording("tenant:holdfast_tenant_tokens:rate5m", rate("holdfast_tenant_tokens_total", f"{TENANT}, kind")),
)


# ---- alerts ----


CRITICAL, WARNING, INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO
# Burn rates after Google's SRE workbook: of the errors that an objective allows in 30 days 2 % go in an hour at 14.4
# times the allowed rate, 5 % in six hours at 6 times. Objectives: 99.9 % of the requests do not fail on our side, 95 %
# have their first token within five seconds.
_FAILED_BUDGET, _SLOW_BUDGET = 0.001, 0.05


def _burns(ratio: str, short: str, long: str) -> str:
    """The smaller of a ratio over two windows. Both must exceed a bound, so the alert ends soon after its cause."""
    near, far = f"model:{ratio}:ratio_rate{short}", f"model:{ratio}:ratio_rate{long}"
    return f"(({near} < {far}) or ({far} and {near}))"


_TENANT_REQUESTS = rate("holdfast_requests_total", "job, tenant", window="15m")
_TENANT_LIMITED = rate("holdfast_request_errors_total", "job, tenant", '{reason="rate_limit_exceeded"}', "15m")

SERVING = (
    Alert(
        "HoldfastMetricsMissing",
        CRITICAL,
        "holdfast_requests_in_flight",
        "",
        "5m",
        "No router of Holdfast is scraped",
        "Prometheus has had no metrics of any router for five minutes: none runs, or it is not allowed to read them.",
        after_rollout="1m",
    ),
    Alert(
        "HoldfastNoReplica",
        CRITICAL,
        "min by (job, application, router) (holdfast_replicas)",
        "< 1",
        "1m",
        "A router has no replica to send to",
        "Router {{ $labels.router }} knows no replica; every request to it fails.",
        after_rollout="1m",
    ),
    Alert(
        "HoldfastReplicasLost",
        WARNING,
        "round(max by (job, application) (increase(holdfast_replicas_lost_total[15m])))",  # increase() extrapolates
        "> 1",
        "0m",
        "Replicas die again and again",
        "{{ $value | humanize }} replicas died or were stopped in 15 minutes.",
        after_rollout="16m",
    ),
    Alert(
        "HoldfastReplicaSilent",
        WARNING,
        "max by (job, application) (holdfast_replicas)"
        " - (count by (job, application) (count by (job, application, replica) (holdfast_sequences_running))"
        " or 0 * max by (job, application) (holdfast_replicas))",
        "> 0",
        "5m",
        "A replica does not report its metrics",
        "{{ $value | humanize }} replicas that routers use have reported no metrics for five minutes.",
        after_rollout="1m",
    ),
    Alert(
        "HoldfastErrorBudgetBurnsFast",
        CRITICAL,
        _burns("holdfast_requests_failed", "5m", "1h"),
        f"> {14.4 * _FAILED_BUDGET:g}",
        "2m",
        "Requests fail; at this rate the month's error budget is used up in two days",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} fail, in the last hour and now.",
    ),
    Alert(
        "HoldfastErrorBudgetBurnsSlowly",
        WARNING,
        _burns("holdfast_requests_failed", "30m", "6h"),
        f"> {6 * _FAILED_BUDGET:g}",
        "15m",
        "Requests fail; at this rate the month's error budget is used up in five days",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} fail, in the last six hours and now.",
    ),
    Alert(
        "HoldfastFirstTokenBudgetBurnsFast",
        CRITICAL,
        _burns("holdfast_first_tokens_slow", "5m", "1h"),
        f"> {14.4 * _SLOW_BUDGET:g}",
        "2m",
        "Most first tokens are late",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} wait more than 5 s for a token.",
    ),
    Alert(
        "HoldfastFirstTokenBudgetBurnsSlowly",
        WARNING,
        _burns("holdfast_first_tokens_slow", "30m", "6h"),
        f"> {6 * _SLOW_BUDGET:g}",
        "15m",
        "Many first tokens are late",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} wait more than 5 s for a token.",
    ),
    Alert(
        "HoldfastKeysRefused",
        WARNING,
        'sum by (job) (rate(holdfast_request_errors_total{reason="invalid_api_key"}[5m]))',
        "> 1",
        "5m",
        "Many requests have an invalid API key",
        "{{ $value | humanize }} requests a second get 401: a client uses a removed key, or somebody guesses keys.",
    ),
    Alert(
        "HoldfastOverloaded",
        WARNING,
        share(
            rate("holdfast_request_errors_total", "job", '{reason=~"overloaded|deadline_unmet"}'),
            rate("holdfast_requests_total", "job"),
        ),
        "> 0.01",
        "5m",
        "Requests are refused for lack of room",
        "{{ $value | humanizePercentage }} of the requests are refused: no replica took them, or too many wait.",
    ),
    Alert(
        "HoldfastFirstTokenSlow",
        WARNING,
        "model:holdfast_time_to_first_token_seconds:p95_rate5m",
        "> 5",
        "10m",
        "First tokens are slow",
        "The slowest 5 % of {{ $labels.model }} wait {{ $value | humanizeDuration }} or longer for their first token.",
    ),
    Alert(
        "HoldfastLineBeforeReplicas",
        WARNING,
        "sum by (job) (holdfast_requests_in_line)",
        "> 0",
        "5m",
        "Requests wait for a free replica",
        "{{ $value | humanize }} requests wait in the routers because every replica is full.",
    ),
    Alert(
        "HoldfastQueueLong",
        WARNING,
        "sum by (job, model) (holdfast_sequences_waiting) / (sum by (job, model) (holdfast_sequences_running) + 1)",
        "> 1",
        "10m",
        "More requests wait in replicas than run",
        "{{ $labels.model }} has {{ $value | humanize }} waiting requests for each running one.",
    ),
    Alert(
        "HoldfastTenantLimited",
        INFO,
        share(_TENANT_LIMITED, _TENANT_REQUESTS),
        "> 0.1",
        "15m",
        "A tenant reaches its limits",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.tenant }} are refused by its own limits.",
    ),
    Alert(
        "HoldfastRouterBusy",
        WARNING,
        "max by (job, router) (rate(holdfast_router_cpu_seconds_total[5m]))",
        "> 0.9",
        "10m",
        "A router has no processor time left",
        "Router {{ $labels.router }} uses {{ $value | humanize }} of the one core that it can use.",
    ),
)

AGENTS = (
    Alert(
        "HoldfastBubblesLong",
        WARNING,
        "model:holdfast_bubble_seconds:p95_rate5m",
        "> 2",
        "10m",
        "Programs wait although their tools are done",
        "5 % of the follow-up turns to {{ $labels.model }} wait {{ $value | humanizeDuration }} or longer.",
    ),
    Alert(
        "HoldfastPinsMissed",
        WARNING,
        "1 - model:holdfast_pin_hits:ratio_rate15m",
        "> 0.5",
        "30m",
        "Programs return after their cells were evicted",
        "{{ $value | humanizePercentage }} of the follow-up turns to {{ $labels.model }} find no kept cells.",
    ),
    Alert(
        "HoldfastHistoryRewritten",
        INFO,
        share(
            rate("holdfast_tokens_rewritten_total", "job, model", window="15m"),
            rate("holdfast_prompt_tokens_computed_total", "job, model", window="15m"),
        ),
        "> 0.3",
        "30m",
        "Clients rewrite the history of their programs",
        "{{ $value | humanizePercentage }} of what {{ $labels.model }} computes was cached until clients changed it.",
    ),
)

ENGINE = (
    Alert(
        "HoldfastEngineHangs",
        CRITICAL,
        "(rate(holdfast_engine_steps_total[2m]) and on (job, replica) (holdfast_sequences_running > 0))",
        "== 0",
        "2m",
        "A replica has work but runs no steps",
        "Replica {{ $labels.replica }} has running sequences and has made no step for two minutes.",
    ),
    Alert(
        "HoldfastStepsFailing",
        CRITICAL,
        "increase(holdfast_engine_steps_failed_total[10m])",
        "> 0",
        "0m",
        "Steps of a replica fail",
        "{{ $value | humanize }} steps of {{ $labels.replica }} failed in ten minutes, with the requests in them.",
    ),
    Alert(
        "HoldfastCellsShort",
        WARNING,
        rate("holdfast_preemptions_total", "job, model", window="10m"),
        "> 0.1",
        "10m",
        "Sequences are preempted for lack of cells",
        "{{ $labels.model }} preempts {{ $value | humanize }} sequences a second and computes them again later.",
    ),
    Alert(
        "HoldfastHostTierFailing",
        WARNING,
        "increase(holdfast_host_moves_failed_total[15m])",
        "> 0",
        "0m",
        "Copies to or from host memory fail",
        "{{ $value | humanize }} steps of {{ $labels.replica }} lost their copies; each emptied its host tier.",
    ),
)

REDIS = (
    Alert(
        "HoldfastRedisAway",
        WARNING,
        "max by (job) (holdfast_store_degraded)",
        "> 0",
        "1m",
        "Redis cannot be reached",
        "Routers work from their own memory. No request fails, but routers share no state.",
    ),
    Alert(
        "HoldfastRedisSlow",
        WARNING,
        "histogram_quantile(0.99, sum by (job, le) (rate(holdfast_store_operation_seconds_bucket[5m])))",
        "> 0.025",
        "10m",
        "Redis is slow",
        "1 % of the operations take {{ $value | humanizeDuration }} or longer; beyond store_timeout_s they fail.",
    ),
    Alert(
        "HoldfastRedisMemoryFull",
        WARNING,
        "max by (job) (holdfast_redis_memory_bytes) / (max by (job) (holdfast_redis_memory_limit_bytes) > 0)",
        "> 0.9",
        "10m",
        "Redis is nearly full",
        "Redis uses {{ $value | humanizePercentage }} of its memory; it evicts the least recently used keys.",
    ),
    Alert(
        "HoldfastRedisEvicting",
        INFO,
        "max by (job) (increase(holdfast_redis_evicted_keys_total[15m]))",
        "> 0",
        "0m",
        "Redis drops keys for lack of memory",
        "{{ $value | humanize }} keys were evicted in 15 minutes.",
    ),
)

RAY = (
    Alert(
        "HoldfastReplicasMissing",
        WARNING,
        "max by (job, application, deployment) (ray_serve_autoscaling_target_replicas)"
        " - (sum by (job, application, deployment) (ray_serve_deployment_replica_healthy)"
        " or 0 * max by (job, application, deployment) (ray_serve_autoscaling_target_replicas))",
        "> 0",
        "10m",
        "Fewer replicas run than the target number",
        "{{ $labels.deployment }} of {{ $labels.application }} lacks {{ $value | humanize }} replicas.",
    ),
    Alert(
        "HoldfastAutoscalerAtMaximum",
        WARNING,
        # Without an autoscaler the difference is 0, and not "no data".
        "(max by (job, application, deployment) (ray_serve_autoscaling_desired_replicas)"
        " or max by (job, application, deployment) (ray_serve_autoscaling_target_replicas))"
        " - max by (job, application, deployment) (ray_serve_autoscaling_target_replicas)",
        "> 0",
        "15m",
        "The autoscaler wants more replicas than its maximum",
        "{{ $labels.application }} needs {{ $value | humanize }} replicas more than its maximum.",
    ),
    Alert(
        "HoldfastRolloutStuck",
        CRITICAL,
        'min by (job, application) (ray_serve_deployment_status{deployment=~"replicas|router"} > 0)',
        "< 4",
        "30m",
        "A rollout does not finish",
        "{{ $labels.application }} has been updating for half an hour, or its update fails.",
    ),
    Alert(
        "HoldfastNodeMemoryFull",
        WARNING,
        "max by (job, ip) (ray_node_mem_used) / max by (job, ip) (ray_node_mem_total)",
        "> 0.9",
        "5m",
        "A node is nearly out of memory",
        "Node {{ $labels.ip }} uses {{ $value | humanizePercentage }}; at 95 % Ray kills workers.",
    ),
    Alert(
        "HoldfastNodeDiskFull",
        WARNING,
        "max by (job, ip) (ray_node_disk_utilization_percentage)",
        "> 90",
        "10m",
        "A node's disk is nearly full",
        "The disk of {{ $labels.ip }} is {{ $value | humanize }} % full; at 95 % Ray starts no more work there.",
    ),
)

GROUPS = {"serving": SERVING, "agents": AGENTS, "engine": ENGINE, "redis": REDIS, "ray": RAY}
ALERTS = tuple(alert for group in GROUPS.values() for alert in group)


# ---- files ----


RUNBOOK = "docs/runbook.md"  # the chart puts its own address of it here
MADE = "# Made by `make chart` from helm/build/rules.py; do not edit.\n"


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
