"""One simulated replica: a real engine over a cost model, the step it is in, and requests that came meanwhile.

    decoding only, nobody waits     the coming steps are known until a sequence ends: they pass as one, and are cut
                                    short when a request comes
    decoding only, somebody waits   steps pass as one until something changes for the waiting requests: a sequence ends,
                                    a request comes, a pin expires. Where another replica may get the next request, at
                                    most `blind` steps pass, so the request is seen a little late
    anything else                   one step at a time

The engine runs a step when it ends in the first case, and when it begins in the others; its events count from the end.

The runner computes nothing: the token after n is n + 1, so nobody has to hold texts. Steps that pass as one draw
several tokens for each sequence and cost what the single steps would cost; the scheduler does not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.loadgen.simulator.machines import Profile, contexts
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.plan import Chunk, Drawn, Landed, RowWrite, Runner, StepOutput, StepPlan
from holdfast.replicas.requests import Event, Notice, Submit, Terminal, Tokens
from holdfast.replicas.types import TokenIds


class Machine(Runner, Protocol):
    """A runner that measures its latest step.

    `seconds` until its result was there, `steps` that it stood for, `drew`: sequences that drew a token; `decoded`: the
    step only decoded; `own`: the tokens are a model's.
    """

    seconds: float
    steps: int
    drew: int
    decoded: bool
    own: bool

    def start(self, engine: Engine, most: int) -> None:
        """The engine begins a step, which may stand for up to `most` steps if it only decodes."""
        ...

    def end(self) -> float:
        """Seconds of the step, with what the engine did around the runner."""
        ...


class CostRunner:
    """Takes as long as a profile says; the engine's own work is part of the profile's constant."""

    own = False

    def __init__(self, profile: Profile, page_size: int) -> None:
        self._profile = profile
        self._page_size = page_size
        self.seconds = 0.0
        self.steps = 1
        self.drew = 0
        self.decoded = False
        self._engine: Engine | None = None
        self._most = 1

    def start(self, engine: Engine, most: int) -> None:
        self._engine, self._most = engine, most
        self.seconds, self.drew = 0.0, 0

    def end(self) -> float:
        return self.seconds

    def begin(self, plan: StepPlan) -> Landed:
        profile, chunks = self._profile, plan.chunks
        self.steps, self.decoded = 1, plan.decodes
        if self.decoded:
            if self._most > 1 and self._engine is not None and more_cells(self._engine, plan, self._most) is not None:
                self.steps = self._most
            self.seconds = profile.decode_s(len(chunks), contexts(chunks), self.steps)
        else:
            self.seconds = profile.step(plan, self._page_size)
        drawn = tuple([_draw(chunk, self.steps) if chunk.draw else None for chunk in chunks])
        self.drew = len(chunks) if self.decoded else sum([each is not None for each in drawn])
        return Landed(StepOutput(drawn, load_s=len(plan.loads) * self._page_size * profile.reload_s))


def _draw(chunk: Chunk, steps: int) -> Drawn:
    first = chunk.tokens.item(-1) + 1
    return Drawn(tuple(range(first, first + steps)))


def more_cells(engine: Engine, plan: StepPlan, steps: int) -> list[RowWrite] | None:
    """Take cells for `steps` steps of every sequence of a plan; returns the new parts of their rows.

    None where the plan does not only decode, where a sequence needs each token before the next (for drafts, a mask, a
    penalty), or where cells are missing.
    """
    if not plan.decodes or not all(chunk.draw is not None and chunk.draw.plain for chunk in plan.chunks):
        return None
    sequences = {sequence.row: sequence for sequence in engine.live.values()}
    holdings = [sequences[chunk.row].the_holding for chunk in plan.chunks]
    ends = [chunk.start + steps for chunk in plan.chunks]
    needed = sum(engine.cache.pool.pages_for(end) - each.n_pages for end, each in zip(ends, holdings, strict=True))
    if needed * engine.cache.page_size > engine.cache.cells.available:  # none gets any: rows have to show their pages
        return None
    writes = []
    for chunk, holding in zip(plan.chunks, holdings, strict=True):
        first = holding.n_pages
        pages = engine.cache.grow(holding, chunk.start + steps)
        if pages is None:
            return None
        if len(pages):
            writes.append(RowWrite(chunk.row, first, pages))
    return writes


@dataclass(frozen=True, slots=True)
class Bulk:
    """The number of decode steps to merge into one: `free` while no request waits, `blind` while one does.

    With `free` 0 no step is predicted: the machine measures how long it took.
    """

    free: int = 1 << 20
    blind: int = 8


ONE_BY_ONE = Bulk(1, 1)


@dataclass(slots=True)
class Reply:
    """A reply in progress: `left` tokens still to draw; a model's tokens go to `text`.

    `stops`: how many tokens are left at the moments when its client must hear of it. Empty: the client does not listen.
    """

    left: int
    text: TokenIds | None = None
    stops: Sequence[int] = ()
    context: int = 0  # cells that the sequence reads in its next step

    @property
    def until_stop(self) -> int:
        """Tokens until it ends or its client must hear of it."""
        return self.left - max((stop for stop in self.stops if stop < self.left), default=0)


class Replica:
    """Takes requests, and says when its step ends."""

    def __init__(self, config: EngineConfig, profile: Profile, machine: Machine, bulk: Bulk) -> None:
        self._runner = machine
        self.engine = Engine(config, machine, stopwatch=lambda: 0.0)
        self._profile = profile
        self._bulk = bulk
        self._arrivals: list[tuple[float, Submit, Reply]] = []
        self._replies: dict[str, Reply] = {}
        self._decoding: dict[str, Reply] = {}  # of sequences that decode
        self._contexts = 0  # cells that they read in their next step, in all
        self._drew = 0  # sequences that drew in the previous step and go on
        self._bulk_steps = 0  # steps of a bulk that nobody waits for; 0: the engine has run
        self._events: list[Event] = []
        self.at = 0.0  # the end of the steps that the engine has run
        self.steps = 0  # of the machine; the engine counts a bulk as one

    @property
    def ongoing(self) -> int:
        """Requests that came and have not ended."""
        return len(self._replies) + len(self._arrivals)

    @property
    def quiet(self) -> bool:
        """The present step has told nothing so far."""
        return not self._events and not self._bulk_steps

    def give(self, submit: Submit, reply: Reply, now: float) -> None:
        """A request comes; the engine takes it at the end of the present step."""
        reply.context = len(submit.tokens) + 1
        self._arrivals.append((now, submit, reply))

    def notice(self, notice: Notice) -> None:
        """Between two steps."""
        self._events += self.engine.handle(notice, self.at)

    def begin(self, now: float, known: float, *, all_known: bool) -> float | None:
        """Begin a step after the previous one; returns when it ends, None where there is nothing to do.

        `known` is when the next request comes that is known to come here; `all_known`: no other one comes before.
        """
        self.at = max(self.at, now)
        arrivals, self._arrivals = self._arrivals, []
        for arrived, submit, reply in arrivals:
            self._replies[submit.request_id] = reply
            self._events += self.engine.handle(submit, self.at, arrived)
        if not self.engine.busy:
            self._drew = self._runner.drew = 0
            return self.at if any(isinstance(event, Terminal) for event in self._events) else None
        if self._bulk.free and self._drew and self._drew == len(self._replies) == len(self._decoding):
            self._bulk_steps = self._most(self._bulk.free)
            return self._end()
        if self._drew and self._runner.decoded:
            steps = self._most(max(self._bulk.free, 1) if all_known else self._bulk.blind)
            due = self.engine.due
            change = known if due is None else min(known, due)
            self._run(self._profile.decode_steps(len(self._decoding), self._contexts, change - self.at, steps))
        else:
            self._run(1)
        return self.at

    def cut(self, now: float) -> float | None:
        """A request has come: when the present step ends now; None where nothing is to be cut short."""
        if not self._bulk_steps:
            return None
        steps = self._profile.decode_steps(len(self._decoding), self._contexts, now - self.at, self._bulk_steps)
        if steps == self._bulk_steps:
            return None
        self._bulk_steps = steps
        return self._end()

    def end(self) -> list[Event]:
        """The step is over: terminal events, and the tokens of replies whose clients listen."""
        while self._bulk_steps > 0:  # the engine may find that it takes fewer at once
            self._run(self._bulk_steps)
            self._bulk_steps -= self._runner.steps
        self._bulk_steps = 0
        events, self._events = self._events, []
        ended = sum(isinstance(event, Terminal) and self._forget(event.request_id) for event in events)
        self._drew = self._runner.drew - ended
        return [event for event in events if isinstance(event, Terminal | Tokens)]

    # ---- parts ----

    def _run(self, steps: int) -> None:
        start, runner = self.at, self._runner
        runner.start(self.engine, steps)
        for event in self.engine.step(start, lambda: start + runner.seconds):
            if isinstance(event, Tokens):
                reply = self._replies[event.request_id]
                if runner.own and reply.text is not None:
                    at = len(reply.text) - reply.left
                    reply.text[at : at + len(event.tokens)] = event.tokens
                self._on_tokens(event.request_id, reply, len(event.tokens))
                if not reply.stops:
                    continue
            self._events.append(event)
        self.at = start + runner.end()
        self.steps += runner.steps

    def _on_tokens(self, name: str, reply: Reply, tokens: int) -> None:
        reply.left -= tokens
        if name not in self._decoding:
            self._decoding[name] = reply
            self._contexts += reply.context
            tokens -= 1
        reply.context += tokens
        self._contexts += tokens

    def _end(self) -> float:
        return self.at + self._profile.decode_s(len(self._decoding), self._contexts, self._bulk_steps)

    def _most(self, most: int) -> int:
        """Decode steps until a sequence ends or stops, at most `most`; fewer where cells may run out before."""
        steps = min(min(reply.until_stop if reply.stops else reply.left for reply in self._decoding.values()), most)
        room = self.engine.cache.cells.available // len(self._replies) - 2 * self.engine.config.page_size
        return max(min(steps, room), 1)

    def _forget(self, request_id: str) -> bool:
        """Drop a reply that has ended; whether it was decoding."""
        self._replies.pop(request_id, None)
        reply = self._decoding.pop(request_id, None)
        if reply is not None:
            self._contexts -= reply.context
        return reply is not None
