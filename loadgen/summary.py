"""From rows to the figures of a comparison. Pure: the same rows and seed give the same figures.

A figure is of requests that succeeded; the failed ones are counted beside it. Ratios are over the first server and of
requests that both servers answered. Wall time and throughput are of repetitions that ended without a failure and hold
all that was planned, what is said of programs likewise of whole ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.loadgen.measure import Estimate, estimate, mean, median, percentile, ratio
from holdfast.loadgen.rows import Job, Row, group, tool_times

T = TypeVar("T")
Estimates = dict[str, Estimate | None]
SAMPLES = (4, 16, 64, 256)
DEPTHS = 4  # turns with figures of their own; the last stands for all after it
STATISTICS = {"mean": mean, "p50": median, "p90": percentile(90), "p99": percentile(99)}
ALL = tuple(STATISTICS)

OF_ROWS: dict[str, tuple[Callable[[Row], float | None], tuple[str, ...]]] = {
    "latency": (lambda row: row.latency, ALL),
    "ttft": (lambda row: row.ttft, ALL),
    "per token": (lambda row: row.per_token, ("p50",)),
}
OF_JOBS: dict[str, tuple[Callable[[Job], float | None], tuple[str, ...]]] = {
    "turns": (lambda job: float(job.turns), ("mean",)),
    "job": (lambda job: job.seconds, ALL),
    "last first token": (lambda job: job.last_first_token, ALL),
    "tool": (lambda job: job.tool, ("mean",)),
    "bubble": (lambda job: job.bubble, ("mean",)),
    "prefill": (lambda job: job.prefill, ("mean",)),
    "decode": (lambda job: job.decode, ("mean",)),
    "tool share": (lambda job: job.tool / job.last_first_token if job.last_first_token else None, ("p50",)),
}
"""Figures of requests and of programs by name, each with its statistics: `latency p50`, `job mean` and so on."""
OF_REPETITIONS = ("wall", "tokens per s", "programs per s")
"""Means over repetitions. The time is in seconds, as all times are."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a server answered as the first one did."""

    asked: int  # requests that both servers answered
    same_prompt: int  # of those, with the same prompt
    same_answer: int  # of those, with the same answer


