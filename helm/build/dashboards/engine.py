"""Panels of each replica: cells, steps, batch, speculation, cache."""

from dataclasses import replace

from helm.build.dashboards.board import JOB, MODEL, REPLICA, Board, Chosen, Kind, Panel, Query, Row, Unit, graph

WHO = Chosen((JOB, MODEL, REPLICA))
LINES = Chosen((JOB,))  # for metrics of routers
EACH = "{{replica}}"


def each(title: str, description: str, unit: Unit, expression: str) -> Panel:
    """One line a replica."""
    return graph(title, description, unit, Query(expression, EACH))


def rates(title: str, description: str, *counters: tuple[str, str], kind: Kind = Kind.LINES) -> Panel:
    """Counters of all replicas together, each with its name in the legend."""
    queries = tuple(Query(WHO.rate(f"holdfast_{name}_total"), legend) for name, legend in counters)
    return graph(title, description, Unit.RATE, *queries, kind=kind)


CELLS = Row(
    "Cells",
    (
        graph(
            "Cells by state",
            "Free ones near 0 are as they should be: the tree keeps what may be asked for again.",
            Unit.PLAIN,
            Query(WHO.total("holdfast_cells", state="held"), "held by sequences"),
            Query(WHO.total("holdfast_cells_pinned"), "in the tree, pinned"),
            Query(f"{WHO.total('holdfast_cells', state='tree')} - {WHO.total('holdfast_cells_pinned')}", "in the tree"),
            Query(WHO.total("holdfast_cells", state="free"), "free"),
            kind=Kind.STACKED,
        ),
        each(
            "Held by sequences",
            "Near 100 %: the batch is bounded by cells.",
            Unit.SHARE,
            WHO.share("holdfast_cells", "holdfast_cell_capacity", "replica", state="held"),
        ),
        graph(
            "State slots and window pages",
            "Of models with linear layers or sliding windows. Few checkpoints: prefixes are computed again.",
            Unit.PLAIN,
            *tuple(
                Query(WHO.total("holdfast_state_slots", state=state), name)
                for state, name in (("running", "running"), ("checkpoint", "checkpoints"), ("free", "free"))
            ),
            kind=Kind.STACKED,
        ),
        *(
            replace(panel, width=6)
            for panel in (
                graph(
                    "Host tier",
                    "Evicted cells that can still come back.",
                    Unit.PLAIN,
                    Query(WHO.total("holdfast_host_cells"), "in use"),
                    Query(WHO.total("holdfast_host_cell_capacity"), "room"),
                ),
                rates(
                    "Between the tiers",
                    "Many out and few in: what is evicted does not come back.",
                    ("host_pages_out", "pages out"),
                    ("host_pages_in", "pages in"),
                    ("host_moves_failed", "steps whose moves failed"),
                    ("checkpoints_evicted", "checkpoints evicted"),
                ),
                rates(
                    "Short of cells",
                    "All at 0 is best. Preempted tokens are computed twice.",
                    ("preemptions", "preemptions"),
                    ("batch_yields", "of these, of batch for others"),
                    ("tokens_recomputed", "tokens recomputed"),
                    ("prefill_chunks_deferred", "chunks deferred"),
                ),
                graph(
                    "Reload speed",
                    "Cells a second from host memory lately; 0: none has come back.",
                    Unit.RATE,
                    Query(WHO.most("holdfast_reload_cells_per_second", "replica"), EACH),
                ),
            )
        ),
    ),
)

