"""The metrics of a replica: one table of names, help and sources, in the order of docs/metrics.md.

`reports` exposes them to Prometheus. The router has a list of its own of the same `Metric` type.
"""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path

from holdfast.replicas.stats import STEP_SECONDS, EngineStats, Histogram, Occupancy, QuestionStats, TextStats

OWNER = ("model", "replica")  # labels of every metric of a replica


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` as Prometheus shows it, a counter's with `_total`. `advice` says how to react to an unusual value."""

    name: str
    kind: MetricKind
    unit: str  # empty: a plain number
    help: str
    advice: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # of a histogram
    source: str = ""  # of a replica's metric: the attribute of `Reading` with its value, by label if it has one; of a
    # histogram of the router: the name of its buckets


# Blocks of: name{label} (unit) = source, and a paragraph: help > advice
_TABLE = """
# Requests

engine_requests_total{outcome} = stats.ended
Client requests by terminal event: `finished`, `aborted`, `rejected`, `failed` > `failed` is a fault of the server: read
the replica's log

own_requests_total{origin} = stats.own_requests
Requests of the server itself: `preamble`, `question` (standing questions), `warm_up`,
`early_stop`. Other counters of requests and
prompt tokens exclude them > No action. `holdfast_own_tokens_total` counts their tokens

sequences_running = now.running
Sequences in the batch > At `engine.max_sequences` for minutes: add replicas, or raise it if cells are free

sequences_waiting = now.waiting
Requests waiting for a place in the batch > Above 0 for minutes: add replicas or cells

tokens_waiting (tokens) = now.tokens_waiting
Tokens in the prompts of waiting requests, cached or not > Near 4 Mi, or 1,024 times `engine.max_waiting` if that is
more: requests will be refused

requests_not_begun_total{reason} = stats.not_begun
Requests that ended before the engine worked on them: the queue was `full`; a request of a higher class took the place
(`gave_way`); the deadline was too short on arrival (`foreseen` before tokenizing, `refused` by the engine) or passed in
the queue (`dropped`); it `waited` for `engine.queue_timeout_s` > Add replicas. In an overload most should be
`foreseen`: admitted requests then meet their deadlines

start_gap_seconds (s) = now.start_gap_s
Average time between two starts of requests while others wait > Multiply by `holdfast_sequences_waiting` to estimate the
wait of a new request

sequence_rows_taken = now.rows_taken
Rows of the sequence pool in use > At the maximum with cells free: raise `engine.max_sequences`

sequence_rows_parked = now.rows_parked
Rows kept for programs between turns. A running request may take them > No action: so many next turns will find their
row unchanged

sessions = now.sessions
Open client sessions > Near `engine.session_rows`: raise it, or lower `engine.session_idle_s`

# Tokens

prompt_tokens_computed_total (tokens) = stats.prompt_computed
Prompt tokens of client requests that the model computed > The work of prefill. Compare with the cached tokens

prompt_tokens_cached_total (tokens) = stats.prompt_cached
Prompt tokens of client requests found in the KV cache > A low share in agent traffic: add cells, or look for a client
that rewrites its history

cached_tokens_by_tag_total{tag} (tokens) = stats.hits_by_tag
Cached prompt tokens by tag. Those of sessions count as `other` > Little `system_prompt` with many new programs: their
prompts begin differently

prompt_tokens_grouped_total (tokens) = stats.prompt_grouped
Cached prompt tokens that another request computed while this one waited for it > No action: the saving of grouped
prefill

completion_tokens_total (tokens) = stats.completion
Tokens drawn for client requests > The throughput of a replica. Divide by the steps for the tokens of a step

own_tokens_total{origin} (tokens) = stats.own_tokens
Tokens computed and drawn for requests of the server itself > See `holdfast_own_requests_total`; in idle time they delay
no one

turns_continued_total = stats.turns_continued
Turns that reused the row of the previous turn of their program or session > Few with many pin hits: rows are short,
raise `engine.max_sequences`

tokens_continued_total (tokens) = stats.tokens_continued
Cached tokens of these turns, neither copied nor written to a row > No action: the saving of kept rows

tokens_rewritten_total (tokens) = stats.tokens_rewritten
Tokens of a program's last turn that are lost because the next prompt differs in an earlier token > High: a chat
template or a client rewrites history

prompt_seeds_total = stats.prompt_seeds
Sampled requests whose noise was seeded by their prompt > No action

# Cells

cells{state} (cells) = now.cells_by_state
KV cells that are `free`, in the `tree`, or `held` by sequences. One cell holds one token > `free` near 0 is normal.
`held` near the capacity: add cells or replicas

cell_capacity (cells) = now.cells_total
KV cells in total > Set by the model and `engine.gpu_memory`, on a CPU by `engine.kv_memory`

tenant_cells{tenant} (cells) = tenant_cells
Cells of each tenant, in use and cached, counted in whole pages. `engine.shared_preambles` belong to no tenant > At
`tenants[].cells.ceiling` with requests waiting: raise it. Below the floor: the tenant needs no more

cells_pinned (cells) = now.cells_pinned
Cells kept for programs until their next turn, shared ones counted once; part of `holdfast_cells{state="tree"}` > At
`engine.retention.share` of the capacity with many pins refused: add cells

cells_raised (cells) = now.cells_raised
Unused cells that are evicted after others because of their tag, mostly system prompts > At its limit, half of the
capacity: clients mark more than that, or share many prefixes

programs_pinned = now.pins
Programs whose cells are kept until their next turn > Compare with the programs that wait for a tool

evicted_cells_total{tag} (cells) = stats.evicted_by_tag
Evicted cells by the main tag of their node: `system_prompt`, `user_query`, `tool_output`, `response`,
`partial_prefill`, `other` > Many `system_prompt`: programs share more prefixes than fit

state_slots{state} = now.slots_by_state
Slots for recurrent states, or pages of layers with a window, that are `free`, of a `checkpoint` of a cached prefix, or
of a `running` sequence. All 0: the model has neither
> Few checkpoints for the programs that pause: raise `engine.state_slots` or `engine.window_cells`

checkpoints_evicted_total = stats.checkpoints_evicted
Checkpoints of recurrent states or windows evicted for others. Their prefixes continue from an earlier one or from host
memory > Many beside low cache hits: raise `engine.state_slots`, `engine.window_cells` or `engine.host_memory`

host_cells (cells) = now.cells_host
KV cells in host memory, not counted in `holdfast_cells` > At the capacity with reloads: raise `engine.host_memory`

host_cell_capacity (cells) = now.cells_host_total
KV cells that fit in host memory; 0: no second tier > Set by `engine.host_memory` and the model

reload_cells_per_second (cells/s) = now.reload_cells_per_s
Recent speed of reloading cells from host memory; 0: none were reloaded > Far below the speed of the bus: other work
uses it, or the memory is not pinned

host_pages_out_total (pages) = stats.pages_out
Evicted pages copied to host memory > Many out and few in: the second tier is too small, or programs do not return

host_pages_in_total (pages) = stats.pages_in
Pages copied back from host memory > See `holdfast_host_pages_out_total`

tokens_reloaded_total (tokens) = stats.tokens_reloaded
Tokens reloaded from host memory instead of being computed again > No action: the saving of the second tier

host_moves_failed_total = stats.failed_moves
Steps whose copies between the tiers failed. The host tier was emptied and the tokens are computed again > Any increase:
read the replica's log. Host memory may be short

# Order and retention

preemptions_total = stats.preemptions
Sequences returned to the queue for lack of cells > Often: add cells, or lower `engine.admission_ceiling`

batch_yields_total = stats.yielded
Preemptions of batch requests for interactive ones > No action: batch requests continue later

engine_seconds_total{tenant} (seconds) = stats.served_s
Seconds of steps by tenant. The sequences of a step share its time by their tokens > With `engine.order: fair`,
proportional to the weights of tenants that have requests waiting

tokens_recomputed_total (tokens) = stats.tokens_recomputed
Tokens computed again after a preemption > The cost of preemptions

prefill_chunks_deferred_total = stats.chunks_deferred
Prefill chunks deferred to a later step because of the high-water mark > Often: cells are short

ahead_tokens_computed_total = stats.ahead_computed
Prompt tokens computed before their turn arrived, for clients that sent the beginning of a prompt > Rises with `POST
/v1/prefills`. Compare with `holdfast_ahead_tokens_used_total`

prefills_ahead_total{end} = stats.ahead_ended
Prefills ahead of a turn by their end: `complete`, `overtaken` (the turn, or a longer prefill, came before), `no_cells`
> Many `overtaken`: replicas are busy, or tools quick. The turn uses the tokens that were computed until then

ahead_tokens_used_total = stats.ahead_used
Prompt tokens computed ahead that their turn used > No action: the saving of computing ahead

ahead_tokens_wasted_total = stats.ahead_wasted
Prompt tokens computed ahead that no turn used > Most of the computed ones: clients continue differently or leave, or
cells are short

pins_total = stats.pins
Turns whose cells were kept for their program's next turn > 0 with tools in use: `engine.retention.policy` is off, or
keeping does not pay

pin_hits_total = stats.pin_hits
Follow-up turns that arrived while their program's cells were kept > Compare with the misses

pin_misses_total = stats.pin_misses
Follow-up turns that arrived when their program's cells were not kept > Many, with a growing
`holdfast_prompt_tokens_computed_total`: add cells, or change `engine.retention.policy`

pins_expired_total = stats.pins_expired
Pins dropped at their deadline > Many: tools take longer than `engine.retention.most_s`, or than keeping is worth

pins_given_way_total = stats.pins_given_way
Pins dropped because others needed the cells > Often: cells are short

pins_refused_total = stats.pins_refused
Pins dropped beyond `engine.retention.share` or `engine.retention.tenant_share` > A tenant keeps too much, or the share
is too small: raise it

# Speculation

draft_tokens_total (tokens) = stats.drafted
Tokens drafted by speculation and verified > 0 under load: drafts do not pay for this model at this load, or
`engine.speculation.enabled` is off

draft_tokens_accepted_total (tokens) = stats.accepted
Drafted tokens that the model drew as well > Below a third of the drafted tokens: lower `engine.speculation.max_draft`

draft_tokens_withheld_total (tokens) = stats.drafts_withheld
Drafted tokens that were not verified because that would cost more than it saves > No action: the gate at work, mostly
with many decoding sequences

# Steps

engine_steps_total = stats.steps
Steps of the engine > Constant with sequences running: the engine hangs

engine_steps_failed_total = stats.failed_steps
Steps that failed together with their requests > Any increase: read the replica's log

step_seconds_total{phase} (s) = stats.step_seconds
Time in the phases of a step: `schedule`, `forward`, `sample`, `commit` > `schedule` and `commit` above a tenth of the
sum: the host is short of cores

step_duration_seconds (s) = stats.step_times
Duration of a step > A growing tail with a steady median: long prefill chunks; see `engine.step_tokens`

# Text

prompt_characters_reused_total (characters) = text.characters_reused
Characters of rendered prompts whose tokens were known from earlier turns > Compare with the tokenized ones

prompt_characters_tokenized_total (characters) = text.characters_tokenized
Characters of rendered prompts that were tokenized > Near the reused ones: conversations are forgotten before they
continue

replies_stopped_total = text.stopped
Replies ended at their last tool call, without waiting for the model to end them > No action: the saving of early stop

early_stop_tokens_saved_total (tokens) = text.saved
Tokens that stopped replies would have drawn behind their calls, an estimate: one stopped reply in 64 goes on unseen for
up to 256 tokens, and counts for 64 > No action. Divide by `holdfast_completion_tokens_total` for the share

replies_rewritten_total = text.rewritten
Replies in which a bare call of an undeclared tool was drawn again > Many: the model does not respect its tools

replies_unguarded_total = unguarded
Replies whose calls are not guaranteed, or only in the names of some tools: the grammar of their arguments was not
supported, took too long to compile or exceeded its limits > Any increase: some schemas are too large, or hostile

replies_empty_total = text.empty
Chat replies that ended without content and without a call, some after thinking > Many: `max_tokens` is too small for
the thinking, or the model writes calls in an unknown format

call_tokens_refused_total (tokens) = stats.refused
Tokens of a call that broke the schema of its tool. They were drawn again > Many: the model does not respect its tools.
Each one costs a step

# Standing questions

questions_standing = questions.standing
Standing questions of all sessions > One tenant may have 64

questions_asked_ahead_total{outcome} = questions.asked
Standing questions asked in idle time: `answered`, `given_up` when another request arrived, `failed` > Many given up and
few answered: the engine has no idle time; shorter answers fit better

question_tokens_total{outcome} (tokens) = questions.tokens
Tokens computed and drawn for standing questions. Those of `given_up` and `failed` are lost > The cost of answering
ahead, in idle time

question_reads_total{answer} = questions.reads
Answers fetched: `current`, `stale` (before the latest append), or `none` > Few reads with many answers: clients should
remove questions they do not read

# Process

replica_cpu_seconds_total (s) = process.cpu_s
Processor time of the replica's process > On a GPU at one core: the host limits the device

replica_memory_bytes (bytes) = process.memory
Memory of the replica's process > Grows without end: a leak. Near the pod's limit: raise the limit

replica_start_time_seconds (s since 1970) = process.started
Start time of the replica's process > A new value without a deployment: a replica died. Read its last log
"""


_STARTED = time.time()
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resources that this process has used since it started."""

    cpu_s: float  # of all threads
    memory: int  # resident bytes; 0: the system does not say
    started: float  # seconds since 1970


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

    @property
    def unguarded(self) -> int:
        return self.text.unguarded + self.stats.unguarded

    def value(self, metric: Metric) -> float | Mapping[str, float] | Histogram:
        value: float | Mapping[str, float] | Histogram = attrgetter(metric.source)(self)
        return dict(value) if isinstance(value, Mapping) else value  # a copy: the engine's thread may add keys


def read_table(table: str, buckets: Mapping[str, tuple[float, ...]]) -> Mapping[str, tuple[Metric, ...]]:
    """The metrics of a table, by its headings. What stands behind a histogram's `=` is a key of `buckets`."""

    def metric(block: str) -> Metric:
        head, *text = block.splitlines()
        match = re.fullmatch(r"(\w+)(?:\{([\w,]+)\})?(?: \((.+?)\))?(?: = ([\w.]+))?", head)
        assert match is not None, head
        name, labels, unit, source = (each or "" for each in match.groups())
        help_text, _, advice = " ".join(text).partition(" > ")
        bounds = buckets.get(source, ())
        kind = MetricKind.HISTOGRAM if bounds else MetricKind.COUNTER if name.endswith("_total") else MetricKind.GAUGE
        owners = tuple(labels.split(",")) if labels else ()
        return Metric(f"holdfast_{name}", kind, unit, help_text, advice, owners, bounds, source)

    groups = (section.strip().split("\n\n") for section in re.split(r"^# ", table, flags=re.MULTILINE)[1:])
    return {title: tuple(map(metric, blocks)) for title, *blocks in groups}


GROUPS = read_table(_TABLE, {"stats.step_times": STEP_SECONDS})
ALL = tuple(each for group in GROUPS.values() for each in group)