@dataclass(frozen=True, slots=True)
class ToolTimes:
    """How long a set of tools took, in seconds. `after`: the mean of the first `SAMPLES`, which converges to `mean`
    (Continuum, figure 11).
    """

    tools: str
    runs: int
    mean: Estimate | None
    p50: Estimate | None
    p99: Estimate | None
    after: tuple[Estimate | None, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """One server under one workload; None: unknown."""

    workload: str
    server: str
    requests: int
    failures: dict[str, int]  # by kind
    figures: Estimates
    ratios: Estimates  # of the figures, over the first server's
    late: Estimate | None  # p99 of the generator's lateness, seconds; None without a schedule
    programs: int
    output_tokens: int
    prompt_tokens: tuple[int, int]  # shortest and longest prompt
    cached_share: float | None  # of prompt tokens
    cold_cached_share: float | None  # of each repetition's least cached first prompt: near 0 on a new server
    cached_by_turn: tuple[float | None, ...]  # of programs' first turns, second, and so on
    call_share: float  # requests answered with calls
    fitting_share: float | None  # of those: all calls fit their schemas
    scripted_share: float  # requests answered with the script's calls
    cache_hits: int  # answered from a response cache
    agreement: Agreement | None  # with the first server; None for itself
    tools: tuple[ToolTimes, ...]  # those that ran most first


def summarize(rows: Sequence[Row], seed: int, planned: Mapping[str, Sequence[int]] | None = None) -> list[Summary]:
    """A summary for each workload and server, in the order in which the rows name them.

    ``planned`` tells how many requests a server was to be sent in each repetition of a workload. Of one that is not in
    it, that is as many as any server was sent.
    """
    summaries = []
    for workload in dict.fromkeys(row.workload for row in rows):
        mine = [row for row in rows if row.workload == workload]
        servers = list(dict.fromkeys(row.server for row in mine))
        by_server = {server: [row for row in mine if row.server == server] for server in servers}
        counts = (planned or {}).get(workload)
        requests = _most(mine) if counts is None else dict(enumerate(counts))
        summaries += [_summary(by_server[server], by_server[servers[0]], requests, seed) for server in servers]
    return summaries


def walls(rows: Sequence[Row], requests: Mapping[int, int]) -> dict[int, float]:
    """Seconds of each repetition of one server and workload with all its ``requests``: its waves' lengths together."""
    ends: defaultdict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    good: Counter[int] = Counter()
    for row in rows:
        waves = ends[row.repetition]
        began, ended = waves.get(row.wave, (row.began, row.ended))
        waves[row.wave] = min(began, row.began), max(ended, row.ended)
        good[row.repetition] += row.ok
    return {
        repetition: sum(ended - began for began, ended in waves.values())
        for repetition, waves in ends.items()
        if good[repetition] == requests.get(repetition)
    }


def _most(rows: Sequence[Row]) -> dict[int, int]:
    """The most requests that any server was sent, of each repetition of one workload."""
    most: dict[int, int] = {}
    for (repetition, _), count in Counter((row.repetition, row.server) for row in rows).items():
        most[repetition] = max(count, most.get(repetition, 0))
    return most


def _summary(rows: Sequence[Row], first: Sequence[Row], requests: Mapping[int, int], seed: int) -> Summary:
    good, programs = [row for row in rows if row.ok], group(rows)
    calling = [row for row in good if row.calls]
    prompts = [row.prompt_tokens for row in good]
    mine, theirs = _by_repetition(rows, programs, requests), _by_repetition(first, group(first), requests)
    figures, ratios = Estimates(), Estimates()
    for name in OF_REPETITIONS:
        both = [repetition for repetition in mine[name] if repetition in theirs[name]]
        figures[name] = estimate(list(mine[name].values()), mean, seed)
        ratios[name] = ratio([mine[name][each] for each in both], [theirs[name][each] for each in both], mean, seed)
    base_rows, base_jobs = {row.key: row for row in first if row.ok}, {job.key: job for job in group(first)}
    row_pairs = [(row, base_rows[row.key]) for row in good if row.key in base_rows]
    job_pairs = [(job, base_jobs[job.key]) for job in programs if job.key in base_jobs]
    _estimate(figures, ratios, OF_ROWS, good, row_pairs, seed)
    _estimate(figures, ratios, OF_JOBS, programs, job_pairs, seed)
    return Summary(
        workload=rows[0].workload,
        server=rows[0].server,
        requests=len(rows),
        failures=dict(Counter(row.failure for row in rows if not row.ok)),
        figures=figures,
        ratios=ratios,
        late=estimate([row.started - row.due for row in rows if row.due is not None], percentile(99), seed),
        programs=len(programs),
        output_tokens=sum(row.output_tokens for row in good),
        prompt_tokens=(min(prompts, default=0), max(prompts, default=0)),
        cached_share=_cached(good),
        cold_cached_share=_cached(_coldest(good)),
        cached_by_turn=tuple(_cached([row for row in good if min(row.turn, DEPTHS - 1) == n]) for n in range(DEPTHS)),
        call_share=len(calling) / max(len(good), 1),
        fitting_share=sum(row.fits for row in calling) / len(calling) if calling else None,
        scripted_share=sum(row.as_scripted for row in good) / max(len(good), 1),
        cache_hits=sum(row.cache == "hit" for row in good),
        agreement=None if rows is first else _agreement(row_pairs),
        tools=tuple(
            ToolTimes(
                tools,
                len(times),
                estimate(times, mean, seed),
                estimate(times, median, seed),
                estimate(times, percentile(99), seed),
                tuple(estimate(times[:n], mean, seed) if n <= len(times) else None for n in SAMPLES),
            )
            for tools, times in sorted(tool_times(rows).items(), key=lambda item: -len(item[1]))
        ),
    )


def _estimate(
    figures: Estimates,
    ratios: Estimates,
    table: Mapping[str, tuple[Callable[[T], float | None], tuple[str, ...]]],
    these: Sequence[T],
    pairs: Sequence[tuple[T, T]],
    seed: int,
) -> None:
    """Add the figures of a table, of what is known, and their ratios, of pairs in which both are known."""
    for name, (value, statistics) in table.items():
        known = [found for each in these if (found := value(each)) is not None]
        both = [(mine, base) for a, b in pairs if (mine := value(a)) is not None and (base := value(b)) is not None]
        over, under = [mine for mine, _ in both], [base for _, base in both]
        for each in statistics:
            figures[f"{name} {each}"] = estimate(known, STATISTICS[each], seed)
            ratios[f"{name} {each}"] = ratio(over, under, STATISTICS[each], seed)


def _by_repetition(
    rows: Sequence[Row], programs: Sequence[Job], requests: Mapping[int, int]
) -> dict[str, dict[int, float]]:
    """Figures of each whole repetition; tokens per second if the server counts tokens."""
    wall, tokens = walls(rows, requests), Counter[int]()
    for row in rows:
        tokens[row.repetition] += row.output_tokens
    done = Counter(program.repetition for program in programs)
    speed = {each: tokens[each] / seconds for each, seconds in wall.items() if seconds > 0 and tokens[each]}
    return dict(
        zip(OF_REPETITIONS, (wall, speed, {each: done[each] / s for each, s in wall.items() if s > 0}), strict=True)
    )


def _cached(rows: Sequence[Row]) -> float | None:
    known = [(row.cached_tokens, row.prompt_tokens) for row in rows if row.cached_tokens is not None]
    prompt = sum(length for _, length in known)
    return sum(cached for cached, _ in known) / prompt if prompt else None


def _coldest(rows: Sequence[Row]) -> list[Row]:
    """Of each repetition's first turns in its first wave the one with the fewest tokens cached."""
    first = [row for row in rows if row.turn == 0 and row.wave == 0 and row.cached_tokens is not None]
    return list({row.repetition: row for row in sorted(first, key=lambda row: -(row.cached_tokens or 0))}.values())


def _agreement(pairs: Sequence[tuple[Row, Row]]) -> Agreement:
    same = [(row, other) for row, other in pairs if row.prompt == other.prompt]
    return Agreement(len(pairs), len(same), sum(row.answer == other.answer for row, other in same))