STEPS = Row(
    "Steps",
    (
        graph(
            "Step time",
            "A long tail beside a short middle: prefill chunks that decoders wait for.",
            Unit.SECONDS,
            *WHO.quantiles("holdfast_step_duration_seconds"),
        ),
        graph(
            "Where a step's time goes",
            "Share of each part. Schedule and commit are the host's.",
            Unit.SHARE,
            Query(
                f"{WHO.rate('holdfast_step_seconds_total', 'phase')}"
                f" / on () group_left () {WHO.rate('holdfast_step_seconds_total')}",
                "{{phase}}",
            ),
            kind=Kind.STACKED,
        ),
        each(
            "Steps a second",
            "0 with sequences running: it hangs.",
            Unit.RATE,
            WHO.rate("holdfast_engine_steps_total", "replica"),
        ),
        each(
            "Tokens a step",
            "Drawn tokens a step: batch size times what speculation gains.",
            Unit.PLAIN,
            f"{WHO.rate('holdfast_completion_tokens_total', 'replica')}"
            f" / {WHO.rate('holdfast_engine_steps_total', 'replica')}",
        ),
        graph(
            "Batch",
            "Waiting with free cells and rows: look at admission_ceiling.",
            Unit.PLAIN,
            Query(WHO.total("holdfast_sequences_running"), "running"),
            Query(WHO.total("holdfast_sequences_waiting"), "waiting"),
            Query(WHO.total("holdfast_sequence_rows_taken"), "rows taken"),
            Query(WHO.total("holdfast_sequence_rows_parked"), "rows parked"),
            Query(WHO.total("holdfast_sessions"), "sessions"),
        ),
        graph(
            "The queue",
            "Tokens that wait, in replicas and in routers' lines; and how long one request waits behind another.",
            Unit.PLAIN,
            Query(WHO.total("holdfast_tokens_waiting"), "tokens in replicas"),
            Query(LINES.total("holdfast_tokens_in_line"), "tokens in lines"),
            Query(WHO.most("holdfast_start_gap_seconds", "replica"), "seconds to the next start, {{replica}}"),
        ),
        graph(
            "Not begun",
            "foreseen is how an overload is to look; many dropped or refused: forecasts are too late.",
            Unit.PER_SECOND,
            Query(WHO.rate("holdfast_requests_not_begun_total", "reason"), "{{reason}}"),
            kind=Kind.STACKED,
        ),
        graph(
            "Requests by terminal event",
            "Failed ones, and steps that failed, are ours to explain.",
            Unit.PER_SECOND,
            Query(WHO.rate("holdfast_engine_requests_total", "outcome"), "{{outcome}}"),
            Query(WHO.rate("holdfast_engine_steps_failed_total"), "steps failed"),
        ),
        graph(
            "Own work",
            "Requests that the server sends itself, by their origin. No other panel counts them.",
            Unit.RATE,
            Query(WHO.rate("holdfast_own_requests_total", "origin"), "{{origin}} requests"),
            Query(WHO.rate("holdfast_own_tokens_total", "origin"), "{{origin}} tokens"),
        ),
    ),
)

SPECULATION = Row(
    "Speculation",
    (
        rates(
            "Drafts",
            "Withheld drafts would have cost more than they save.",
            ("draft_tokens", "verified"),
            ("draft_tokens_accepted", "accepted"),
            ("draft_tokens_withheld", "withheld"),
        ),
        graph(
            "Accepted drafts",
            "Share of the verified drafts that the model drew as well; no line: nothing was drafted.",
            Unit.SHARE,
            Query(
                f"{WHO.rate('holdfast_draft_tokens_accepted_total', 'replica')}"
                f" / {WHO.rate('holdfast_draft_tokens_total', 'replica')}",
                EACH,
            ),
            width=16,
        ),
    ),
)

PROMPTS = Row(
    "Prompts",
    (
        rates(
            "Prompt tokens",
            "Grouped ones were computed once for several.",
            ("prompt_tokens_computed", "computed"),
            ("prompt_tokens_cached", "cached"),
            ("prompt_tokens_grouped", "of these, grouped"),
            ("tokens_reloaded", "of these, reloaded"),
        ),
        rates(
            "Tokenizing",
            "Tokenized near reused: conversations are forgotten before they continue.",
            ("prompt_characters_reused", "characters reused"),
            ("prompt_characters_tokenized", "characters tokenized"),
        ),
        rates(
            "Turns",
            "Continued ones took over the row of the one before.",
            ("turns_continued", "continued"),
            ("prompt_seeds", "seeded by their prompt"),
        ),
    ),
)

PROCESS = Row(
    "Process",
    (
        each("Processor", "Cores in use.", Unit.PLAIN, WHO.rate("holdfast_replica_cpu_seconds_total", "replica")),
        each("Memory", "Of the replica's process.", Unit.BYTES, WHO.most("holdfast_replica_memory_bytes", "replica")),
        graph(
            "Started",
            "A new one that nobody deployed: a replica died.",
            Unit.MOMENT,
            Query(f"1000 * {WHO.most('holdfast_replica_start_time_seconds', 'replica')}", EACH),
            kind=Kind.NUMBER,
        ),
    ),
)

BOARD = Board(
    "engine",
    "Holdfast: Engine",
    "What the replicas do: cells by state, steps, batch, speculation, prompts.",
    (JOB, MODEL, REPLICA),
    (CELLS, STEPS, SPECULATION, PROMPTS, PROCESS),
)
