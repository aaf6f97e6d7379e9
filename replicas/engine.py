"""The engine: takes commands in, runs steps, gives events out. One thread calls it; it never waits and reads no clock.

Whatever happens inside a step, every submitted request ends in exactly one terminal event.
"""

import logging
import secrets
import time
from dataclasses import replace
from itertools import count

import numpy as np

from holdfast.replicas.arrivals import Arrivals
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import EngineError, HoldfastError, InvalidRequestError, OverloadedError
from holdfast.replicas.events import (
    Abort,
    Command,
    Event,
    Failed,
    Notice,
    Rejected,
    Request,
    Stop,
    Submit,
    Terminal,
    Tokens,
)
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.host_tier import HostTier
from holdfast.replicas.kv.radix import NO_TOKENS
from holdfast.replicas.retention.learned import Learned
from holdfast.replicas.scheduling.order import order_of
from holdfast.replicas.scheduling.places import Places
from holdfast.replicas.scheduling.plan import Runner
from holdfast.replicas.scheduling.running import BooksError
from holdfast.replicas.scheduling.scheduler import Scheduler
from holdfast.replicas.seed import prompt_seed
from holdfast.replicas.sequences.pool import SequencePool
from holdfast.replicas.sequences.sequence import Sequence, Status, cut
from holdfast.replicas.sessions import Sessions
from holdfast.replicas.speculation.drafter import Drafter
from holdfast.replicas.speculation.gate import VerificationCost
from holdfast.replicas.stats import EngineStats, Occupancy
from holdfast.replicas.steps import Steps, Stopwatch, expect_sound
from holdfast.replicas.tokens import TokenIds
from holdfast.replicas.validation import check_room, check_submit

log = logging.getLogger(__name__)


