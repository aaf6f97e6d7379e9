"""The health of the installation at a glance."""

from helm.build.dashboards.board import JOB, MODEL, Board, Chosen, Kind, Query, Row, Unit, graph, number

WHO = Chosen((JOB, MODEL))
ALL = Chosen((JOB,))  # for metrics of a router, which know no model
CACHED = WHO.rate("holdfast_prompt_tokens_cached_total")

BOARD = Board(
    "overview",
    "Holdfast: Overview",
    "Whether all is well. The other dashboards say why not.",
    (JOB, MODEL),
    (
        Row(
            "Now",
            (
                number("Requests a second", "All that ended.", Unit.PER_SECOND, WHO.rate("holdfast_requests_total")),
                number(
                    "Failed",
                    "Share of requests that failed on our side; 0 is normal.",
                    Unit.SHARE,
                    f"({WHO.rate('holdfast_requests_total', outcome='failed')} or vector(0))"
                    f" / {WHO.rate('holdfast_requests_total')}",
                    bad=0.02,
                ),
                number(
                    "Time to first token, p95",
                    "What clients wait before the first word.",
                    Unit.SECONDS,
                    WHO.quantile(0.95, "holdfast_time_to_first_token_seconds"),
                    bad=5.0,
                ),
                number(
                    "Prompt tokens from cache",
                    "High with agents: every turn repeats the one before it.",
                    Unit.SHARE,
                    f"{CACHED} / ({CACHED} + {WHO.rate('holdfast_prompt_tokens_computed_total')})",
                ),
                number(
                    "Replicas",
                    "Those that answer to a scrape.",
                    Unit.PLAIN,
                    f"count({WHO.of('holdfast_cell_capacity')})",
                ),
                number(
                    "Redis away",
                    "Yes: routers work from their own memory.",
                    Unit.YES_NO,
                    ALL.most("holdfast_store_degraded"),
                    bad=1.0,
                ),
            ),
        ),
        Row(
            "Requests",
            (
                graph(
                    "Requests by how they ended",
                    "Rejected ones are the client's or the load's doing, failed ones ours.",
                    Unit.PER_SECOND,
                    Query(WHO.rate("holdfast_requests_total", "outcome"), "{{outcome}}"),
                    kind=Kind.STACKED,
                ),
                graph(
                    "Why requests were not served",
                    "The code that the client was told.",
                    Unit.PER_SECOND,
                    Query(ALL.rate("holdfast_request_errors_total", "reason"), "{{reason}}"),
                    kind=Kind.STACKED,
                ),
                graph(
                    "Requests in hand",
                    "Waiting ones for minutes: more replicas.",
                    Unit.PLAIN,
                    Query(ALL.total("holdfast_requests_in_flight"), "in flight"),
                    Query(WHO.total("holdfast_sequences_running"), "running"),
                    Query(WHO.total("holdfast_sequences_waiting"), "waiting in replicas"),
                    Query(ALL.total("holdfast_requests_in_line"), "in the router's line"),
                ),
            ),
        ),
        Row(
            "Latency",
            (
                graph(
                    "Time to first token",
                    "Grows with the queue and with prompts that are not cached.",
                    Unit.SECONDS,
                    *WHO.quantiles("holdfast_time_to_first_token_seconds", "model"),
                ),
                graph(
                    "Time per output token",
                    "Grows with the batch and with prefill beside it.",
                    Unit.SECONDS,
                    *WHO.quantiles("holdfast_time_per_output_token_seconds", "model"),
                ),
                graph(
                    "Whole turns",
                    "From arrival to last token.",
                    Unit.SECONDS,
                    *WHO.quantiles("holdfast_turn_seconds", "model"),
                ),
            ),
        ),
        Row(
            "Work and room",
            (
                graph(
                    "Tokens a second",
                    "What was computed, what came from the cache, what was drawn.",
                    Unit.RATE,
                    Query(WHO.rate("holdfast_prompt_tokens_computed_total"), "prompt, computed"),
                    Query(WHO.rate("holdfast_prompt_tokens_cached_total"), "prompt, cached"),
                    Query(WHO.rate("holdfast_completion_tokens_total"), "completion"),
                ),
                graph(
                    "Cells held by sequences",
                    "Near 100 %: the batch is bounded by cells.",
                    Unit.SHARE,
                    Query(
                        WHO.share("holdfast_cells", "holdfast_cell_capacity", "replica", state="held"), "{{replica}}"
                    ),
                ),
                graph(
                    "Replicas, as routers see them",
                    "A dip is a replica that died or was stopped.",
                    Unit.PLAIN,
                    Query(ALL.most("holdfast_replicas", "router"), "router {{router}}"),
                ),
            ),
        ),
    ),
)
