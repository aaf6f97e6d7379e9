"""What a replica's metrics are, in the order of docs/metrics.md, and how the value of each is read.

A metric that is not in `GROUPS` does not exist. `actor` turns them into Prometheus' families; the router has a list of
its own of the same `Metric`s, and the tables of the docs are made from both.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from holdfast.replicas.stats import STEP_SECONDS, EngineStats, Histogram, Occupancy, QuestionStats, TextStats

OWNER = ("model", "replica")  # labels of every metric of a replica


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` as Prometheus shows it, a counter's with `_total`. `unit`: of the value; "" is a plain number.

    `advice` says what to look at or to change when the value is not as it should be. `buckets` are a histogram's.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    advice: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_STARTED = time.time()
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What this process has used of the machine since it began; whoever asks again takes differences.

    `cpu_s`: of all threads. `memory`: resident bytes, 0 where the system does not tell. `started`: since 1970.
    """

    cpu_s: float
    memory: int
    started: float


def process_usage() -> ProcessUsage:
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        resident = 0
    return ProcessUsage(time.process_time(), resident, _STARTED)


@dataclass(frozen=True, slots=True)
class Reading:
    """All numbers of a replica at one moment."""

    stats: EngineStats
    now: Occupancy
    text: TextStats
    process: ProcessUsage
    questions: QuestionStats
    tenant_cells: Mapping[str, float]


Value: TypeAlias = float | Mapping[str, float] | Histogram
Read: TypeAlias = Callable[[Reading], Value]


@dataclass(frozen=True, slots=True)
class ReplicaMetric:
    """`read` gives a number; where the metric has a label of its own, a number for each value of it."""

    metric: Metric
    read: Read


def counter(name: str, unit: str, help_text: str, advice: str, read: Read, *labels: str) -> ReplicaMetric:
    return ReplicaMetric(Metric(f"holdfast_{name}_total", Kind.COUNTER, unit, help_text, advice, labels), read)


def gauge(name: str, unit: str, help_text: str, advice: str, read: Read, *labels: str) -> ReplicaMetric:
    return ReplicaMetric(Metric(f"holdfast_{name}", Kind.GAUGE, unit, help_text, advice, labels), read)


REQUESTS = (
    counter(
        "engine_requests",
        "",
        "Clients' requests by their terminal event: `finished`, `aborted`, `rejected`, `failed`",
        "`failed` is ours to explain: look into the replica's log",
        lambda r: r.stats.ended,
        "outcome",
    ),
    counter(
        "own_requests",
        "",
        "Requests that the server sent itself: `preamble`, "
        "`question` (standing ones), `warm_up`. No other counter of requests or prompt tokens includes them",
        "Nothing. `holdfast_own_tokens_total` has their tokens",
        lambda r: r.stats.own_requests,
        "origin",
    ),
    gauge(
        "sequences_running",
        "",
        "Sequences in the batch",
        "At `engine.max_sequences` for long: more replicas, or more rows if cells are free",
        lambda r: r.now.running,
    ),
    gauge(
        "sequences_waiting",
        "",
        "Requests waiting for a place in the batch",
        "Above 0 for minutes: more replicas, or more cells",
        lambda r: r.now.waiting,
    ),
    gauge(
        "tokens_waiting",
        "tokens",
        "Tokens in the prompts of these, cached or not",
        "Near `engine.max_waiting_tokens`: requests will be refused",
        lambda r: r.now.tokens_waiting,
    ),
    counter(
        "requests_not_begun",
        "",
        "Requests that ended before anything was done for them: the queue was `full`; it `gave_way` to one of a higher "
        "class; the time that it gave was too short, as was `foreseen` before it was read or `refused` by the engine, "
        "or over in the queue (`dropped`); it `waited` for `engine.queue_timeout_s`",
        "More replicas. `foreseen` is how an overload is to look: who is let in has its answer in time",
        lambda r: r.stats.not_begun,
        "reason",
    ),
    gauge(
        "start_gap_seconds",
        "s",
        "Between two starts of requests while others wait, as learned",
        "Times `holdfast_sequences_waiting`: what a new request waits",
        lambda r: r.now.start_gap_s,
    ),
    gauge(
        "sequence_rows_taken",
        "",
        "Rows of the sequence pool in use",
        "At its most with cells free: raise `engine.max_sequences`",
        lambda r: r.now.rows_taken,
    ),
    gauge(
        "sequence_rows_parked",
        "",
        "Rows kept for programs between turns; whoever needs one takes it",
        "Nothing: it says how many next turns will find their row as it was",
        lambda r: r.now.rows_parked,
    ),
    gauge(
        "sessions",
        "",
        "Sessions that clients have open",
        "Near `engine.session_rows`: raise it, or lower `engine.session_idle_s`",
        lambda r: r.now.sessions,
    ),
)

