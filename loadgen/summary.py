"""From rows to the figures of a comparison. Pure: the same rows and seed give the same figures.

Figures cover successful requests; failures are counted separately. Ratios are over the first server, for requests that
both servers answered. Wall time and throughput cover complete repetitions without a failure. Figures of programs cover
complete programs only.
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
DEPTHS = 4  # turns with figures of their own; the last one covers all later turns
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
    """The number of answers that equal the first server's."""

    asked: int  # requests that both servers answered
    same_prompt: int  # of those, with the same prompt
    same_answer: int  # of those, with the same answer


@dataclass(frozen=True, slots=True)
class ToolTimes:
    """Running times of a set of tools, in seconds. `after`: the mean of the first `SAMPLES`, which converges to `mean`
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

    ``planned`` has the number of requests to each server in each repetition of a workload. For a workload that it does
    not name, the number is the most that any server was sent.
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
    waves_of: defaultdict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    n_ok: Counter[int] = Counter()
    for row in rows:
        waves = waves_of[row.repetition]
        began, ended = waves.get(row.wave, (row.began, row.ended))
        waves[row.wave] = min(began, row.began), max(ended, row.ended)
        n_ok[row.repetition] += row.ok
    return {
        repetition: sum(ended - began for began, ended in waves.values())
        for repetition, waves in waves_of.items()
        if n_ok[repetition] == requests.get(repetition)
    }


def _most(rows: Sequence[Row]) -> dict[int, int]:
    """The most requests that any server was sent, of each repetition of one workload."""
    most: dict[int, int] = {}
    for (repetition, _), count in Counter((row.repetition, row.server) for row in rows).items():
        most[repetition] = max(count, most.get(repetition, 0))
    return most


def _summary(rows: Sequence[Row], base: Sequence[Row], requests: Mapping[int, int], seed: int) -> Summary:
    ok_rows, programs = [row for row in rows if row.ok], group(rows)
    calling = [row for row in ok_rows if row.calls]
    prompts = [row.prompt_tokens for row in ok_rows]
    mine, theirs = _by_repetition(rows, programs, requests), _by_repetition(base, group(base), requests)
    figures, ratios = Estimates(), Estimates()
    for name in OF_REPETITIONS:
        repetitions = [repetition for repetition in mine[name] if repetition in theirs[name]]
        figures[name] = estimate(list(mine[name].values()), mean, seed)
        over, under = ([side[name][number] for number in repetitions] for side in (mine, theirs))
        ratios[name] = ratio(over, under, mean, seed)
    base_rows, base_jobs = {row.key: row for row in base if row.ok}, {job.key: job for job in group(base)}
    row_pairs = [(row, base_rows[row.key]) for row in ok_rows if row.key in base_rows]
    job_pairs = [(job, base_jobs[job.key]) for job in programs if job.key in base_jobs]
    _estimate(figures, ratios, OF_ROWS, ok_rows, row_pairs, seed)
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
        output_tokens=sum(row.output_tokens for row in ok_rows),
        prompt_tokens=(min(prompts, default=0), max(prompts, default=0)),
        cached_share=_cached(ok_rows),
        cold_cached_share=_cached(_coldest(ok_rows)),
        cached_by_turn=tuple(
            _cached([row for row in ok_rows if min(row.turn, DEPTHS - 1) == n]) for n in range(DEPTHS)
        ),
        call_share=len(calling) / max(len(ok_rows), 1),
        fitting_share=sum(row.fits for row in calling) / len(calling) if calling else None,
        scripted_share=sum(row.as_scripted for row in ok_rows) / max(len(ok_rows), 1),
        cache_hits=sum(row.cache == "hit" for row in ok_rows),
        agreement=None if rows is base else _agreement(row_pairs),
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
    entries: Sequence[T],
    pairs: Sequence[tuple[T, T]],
    seed: int,
) -> None:
    """Add the figures of a table from the known values, and their ratios from pairs of known values."""
    for name, (value, statistics) in table.items():
        values = [figure for entry in entries if (figure := value(entry)) is not None]
        both = [(mine, base) for a, b in pairs if (mine := value(a)) is not None and (base := value(b)) is not None]
        over, under = [mine for mine, _ in both], [base for _, base in both]
        for statistic in statistics:
            figures[f"{name} {statistic}"] = estimate(values, STATISTICS[statistic], seed)
            ratios[f"{name} {statistic}"] = ratio(over, under, STATISTICS[statistic], seed)


def _by_repetition(
    rows: Sequence[Row], programs: Sequence[Job], requests: Mapping[int, int]
) -> dict[str, dict[int, float]]:
    """Figures of each whole repetition; tokens per second if the server counts tokens."""
    wall, tokens = walls(rows, requests), Counter[int]()
    for row in rows:
        tokens[row.repetition] += row.output_tokens
    completed = Counter(program.repetition for program in programs)
    speed = {number: tokens[number] / seconds for number, seconds in wall.items() if seconds > 0 and tokens[number]}
    programs_per_s = {number: completed[number] / seconds for number, seconds in wall.items() if seconds > 0}
    return dict(zip(OF_REPETITIONS, (wall, speed, programs_per_s), strict=True))


def _cached(rows: Sequence[Row]) -> float | None:
    counts = [(row.cached_tokens, row.prompt_tokens) for row in rows if row.cached_tokens is not None]
    prompt = sum(length for _, length in counts)
    return sum(cached for cached, _ in counts) / prompt if prompt else None


def _coldest(rows: Sequence[Row]) -> list[Row]:
    """The row of each repetition with the fewest cached tokens, among first turns in its first wave."""
    first_turns = [row for row in rows if row.turn == 0 and row.wave == 0 and row.cached_tokens is not None]
    ordered = sorted(first_turns, key=lambda row: -(row.cached_tokens or 0))
    return list({row.repetition: row for row in ordered}.values())


def _agreement(pairs: Sequence[tuple[Row, Row]]) -> Agreement:
    same_prompt = [(row, other) for row, other in pairs if row.prompt == other.prompt]
    return Agreement(len(pairs), len(same_prompt), sum(row.answer == other.answer for row, other in same_prompt))
