"""`holdfast bench scheduling`: orders and retention policies side by side, on the real engine and over HTTP.

A server for each policy, once with a KV cache that is too small for all programs and once with one that has room for
them. All get the same agent programs in turn, as `bench compare` sends them. The figure is a program's time from its
first request to its last answer, beside the targets of program-level scheduling on this engine.

Every repetition starts new servers, another of them first: equal servers differ by several percent from one start to
the next, and keep that difference for as long as they live.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.loadgen import compare
from holdfast.loadgen.measure import Estimate, mean, ratio
from holdfast.loadgen.options import Options
from holdfast.loadgen.report.page import read_rows, read_run
from holdfast.loadgen.rows import Job, group
from holdfast.loadgen.serving import serving
from holdfast.loadgen.simulator.policies import Policy, policy
from holdfast.loadgen.table import check_writable
from holdfast.loadgen.workloads.script import Sizes
from holdfast.replicas.errors import ConfigError

PAIR = ("request", "continuum")  # what is compared where no policy is given
TARGETS = {"small": 1.3, "large": 0.98}  # mean completion time by order of requests over that of another policy


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `cells`: of the small and of the large cache. Raises ConfigError."""

    policies: tuple[str, ...] = PAIR
    caches: tuple[str, ...] = tuple(TARGETS)
    cells: tuple[int, ...] = (8192, 65536)
    model: str = "pocket"
    threads: int = 1
    workload: str = "swe"
    sizes: Sizes = field(default_factory=lambda: Sizes(jobs=12, rate=1.0, prompt_tokens=600))
    max_tokens: int = 96
    repetitions: int = 3
    seed: int = 0
    folder: Path | None = None  # the comparisons' own files go there

    def __post_init__(self) -> None:
        if len(self.policies) < 2 or len(set(self.policies)) < len(self.policies):
            raise ConfigError("a comparison needs two policies at least, each of them once", "policy")
        if len(self.cells) != len(TARGETS):
            raise ConfigError(f"two caches are compared, a small and a large one, not {len(self.cells)}", "cells")
        if not set(self.caches) <= set(TARGETS):
            raise ConfigError(f"a cache is {' or '.join(TARGETS)}", "cache")
        if self.repetitions < 1:
            raise ConfigError("a comparison needs one repetition at least", "repetitions")
        for name in self.policies:
            policy(name)
        self.options([(name, "") for name in self.policies], None)  # raises before a server is started

    @property
    def programs(self) -> int:
        """How many every policy gets."""
        named = [(name, "") for name in self.policies]
        parts = [part for number in range(self.repetitions) for part in compare.plan(self.options(named, None, number))]
        return sum(len(part.round.programs) for part in parts if part.round.waves)

    def options(self, servers: Sequence[tuple[str, str]], file: Path | None, number: int = 0) -> Options:
        """Of one repetition. Raises ConfigError."""
        return Options(
            servers=tuple(servers),
            workloads=(self.workload,),
            repetitions=1,
            seed=self.seed + number,
            sizes=self.sizes,
            max_tokens=self.max_tokens,
            json_file=file,
        )


@dataclass(frozen=True, slots=True)
class Faster:
    """How many times faster programs are under `policy` than under `first`, on average and in `each` repetition.

    Of the `pairs` that both policies served to their end, out of `programs`.
    """

    cache: str
    cells: int
    policy: str
    first: str
    mean_s: float
    first_mean_s: float
    ratio: Estimate
    each: tuple[float, ...]
    pairs: int
    programs: int

    @property
    def target(self) -> float | None:
        """The target against order by request; None between two other policies."""
        return TARGETS[self.cache] if self.first == PAIR[0] else None

    @property
    def met(self) -> bool:
        """Whether all programs were served, and the target is reached: failed programs may be the slow ones."""
        return self.ratio.value >= (self.target or 0.0) and self.pairs == self.programs

    def __str__(self) -> str:
        low, high = self.ratio.low, self.ratio.high
        interval = "" if low is None or high is None else f" ({low:.2f}-{high:.2f})"
        each = ", ".join(f"{value:.2f}" for value in self.each)
        verdict = "" if self.target is None else f"; target {self.target:g}: {'met' if self.met else 'MISSED'}"
        return (
            f"{self.cache} cache, {self.cells} cells: {self.policy} {self.mean_s:.1f} s a program, {self.first} "
            f"{self.first_mean_s:.1f} s: {self.ratio.value:.2f}x faster{interval}, by repetition {each}; "
            f"{self.pairs} of {self.programs} programs served under both{verdict}"
        )