TOKENS = (
    counter(
        "prompt_tokens_computed",
        "tokens",
        "Prompt tokens of clients' requests run through the model",
        "The work of prefill; compare it with the cached ones",
        lambda r: r.stats.prompt_computed,
    ),
    counter(
        "prompt_tokens_cached",
        "tokens",
        "Prompt tokens of clients' requests found in the KV cache",
        "A low share of the sum on agents' traffic: more cells, or a client that rewrites its history",
        lambda r: r.stats.prompt_cached,
    ),
    counter(
        "cached_tokens_by_tag",
        "tokens",
        "Prompt tokens that a request found cached when it began, by what they are; sessions' are `other`",
        "Little of `system_prompt` beside many new programs: their prompts do not begin alike",
        lambda r: r.stats.hits_by_tag,
        "tag",
    ),
    counter(
        "prompt_tokens_grouped",
        "tokens",
        "Of the cached ones, those computed by another request while this one waited for it",
        "Nothing: what grouped prefill saved",
        lambda r: r.stats.prompt_grouped,
    ),
    counter(
        "completion_tokens",
        "tokens",
        "Tokens drawn for clients' requests",
        "The throughput of a replica; divided by the steps, the tokens of a step",
        lambda r: r.stats.completion,
    ),
    counter(
        "own_tokens",
        "tokens",
        "Tokens computed and drawn for requests that the server sent itself",
        "See `holdfast_own_requests_total`; many in idle time cost nobody anything",
        lambda r: r.stats.own_tokens,
        "origin",
    ),
    counter(
        "turns_continued",
        "",
        "Turns that took over the row of the program's or session's turn before",
        "Few beside many pin hits: rows are short, raise `engine.max_sequences`",
        lambda r: r.stats.turns_continued,
    ),
    counter(
        "tokens_continued",
        "tokens",
        "Cached tokens of these turns, neither copied nor written to a row",
        "Nothing: what keeping rows saved",
        lambda r: r.stats.tokens_continued,
    ),
    counter(
        "tokens_rewritten",
        "tokens",
        "Computed for a program's last turn and lost, for its next prompt changed a token before them",
        "High: a template or a client that rewrites history",
        lambda r: r.stats.tokens_rewritten,
    ),
    counter(
        "prompt_seeds",
        "",
        "Sampled requests whose noise was seeded by their prompt",
        "Nothing: with `engine.prompt_seed` off it stands still",
        lambda r: r.stats.prompt_seeds,
    ),
)

STATES = ("free", "tree", "held")