class Engine:
    """One replica's requests and their steps.

    `config` is resolved: it has no "auto" and no 0 where a number is needed. `eos` are the model's own end tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        eos: frozenset[int] = frozenset(),
        vocabulary: int | None = None,
        cost: VerificationCost | None = None,
        stopwatch: Stopwatch = time.perf_counter,
    ) -> None:
        self.config = config
        self._eos = eos
        self._vocabulary = vocabulary
        self._order = order_of(config.order)
        self._learned = Learned(config.retention.wait_window)
        self._drafter = Drafter(config.speculation, cost)
        self.stats = EngineStats(drafts=self._drafter.counts)
        self._steps = Steps(runner, config.overlap_steps == "on", self.stats, stopwatch)
        self._numbers = count()
        self._live: dict[str, Sequence] = {}
        self._arrivals = Arrivals()
        self._events: list[Event] = []
        self._sessions = Sessions(self, self._events, config.session_rows, config.session_idle_s)
        self._open_books()

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return self._scheduler.busy or self._steps.flying

    @property
    def due(self) -> float | None:
        """When a step has to end what its time is over for, though nothing is asked of the engine; None: never."""
        return min((due for due in (self._scheduler.keeping.due, self._sessions.due) if due is not None), default=None)

    def occupancy(self) -> Occupancy:
        return replace(
            self._scheduler.occupancy(), sessions=len(self._sessions), cells_host_total=self.config.host_cells
        )

    def handle(self, command: Command, now: float, arrived: float | None = None) -> list[Event]:
        """Take a command in. An unknown id in `Stop` or `Abort` is a request that has just ended: ignored.

        A request's time counts from `arrived`, where it had to wait for the step before this moment.
        """
        try:
            self._sessions.expire(now)
            if isinstance(command, Stop | Abort):
                self.end(command, now)
            elif isinstance(command, Notice):
                self._scheduler.keeping.notice(command, now)
            else:
                self._accept(command, now, now if arrived is None else arrived)
            expect_sound(self.cache)
        except Exception as failure:
            coming = None if isinstance(command, Stop | Abort | Notice) else command.request_id
            self._start_anew(failure, now, coming)
        return self._flush(now)

    def step(self, now: float, clock: Stopwatch | None = None, times: int = 1) -> list[Event]:
        """Run one step. `clock` gives the time of its end, for the events; without it they carry `now`.

        Where steps overlap its events come with the next call. With a runner that does several decode steps at once, a
        step that only decodes stands for as many as `times`.
        """
        try:
            self._sessions.expire(now)
            self._steps.advance(self._scheduler, self.cache, now, clock, times)
        except Exception as failure:
            self._start_anew(failure, now)
        return self._flush(clock() if clock else now)  # what begins now begins after what the step committed

    def fail_all(self, error: HoldfastError, now: float) -> list[Event]:
        """End every request with `error`: the engine is stopping."""
        self._steps.forget()
        for sequence in self._scheduler.everything():
            try:
                self._scheduler.ends.fail(sequence, error.info, now)
            except BooksError:
                log.exception("an engine that stops leaves its books as they are")
        self._sessions.fail_all(error)
        return self._flush(now)

    # ---- what sessions need ----

    @property
    def places(self) -> Places:
        return self._scheduler.places

    def begin(
        self, submit: Submit, history: TokenIds, arrived: float, began: float, promised: int = 0
    ) -> Sequence | None:
        """Take a request in; None when it ended at once. Whatever goes wrong here is its own fault, or its end.

        `began` is when its program did, by the engine's clock, where the request does not say it. `promised` cells of
        the room that sessions have are others' to come.
        """
        request_id = submit.request_id
        try:
            tokens = np.concatenate((history, submit.tokens)) if len(history) else submit.tokens
            submit = replace(submit, tokens=tokens, program_arrival=self._arrivals.of(submit, arrived, began))
            check_submit(submit, self.config, self._vocabulary)
            if submit.session_id:
                check_room(submit, len(history), self._scheduler.admission.room_for_sessions - promised)
            sequence = Sequence.of(submit, next(self._numbers), arrived, self._eos, self._seed(submit))
            sequence.n_history = len(history)
            self._scheduler.add(sequence)
        except HoldfastError as error:
            self._events.append(Rejected(request_id, error.info))
            return None
        except Exception as failure:
            log.exception("a request could not be taken in")
            self._events.append(Failed(request_id, EngineError(f"the engine failed: {failure}").info))
            return None
        self._live[request_id] = sequence
        return sequence

    def end(self, command: Stop | Abort, now: float) -> None:
        """End a request, if there still is one of that id."""
        request_id = command.request_id
        sequence = self._live.get(request_id)
        if sequence is None:
            if request_id in self._sessions:
                self._sessions.abort(request_id, now)
        elif isinstance(command, Stop):
            if command.completion is not None:
                cut(sequence, command.completion)
            self._scheduler.ends.finish(sequence, "stop", now)
        else:
            self._scheduler.ends.abort(sequence, now)

    # ---- parts ----

    def _seed(self, submit: Submit) -> int:
        """The seed of a request's noise; where none is given that of the prompt, or a random one."""
        sampling = submit.sampling
        if sampling.seed is not None:
            return sampling.seed
        if sampling.temperature <= 0:
            return 0
        if not self.config.prompt_seed:
            return secrets.randbits(64)
        self.stats.prompt_seeds += 1
        return prompt_seed(submit.tokens)

    def _open_books(self) -> None:
        config = self.config
        size = config.page_size
        host = HostTier(config.host_cells // size, size) if config.host_cells >= size and config.prefix_cache else None
        self.cache = KVCache(config.cells // size, size, config.prefix_cache, host)
        self._pool = SequencePool(config.max_sequences, config.session_rows)
        self._scheduler = Scheduler(
            config, self.cache, self._pool, self._drafter, self._order, self.stats, self._events, self._learned
        )

    def _accept(self, command: Request, now: float, arrived: float) -> None:
        request_id = command.request_id
        try:
            if request_id in self._live or request_id in self._sessions:
                raise InvalidRequestError(f"request id {request_id} is in use", "request_id")
            waiting = len(self._scheduler.admission) + self._sessions.n_queued
            if isinstance(command, Submit) and waiting >= self.config.max_waiting:
                raise OverloadedError(f"{self.config.max_waiting} requests are waiting already")
            if not isinstance(command, Submit) or command.session_id:
                self._sessions.command(command, now, arrived)
            else:
                self.begin(command, NO_TOKENS, arrived, began=arrived)
        except HoldfastError as error:
            self._events.append(Rejected(request_id, error.info))

    def _start_anew(self, failure: Exception, now: float, coming: str | None = None) -> None:
        """The last resort, when it is not known any more what is free: new books over the same memory.

        What runs fails, and the request that was `coming` in; what waits goes on, nothing is cached. The device's pages
        need no care: every row is written again before it is read.
        """
        log.error("the engine starts anew", exc_info=failure)
        self._steps.forget()
        error = EngineError(f"the engine failed: {failure}").info
        told = {event.request_id for event in self._events if isinstance(event, Terminal)}
        if coming is not None and not (coming in told or coming in self._live or coming in self._sessions):
            self._events.append(Failed(coming, error))
        before, waiting = self._scheduler, []
        for sequence in self._live.values():
            if sequence.request_id not in told and sequence in before.admission:
                waiting.append(sequence)
                continue
            if sequence.request_id not in told:
                self._events.append(sequence.failed(error))
            if sequence.status is not Status.ENDED:
                sequence.move(Status.ENDED)
        self._open_books()
        for sequence in waiting:
            self._scheduler.add(sequence)

    def _flush(self, now: float) -> list[Event]:
        """Give the events out: requests that ended are forgotten, and the next operations of their sessions begin."""
        for event in self._events:  # more may be told meanwhile
            if not isinstance(event, Tokens):
                self.stats.ended[type(event).__name__.lower()] += 1
                sequence = self._live.get(event.request_id)
                if sequence is not None and sequence.status is Status.ENDED:
                    del self._live[event.request_id]
                    self._sessions.ended(sequence, event, now)
        events = self._events[:]
        self._events.clear()
        return events
