"""The virtual clock: programs arrive, steps end, tools return, in the order of their times. Deterministic.

`Loop` is the clock with its replicas; a subclass plays the clients. `Simulation` plays programs whose turns and tools
come one after another; `clients` has the others. Everything random comes with the programs, so a run depends on them
and on the settings alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from typing import Any

from holdfast.loadgen.program import Program, Turn
from holdfast.loadgen.simulator.machines import Profile
from holdfast.loadgen.simulator.replica import Bulk, CostRunner, Machine, Replica, Reply
from holdfast.loadgen.simulator.routing import Ours, Placing, Routing
from holdfast.loadgen.simulator.workloads import MAX_TOKENS, tokens_of
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import EngineError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Event, Finished, Submit, ToolLatencies, TurnEnded
from holdfast.replicas.retention.latency import LatencyBook
from holdfast.replicas.types import TokenIds

STALE_S = 1.0  # age of the tools' statistics that a replica decides with, at most
BEHIND_S = 300.0  # after a window, time in which its turns may still end
PARTS = 10  # replicas report by tenths, one after the other
USUAL = Bulk()


@dataclass(frozen=True, slots=True)
class Done:
    """One program's run. `bubble_s`: time in which its requests waited to be scheduled, in all."""

    number: int
    arrived: float
    ended: float
    turns: int
    tool_s: float
    bubble_s: float
    prompt: int  # tokens of all its prompts
    cached: int  # of these
    drawn: int

    @property
    def seconds(self) -> float:
        """Job completion time."""
        return self.ended - self.arrived


@dataclass(frozen=True, slots=True)
class Served:
    """One turn: `first_s` to its first token and `seconds` to its end, on replica number `replica`.

    A turn that had not ended when the run was over has no `prompt`.
    """

    tenant: str
    asked: float
    first_s: float
    seconds: float
    prompt: int
    cached: int
    replica: int


COUNTED = (
    *("preemptions", "prompt_computed", "tokens_reloaded", "pins", "pin_hits", "pin_misses", "pins_expired"),
    *("pins_given_way", "pins_refused", "pages_out", "pages_in", "steps"),
)
"""The statistics of engines that a run adds up; `machine_steps` beside them counts steps that passed as one singly."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, programs by their numbers."""

    programs: list[Done]
    counts: dict[str, int]

    @property
    def wall_s(self) -> float:
        """From the first arrival to the last end."""
        return max(program.ended for program in self.programs) - min(program.arrived for program in self.programs)

    @property
    def programs_per_s(self) -> float:
        return len(self.programs) / self.wall_s


@dataclass(slots=True)
class Site:
    """A replica and its events. Of the predicted ends of its step only number `end` counts; -1: it is idle."""

    replica: Replica
    returns: list[float]  # when requests come here that are known to come
    end: int = -1
    informed: float = -inf  # when it last got the tools' statistics
    began: float = 0.0  # the present step
    busy_s: float = 0.0  # of steps within the window

    def known(self, now: float) -> float:
        """When the next request comes that is known to come."""
        while self.returns and self.returns[0] <= now:
            heapq.heappop(self.returns)
        return self.returns[0] if self.returns else inf


