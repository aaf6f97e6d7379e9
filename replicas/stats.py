"""What the engine and the text side count while they run, and what one replica says of itself. Plain numbers.

`metrics` says which of them are told to Prometheus, and under which names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.replicas.kv.tags import OTHER, TAGS
from holdfast.replicas.types import Origin

NOT_BEGUN = ("full", "gave_way", "foreseen", "refused", "dropped", "waited")
_KEEPS = 0.98  # of what a mean knows, with each observation
_LEAST = 8  # observations before a mean is believed
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(slots=True)
class Histogram:
    """Observations up to each of `bounds`, and a last count of those beyond. One thread observes, any may read.

    An observation costs one bisection and two additions.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """The upper bound of each bucket as Prometheus writes it, and how many observations are not above it."""
        told, so_far = [], 0
        for bound, n in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += n
            told.append((bound, so_far))
        return told


class Mean:
    """Of the latest observations, older ones counting less and less."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self._seen = 0

    def add(self, total: float, n: int = 1) -> None:
        """`n` observations, of so much together."""
        keep = _KEEPS**n
        self._sum, self._weight, self._seen = self._sum * keep + total, self._weight * keep + n, self._seen + n

    @property
    def value(self) -> float:
        """0 while too few were seen."""
        return self._sum / self._weight if self._seen >= _LEAST else 0.0


def _by_tag() -> dict[str, int]:
    return dict.fromkeys((*TAGS, OTHER), 0)


def _by_origin() -> dict[str, int]:
    return {origin.value: 0 for origin in Origin if origin is not Origin.CLIENT}


OTHERS = "other"  # the name under which tenants are counted together that are not counted apart


@dataclass(slots=True)
class EngineStats:
    """Totals since the start, written by the engine thread alone.

    Requests, their tokens and what they find in the cache are clients'. `own_requests` and `own_tokens`, computed and
    drawn, are of requests that the server sent itself, by `Origin`.
    """

    steps: int = 0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    prompt_computed: int = 0
    prompt_cached: int = 0
    prompt_grouped: int = 0  # of the cached ones, those a leader computed while the request waited
    completion: int = 0
    drafted: int = 0
    accepted: int = 0  # of the drafted ones
    drafts_withheld: int = 0  # drafts that the gate did not verify
    refused: int = 0  # drawn in a call that they had no place in, and drawn again
    unguarded: int = 0  # replies whose calls were free from some place on: their grammar grew beyond its limits
    yielded: int = 0  # of `preemptions`, those of batch for interactive requests
    preemptions: int = 0
    failed_steps: int = 0
    not_begun: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NOT_BEGUN, 0))  # requests, by why
    turns_continued: int = 0  # turns of programs and sessions that took over the row of the one before
    tokens_continued: int = 0  # cached tokens of these turns: shown by the row, neither copied nor written to it
    tokens_rewritten: int = 0  # computed for a program's last turn, and behind a token that its next prompt changed
    chunks_deferred: int = 0  # prefill chunks put off to a later step above the high-water mark
    tokens_recomputed: int = 0  # computed before a preemption, and again after it
    prompt_seeds: int = 0  # sampled requests whose noise was seeded by their prompt
    ahead_computed: int = 0  # prompt tokens computed before the turn came that has them: not among `prompt_computed`
    ahead_used: int = 0  # of these, found in the cache by the turn that they were for
    ahead_wasted: int = 0  # and those that no turn found
    pins: int = 0  # turns whose cells were kept for their program's next one
    pin_hits: int = 0  # follow-up turns that came while their program's cells were pinned
    pin_misses: int = 0  # and those that came when they were not
    pins_expired: int = 0
    pins_given_way: int = 0  # dropped for others that needed the cells
    pins_refused: int = 0  # dropped because a tenant's pins, or all, would have kept more than they may
    pages_out: int = 0  # evicted pages that were copied to host memory
    pages_in: int = 0  # and pages that were copied back
    tokens_reloaded: int = 0  # tokens that came back instead of being computed again
    failed_moves: int = 0  # steps whose copies between the tiers failed: the host tier began anew
    hits_by_tag: dict[str, int] = field(default_factory=_by_tag)  # of `prompt_cached`, tokens
    evicted_by_tag: dict[str, int] = field(default_factory=_by_tag)  # cells
    served_s: dict[str, float] = field(default_factory=dict)  # seconds of steps, by cache scope, shared by their tokens
    ended: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("finished", "aborted", "rejected", "failed"), 0)
    )
    own_requests: dict[str, int] = field(default_factory=_by_origin)
    own_tokens: dict[str, int] = field(default_factory=_by_origin)
    step_times: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))  # whole steps, seconds


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What is in use right now. Cells: free + in the tree + held by sequences == total."""

    running: int
    waiting: int
    rows_taken: int
    cells_total: int
    cells_free: int
    cells_tree: int
    cells_held: int
    rows_parked: int = 0  # kept for programs, and free for whoever needs them: not among `rows_taken`
    sessions: int = 0
    cells_host: int = 0  # in host memory, not among `cells_total`
    reload_cells_per_s: float = 0.0  # how fast they came back lately; 0: none has
    pins: int = 0  # programs whose cells are kept between turns
    cells_pinned: int = 0  # of `cells_tree`, those that they keep
    cells_raised: int = 0  # of `cells_tree`, those in nobody's use that stand above the others by what they are
    cells_host_total: int = 0  # room in host memory; 0: no second tier
    tokens_waiting: int = 0  # in the prompts of the `waiting`; some of them may be found in the cache
    start_gap_s: float = 0.0  # between two starts while somebody waits, as learned; 0: not known yet
    ahead_running: int = 0  # of the `running`, work ahead, which nobody waits for
    ahead_waiting: int = 0  # of the `waiting`, likewise
    tokens_ahead: int = 0  # of `tokens_waiting`, those of the `ahead_waiting`

    @property
    def turns(self) -> tuple[int, int]:
        """The running and the waiting without work ahead. Read beside the engine's thread, they may be late by one."""
        return max(0, self.running - self.ahead_running), max(0, self.waiting - self.ahead_waiting)

    @property
    def turns_tokens(self) -> int:
        """In the prompts of the waiting without work ahead; likewise."""
        return max(0, self.tokens_waiting - self.tokens_ahead)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a replica tells of itself about once a second, for those who place programs. Small: it goes to all of them.

    `running`, `waiting` and `tokens_waiting` are without work ahead, which gives way to whoever comes.
    `prefixes`: tokens of the beginnings of prompts that its cache has, by the digests that routers gave them; 0: it has
    such a beginning, and no two prompts have shown yet where that ends.
    `seconds_per_token`: to compute one more token of a prompt, as learned; 0 where it is not known yet.
    """

    running: int = 0
    waiting: int = 0
    tokens_waiting: int = 0
    cells_total: int = 0
    cells_free: int = 0
    cells_pinned: int = 0
    seconds_per_token: float = 0.0
    prefixes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextStats:
    """What the text side did since the start."""

    characters_reused: int = 0  # of rendered prompts, those whose tokens were known
    characters_tokenized: int = 0
    stopped: int = 0  # replies ended early
    rewritten: int = 0  # replies of which a part was written again
    unguarded: int = 0  # replies whose calls are not guaranteed from their beginning, or only in their names
    empty: int = 0  # replies without content and calls


@dataclass(slots=True)
class QuestionStats:
    """What standing questions did since the start. Written on the event loop alone."""

    standing: int = 0  # now
    asked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("answered", "given_up", "failed"), 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("answered", "given_up", "failed"), 0))
    reads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("current", "stale", "none"), 0))


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as those who watch a cluster see it, picklable: what is in use now, and totals since the start.

    Whoever looks twice has the rates.
    """

    replica_id: str
    model: str
    device: str
    occupancy: Occupancy
    steps: int
    prompt_computed: int  # tokens
    prompt_cached: int
    completion: int
    drafted: int
    accepted: int
    pin_hits: int
    pin_misses: int
    preemptions: int
    failed_steps: int

    @property
    def row(self) -> dict[str, Any]:
        """All of it as one flat mapping, for JSON."""
        told = asdict(self)
        return {**{name: value for name, value in told.items() if name != "occupancy"}, **told["occupancy"]}


def replica_status(replica_id: str, model: str, device: str, stats: EngineStats, now: Occupancy) -> ReplicaStatus:
    """The status of an engine with these counts. They are read while the engine runs on, so each is right by itself."""
    return ReplicaStatus(
        replica_id=replica_id,
        model=model,
        device=device,
        occupancy=now,
        steps=stats.steps,
        prompt_computed=stats.prompt_computed,
        prompt_cached=stats.prompt_cached,
        completion=stats.completion,
        drafted=stats.drafted,
        accepted=stats.accepted,
        pin_hits=stats.pin_hits,
        pin_misses=stats.pin_misses,
        preemptions=stats.preemptions,
        failed_steps=stats.failed_steps,
    )
