"""`holdfast bench scheduling`: orders and retention policies side by side, on the real engine and over HTTP.

Each policy has its own server, once with a KV cache that is too small for all programs and once with a large one. All
servers get the same agent programs in turn, as `bench compare` sends them. The figure is a program's time from its
first request to its last answer, shown with the targets of program-level scheduling on this engine.

Every repetition starts new servers in another order. Equal servers differ by several percent from one start to the
next, and keep that difference while they run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.loadgen import compare
from holdfast.loadgen.measure import Estimate, mean, ratio
from holdfast.loadgen.options import CACHES, Scheduling
from holdfast.loadgen.report.page import read_rows, read_run
from holdfast.loadgen.rows import Job, group
from holdfast.loadgen.serving import serving
from holdfast.loadgen.simulator.policies import Policy, policy
from holdfast.loadgen.table import check_writable
from holdfast.replicas.errors import ConfigError

TARGETS = {"small": 1.3, "large": 0.98}  # mean completion time by order of requests over that of another policy


@dataclass(frozen=True, slots=True)
class Faster:
    """The speedup of programs under `policy` over `first`, on average and in `each` repetition.

    It covers the `pairs` that both policies completed, out of `programs`. `target` is set against `request` order only.
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
    target: float | None

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


def main(options: Scheduling) -> int:
    """Measure, print, write; the exit status: a failed comparison's, or 1 where a target is missed or a program
    failed. Raises ConfigError.
    """
    policies = [policy(name) for name in options.policies]  # raises before a server is started
    results: list[Faster] = []
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for path, name in ((options.json_file, "json"), (folder / f"{options.caches[0]}-0.json", "folder")):
            if path is not None:
                check_writable(path, name)
        for cache, cells in zip(CACHES, options.cells, strict=True):
            if cache not in options.caches:
                continue
            programs, count = list[Job](), 0
            for number in range(options.repetitions):
                file = folder / f"{cache}-{number}.json"
                status = _measure(options, policies, number, cells, file)
                if status:
                    return status
                programs += [replace(job, repetition=number) for job in group(read_rows(read_run(file)))]
                parts = compare.plan(options.comparison([("", "")], None, number))
                count += sum(len(part.round.programs) for part in parts if part.round.waves)
            results += faster(programs, count, cache, cells, options.policies, options.seed)
    for line in results:
        print(line)
    if options.json_file is not None:
        settings = asdict(options) | {
            "folder": options.folder and str(options.folder),
            "json_file": str(options.json_file),
        }
        content = {"options": settings, "faster": [asdict(line) for line in results]}
        options.json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(not all(line.met for line in results))


def engine(chosen: Policy, options: Scheduling, cells: int) -> dict[str, Any]:
    """The `engine` section of one server's configuration."""
    memory = {"cells": cells, "host_cells": options.host_cells}
    return memory | {"threads": options.threads, "order": chosen.order, "retention": {"policy": chosen.retention}}


def faster(
    programs: Sequence[Job], count: int, cache: str, cells: int, policies: Sequence[str], seed: int
) -> list[Faster]:
    """Every other policy against the first, over the programs that both completed, out of ``count``."""
    seconds = {(job.server, job.key): job.seconds for job in programs}
    baseline, *others = policies
    results = []
    for name in others:
        pairs: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for job in programs:
            if job.server == name and (baseline, job.key) in seconds:
                pairs[job.repetition].append((seconds[baseline, job.key], job.seconds))
        all_pairs = [pair for repetition in pairs.values() for pair in repetition]
        over, under = [base_s for base_s, _ in all_pairs], [policy_s for _, policy_s in all_pairs]
        estimate = ratio(over, under, mean, seed)
        if estimate is None:
            raise ConfigError(f"no program was completed under both {baseline} and {name}", "policy")
        each_ratio = tuple(fmean(a for a, _ in both) / fmean(b for _, b in both) for both in pairs.values())
        figures = fmean(under), fmean(over), estimate, each_ratio, len(all_pairs), count
        target = TARGETS[cache] if baseline == "request" else None
        results.append(Faster(cache, cells, name, baseline, *figures, target))
    return results


def _measure(options: Scheduling, policies: Sequence[Policy], number: int, cells: int, file: Path) -> int:
    """One repetition, with all its servers running; only one of them gets requests at a time."""
    offset = number % len(policies)
    named = list(zip(options.policies, policies, strict=True))
    with ExitStack() as stack:
        servers = [
            (name, stack.enter_context(serving(options.model, engine(policy, options, cells))))
            for name, policy in (*named[offset:], *named[:offset])
        ]
        return compare.main(options.comparison(servers, file, number))