CELLS = (
    gauge(
        "cells",
        "cells",
        "KV cells `free`, in the `tree`, `held` by sequences. One cell holds one token",
        "`free` near 0 is as it should be; `held` near the capacity is not: more cells or replicas",
        lambda r: {state: getattr(r.now, f"cells_{state}") for state in STATES},
        "state",
    ),
    gauge(
        "cell_capacity",
        "cells",
        "The sum of the three",
        "Follows from the model and `engine.gpu_memory`, on a CPU `engine.kv_memory`",
        lambda r: r.now.cells_total,
    ),
    gauge(
        "tenant_cells",
        "cells",
        "Cells that each tenant has, in use and cached, by pages. `engine.shared_preambles` are nobody's",
        "At its `tenants[].cells.ceiling` with its requests waiting: raise that. Below its floor: it needs no more",
        lambda r: r.tenant_cells,
        "tenant",
    ),
    gauge(
        "cells_pinned",
        "cells",
        'Cells kept for programs until their next turn, shared ones once (of `holdfast_cells{state="tree"}`)',
        "At `engine.retention.share` of the capacity with many pins refused: more cells",
        lambda r: r.now.cells_pinned,
    ),
    gauge(
        "cells_raised",
        "cells",
        "Cells in nobody's use that are evicted after others, by what they are: mostly system prompts",
        "At `engine.kv_tags_share` of the capacity: clients mark more than that, or share many beginnings",
        lambda r: r.now.cells_raised,
    ),
    gauge(
        "programs_pinned",
        "",
        "Programs whose cells are kept until their next turn",
        "Compare it with the programs that wait for a tool",
        lambda r: r.now.pins,
    ),
    counter(
        "evicted_cells",
        "cells",
        "Evicted cells by what most of their node was: `system_prompt`, `user_query`, `tool_output`, `response`, "
        "`partial_prefill`, `other`",
        "Many of `system_prompt`: more beginnings are shared than fit, see `engine.kv_tags_share`",
        lambda r: r.stats.evicted_by_tag,
        "tag",
    ),
    gauge(
        "host_cells",
        "cells",
        "KV cells in host memory; they do not count in `holdfast_cells`",
        "At the capacity with reloads: raise `engine.host_memory`",
        lambda r: r.now.cells_host,
    ),
    gauge(
        "host_cell_capacity",
        "cells",
        "KV cells that host memory has room for; 0: there is no second tier",
        "Follows from `engine.host_memory` and the model",
        lambda r: r.now.cells_host_total,
    ),
    gauge(
        "reload_cells_per_second",
        "cells/s",
        "How fast cells came back from host memory lately; 0: none has",
        "Far below what the bus can do: other work on it, or memory that is not pinned",
        lambda r: r.now.reload_cells_per_s,
    ),
    counter(
        "host_pages_out",
        "pages",
        "Evicted pages copied to host memory",
        "Many out and few in: the second tier is smaller than what comes back, or nothing does",
        lambda r: r.stats.pages_out,
    ),
    counter(
        "host_pages_in",
        "pages",
        "Pages copied back",
        "See `holdfast_host_pages_out_total`",
        lambda r: r.stats.pages_in,
    ),
    counter(
        "tokens_reloaded",
        "tokens",
        "Tokens that came back from host memory instead of being computed again",
        "Nothing: what the second tier saved",
        lambda r: r.stats.tokens_reloaded,
    ),
    counter(
        "host_moves_failed",
        "",
        "Steps whose copies between the tiers failed: the tier was emptied, and what was to come back computed",
        "Any: look into the replica's log; host memory may be short",
        lambda r: r.stats.failed_moves,
    ),
)

