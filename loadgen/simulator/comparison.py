"""Policies side by side on the same programs: one row a run, and figures over seeds with their intervals.

A seed is one observation: what it says of two policies is a pair, and pairs are drawn again together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from holdfast.loadgen.lag import uncollected
from holdfast.loadgen.measure import Estimate, estimate, mean, ratio
from holdfast.loadgen.simulator.outcome import Outcome
from holdfast.loadgen.simulator.policies import engine_config
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.programs import Workload
from holdfast.loadgen.simulator.replica import Bulk
from holdfast.loadgen.simulator.simulation import Simulation

FIGURES = ("mean_s", "p50_s", "p90_s", "p99_s", "programs_per_s", "bubble_s", "cached")


@dataclass(frozen=True, slots=True)
class Case:
    """What runs under every policy: a workload on a machine."""

    workload: Workload
    profile: Profile
    replicas: int = 1
    host: bool = False

    @property
    def name(self) -> str:
        times = f" x{self.workload.turns_times}" if self.workload.turns_times > 1 else ""
        tier = ", host tier" if self.host else ""
        return f"{self.workload.kind}{times} {self.workload.rate:g}/s on {self.replicas} x {self.profile.name}{tier}"


@dataclass(frozen=True, slots=True)
class Row:
    """One run: figures of its programs' completion times in seconds, and what the engines counted."""

    case: str
    policy: str
    seed: int
    programs: int
    turns: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    programs_per_s: float
    bubble_s: float  # mean of a program
    tool_s: float  # mean of a program
    cached: float  # share of prompt tokens
    counts: dict[str, int]


def run(case: Case, policy: str, seed: int, bulk: Bulk | None = None, ended: Callable[[], None] = lambda: None) -> Row:
    """One run to its end. Raises ConfigError, and EngineError where an engine failed a request."""
    config = engine_config(policy, case.profile, case.host)
    with uncollected():
        outcome = Simulation(case.profile, config, case.replicas, bulk).run(case.workload.draw(seed), ended)
    return row(case.name, policy, seed, outcome)


def row(case: str, policy: str, seed: int, outcome: Outcome) -> Row:
    """The figures of one run."""
    done = outcome.programs
    seconds = np.array([each.seconds for each in done])
    p50, p90, p99 = (float(np.percentile(seconds, percent)) for percent in (50, 90, 99))
    return Row(
        case=case,
        policy=policy,
        seed=seed,
        programs=len(done),
        turns=outcome.turns,
        mean_s=float(seconds.mean()),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        programs_per_s=outcome.programs_per_s,
        bubble_s=sum(each.bubble_s for each in done) / len(done),
        tool_s=sum(each.tool_s for each in done) / len(done),
        cached=sum(each.cached for each in done) / sum(each.prompt for each in done),
        counts=asdict(outcome.counts),
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy in one case. `faster` and `more`: the first policy's mean time over this one's, this one's throughput
    over the first one's; above 1 is better.
    """

    case: str
    policy: str
    figures: dict[str, Estimate]
    faster: Estimate | None
    more: Estimate | None


def summarize(rows: Sequence[Row]) -> list[Summary]:
    """A summary of each case and policy, in the order of the rows."""
    summaries = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        policies = list(dict.fromkeys(row.policy for row in mine))
        by_policy = {name: sorted((r for r in mine if r.policy == name), key=lambda r: r.seed) for name in policies}
        first = by_policy[policies[0]]
        for name, runs in by_policy.items():
            figures = {figure: _estimate([getattr(run, figure) for run in runs]) for figure in FIGURES}
            pairs = [(run, base) for run in runs for base in first if run.seed == base.seed]
            faster = ratio([base.mean_s for _, base in pairs], [run.mean_s for run, _ in pairs], mean, 0)
            rates = [(run.programs_per_s, base.programs_per_s) for run, base in pairs]
            more = ratio([mine for mine, _ in rates], [base for _, base in rates], mean, 0)
            summaries.append(Summary(case, name, figures, faster, more))
    return summaries


def _estimate(values: Sequence[float]) -> Estimate:
    found = estimate(values, mean, 0)
    assert found is not None
    return found


def cases(case: Case, rates: Sequence[float], hosts: Sequence[bool], times: Sequence[int]) -> Iterator[Case]:
    """`case` at every rate, with and without a second tier, and with its turns multiplied."""
    for host in hosts:
        for factor in times:
            for rate in rates:
                workload = replace(case.workload, rate=rate, turns_times=factor)
                yield replace(case, workload=workload, host=host)


def to_json(rows: Sequence[Row], options: dict[str, Any]) -> dict[str, Any]:
    """Everything that was run and what it says; equal for equal options."""
    return {
        "options": options,
        "rows": [asdict(row) for row in rows],
        "summaries": [asdict(summary) for summary in summarize(rows)],
    }