def main(plan: Plan, json_file: Path | None = None) -> int:
    """Measure, print, write; the exit status: a failed comparison's, or 1 where a target is missed or a program
    failed. Raises ConfigError.
    """
    if json_file is not None:
        check_writable(json_file, "json")
    results: list[Faster] = []
    with TemporaryDirectory() as temporary:
        folder = plan.folder or Path(temporary)
        check_writable(folder / f"{plan.caches[0]}-0.json", "folder")
        for cache, cells in zip(TARGETS, plan.cells, strict=True):
            if cache not in plan.caches:
                continue
            programs: list[Job] = []
            for number in range(plan.repetitions):
                file = folder / f"{cache}-{number}.json"
                status = _measure(plan, number, cells, file)
                if status:
                    return status
                programs += [replace(each, repetition=number) for each in group(read_rows(read_run(file)))]
            results += faster(programs, plan.programs, cache, cells, plan.policies, plan.seed)
    for line in results:
        print(line)
    if json_file is not None:
        json_file.write_text(json.dumps(_content(plan, results), indent=1) + "\n", encoding="utf-8")
    return int(not all(line.met for line in results))


def engine(named: Policy, plan: Plan, cells: int) -> dict[str, Any]:
    """The `engine` section of one server's configuration."""
    return {
        "threads": plan.threads,
        "cells": cells,
        "order": named.order,
        "retention": {"policy": named.retention},
    }


def faster(
    programs: Sequence[Job], count: int, cache: str, cells: int, policies: Sequence[str], seed: int
) -> list[Faster]:
    """Every other policy against the first, over the programs that both served to their end, of ``count``."""
    seconds = {(each.server, each.key): each.seconds for each in programs}
    first, *others = policies
    results = []
    for name in others:
        pairs: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for each in programs:
            if each.server == name and (first, each.key) in seconds:
                pairs[each.repetition].append((seconds[first, each.key], each.seconds))
        both = [pair for repetition in pairs.values() for pair in repetition]
        over, under = [before for before, _ in both], [now for _, now in both]
        estimate = ratio(over, under, mean, seed)
        if estimate is None:
            raise ConfigError(f"no program was served to its end under both {first} and {name}", "policy")
        each_ratio = tuple(fmean(a for a, _ in some) / fmean(b for _, b in some) for some in pairs.values())
        figures = fmean(under), fmean(over), estimate, each_ratio, len(both), count
        results.append(Faster(cache, cells, name, first, *figures))
    return results


def _measure(plan: Plan, number: int, cells: int, file: Path) -> int:
    """One repetition, with all its servers running; only one of them gets requests at a time."""
    first = number % len(plan.policies)
    with ExitStack() as stack:
        servers = [
            (name, stack.enter_context(serving(plan.model, engine(policy(name), plan, cells))))
            for name in (*plan.policies[first:], *plan.policies[:first])
        ]
        return compare.main(plan.options(servers, file, number))


def _content(plan: Plan, results: Sequence[Faster]) -> dict[str, Any]:
    options = asdict(plan) | {"folder": None if plan.folder is None else str(plan.folder)}
    return {"options": options, "faster": [asdict(line) | {"target": line.target} for line in results]}
