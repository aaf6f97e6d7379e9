"""From rows to the figures of a comparison. Pure: the same rows and seed give the same figures.

A figure is of requests that succeeded; the failed ones are counted beside it. Ratios are over the first server and of
requests that both servers answered. Wall time and throughput are of repetitions that ended without a failure and hold
all that was planned, what is said of programs likewise of whole ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.loadgen.measure import Estimate, estimate, mean, median, percentile, ratio
from holdfast.loadgen.rows import Row, group, tool_times

T = TypeVar("T")


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
    latency: dict[str, Estimate | None]  # mean, p50, p90, p99; seconds
    ttft: dict[str, Estimate | None]
    per_token: Estimate | None  # median seconds of latency for each output token
    wall: Estimate | None  # mean over repetitions, seconds
    tokens_per_s: Estimate | None  # mean over repetitions
    output_tokens: int
    prompt_tokens: tuple[int, int]  # shortest and longest prompt
    cached_share: float | None  # of prompt tokens
    cold_cached_share: float | None  # of each repetition's least cached first prompt: near 0 on a new server
    call_share: float  # requests answered with calls
    fitting_share: float | None  # of those: all calls fit their schemas
    scripted_share: float  # requests answered with the script's calls
    cache_hits: int  # answered from a response cache
    late: Estimate | None  # p99 of the generator's lateness, seconds; None without a schedule
    ratios: dict[str, Estimate | None]  # over the first server
    agreement: Agreement | None  # with the first server; None for itself
    programs: int = 0
    turns: Estimate | None = None  # mean of a program
    job: dict[str, Estimate | None] = field(default_factory=dict)  # completion time of a program: mean, p50, p90, p99
    last_first_token: dict[str, Estimate | None] = field(default_factory=dict)  # of its last answer, since it began
    tool: Estimate | None = None  # mean seconds of tools in a program
    bubble: Estimate | None = None  # mean seconds in which it had a request there that nobody worked on
    prefill: Estimate | None = None  # mean seconds, as those of decoding a part of the time to the last first token
    decode: Estimate | None = None
    programs_per_s: Estimate | None = None  # mean over repetitions
    tool_share: Estimate | None = None  # median, of the time to a program's last first token
    cached_by_turn: tuple[float | None, ...] = ()  # of prompt tokens, of programs' first turns, second, and so on
    tools: tuple[ToolTimes, ...] = ()  # those that ran most first


SAMPLES = (4, 16, 64, 256)
DEPTHS = 4  # turns with figures of their own; the last stands for all after it
_STATISTICS = {"mean": mean, "p50": median, "p90": percentile(90), "p99": percentile(99)}


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
        first = by_server[servers[0]]
        counts = (planned or {}).get(workload)
        requests = _most(mine) if counts is None else dict(enumerate(counts))
        summaries += [_summary(by_server[server], first, requests, seed) for server in servers]
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
    good = [row for row in rows if row.ok]
    wall, speed = walls(rows, requests), _speeds(rows, requests)
    programs = group(rows)
    done = Counter(program.repetition for program in programs)
    calling = [row for row in good if row.calls]
    prompts = [row.prompt_tokens for row in good]
    return Summary(
        workload=rows[0].workload,
        server=rows[0].server,
        requests=len(rows),
        failures=dict(Counter(row.failure for row in rows if not row.ok)),
        latency=_spread([row.latency for row in good], seed),
        ttft=_spread(_known(good, lambda row: row.ttft), seed),
        per_token=estimate(_known(good, lambda row: row.per_token), median, seed),
        wall=estimate(list(wall.values()), mean, seed),
        tokens_per_s=estimate(list(speed.values()), mean, seed),
        output_tokens=sum(row.output_tokens for row in good),
        prompt_tokens=(min(prompts, default=0), max(prompts, default=0)),
        cached_share=_cached(good),
        cold_cached_share=_cached(_coldest(good)),
        call_share=len(calling) / max(len(good), 1),
        fitting_share=sum(row.fits for row in calling) / len(calling) if calling else None,
        scripted_share=sum(row.as_scripted for row in good) / max(len(good), 1),
        cache_hits=sum(row.cache == "hit" for row in good),
        late=estimate([row.started - row.due for row in rows if row.due is not None], percentile(99), seed),
        ratios=_ratios(rows, first, requests, seed),
        agreement=None if rows is first else _agreement(good, first),
        programs=len(programs),
        turns=estimate([float(program.turns) for program in programs], mean, seed),
        job=_spread([program.seconds for program in programs], seed),
        last_first_token=_spread(_known(programs, lambda program: program.last_first_token), seed),
        tool=estimate([program.tool for program in programs], mean, seed),
        bubble=estimate(_known(programs, lambda program: program.bubble), mean, seed),
        prefill=estimate(_known(programs, lambda program: program.prefill), mean, seed),
        decode=estimate(_known(programs, lambda program: program.decode), mean, seed),
        programs_per_s=estimate([done[repetition] / s for repetition, s in wall.items() if s > 0], mean, seed),
        tool_share=estimate([p.tool / p.last_first_token for p in programs if p.last_first_token], median, seed),
        cached_by_turn=tuple(_cached([row for row in good if min(row.turn, DEPTHS - 1) == n]) for n in range(DEPTHS)),
        tools=_tools(rows, seed),
    )


def _tools(rows: Sequence[Row], seed: int) -> tuple[ToolTimes, ...]:
    return tuple(
        ToolTimes(
            tools,
            len(times),
            estimate(times, mean, seed),
            estimate(times, median, seed),
            estimate(times, percentile(99), seed),
            tuple(estimate(times[:n], mean, seed) if n <= len(times) else None for n in SAMPLES),
        )
        for tools, times in sorted(tool_times(rows).items(), key=lambda item: -len(item[1]))
    )


def _known(these: Sequence[T], value: Callable[[T], float | None]) -> list[float]:
    return [known for each in these if (known := value(each)) is not None]


def _spread(values: Sequence[float], seed: int) -> dict[str, Estimate | None]:
    return {name: estimate(values, statistic, seed) for name, statistic in _STATISTICS.items()}


def _speeds(rows: Sequence[Row], requests: Mapping[int, int]) -> dict[int, float]:
    """Output tokens per second of each whole repetition, if the server counts tokens."""
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens[row.repetition] += row.output_tokens
    lengths = walls(rows, requests).items()
    return {repetition: tokens[repetition] / wall for repetition, wall in lengths if wall > 0 and tokens[repetition]}


def _cached(rows: Sequence[Row]) -> float | None:
    known = [(row.cached_tokens, row.prompt_tokens) for row in rows if row.cached_tokens is not None]
    prompt = sum(length for _, length in known)
    return sum(cached for cached, _ in known) / prompt if prompt else None


def _coldest(rows: Sequence[Row]) -> list[Row]:
    """Of each repetition's first turns in its first wave the one with the fewest tokens cached."""
    first = [row for row in rows if row.turn == 0 and row.wave == 0 and row.cached_tokens is not None]
    return list({row.repetition: row for row in sorted(first, key=lambda row: -(row.cached_tokens or 0))}.values())


