"""One simulated replica: a real engine, the step it is in, and what came while that ran.

    decoding only, nobody waits     the coming steps are known until a sequence ends: they pass as one, and are cut
                                    short when a request comes
    decoding only, somebody waits   steps pass as one until something changes for who waits: a sequence ends, a request
                                    comes, a pin expires. Where others than this replica may get the next request, at
                                    most `blind` of them: then it is looked at a little late
    anything else                   one step at a time

The engine runs a step when it ends in the first case, and when it begins in the others; its events count from the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.runner import Machine
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import EngineError
from holdfast.replicas.requests import Event, Finished, Notice, Rejected, Submit, Terminal, Tokens
from holdfast.replicas.types import TokenIds


@dataclass(frozen=True, slots=True)
class Bulk:
    """How many decode steps may pass as one: `free` while nobody waits, `blind` while somebody does.

    Where `free` is 0 no step is foreseen: the machine says how long it took.
    """

    free: int = 1 << 20
    blind: int = 8


ONE_BY_ONE = Bulk(1, 1)


@dataclass(slots=True)
class Reply:
    """A reply in the making: cells its sequence looks at in its next step, tokens it still draws, and where to."""

    context: int
    left: int
    text: TokenIds


class Replica:
    """Given requests, it says when it will have something to tell."""

    def __init__(self, name: str, config: EngineConfig, profile: Profile, machine: Machine, bulk: Bulk) -> None:
        self.name = name
        self._runner = machine
        self.engine = Engine(config, machine, stopwatch=lambda: 0.0)
        self._profile = profile
        self._bulk = bulk
        self._came: list[tuple[float, Submit, Reply]] = []
        self._replies: dict[str, Reply] = {}
        self._decoding: dict[str, Reply] = {}  # of sequences that decode
        self._contexts = 0  # cells that they look at in their next step, all together
        self._drew = 0  # sequences that drew in the step before and go on
        self._planned = 0  # steps of a bulk that nobody waits for; 0: the engine has run
        self._events: list[Event] = []
        self.at = 0.0  # the end of the steps that the engine has run
        self.steps = 0  # of the machine; the engine counts a bulk as one
        self.rejected: list[Rejected] | None = None  # those that were, where that may be

    @property
    def ongoing(self) -> int:
        """Requests it has in hand."""
        return len(self._replies) + len(self._came)

    def give(self, submit: Submit, text: TokenIds, now: float) -> None:
        """A request comes whose reply will be as long as `text`, and goes there where a model draws it.

        It is taken in when the step that runs is over.
        """
        self._came.append((now, submit, Reply(len(submit.tokens) + 1, len(text), text)))

    def notice(self, notice: Notice) -> None:
        """Between two steps."""
        self._events += self.engine.handle(notice, self.at)

    def begin(self, now: float, known: float, *, all_known: bool) -> float | None:
        """Begin a step, now that the one before is over; when it will be over, None where there is nothing to do.

        `known` is when the next request will come that is known to come here; `all_known`: no other one comes before.
        """
        self.at = max(self.at, now)
        for came, submit, reply in self._came:
            self._replies[submit.request_id] = reply
            self._events += self.engine.handle(submit, self.at, came)
        self._came.clear()
        if not self.engine.busy:
            return None
        if self._bulk.free and self._drew and self._drew == len(self._replies):
            self._planned = self._most(self._bulk.free)
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
        """A request has come: when the step that runs then is over; None where nothing is to be cut short."""
        if not self._planned:
            return None
        steps = self._profile.decode_steps(len(self._decoding), self._contexts, now - self.at, self._planned)
        if steps == self._planned:
            return None
        self._planned = steps
        return self._end()

    def end(self) -> list[Finished]:
        """The step is over: what finished in it. Raises EngineError where a request did not get its answer."""
        while self._planned > 0:  # the engine may find that it takes fewer at once
            self._run(self._planned)
            self._planned -= self._runner.steps
        self._planned = 0
        events, self._events = self._events, []
        if self.rejected is not None:
            for event in events:
                if isinstance(event, Rejected):
                    self._replies.pop(event.request_id)
                    self.rejected.append(event)
            events = [event for event in events if not isinstance(event, Rejected)]
        finished = [self._ended(event) for event in events if isinstance(event, Terminal)]
        self._drew = self._runner.drew - len(finished)
        return finished

    # ---- parts ----

    def _run(self, steps: int) -> None:
        begun, runner = self.at, self._runner
        runner.start(self.engine, steps)
        for event in self.engine.step(begun, lambda: begun + runner.seconds):
            if isinstance(event, Tokens):
                reply = self._replies[event.request_id]
                if runner.own:
                    at = len(reply.text) - reply.left
                    reply.text[at : at + len(event.tokens)] = event.tokens
                self._drawn(event.request_id, reply, len(event.tokens))
            else:
                self._events.append(event)
        self.at = begun + runner.end()
        self.steps += runner.steps

    def _drawn(self, name: str, reply: Reply, tokens: int) -> None:
        """A reply has got so many tokens more."""
        reply.left -= tokens
        if name not in self._decoding:
            self._decoding[name] = reply
            self._contexts += reply.context
            tokens -= 1
        reply.context += tokens
        self._contexts += tokens

    def _end(self) -> float:
        return self.at + self._profile.decode_s(len(self._decoding), self._contexts, self._planned)

    def _most(self, most: int) -> int:
        """Decode steps until a sequence ends, at most `most`; fewer where cells may come to be missing before."""
        steps = min(min(reply.left for reply in self._decoding.values()), most)
        room = self.engine.cache.cells.available // len(self._replies) - 2 * self.engine.config.page_size
        return max(min(steps, room), 1)

    def _ended(self, event: Terminal) -> Finished:
        if not isinstance(event, Finished):
            raise EngineError(f"{event.request_id} did not get its answer: {event}")
        reply = self._replies.pop(event.request_id)
        if self._decoding.pop(event.request_id, None) is not None:
            self._contexts -= reply.context
        return event
