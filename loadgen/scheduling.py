"""`holdfast bench scheduling`: one program's order and retention against another's, on the real engine and over HTTP.

A server for each policy, once with a KV cache that is too small for all programs and once with one that has room for
them; the same agent programs to each, in turn, as `bench compare` sends them. What counts is how long a program takes
from its first request to its last answer. Beside the targets: those of program-level scheduling on this engine.

Every repetition starts its servers anew, another of them first: equal servers differ by several percent from one start
to the next, and keep that difference for as long as they live.
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
from holdfast.loadgen.programs import Program, group
from holdfast.loadgen.report.commands import read_run
from holdfast.loadgen.report.page import read_rows
from holdfast.loadgen.serving import serving
from holdfast.loadgen.simulator.policies import Policy, policy
from holdfast.loadgen.table import check_writable
from holdfast.loadgen.workloads.script import Sizes
from holdfast.replicas.errors import ConfigError

PAIR = ("request", "continuum")  # what is compared where nothing else is asked for
TARGETS = {"small": 1.3, "large": 0.98}  # mean completion time by order of requests over that of another policy


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured. `cells` are those of the small and of the large cache. Raises ConfigError."""

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
        self.options([(name, "") for name in self.policies], None)  # what it refuses, before a server is started

    @property
    def programs(self) -> int:
        """What every policy is to serve."""
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
    """How many times faster than under the `first` policy programs are, on average; `each` repetition's beside it.

    It is of the `pairs` that both policies served to their end, of so many `programs`.
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
        """What is wanted against order by request; between two policies nothing is."""
        return TARGETS[self.cache] if self.first == PAIR[0] else None

    @property
    def met(self) -> bool:
        """A target is for all programs: those that failed may be the slow ones. Without one all are to be served."""
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


def main(asked: Asked, json_file: Path | None = None) -> int:
    """Measure, print, write; the exit status: of a comparison that came to nothing, or 1 where a target is missed or a
    program failed. Raises ConfigError.
    """
    if json_file is not None:
        check_writable(json_file, "json")
    told: list[Faster] = []
    with TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        check_writable(folder / f"{asked.caches[0]}-0.json", "folder")
        for cache, cells in zip(TARGETS, asked.cells, strict=True):
            if cache not in asked.caches:
                continue
            programs: list[Program] = []
            for number in range(asked.repetitions):
                file = folder / f"{cache}-{number}.json"
                status = _measure(asked, number, cells, file)
                if status:
                    return status
                programs += [replace(each, repetition=number) for each in group(read_rows(read_run(file)))]
            told += faster(programs, asked.programs, cache, cells, asked.policies, asked.seed)
    for line in told:
        print(line)
    if json_file is not None:
        json_file.write_text(json.dumps(_content(asked, told), indent=1) + "\n", encoding="utf-8")
    return int(not all(line.met for line in told))


def engine(named: Policy, asked: Asked, cells: int) -> dict[str, Any]:
    """The `engine` section of one server's configuration."""
    return {
        "threads": asked.threads,
        "cells": cells,
        "order": named.order,
        "retention": {"policy": named.retention},
    }


def faster(
    programs: Sequence[Program], count: int, cache: str, cells: int, policies: Sequence[str], seed: int
) -> list[Faster]:
    """Every policy but the first against the first, over the programs, of ``count``, that both served to their end."""
    seconds = {(each.server, each.key): each.seconds for each in programs}
    first, *others = policies
    found = []
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
        found.append(Faster(cache, cells, name, first, *figures))
    return found


def _measure(asked: Asked, number: int, cells: int, file: Path) -> int:
    """One repetition, all its servers beside each other: only one of them is sent anything at a time."""
    first = number % len(asked.policies)
    with ExitStack() as stack:
        servers = [
            (name, stack.enter_context(serving(asked.model, engine(policy(name), asked, cells))))
            for name in (*asked.policies[first:], *asked.policies[:first])
        ]
        return compare.main(asked.options(servers, file, number))


def _content(asked: Asked, told: Sequence[Faster]) -> dict[str, Any]:
    options = asdict(asked) | {"folder": None if asked.folder is None else str(asked.folder)}
    return {"options": options, "faster": [asdict(line) | {"target": line.target} for line in told]}