SCHEDULING = (
    counter(
        "preemptions",
        "",
        "Sequences sent back to the queue for lack of cells",
        "Often: more cells, or a lower `engine.admission_ceiling`",
        lambda r: r.stats.preemptions,
    ),
    counter(
        "batch_yields",
        "",
        "Of the preemptions, those of batch for interactive requests",
        "Nothing: batch gives way, and goes on later where it was",
        lambda r: r.stats.yielded,
    ),
    counter(
        "engine_seconds",
        "seconds",
        "Seconds of steps that each tenant had, which the sequences of a step share by their tokens",
        "With `engine.order: fair` alike for their weights, where all have requests waiting",
        lambda r: r.stats.served_s.copy(),
        "tenant",
    ),
    counter(
        "tokens_recomputed",
        "tokens",
        "Computed before a preemption, and again after it",
        "What preemptions cost",
        lambda r: r.stats.tokens_recomputed,
    ),
    counter(
        "prefill_chunks_deferred",
        "",
        "Prefill chunks put off to a later step above the high-water mark",
        "Often: cells are short",
        lambda r: r.stats.chunks_deferred,
    ),
    counter(
        "ahead_tokens_computed",
        "",
        "Prompt tokens computed ahead of their turn, for clients that sent the beginning of a prompt",
        "Rises with `POST /v1/prefills`; compare with `ahead_tokens_used`",
        lambda r: r.stats.ahead_computed,
    ),
    counter(
        "ahead_tokens_used",
        "",
        "Of these, those that the turn found: so many did not stand before its first token",
        "Nothing: what computing ahead saved",
        lambda r: r.stats.ahead_used,
    ),
    counter(
        "ahead_tokens_wasted",
        "",
        "And those that no turn found",
        "Most of the computed ones: clients begin otherwise than they say, or leave; or cells are short",
        lambda r: r.stats.ahead_wasted,
    ),
    counter(
        "pins",
        "",
        "Turns whose cells were kept for their program's next one",
        "0 with tools in use: `engine.retention.policy` is off, or finds that keeping does not pay",
        lambda r: r.stats.pins,
    ),
    counter(
        "pin_hits",
        "",
        "Follow-up turns that came while their program's cells were kept",
        "Compare it with the misses",
        lambda r: r.stats.pin_hits,
    ),
    counter(
        "pin_misses",
        "",
        "Follow-up turns that came when they were not",
        "Many with a growing `holdfast_prompt_tokens_computed_total`: more cells, or another `engine.retention.policy`",
        lambda r: r.stats.pin_misses,
    ),
    counter(
        "pins_expired",
        "",
        "Pins dropped at their deadline",
        "Many: tools take longer than `engine.retention.most_s`, or than keeping was worth",
        lambda r: r.stats.pins_expired,
    ),
    counter(
        "pins_given_way",
        "",
        "Pins dropped for others that needed the cells",
        "Often: cells are short",
        lambda r: r.stats.pins_given_way,
    ),
    counter(
        "pins_refused",
        "",
        "Pins dropped beyond `engine.retention.share` or `engine.retention.tenant_share`",
        "One tenant may be keeping more than its share; or raise the share",
        lambda r: r.stats.pins_refused,
    ),
)

SPECULATION = (
    counter(
        "draft_tokens",
        "tokens",
        "Tokens drafted by speculation and verified",
        "0 under load: drafts do not pay on this model at this load, or `engine.speculation.enabled` is off",
        lambda r: r.stats.drafted,
    ),
    counter(
        "draft_tokens_accepted",
        "tokens",
        "Drafted tokens that the model drew as well",
        "Below a third of the drafted tokens: lower `engine.speculation.max_draft`",
        lambda r: r.stats.accepted,
    ),
    counter(
        "draft_tokens_withheld",
        "tokens",
        "Drafts that were not verified because verification would cost more than it saves",
        "No action: this is the gate at work, mostly with many decoding sequences",
        lambda r: r.stats.drafts_withheld,
    ),
)

PHASES = ("schedule", "forward", "sample", "commit")

STEPS = (
    counter(
        "engine_steps",
        "",
        "Steps run",
        "Stands still with sequences running: the engine hangs",
        lambda r: r.stats.steps,
    ),
    counter(
        "engine_steps_failed",
        "",
        "Steps that failed, with their requests",
        "Any: look into the replica's log",
        lambda r: r.stats.failed_steps,
    ),
    counter(
        "step_seconds",
        "s",
        "Time in the parts of a step: `schedule`, `forward`, `sample`, `commit`",
        "`schedule` and `commit` above a tenth of the sum: the host is short of cores",
        lambda r: {phase: getattr(r.stats, f"{phase}_s") for phase in PHASES},
        "phase",
    ),
    ReplicaMetric(
        Metric(
            "holdfast_step_duration_seconds",
            Kind.HISTOGRAM,
            "s",
            "How long whole steps took",
            "A growing tail with a steady median: long prefill chunks; see `engine.step_tokens`",
            buckets=STEP_SECONDS,
        ),
        lambda r: r.stats.step_times,
    ),
)

