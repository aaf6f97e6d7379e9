"""Panels of programs: how long they run, the tools they wait for, and whether their cells were kept meanwhile."""

from helm.build.dashboards.board import JOB, MODEL, Board, Chosen, Kind, Query, Row, Unit, graph, number

WHO = Chosen((JOB, MODEL))
HITS, MISSES = WHO.rate("holdfast_pin_hits_total"), WHO.rate("holdfast_pin_misses_total")
SAVED = WHO.rate("holdfast_early_stop_tokens_saved_total")
PROGRAMS = WHO.rate("holdfast_program_seconds_count")


def a_program(name: str) -> str:
    """Seconds of a histogram for each program that ended."""
    return f"{WHO.rate(f'{name}_sum')} / {PROGRAMS}"


BOARD = Board(
    "agents",
    "Holdfast: Agents",
    "How long agent programs run, what they wait for, and whether their cells were kept while tools ran.",
    (JOB, MODEL),
    (
        Row(
            "Now",
            (
                number("Programs a second", "Those that came to an answer.", Unit.PER_SECOND, PROGRAMS),
                number(
                    "Program time, p50",
                    "From question to answer.",
                    Unit.SECONDS,
                    WHO.quantile(0.5, "holdfast_program_seconds"),
                ),
                number(
                    "Program time, p95",
                    "From question to answer.",
                    Unit.SECONDS,
                    WHO.quantile(0.95, "holdfast_program_seconds"),
                ),
                number("Turns a program", "Mean.", Unit.PLAIN, WHO.mean("holdfast_program_turns")),
                number(
                    "Bubble, p95",
                    "How long a turn whose tool is done waits for the engine.",
                    Unit.SECONDS,
                    WHO.quantile(0.95, "holdfast_bubble_seconds"),
                    bad=2.0,
                ),
                number(
                    "Pin hits",
                    "Share of follow-up turns whose cells were kept.",
                    Unit.SHARE,
                    f"{HITS} / ({HITS} + {MISSES})",
                ),
            ),
        ),
        Row(
            "Programs",
            (
                graph(
                    "Program completion time",
                    "What users wait for.",
                    Unit.SECONDS,
                    *WHO.quantiles("holdfast_program_seconds", "model"),
                    width=6,
                ),
                graph(
                    "First token of the final answer (FTR)",
                    "From the arrival of a program's first turn to the first token of the answer that calls no tool.",
                    Unit.SECONDS,
                    *WHO.quantiles("holdfast_first_token_rendered_seconds", "model"),
                    width=6,
                ),
                graph(
                    "Where a program's time goes",
                    "Seconds a program, mean. Turns include their bubbles.",
                    Unit.SECONDS,
                    Query(a_program("holdfast_turn_seconds"), "turns"),
                    Query(a_program("holdfast_tool_seconds"), "tools"),
                    Query(a_program("holdfast_bubble_seconds"), "bubbles, of the turns"),
                    width=6,
                ),
                graph(
                    "Turns a program",
                    "Growing: the model calls tools in circles.",
                    Unit.PLAIN,
                    Query(WHO.mean("holdfast_program_turns", "model"), "{{model}}"),
                    width=6,
                ),
            ),
        ),
        Row(
            "Waiting",
            (
                graph(
                    "Tool latency",
                    "From a reply with calls to the next turn; long ones outlive their pins.",
                    Unit.SECONDS,
                    *WHO.quantiles("holdfast_tool_seconds", "model"),
                ),
                graph(
                    "Bubbles",
                    "The tool is done and the engine does not work on the turn yet.",
                    Unit.SECONDS,
                    *WHO.quantiles("holdfast_bubble_seconds", "model"),
                ),
                graph(
                    "Queue in the replica",
                    "Of all turns; a part of each bubble.",
                    Unit.SECONDS,
                    *WHO.quantiles("holdfast_queue_seconds", "model"),
                ),
            ),
        ),
        Row(
            "Kept cells",
            (
                graph(
                    "Pin hits and misses",
                    "A miss computes the history again, unless the tree still has it.",
                    Unit.PER_SECOND,
                    Query(HITS, "hits"),
                    Query(MISSES, "misses"),
                    kind=Kind.STACKED,
                ),
                graph(
                    "Pins, and how they ended early",
                    "Expired: the tool took longer than keeping was worth. Given way or refused: cells are short.",
                    Unit.RATE,
                    Query(WHO.rate("holdfast_pins_total"), "made"),
                    Query(WHO.rate("holdfast_pins_expired_total"), "expired"),
                    Query(WHO.rate("holdfast_pins_given_way_total"), "given way"),
                    Query(WHO.rate("holdfast_pins_refused_total"), "refused"),
                ),
                graph(
                    "Cells that pins keep",
                    "Share of all; the policy keeps it below engine.retention.share.",
                    Unit.SHARE,
                    Query(WHO.share("holdfast_cells_pinned", "holdfast_cell_capacity", "replica"), "{{replica}}"),
                ),
                graph(
                    "Programs between turns",
                    "With cells kept, and with a row kept.",
                    Unit.PLAIN,
                    Query(WHO.total("holdfast_programs_pinned"), "cells kept"),
                    Query(WHO.total("holdfast_sequence_rows_parked"), "row kept"),
                    width=6,
                ),
                graph(
                    "History",
                    "Continued tokens cost nothing; rewritten ones were computed twice.",
                    Unit.RATE,
                    Query(WHO.rate("holdfast_tokens_continued_total"), "tokens continued"),
                    Query(WHO.rate("holdfast_tokens_rewritten_total"), "tokens rewritten"),
                    width=6,
                ),
                graph(
                    "Replies",
                    "Stopped where calls closed; written again for an undeclared tool; without a guarantee as the "
                    "grammar of their tools took too long; without content and calls; and tokens of calls that were "
                    "refused and drawn again.",
                    Unit.PER_SECOND,
                    Query(WHO.rate("holdfast_replies_stopped_total"), "stopped early"),
                    Query(WHO.rate("holdfast_replies_rewritten_total"), "written again"),
                    Query(WHO.rate("holdfast_replies_unguarded_total"), "without a guarantee"),
                    Query(WHO.rate("holdfast_replies_empty_total"), "empty"),
                    Query(WHO.rate("holdfast_call_tokens_refused_total"), "tokens drawn again"),
                    width=6,
                ),
                graph(
                    "Tokens that early stop saves",
                    "Of all that would be drawn; an estimate from the replies that go on unseen, one in 64.",
                    Unit.SHARE,
                    Query(f"{SAVED} / ({SAVED} + {WHO.rate('holdfast_completion_tokens_total')})", "saved"),
                    width=6,
                ),
            ),
        ),
        Row(
            "What prompts are",
            (
                graph(
                    "Cached prompt tokens by what they are",
                    "As requests say, else by the roles of their messages.",
                    Unit.RATE,
                    Query(WHO.rate("holdfast_cached_tokens_by_tag_total", "tag"), "{{tag}}"),
                ),
                graph(
                    "Evicted cells by what they were",
                    "System prompts that programs share go last.",
                    Unit.RATE,
                    Query(WHO.rate("holdfast_evicted_cells_total", "tag"), "{{tag}}"),
                ),
                graph(
                    "Cells that go last",
                    "Of those in nobody's use; they are half of all cells at most.",
                    Unit.PLAIN,
                    Query(WHO.total("holdfast_cells_raised"), "cells"),
                ),
            ),
        ),
        Row(
            "Ahead of time",
            (
                graph(
                    "Prompts ahead of their turns",
                    "While tools run: for handles, or up to their results. Wasted: no turn found it.",
                    Unit.RATE,
                    Query(WHO.rate("holdfast_ahead_tokens_computed_total"), "tokens computed"),
                    Query(WHO.rate("holdfast_ahead_tokens_used_total"), "used"),
                    Query(WHO.rate("holdfast_ahead_tokens_wasted_total"), "wasted"),
                    width=6,
                ),
                graph(
                    "How prefills ahead end",
                    "Overtaken: the turn came first, and uses the tokens that were computed until then.",
                    Unit.PER_SECOND,
                    Query(WHO.rate("holdfast_prefills_ahead_total", "end"), "{{end}}"),
                    width=6,
                ),
                graph(
                    "Standing questions",
                    "Asked while nobody else wanted the engine, by what became of it; and their answers fetched.",
                    Unit.PER_SECOND,
                    Query(WHO.rate("holdfast_questions_asked_ahead_total", "outcome"), "{{outcome}}"),
                    Query(WHO.rate("holdfast_question_reads_total", "answer"), "read: {{answer}}"),
                    width=6,
                ),
                graph(
                    "What standing questions cost",
                    "Tokens; those given up were for nothing. And how many questions stand.",
                    Unit.RATE,
                    Query(WHO.rate("holdfast_question_tokens_total", "outcome"), "{{outcome}}"),
                    Query(WHO.total("holdfast_questions_standing"), "standing"),
                    width=6,
                ),
            ),
        ),
    ),
)
