"""Who asks for how much, what they are allowed, and what they get."""

from holdfast.cluster.dashboards.board import JOB, MODEL, TENANT, Board, Chosen, Kind, Panel, Query, Row, Unit

WHO = Chosen((JOB, MODEL, TENANT))
ALL = Chosen((JOB, TENANT))  # for metrics that know no model


def tokens(kind: str) -> Panel:
    about = {"prompt": "Of prompts, cached ones included.", "cached": "Of prompts, those not computed again."}
    return Panel(
        f"Tokens a second: {kind}",
        about.get(kind, "Drawn."),
        Unit.RATE,
        (Query(WHO.rate("holdfast_tenant_tokens_total", "tenant", kind=kind), "{{tenant}}"),),
        Kind.STACKED,
    )


def p95(title: str, about: str, name: str) -> Panel:
    return Panel(title, about, Unit.SECONDS, (Query(WHO.quantile(0.95, name, "tenant"), "{{tenant}}"),))


BOARD = Board(
    "tenants",
    "Holdfast: Tenants",
    "Who asks for how much, what they may ask for, and what they get. Tenants beyond router.metrics_tenants: 'other'.",
    (JOB, MODEL, TENANT),
    (
        Row(
            "Requests",
            (
                Panel(
                    "Requests",
                    "All that ended.",
                    Unit.PER_SECOND,
                    (Query(WHO.rate("holdfast_requests_total", "tenant"), "{{tenant}}"),),
                    Kind.STACKED,
                ),
                Panel(
                    "Not served, and left out",
                    "rate_limit_exceeded is the tenant's own limit, overloaded is not. Left out are unknown fields.",
                    Unit.PER_SECOND,
                    (
                        Query(ALL.rate("holdfast_request_errors_total", "tenant", "reason"), "{{tenant}} {{reason}}"),
                        Query(
                            ALL.rate("holdfast_request_fields_skipped_total", "tenant", "endpoint"),
                            "{{tenant}} left out of {{endpoint}}",
                        ),
                    ),
                    Kind.STACKED,
                ),
                Panel(
                    "From the response cache",
                    "Share of look-ups that found an exact repeat.",
                    Unit.SHARE,
                    (
                        Query(
                            f"({ALL.rate('holdfast_response_cache_lookups_total', 'tenant', result='hit')}"
                            f" or 0 * {ALL.rate('holdfast_response_cache_lookups_total', 'tenant')})"
                            f" / {ALL.rate('holdfast_response_cache_lookups_total', 'tenant', result='hit|miss')}",
                            "{{tenant}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Limits",
            (
                Panel(
                    "Requests in flight",
                    "Beside the limit, where there is one. Each router counts for itself.",
                    Unit.PLAIN,
                    (
                        Query(ALL.total("holdfast_tenant_requests_in_flight", "tenant"), "{{tenant}}"),
                        Query(ALL.most("holdfast_tenant_limit", "tenant", limit="max_concurrent"), "{{tenant}}: limit"),
                    ),
                    width=12,
                ),
                Panel(
                    "Requests a minute",
                    "Without those from the response cache, beside the limit, where there is one.",
                    Unit.PLAIN,
                    (
                        Query(
                            f"60 * {WHO.rate('holdfast_requests_total', 'tenant', outcome='completed|failed|aborted')}",
                            "{{tenant}}",
                        ),
                        Query(
                            ALL.most("holdfast_tenant_limit", "tenant", limit="requests_per_minute"),
                            "{{tenant}}: limit",
                        ),
                    ),
                    width=12,
                ),
            ),
        ),
        Row("Tokens", (tokens("prompt"), tokens("cached"), tokens("completion"))),
        Row(
            "What they get",
            (
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
