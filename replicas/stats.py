"""Counters and state that the engine and the text side report. `metrics` names those exposed to Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from holdfast.replicas.kv.tags import OTHER, TAGS
from holdfast.replicas.types import Origin

STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
OTHERS = "other"  # the name of the tenants that are not counted separately
NOT_BEGUN = ("full", "gave_way", "foreseen", "refused", "dropped", "waited")
_KEEPS = 0.98  # weight that a mean keeps with each new observation
_LEAST = 8  # observations that a mean needs


@dataclass(slots=True)
class Histogram:
    """Counts of observations up to each of `bounds`, and beyond. One thread observes, any may read."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """The upper bound of each bucket, as Prometheus writes it, and the number of observations up to it."""
        return list(zip((*map(str, self.bounds), "+Inf"), accumulate(self.counts), strict=True))


class Mean:
    """A decaying mean of the latest observations."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self._seen = 0

    def add(self, total: float, n: int = 1) -> None:
        """Add `n` observations that sum up to `total`."""
        keep = _KEEPS**n
        self._sum, self._weight, self._seen = self._sum * keep + total, self._weight * keep + n, self._seen + n

    @property
    def value(self) -> float:
        """0 before enough observations."""
        return self._sum / self._weight if self._seen >= _LEAST else 0.0


def _zeros(*keys: str) -> Callable[[], dict[str, int]]:
    """Makes a counter for each key."""
    return lambda: dict.fromkeys(keys, 0)


_TAGS = (*TAGS, OTHER)
_ORIGINS = tuple(origin.value for origin in Origin if origin is not Origin.CLIENT)


