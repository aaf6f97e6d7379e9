"""Overload: how much of what comes has its answer in time, by how much more comes than can be served. Simulated.

Single requests come by a Poisson process, each of a program of its own; lengths of prompts and replies are lognormal.
Each client wants its answer within a time that is drawn evenly between a half and one and a half of `deadline_s`, and
leaves when that is over. A `told` server knows the time, one that is not knows nothing of it. Both are the real engine
over a cost model. The capacity is what the machine completes in a second while many wait and nobody leaves.

A replica foresees from outside of a step whether a request will have its answer: that takes no time here. What it
could not foresee the engine refuses at the end of the step in which the request came, or drops later.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from holdfast.loadgen.simulator import machines
from holdfast.loadgen.simulator.programs import Length
from holdfast.loadgen.simulator.runner import CostRunner
from holdfast.loadgen.table import WIDTH
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import DeadlineError, EngineError, ErrorKind
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Abort, Aborted, Event, Finished, Rejected, Submit, Terminal
from holdfast.replicas.types import Priority

PAGE = 16
LONGEST = 8192  # tokens of a prompt, and of a reply
HEADS = (
    *("load", "told", "in time a second", "of the best", "in time", "refused", "dropped", "left"),
    "refusal ms p99, longest",
)
WARM_S = 60.0  # at the beginning of a run, which are not counted


@dataclass(frozen=True, slots=True)
class Options:
    """`loads`: how much comes, in times of the capacity. `batch`: the part of it that is of the class batch."""

    profile: str = "8b-a100"
    loads: tuple[float, ...] = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
    seconds: float = 300.0
    deadline_s: float = 40.0
    prompt: int = 2000
    reply: int = 250
    sequences: int = 64
    batch: float = 0.0
    order: str = "program"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when, how long its prompt and its reply are, and within what time it is wanted."""

    at: float
    prompt: int
    reply: int
    within_s: float
    priority: Priority


@dataclass(slots=True)
class Told:
    """What became of the requests of one run, and how long refusals took. Seconds."""

    seconds: float
    ended: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    refused: Counter[Priority] = field(default_factory=Counter)
    good: Counter[Priority] = field(default_factory=Counter)  # answers in time

    @property
    def completed(self) -> int:
        return self.ends["in time"] + self.ends["late"]

    @property
    def goodput(self) -> float:
        """Answers in time, a second."""
        return self.good.total() / self.seconds


def drawn(options: Options, rate: float) -> Iterator[Asked]:
    """The requests of a run, in order."""
    draw, at = random.Random(options.seed), 0.0
    prompt, reply = Length(options.prompt, 0.7), Length(options.reply, 0.7)
    while (at := at + draw.expovariate(rate)) < options.seconds + WARM_S:
        within_s = options.deadline_s * draw.uniform(0.5, 1.5)
        priority = Priority.BATCH if draw.random() < options.batch else Priority.INTERACTIVE
        yield Asked(at, min(prompt.draw(draw), LONGEST), min(reply.draw(draw), LONGEST), within_s, priority)


