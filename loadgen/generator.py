"""`holdfast bench generator`: what the load generator itself costs, and whether it keeps a schedule.

Requests arrive by a Poisson process at a stub in a process of its own, which reports how long it took for each. Time
measured beyond that, and how late each request was sent, are the generator's.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

import numpy as np

from holdfast.loadgen.chat import ChatClient
from holdfast.loadgen.conversation import Manner
from holdfast.loadgen.progress import LoopLag, bar, uncollected
from holdfast.loadgen.rows import Row
from holdfast.loadgen.runner import Part, Runner, Server
from holdfast.loadgen.stub import Delays
from holdfast.loadgen.workloads import tools
from holdfast.loadgen.workloads.drawing import Draw, agent_script, poisson
from holdfast.loadgen.workloads.script import Round, at_once
from holdfast.replicas.errors import ConfigError, UnavailableError

QUANTILES = (50, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class Load:
    """The load: so many requests a second for so long, and how the stub answers. Raises ConfigError."""

    rate: float = 500.0
    seconds: float = 10.0
    delays: Delays = field(default_factory=lambda: Delays(0.05, 0.01, 4))
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"rate": self.rate, "seconds": self.seconds, "tokens": self.delays.tokens}
        for name, value in least.items():
            if not 0 < value < inf:
                raise ConfigError(f"{name} must be a number more than 0", name)
        for name, value in {"first": self.delays.first_s, "token": self.delays.token_s}.items():
            if not 0 <= value < inf:
                raise ConfigError(f"{name} must be a number, 0 or more", name)

    @property
    def requests(self) -> int:
        return max(2, round(self.rate * self.seconds))


@dataclass(frozen=True, slots=True)
class Measured:
    """The rows of a run, and what the generator took. Times are seconds."""

    rows: list[Row]
    cpu: float  # of the generator
    wall: float
    lag: LoopLag

    @property
    def good(self) -> list[Row]:
        return [row for row in self.rows if row.ok]

    @property
    def late(self) -> list[float]:
        """Of each request: how much later than due it was sent."""
        return [row.started - (row.due or 0.0) for row in self.rows]

    @property
    def beyond(self) -> list[float]:
        """Of each request: how much longer it took than the stub took to answer it."""
        return [row.ended - row.started - (row.prefill or 0.0) - (row.decode or 0.0) for row in self.good]

    @property
    def pace(self) -> float:
        """The time over which requests were sent, over the schedule's: above 1, the generator fell behind."""
        due, sent = [row.due or 0.0 for row in self.rows], [row.started for row in self.rows]
        return (max(sent) - min(sent)) / (max(due) - min(due))

    @property
    def at_once(self) -> int:
        """The most requests in progress together."""
        ends = sorted([(row.started, 1) for row in self.rows] + [(row.ended, -1) for row in self.rows])
        return max(accumulate(step for _, step in ends))


def main(load: Load) -> int:
    """Measure and print; the exit status."""
    for line in report(load, measure(load)):
        print(line)
    return 0


def measure(load: Load) -> Measured:
    """Send a load to a new stub. Raises UnavailableError where that does not start."""
    with stub(load.delays) as url:
        return asyncio.run(_send(load, url))


def report(load: Load, result: Measured) -> list[str]:
    """The lines that are printed."""
    n, delays = len(result.rows), load.delays
    heads = "".join(f"{'most' if percent == 100 else f'p{percent}':>9}" for percent in QUANTILES)
    return [
        f"{n} requests, {load.rate:g} a second (Poisson); the stub answers with {delays.tokens} tokens, the first "
        f"after {delays.first_s * 1e3:g} ms; up to {result.at_once} at once, {n - len(result.good)} failed",
        f"{'milliseconds':<42}{heads}",
        _line("sent later than due", result.late),
        _line("measured beyond what the stub took", result.beyond),
        _line("event loop late", result.lag.ticks),
        f"sending took {result.pace:.3f} times as long as the schedule, whose mean gap is {1e3 / load.rate:.2f} ms",
        f"the generator took {result.cpu / result.wall:.1%} of one core, {result.cpu / n * 1e3:.2f} ms of it a request",
    ]


@contextmanager
def stub(delays: Delays) -> Iterator[str]:
    """The address of a stub in a process of its own. Raises UnavailableError."""
    delay_words = (f"{delays.first_s}", f"{delays.token_s}", f"{delays.tokens}")
    words = [sys.executable, "-m", "holdfast.loadgen.stub", *delay_words]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise UnavailableError("the stub server did not start")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()  # it serves until then


def drawn(load: Load) -> Round:
    """Programs of one turn with coding tools, which arrive by a Poisson process."""
    draw = Draw(load.seed, "generator", 0)
    count = load.requests
    scripts = tuple(agent_script(draw, f"job{i}", "a coding agent", tools.CODING, 1, 1) for i in range(count))
    return draw.round(scripts, at_once(count, 1), poisson(draw.rng("arrivals"), count, load.rate))


async def _send(load: Load, url: str) -> Measured:
    async with ChatClient(url, 60.0) as client:
        runner, lag = Runner([Server("stub", client, "stub")]), LoopLag()
        round_ = drawn(load)
        with uncollected(), bar("requests", load.requests) as shown:
            runner.sent = shown.advance
            async with lag.watching():
                cpu, wall = time.process_time(), time.perf_counter()
                await runner.send(Part("generator", 0, round_, Manner(max_tokens=128)))
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return Measured(runner.rows, cpu, wall, lag)


def _line(name: str, seconds: list[float]) -> str:
    values = np.percentile(seconds, QUANTILES) * 1e3 if seconds else [float("nan")] * len(QUANTILES)
    return f"{name:<42}" + "".join(f"{value:9.2f}" for value in values)