@dataclass(slots=True)
class EngineStats:
    """Totals since the start, written by the engine thread alone. `metrics` says what each one counts.

    Requests, their tokens and cache hits are those of clients; `own_requests` and `own_tokens` are the server's own.
    """

    steps: int = 0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    prompt_computed: int = 0
    prompt_cached: int = 0
    prompt_grouped: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0
    drafts_withheld: int = 0
    refused: int = 0
    unguarded: int = 0
    yielded: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    not_begun: dict[str, int] = field(default_factory=_zeros(*NOT_BEGUN))
    turns_continued: int = 0
    tokens_continued: int = 0
    tokens_rewritten: int = 0
    chunks_deferred: int = 0
    tokens_recomputed: int = 0
    prompt_seeds: int = 0
    ahead_computed: int = 0
    ahead_used: int = 0
    ahead_wasted: int = 0
    ahead_ended: dict[str, int] = field(default_factory=_zeros("complete", "overtaken", "no_cells"))
    pins: int = 0
    pin_hits: int = 0
    pin_misses: int = 0
    pins_expired: int = 0
    pins_given_way: int = 0
    pins_refused: int = 0
    pages_out: int = 0
    pages_in: int = 0
    tokens_reloaded: int = 0
    failed_moves: int = 0
    hits_by_tag: dict[str, int] = field(default_factory=_zeros(*_TAGS))
    evicted_by_tag: dict[str, int] = field(default_factory=_zeros(*_TAGS))
    checkpoints_evicted: int = 0
    served_s: dict[str, float] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=_zeros("finished", "aborted", "rejected", "failed"))
    own_requests: dict[str, int] = field(default_factory=_zeros(*_ORIGINS))
    own_tokens: dict[str, int] = field(default_factory=_zeros(*_ORIGINS))
    step_times: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))

    @property
    def step_seconds(self) -> Mapping[str, float]:
        return {phase: getattr(self, f"{phase}_s") for phase in ("schedule", "forward", "sample", "commit")}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Resources in use at this moment. Cells: free + in the tree + held by sequences == total."""

    running: int
    waiting: int
    rows_taken: int
    cells_total: int
    cells_free: int
    cells_tree: int
    cells_held: int
    rows_parked: int = 0  # kept for programs, and free for any request: not part of `rows_taken`
    sessions: int = 0
    cells_host: int = 0  # in host memory, not part of `cells_total`
    reload_cells_per_s: float = 0.0  # recent; 0: none were reloaded
    pins: int = 0  # programs whose cells are kept between turns
    cells_pinned: int = 0  # part of `cells_tree`: kept for these programs
    cells_raised: int = 0  # part of `cells_tree`: unused, and evicted after others because of their tag
    cells_host_total: int = 0  # room in host memory; 0: no second tier
    tokens_waiting: int = 0  # in the prompts of `waiting`, cached or not
    start_gap_s: float = 0.0  # average time between two starts while requests wait; 0: unknown
    ahead_running: int = 0  # background prefills, part of `running`
    ahead_waiting: int = 0  # likewise, part of `waiting`
    tokens_ahead: int = 0  # likewise, part of `tokens_waiting`
    slots_total: int = 0  # for recurrent states, or window pages; 0: the model has neither
    slots_free: int = 0
    checkpoints: int = 0  # those of cached prefixes alone

    @property
    def slots_by_state(self) -> Mapping[str, int]:
        running = max(0, self.slots_total - self.slots_free - self.checkpoints)
        return {"free": self.slots_free, "checkpoint": self.checkpoints, "running": running}

    @property
    def cells_by_state(self) -> Mapping[str, int]:
        return {"free": self.cells_free, "tree": self.cells_tree, "held": self.cells_held}

    @property
    def turns(self) -> tuple[int, int]:
        """Running and waiting requests without background prefills. Other threads may read them one late."""
        return max(0, self.running - self.ahead_running), max(0, self.waiting - self.ahead_waiting)

    @property
    def turns_tokens(self) -> int:
        """Tokens in the prompts of the waiting requests of `turns`."""
        return max(0, self.tokens_waiting - self.tokens_ahead)

    @property
    def demand(self) -> dict[str, float]:
        """The replica's work, and what would be lost with it: the input of autoscaling."""
        return {
            "requests": sum(self.turns),
            "waiting_tokens": self.turns_tokens,
            "cell_pressure": (self.cells_held + self.cells_pinned) / self.cells_total,
            "pinned_programs": self.pins,
        }


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The state that a replica reports about once a second, for placement. Small: every router receives it.

    Background prefills are not counted: they yield to every other request.
    """

    running: int = 0
    waiting: int = 0
    tokens_waiting: int = 0
    cells_total: int = 0
    cells_free: int = 0
    cells_pinned: int = 0
    seconds_per_token: float = 0.0  # cost of one more prompt token; 0: unknown
    # Cached tokens of prompt prefixes by the router's digest; 0: cached, and its end is still unknown.
    prefixes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextStats:
    """Totals of the text side since the start; see `metrics`."""

    characters_reused: int = 0
    characters_tokenized: int = 0
    stopped: int = 0
    saved: int = 0
    rewritten: int = 0
    unguarded: int = 0
    empty: int = 0


@dataclass(slots=True)
class QuestionStats:
    """Standing questions now, and totals since the start. Written on the event loop alone."""

    standing: int = 0
    asked: dict[str, int] = field(default_factory=_zeros("answered", "given_up", "failed"))
    tokens: dict[str, int] = field(default_factory=_zeros("answered", "given_up", "failed"))
    reads: dict[str, int] = field(default_factory=_zeros("current", "stale", "none"))


_TOTALS = (
    *("steps", "prompt_computed", "prompt_cached", "completion", "drafted", "accepted"),
    *("pin_hits", "pin_misses", "preemptions", "failed_steps"),
)

ReplicaStatus: TypeAlias = dict[str, Any]


def replica_status(replica_id: str, model: str, device: str, stats: EngineStats, now: Occupancy) -> ReplicaStatus:
    """A replica as monitoring tools see it: resources in use, and totals since the start."""
    totals = {name: getattr(stats, name) for name in _TOTALS}
    return {"replica_id": replica_id, "model": model, "device": device, **totals, **asdict(now)}


# Rows of a replica's activity: there may be a thousand of them a second, so they are tuples in these columns.
TURN = ("request", "phase", "prompt", "cached", "computed", "drawn")  # tokens; the cached ones count as computed
PIN = ("program", "cells", "since_s", "worth_s", "until_s")  # worth keeping for, and dropped after at the latest
QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"  # phases

TurnRow: TypeAlias = tuple[str, str, int, int, int, int]
PinRow: TypeAlias = tuple[str, int, float, float, float]
