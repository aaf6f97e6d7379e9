"""`holdfast bench generator`: the cost of the load generator itself, and whether it keeps a schedule.

Requests arrive by a Poisson process at a stub in a process of its own. The stub reports its time for each request. The
rest of the measured time, and the lateness of each request, are the generator's.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from holdfast.loadgen.chat import ChatClient
from holdfast.loadgen.conversation import Manner
from holdfast.loadgen.options import Generated
from holdfast.loadgen.progress import LoopLag, bar, uncollected
from holdfast.loadgen.rows import Row
from holdfast.loadgen.runner import Part, Runner, Server
from holdfast.loadgen.workloads import tools
from holdfast.loadgen.workloads.drawing import Draw, agent_script, poisson
from holdfast.loadgen.workloads.script import Round, at_once
from holdfast.replicas.errors import UnavailableError

QUANTILES = (50, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class Measured:
    """The rows of a run, and the generator's own time. Times are seconds."""

    rows: list[Row]
    cpu: float  # of the generator
    wall: float
    lag: LoopLag

    @property
    def late(self) -> list[float]:
        """The lateness of each request: the time from due to sent."""
        return [row.started - (row.due or 0.0) for row in self.rows]

    @property
    def beyond(self) -> list[float]:
        """The generator's part of each successful request: its latency minus the stub's own time."""
        ok_rows = [row for row in self.rows if row.ok]
        return [row.ended - row.started - (row.prefill or 0.0) - (row.decode or 0.0) for row in ok_rows]

    @property
    def pace(self) -> float:
        """The time in which requests were sent, divided by the schedule's. Above 1, the generator fell behind."""
        due, starts = [row.due or 0.0 for row in self.rows], [row.started for row in self.rows]
        return (max(starts) - min(starts)) / (max(due) - min(due))

    @property
    def at_once(self) -> int:
        """The most requests in progress together."""
        events = sorted([(row.started, 1) for row in self.rows] + [(row.ended, -1) for row in self.rows])
        return max(accumulate(step for _, step in events))


def main(load: Generated) -> int:
    """Measure and print; the exit status."""
    print("\n".join(report(load, measure(load))))
    return 0


def measure(load: Generated) -> Measured:
    """Send a load to a new stub. Raises UnavailableError where that does not start."""
    with stub(load) as url:
        return asyncio.run(_send(load, url))


def report(load: Generated, result: Measured) -> list[str]:
    """The lines that are printed."""
    n, n_ok = len(result.rows), sum(row.ok for row in result.rows)
    heads = "".join(f"{'most' if percent == 100 else f'p{percent}':>9}" for percent in QUANTILES)
    lines = [
        f"{n} requests, {load.rate:g} a second (Poisson); the stub answers with {load.tokens} tokens, the first "
        f"after {load.first_s * 1e3:g} ms; up to {result.at_once} at once, {n - n_ok} failed",
        f"{'milliseconds':<42}{heads}",
    ]
    for name, seconds in (
        ("sent later than due", result.late),
        ("measured beyond what the stub took", result.beyond),
        ("event loop late", result.lag.ticks),
    ):
        values = np.percentile(seconds, QUANTILES) * 1e3 if seconds else [float("nan")] * len(QUANTILES)
        lines.append(f"{name:<42}" + "".join(f"{value:9.2f}" for value in values))
    return [
        *lines,
        f"sending took {result.pace:.3f} times as long as the schedule, whose mean gap is {1e3 / load.rate:.2f} ms",
        f"the generator took {result.cpu / result.wall:.1%} of one core, {result.cpu / n * 1e3:.2f} ms of it a request",
    ]


@contextmanager
def stub(load: Generated) -> Iterator[str]:
    """The address of a stub in a process of its own. Raises UnavailableError."""
    delays = (f"{load.first_s}", f"{load.token_s}", f"{load.tokens}")
    words = [sys.executable, "-m", "holdfast.loadgen.stub", *delays]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise UnavailableError("the stub server did not start")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()  # the stub serves until its input ends


def make_round(load: Generated) -> Round:
    """Programs of one turn with coding tools, which arrive by a Poisson process."""
    draw, count = Draw(load.seed, "generator", 0), load.requests
    scripts = tuple(agent_script(draw, f"job{i}", "a coding agent", tools.CODING, 1, 1) for i in range(count))
    return draw.round(scripts, at_once(count, 1), poisson(draw.rng("arrivals"), count, load.rate))


async def _send(load: Generated, url: str) -> Measured:
    async with ChatClient(url, 60.0) as client:
        runner, lag, round_ = Runner([Server("stub", client, "stub")]), LoopLag(), make_round(load)
        with uncollected(), bar("requests", load.requests) as progress:
            runner.on_sent = progress.advance
            async with lag.watching():
                cpu, wall = time.process_time(), time.perf_counter()
                await runner.send(Part("generator", 0, round_, Manner(max_tokens=128)))
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return Measured(runner.rows, cpu, wall, lag)
