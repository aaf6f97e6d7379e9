"""Panels of tenants: their demand, their limits, and the service they get."""

from helm.build.dashboards.board import JOB, MODEL, TENANT, Board, Chosen, Kind, Panel, Query, Row, Unit, graph

WHO = Chosen((JOB, MODEL, TENANT))
ALL = Chosen((JOB, TENANT))  # for metrics that know no model
LOOKED = "hit|miss"  # look-ups that had something to find
OF = Chosen((JOB,))  # and for those that know no tenant


def tokens(kind: str) -> Panel:
    descriptions = {"prompt": "Of prompts, cached ones included.", "cached": "Of prompts, those not computed again."}
    return graph(
        f"Tokens a second: {kind}",
        descriptions.get(kind, "Drawn."),
        Unit.RATE,
        Query(WHO.rate("holdfast_tenant_tokens_total", "tenant", kind=kind), "{{tenant}}"),
        kind=Kind.STACKED,
    )


def p95(title: str, description: str, name: str) -> Panel:
    return graph(title, description, Unit.SECONDS, Query(WHO.quantile(0.95, name, "tenant"), "{{tenant}}"))


BOARD = Board(
    "tenants",
    "Holdfast: Tenants",
    "Who asks for how much, what they may ask for, and what they get. Tenants beyond router.metrics_tenants: 'other'.",
    (JOB, MODEL, TENANT),
    (
        Row(
            "Requests",
            (
                graph(
                    "Requests",
                    "All that ended.",
                    Unit.PER_SECOND,
                    Query(WHO.rate("holdfast_requests_total", "tenant"), "{{tenant}}"),
                    kind=Kind.STACKED,
                ),
                graph(
                    "Not served, and left out",
                    "rate_limit_exceeded is the tenant's own limit, overloaded is not. Left out are unknown fields.",
                    Unit.PER_SECOND,
                    Query(ALL.rate("holdfast_request_errors_total", "tenant", "reason"), "{{tenant}} {{reason}}"),
                    Query(
                        ALL.rate("holdfast_request_fields_skipped_total", "tenant", "endpoint"),
                        "{{tenant}} left out of {{endpoint}}",
                    ),
                    kind=Kind.STACKED,
                ),
                graph(
                    "From the response cache",
                    "Share of look-ups that found an exact repeat.",
                    Unit.SHARE,
                    Query(
                        f"({ALL.rate('holdfast_response_cache_lookups_total', 'tenant', result='hit')}"
                        f" or 0 * {ALL.rate('holdfast_response_cache_lookups_total', 'tenant')})"
                        f" / {ALL.rate('holdfast_response_cache_lookups_total', 'tenant', result=LOOKED)}",
                        "{{tenant}}",
                    ),
                ),
            ),
        ),
        Row(
            "Limits",
            (
                graph(
                    "Requests in flight",
                    "All calls, of all routers, beside the limit for those that generate.",
                    Unit.PLAIN,
                    Query(ALL.total("holdfast_tenant_requests_in_flight", "tenant"), "{{tenant}}"),
                    Query(ALL.most("holdfast_tenant_limit", "tenant", limit="max_concurrent"), "{{tenant}}: limit"),
                    width=12,
                ),
                graph(
                    "Requests a minute",
                    "Without those from the response cache, beside the limit of all routers together.",
                    Unit.PLAIN,
                    Query(
                        f"60 * {WHO.rate('holdfast_requests_total', 'tenant', outcome='completed|failed|aborted')}",
                        "{{tenant}}",
                    ),
                    Query(
                        ALL.most("holdfast_tenant_limit", "tenant", limit="requests_per_minute"), "{{tenant}}: limit"
                    ),
                    width=12,
                ),
            ),
        ),
        Row(
            "Quotas and books",
            (
                graph(
                    "Used, of each limit",
                    "In the last minute, at once, of the day's and the month's budget, as a router was told last.",
                    Unit.SHARE,
                    Query(
                        f"{ALL.most('holdfast_tenant_quota_used', 'tenant', 'limit')}"
                        f" / {ALL.most('holdfast_tenant_limit', 'tenant', 'limit')}",
                        "{{tenant}} {{limit}}",
                    ),
                    width=12,
                ),
                graph(
                    "Refused by a limit",
                    "Which limit it was.",
                    Unit.PER_SECOND,
                    Query(ALL.rate("holdfast_tenant_quota_refusals_total", "tenant", "limit"), "{{tenant}} {{limit}}"),
                    kind=Kind.STACKED,
                    width=12,
                ),
                graph(
                    "Records of usage",
                    "One for each request. Any that are lost are on no bill.",
                    Unit.PER_SECOND,
                    Query(OF.rate("holdfast_usage_records_total", "result"), "{{result}}"),
                    width=12,
                ),
                graph(
                    "Whether limits are shared",
                    "Routers that share them; above 0 while Redis is away: by their part, ends that wait.",
                    Unit.PLAIN,
                    Query(OF.most("holdfast_quota_routers"), "routers"),
                    Query(OF.total("holdfast_quota_local"), "by their own part"),
                    Query(OF.total("holdfast_usage_records_waiting"), "records that wait"),
                    width=12,
                ),
            ),
        ),
        Row("Tokens", (tokens("prompt"), tokens("cached"), tokens("completion"))),
        Row(
            "What they get",
            (
                graph(
                    "Engines' time",
                    "Seconds of steps a second, of all replicas. In a fair order by their weights, where all wait.",
                    Unit.PLAIN,
                    Query(WHO.rate("holdfast_engine_seconds_total", "tenant"), "{{tenant}}"),
                    kind=Kind.STACKED,
                    width=12,
                ),
                graph(
                    "Cells",
                    "In use and cached, of all replicas. At its ceiling a tenant evicts its own.",
                    Unit.PLAIN,
                    Query(WHO.total("holdfast_tenant_cells", "tenant"), "{{tenant}}"),
                    kind=Kind.STACKED,
                    width=12,
                ),
                p95(
                    "Time to first token, p95",
                    "What its users wait before the first word.",
                    "holdfast_time_to_first_token_seconds",
                ),
                p95("Whole turns, p95", "From arrival to last token.", "holdfast_turn_seconds"),
                p95("Program completion, p95", "From question to answer.", "holdfast_program_seconds"),
                p95("Queue, p95", "Even for all, or one tenant waits for another.", "holdfast_queue_seconds"),
                p95("Bubbles, p95", "Tool done, engine not at it.", "holdfast_bubble_seconds"),
                p95("Tool latency, p95", "The tenant's own tools.", "holdfast_tool_seconds"),
            ),
        ),
    ),
)