class Loop:
    """Replicas of one kind on a virtual clock. A subclass sends requests and handles their events.

    Within the `window`, from one moment to another, each site's busy time is counted. `coming`: when the next request
    of a new client comes.
    """

    coming = inf

    def __init__(
        self,
        profile: Profile,
        config: EngineConfig,
        replicas: int = 1,
        bulk: Bulk = USUAL,
        machine: Callable[[], Machine] | None = None,
        window: tuple[float, float] = (0.0, inf),
    ) -> None:
        make = machine or (lambda: CostRunner(profile, config.page_size))
        self.sites = [Site(Replica(config, profile, make(), bulk), []) for _ in range(replicas)]
        self.window = window
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._numbers = count()

    def event(self, site: Site, event: Event) -> None:
        """A request has ended, or a reply has got tokens."""
        raise NotImplementedError

    def over(self) -> bool:
        """Whether the run ends before nothing is left to do."""
        return False

    def play(self) -> None:
        """Until it is over. Raises EngineError where requests wait for ever."""
        while self._heap and not self.over():
            self.now, _, happens, argument = heapq.heappop(self._heap)
            happens(argument)

    def at(self, when: float, happens: Callable[..., None], argument: Any, site: Site | None = None) -> None:
        """Call `happens(about)` at a moment; at `site` a request comes then."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._numbers), happens, argument))
        if site is not None:
            heapq.heappush(site.returns, when)

    def send(self, site: Site, submit: Submit, reply: Reply) -> None:
        """A request reaches a replica now."""
        site.replica.give(submit, reply, self.now)
        if site.end < 0:
            self._begin(site)
        elif (end := site.replica.cut(self.now)) is not None:
            self._ends(site, end)

    def _step_over(self, site_step: tuple[Site, int]) -> None:
        site, number = site_step
        if site.end != number:
            return  # it was cut short
        begin, end = self.window
        site.busy_s += max(0.0, min(self.now, end) - max(site.began, begin))
        for event in site.replica.end():
            self.event(site, event)
        self._begin(site)

    def _begin(self, site: Site) -> None:
        site.began = self.now
        known, single = site.known(self.now), len(self.sites) == 1
        end = site.replica.begin(self.now, min(known, self.coming) if single else known, all_known=single)
        if end is None:
            site.end = -1
            return
        if end <= self.now and site.replica.quiet:  # nothing could run: look again when something has happened
            if not self._heap:
                raise EngineError("requests wait that nothing will let in")
            end = self._heap[0][0]
        self._ends(site, end)

    def _ends(self, site: Site, end: float) -> None:
        site.end = next(self._numbers)
        heapq.heappush(self._heap, (max(end, self.now), site.end, self._step_over, (site, site.end)))


@dataclass(slots=True)
class Run:
    """A program in progress: `at` is its turn, `length` the tokens of its text so far."""

    program: Program
    text: TokenIds
    home: int | None = None
    at: int = 0
    length: int = 0
    ended: float = 0.0  # its latest turn
    tool_s: float = 0.0
    bubble_s: float = 0.0
    prompt: int = 0
    cached: int = 0
    drawn: int = 0
    asked: float = 0.0  # its present turn
    parent: Run | None = None
    children: int = 0  # sub-agents that it waits for

    @property
    def turn(self) -> Turn:
        return self.program.turns[self.at]


class Simulation(Loop):
    """Programs on replicas: each turn is sent when the tools, or the sub-agents, of the turn before are back.

    `exact` requests say how long their reply is; others ask for `MAX_TOKENS` and end before. `vocabulary` is of a model
    that reads the texts. `routing` places turns. `served` is called for every turn. A run is over once every turn that
    came in the window has ended, or `BEHIND_S` after it: then `served` is called for the others as if they ended then.
    """

    def __init__(
        self,
        profile: Profile,
        config: EngineConfig,
        replicas: int = 1,
        bulk: Bulk = USUAL,
        machine: Callable[[], Machine] | None = None,
        window: tuple[float, float] = (0.0, inf),
        *,
        exact: bool = False,
        vocabulary: int | None = None,
        routing: Callable[[int], Routing] = Ours,
        served: Callable[[Served], None] = lambda turn: None,
    ) -> None:
        super().__init__(profile, config, replicas, bulk, machine, window)
        self._exact, self._vocabulary = exact, vocabulary
        self._routing = routing(replicas)
        self._served = served
        self._n_open = 0  # programs that have come and not ended
        self._runs: dict[str, Run] = {}
        self._open_runs: dict[str, Run] = {}  # whose present turn came in the window
        self._book = LatencyBook()
        self._latencies, self._snapshot_at = ToolLatencies(self._book.snapshot()), -inf
        self._results: list[Done] = []
        self._programs: Iterator[Program] = iter(())
        self._ended: Callable[[], None] = lambda: None
        self._enough: Callable[[int], bool] = lambda number: False
        self._stopped = False

    def run(
        self,
        programs: Iterable[Program],
        ended: Callable[[], None] = lambda: None,
        enough: Callable[[int], bool] = lambda number: False,
    ) -> Outcome:
        """Play programs, which come in order of arrival, until all have ended or it is `enough` with one's end.

        `ended` is called for each. Raises EngineError where a request did not get its answer.
        """
        self._programs, self._ended, self._enough = iter(programs), ended, enough
        self._next_program()
        if self._routing.every < inf:
            for part in range(PARTS):
                self.at(self._routing.every * part / PARTS, self._report, range(part, len(self.sites), PARTS))
        self.play()
        for run in self._open_runs.values():
            self._tell_served(run, self.now, self.now, prompt=0, cached=0)
        replicas = [site.replica for site in self.sites]
        counts = {name: sum(getattr(each.engine.stats, name) for each in replicas) for name in COUNTED}
        counts["machine_steps"] = sum(replica.steps for replica in replicas)
        return Outcome(sorted(self._results, key=lambda program: program.number), counts)

    def over(self) -> bool:
        behind = self.now - self.window[1]
        return self._stopped or (behind > 0 and (not self._open_runs or behind > BEHIND_S))

    def event(self, site: Site, event: Event) -> None:
        if not isinstance(event, Finished):
            raise EngineError(f"{event.request_id} did not get its answer: {event}")
        name = event.request_id.rpartition("/")[0]
        run, timing, usage = self._runs[name], event.timing, event.usage
        turn, last = run.turn, run.at + 1 == len(run.program.turns)
        assert timing.scheduled is not None
        assert timing.first_token is not None
        assert timing.finished is not None
        assert run.home is not None
        run.ended = timing.finished
        run.bubble_s += timing.scheduled - timing.arrived
        self._open_runs.pop(name, None)
        self._tell_served(run, timing.first_token, timing.finished, usage.prompt, usage.cached)
        run.length += turn.reply
        run.prompt += usage.prompt
        run.cached += usage.cached
        run.drawn += usage.completion
        self._routing.ended(run.home, run.program, run.at)
        self._inform(site)
        tools = tuple(tool_run.tool for tool_run in turn.runs)
        site.replica.notice(TurnEnded(event.request_id, run.program.tenant, name, tools, last, run.at + 1))
        if last:
            self._end_program(run)
        elif turn.children:
            run.children = len(turn.children)
            for child in turn.children:
                when = run.ended + child.arrived
                self.at(when, self._begin_program, (replace(child, arrived=when), run), site)
        else:
            self.at(run.ended + turn.pause_s, self._return, run, site)

    # ---- what happens ----

    def _arrive(self, program: Program) -> None:
        self._begin_program((program, None))
        self._next_program()

    def _next_program(self) -> None:
        program = next(self._programs, None)
        self.coming = inf if program is None else program.arrived
        if program is not None:
            self.at(program.arrived, self._arrive, program)

    def _begin_program(self, program_parent: tuple[Program, Run | None]) -> None:
        program, parent = program_parent
        self._n_open += 1
        run = self._runs[program.id] = Run(program, tokens_of(program, self._vocabulary), parent=parent)
        self._send_turn(run)

    def _return(self, run: Run) -> None:
        """The tools are back: the next turn."""
        for tool_run in run.turn.runs:
            self._book.record("", tool_run.tool, self.now - run.ended)
        run.tool_s += self.now - run.ended
        run.at += 1
        self._send_turn(run)

    def _send_turn(self, run: Run) -> None:
        run.asked, turn, program = self.now, run.turn, run.program
        if self.window[0] <= self.now <= self.window[1]:
            self._open_runs[program.id] = run
        run.length += turn.added
        parent_home = None if run.parent is None else (run.parent.program.id, run.parent.home)
        run.home = self._routing.place(Placing(program, run.at, run.length, run.home, parent_home))
        reply = run.text[run.length : run.length + turn.reply]
        sampling = Sampling(max_tokens=turn.reply, ignore_eos=True)
        if not self._exact:
            last = int(run.text[run.length + turn.reply - 1])
            sampling = Sampling(max_tokens=MAX_TOKENS, stop_token_ids=frozenset((last,)))
        submit = Submit(
            f"{program.id}/{run.at}",
            tokens=run.text[: run.length],
            sampling=sampling,
            scope=program.tenant,
            program_id=program.id,
            program_arrival=program.arrived,
            program_turns=run.at,
        )
        self.send(self.sites[run.home], submit, Reply(turn.reply, reply))

    def _report(self, numbers: range) -> None:
        """These replicas report their load, and will again."""
        for number in numbers:
            self._routing.report(number, self.sites[number].replica)
        if self._n_open or self.coming < inf:
            self.at(self.now + self._routing.every, self._report, numbers)

    def _end_program(self, run: Run) -> None:
        program, parent = run.program, run.parent
        self._n_open -= 1
        del self._runs[program.id]
        costs = (run.tool_s, run.bubble_s, run.prompt, run.cached, run.drawn)
        self._results.append(Done(program.number, program.arrived, run.ended, len(program.turns), *costs))
        self._stopped = self._stopped or self._enough(program.number)
        self._ended()
        if parent is None:
            return
        parent.children -= 1
        if not parent.children:
            assert parent.home is not None
            self.at(max(run.ended, parent.ended), self._return, parent, self.sites[parent.home])

    def _tell_served(self, run: Run, first: float, ended: float, prompt: int, cached: int) -> None:
        assert run.home is not None
        first_s, seconds = first - run.asked, ended - run.asked
        self._served(Served(run.program.tenant, run.asked, first_s, seconds, prompt, cached, run.home))

    def _inform(self, site: Site) -> None:
        """Send the tools' statistics to a replica that has old ones."""
        if self.now - site.informed < STALE_S:
            return
        if self.now - self._snapshot_at >= STALE_S:
            self._latencies, self._snapshot_at = ToolLatencies(self._book.snapshot()), self.now
        site.replica.notice(self._latencies)
        site.informed = self.now