TEXT = (
    counter(
        "prompt_characters_reused",
        "characters",
        "Of rendered prompts, those whose tokens were known from earlier turns",
        "Compare it with the tokenized ones",
        lambda r: r.text.characters_reused,
    ),
    counter(
        "prompt_characters_tokenized",
        "characters",
        "Of rendered prompts, those tokenized",
        "Near the reused ones: `engine.tokenize_cache` is too small",
        lambda r: r.text.characters_tokenized,
    ),
    counter(
        "replies_stopped",
        "",
        "Replies ended where their tool calls did, without waiting for the model to end them",
        "Nothing: what stopping early saved",
        lambda r: r.text.stopped,
    ),
    counter(
        "replies_rewritten",
        "",
        "Replies in which a bare call of an undeclared tool was written again",
        "Many: the model does not follow its tools",
        lambda r: r.text.rewritten,
    ),
    counter(
        "replies_unguarded",
        "",
        "Replies whose calls are not guaranteed, or only in the names of some tools, because the grammar of their "
        "arguments could not be made, took too long to compile or grew beyond its limits",
        "Any: schemas that are large, or hostile",
        lambda r: r.text.unguarded + r.stats.unguarded,
    ),
    counter(
        "replies_empty",
        "",
        "Replies of a chat that ended without content and without a call: of nothing, or of thinking alone",
        "Many: `max_tokens` is too small for the thinking, or the model writes calls in a format that is not read",
        lambda r: r.text.empty,
    ),
    counter(
        "call_tokens_refused",
        "tokens",
        "Drawn in a call where its tool's schema has no place for them, and drawn again",
        "Many: the model does not follow its tools; each costs a step",
        lambda r: r.stats.refused,
    ),
)

QUESTIONS = (
    gauge(
        "questions_standing",
        "",
        "Questions that stand with sessions, to be answered ahead",
        "At `engine.tenant_questions` for one tenant: raise it, or ask the tenant",
        lambda r: r.questions.standing,
    ),
    counter(
        "questions_asked_ahead",
        "",
        "Standing questions asked while nobody else wanted the engine: `answered`, `given_up` for somebody who came, "
        "`failed`",
        "Many given up and few answered: the engine has no time to spare, shorter answers fit better",
        lambda r: r.questions.asked,
        "outcome",
    ),
    counter(
        "question_tokens",
        "tokens",
        "Tokens computed and drawn for them; those of `given_up` and `failed` were for nothing",
        "What answering ahead costs, in time that nobody else wanted",
        lambda r: r.questions.tokens,
        "outcome",
    ),
    counter(
        "question_reads",
        "",
        "Answers fetched: `current`, `stale` (an append has come since), or `none` yet",
        "Few reads beside many answers: the questions need not stand",
        lambda r: r.questions.reads,
        "answer",
    ),
)

PROCESS = (
    counter(
        "replica_cpu_seconds",
        "s",
        "Processor time of the replica's process",
        "On a GPU at one core: the host holds the device up",
        lambda r: r.process.cpu_s,
    ),
    gauge(
        "replica_memory_bytes",
        "bytes",
        "Memory of the replica's process",
        "Growing without end: a leak; else give the pod more",
        lambda r: r.process.memory,
    ),
    gauge(
        "replica_start_time_seconds",
        "s since 1970",
        "When the replica's process began",
        "A new one that nobody deployed: a replica died; see the log of the one before",
        lambda r: r.process.started,
    ),
)

GROUPS: Mapping[str, tuple[ReplicaMetric, ...]] = {
    "Requests": REQUESTS,
    "Tokens": TOKENS,
    "Cells": CELLS,
    "Order and retention": SCHEDULING,
    "Speculation": SPECULATION,
    "Steps": STEPS,
    "Text": TEXT,
    "Standing questions": QUESTIONS,
    "Process": PROCESS,
}
ALL = tuple(each for group in GROUPS.values() for each in group)