def _ratios(
    rows: Sequence[Row], first: Sequence[Row], requests: Mapping[int, int], seed: int
) -> dict[str, Estimate | None]:
    """This server's figures over the first server's."""
    theirs = {row.key: row for row in first if row.ok}
    pairs = [(row, theirs[row.key]) for row in rows if row.ok and row.key in theirs]
    ratios = {f"latency {name}": _ratio(pairs, lambda row: row.latency, name, seed) for name in _STATISTICS}
    for name in ("p50", "p99"):
        ratios[f"ttft {name}"] = _ratio(pairs, lambda row: row.ttft, name, seed)
    ratios["per token p50"] = _ratio(pairs, lambda row: row.per_token, "p50", seed)
    jobs = {program.key: program for program in group(first)}
    both = [(program, jobs[program.key]) for program in group(rows) if program.key in jobs]
    for name in _STATISTICS:
        ratios[f"job {name}"] = _ratio(both, lambda program: program.seconds, name, seed)
    ratios["last first token p50"] = _ratio(both, lambda program: program.last_first_token, "p50", seed)
    for name, figure in (("wall", walls), ("tokens per s", _speeds)):
        mine, base = figure(rows, requests), figure(first, requests)
        shared = [repetition for repetition in mine if repetition in base]
        ratios[name] = ratio([mine[r] for r in shared], [base[r] for r in shared], mean, seed)
    return ratios


def _ratio(
    pairs: Sequence[tuple[T, T]], value: Callable[[T], float | None], statistic: str, seed: int
) -> Estimate | None:
    """Over the pairs in which both values are known, the second of each as the denominator."""
    known = [(mine, base) for a, b in pairs if (mine := value(a)) is not None and (base := value(b)) is not None]
    return ratio([mine for mine, _ in known], [base for _, base in known], _STATISTICS[statistic], seed)


def _agreement(good: Sequence[Row], first: Sequence[Row]) -> Agreement:
    theirs = {row.key: row for row in first if row.ok}
    both = [(row, theirs[row.key]) for row in good if row.key in theirs]
    same = [(row, other) for row, other in both if row.prompt == other.prompt]
    return Agreement(len(both), len(same), sum(row.answer == other.answer for row, other in same))