class Run:
    """One engine, its clients and the clock."""

    def __init__(self, options: Options, asked: Iterator[Asked], *, told: bool, leave: bool = True) -> None:
        self._machine = CostRunner(machines.profile(options.profile), PAGE)
        config = EngineConfig(
            context_length=2 * LONGEST,
            cells=machines.profile(options.profile).cells // PAGE * PAGE,
            page_size=PAGE,
            max_sequences=options.sequences,
            session_rows=0,
            max_waiting=1 << 30,
            queue_timeout_s=1e9,
            speculation=DraftConfig(enabled=False),
            without=("prefix_cache",),  # no two prompts begin alike
            order=options.order,
        )
        self._engine = Engine(config, self._machine, stopwatch=lambda: 0.0)
        self._coming = asked
        self._next = next(asked, None)
        self._told, self._leave = told, leave
        self._open: dict[str, Asked] = {}
        self._leaves: list[tuple[float, str]] = []
        self._end = options.seconds + WARM_S
        self.found = Told(options.seconds)

    def run(self) -> Told:
        """Until as many seconds have passed as are looked at."""
        now = 0.0
        while now < self._end:
            events = [*self._arrive(now), *self._go(now)]
            if self._engine.busy:
                self._machine.start(self._engine, 1)
                begun = now
                events += self._engine.step(now, lambda begun=begun: begun + self._machine.seconds)  # type: ignore[misc]
                now += max(self._machine.end(), 1e-6)
            elif self._next is not None:
                now = max(now, self._next.at)
            else:
                break
            for event in events:
                if isinstance(event, Terminal):
                    self._ended(event, now)
        return self.found

    def _arrive(self, now: float) -> list[Event]:
        events: list[Event] = []
        while self._next is not None and self._next.at <= now:
            asked, name = self._next, f"r{len(self._open)}-{self._next.at}"
            self._open[name] = asked
            if self._leave:
                heapq.heappush(self._leaves, (asked.at + asked.within_s, name))
            submit = Submit(
                name,
                tokens=np.arange(asked.prompt, dtype=np.int32),
                sampling=Sampling(max_tokens=asked.reply, ignore_eos=True),
                program_id=name,
                program_arrival=asked.at,
                program_end=True,
                priority=asked.priority,
                within_s=asked.within_s if self._told else inf,
            )
            try:  # those before it are in the queue
                foreseen = self._engine.scheduler.admission.check_deadline_early(submit, asked.reply, 0)
            except DeadlineError as unmet:
                self._ended(Rejected(name, unmet.info), asked.at)
            else:
                events += self._engine.handle(replace(submit, foreseen=foreseen), now, asked.at)
            self._next = next(self._coming, None)
        return events

    def _go(self, now: float) -> list[Event]:
        """Clients whose time is over leave."""
        events: list[Event] = []
        while self._leaves and self._leaves[0][0] <= now:
            name = heapq.heappop(self._leaves)[1]
            if name in self._open:
                events += self._engine.handle(Abort(name), now)
        return events

    def _ended(self, event: Terminal, now: float) -> None:
        asked = self._open.pop(event.request_id)
        if now < WARM_S:
            return
        found = self.found
        found.ended += 1
        if isinstance(event, Finished):
            assert event.timing.finished is not None
            in_time = event.timing.finished <= asked.at + asked.within_s
            found.good[asked.priority] += in_time
            found.ends["in time" if in_time else "late"] += 1
        elif isinstance(event, Rejected) and event.error.kind is ErrorKind.DEADLINE:
            found.refused[asked.priority] += 1
            if event.error.retry_after_s is None:
                found.ends["dropped"] += 1
            else:
                found.ends["refused"] += 1
                found.refused_s.append(now - asked.at)
        elif isinstance(event, Aborted):
            found.ends["left"] += 1
        else:
            raise EngineError(f"{event.request_id} ended by {event}")


def capacity(options: Options) -> float:
    """Requests a second that the machine completes while many wait, and nobody leaves."""
    flood = replace(options, batch=0.0)
    run = Run(flood, drawn(flood, 50.0), told=False, leave=False)
    found = run.run()
    return found.completed / flood.seconds


def main(options: Options) -> int:
    """Print the table."""
    most = capacity(options)
    rows = [
        (load, told, Run(options, drawn(options, load * most), told=told).run())
        for load in options.loads
        for told in (True, False)
    ]
    best = max(found.goodput for _, told, found in rows if told)
    profile = f"{options.profile}, {options.sequences} sequences, deadlines of {options.deadline_s:g} s +- half"
    table = Table(title=f"{profile}: {most:.2f} requests a second at most", box=SIMPLE)
    for name in HEADS:
        table.add_column(name, justify="right")
    for load, told, found in rows:
        refusals = sorted(found.refused_s) or [0.0]
        share = [f"{found.ends[name] / found.ended:.1%}" for name in ("in time", "refused", "dropped", "left")]
        cells = [f"{load:g}", "yes" if told else "no", f"{found.goodput:.2f}", f"{found.goodput / best:.1%}", *share]
        cells.append(f"{refusals[int(0.99 * (len(refusals) - 1))] * 1e3:.0f}, {refusals[-1] * 1e3:.0f}")
        if options.batch:
            cells += [f"{found.good[each] / options.seconds:.2f}" for each in Priority]
        table.add_row(*cells)
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)
    return 0
