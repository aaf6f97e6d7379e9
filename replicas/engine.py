"""The engine: takes commands in, runs steps, gives events out. One thread calls it; it never waits and reads no clock.

handle    one command: a request, a notice about a program, the end of a request
step      plan, begin, land, commit: one step of the batch, or where steps overlap parts of two
events    tokens and ends, returned by both; every submitted request ends in exactly one terminal event
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    HoldfastError,
    InvalidRequestError,
    OverloadedError,
    too_long,
)
from holdfast.replicas.kv.cache import KVCache, PrefixReport
from holdfast.replicas.kv.host import HostTier
from holdfast.replicas.kv.pages import SHARED
from holdfast.replicas.kv.tags import UNLABELLED
from holdfast.replicas.plan import Flight, Runner, Sampling, StepCost, prompt_seed
from holdfast.replicas.programs import Kind, Programs, Sequence, SequencePool, Session, Status
from holdfast.replicas.requests import (
    Abort,
    CloseSession,
    Command,
    Event,
    Failed,
    Finished,
    ForkSession,
    Notice,
    OpenSession,
    Rejected,
    Request,
    Stop,
    Submit,
    Terminal,
    Tokens,
)
from holdfast.replicas.retention.policy import LoadStats
from holdfast.replicas.scheduling.admission import check_cells, pages_of
from holdfast.replicas.scheduling.batch import BooksError, Step
from holdfast.replicas.scheduling.queue import request_order
from holdfast.replicas.scheduling.scheduler import Scheduler
from holdfast.replicas.sessions import SessionFacts, Sessions, check_room
from holdfast.replicas.speculation.drafter import Drafter
from holdfast.replicas.stats import EngineStats, LoadReport, Occupancy
from holdfast.replicas.types import NO_TOKENS, CellLimits, Origin, TokenIds

log = logging.getLogger(__name__)

Stopwatch = Callable[[], float]

MOST_TOP_K = 2**31 - 1  # what the sampler's arrays hold


class Engine:
    """One replica's requests and their steps.

    `config` is resolved: it has no "auto" and no 0 where a number is needed. `eos` are the model's own end tokens.
    `window`: tokens that a sequence keeps in layers with window pages; 0: the model has none.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        eos: frozenset[int] = frozenset(),
        vocabulary: int | None = None,
        cost: StepCost | None = None,
        stopwatch: Stopwatch = time.perf_counter,
        window: int = 0,
    ) -> None:
        if (window > 0) != (config.window_cells > 0):
            raise ConfigError(f"{config.window_cells} cells for windows of {window} tokens", "window_cells")
        self.config = config
        self._window = window
        self._eos = eos
        self._shares_prefixes = config.has("prefix_cache")
        self._keeps_programs = config.has("sessions")
        self._uses_labels = config.has("kv_tags")
        self._vocabulary = vocabulary
        self._order = request_order(config.order)
        self._load = LoadStats()
        self.stats = EngineStats()
        self._drafter = Drafter(config.speculation, self.stats, cost, bounded=config.state_slots > 0)
        self._pipeline = Pipeline(runner, config.overlap_steps == "on", self.stats, stopwatch)
        self._numbers = count()
        self.live: dict[str, Sequence] = {}  # requests that have not ended, by id; other threads read it, too
        self._arrivals = Arrivals()
        self._prefix_report = PrefixReport()
        self._events: list[Event] = []
        self._own: dict[str, Origin] = {}  # requests of the server itself that have not ended, by id
        self._preambles: dict[str, TokenIds] = {}  # shared by all tenants, by the id of their request
        self._uncomputed: list[str] = []
        self.programs = Programs(self.stats, tokens=config.cells)
        self._open_books({})
        self._sessions = Sessions(
            self.programs,
            self.scheduler.rows,
            self._events,
            config.session_rows,
            config.session_idle_s,
            config.tenant_sessions,
        )

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.busy or self._pipeline.flying or bool(self._uncomputed)

    def share(self, preambles: list[TokenIds]) -> None:
        """Compute these beginnings of prompts once, before all requests, and keep them for all tenants.

        Raises ConfigError if one does not fit the context, or all of them take more than half of the cells.
        """
        config = self.config
        for tokens in preambles:
            if len(tokens) >= config.context_length:
                message = f"a shared preamble of {len(tokens)} tokens leaves no room in {config.context_length}"
                raise ConfigError(message, "shared_preambles")
        if 2 * sum(map(len, preambles)) > config.cells or not self._shares_prefixes:
            message = f"shared preambles need the prefix cache, and at most half of {config.cells} cells"
            raise ConfigError(message, "shared_preambles")
        self._preambles = {f"{SHARED} {i}": tokens for i, tokens in enumerate(preambles)}
        self._uncomputed = list(self._preambles)

    @property
    def due(self) -> float | None:
        """The time at which a step must drop expired pins or sessions although no request waits; None: never."""
        dues = self.scheduler.retention.due, self._sessions.due, self._prefix_report.due
        return min((due for due in dues if due is not None), default=None)

    def occupancy(self) -> Occupancy:
        return replace(
            self.scheduler.occupancy(), sessions=len(self._sessions), cells_host_total=self.config.host_cells
        )

    def load(self) -> LoadReport:
        """The load figures that a router needs to place programs. Any thread may ask."""
        now = self.occupancy()
        running, waiting = now.turns
        return LoadReport(
            running=running,
            waiting=waiting,
            tokens_waiting=now.turns_tokens,
            cells_total=now.cells_total,
            cells_free=now.cells_free,
            cells_pinned=now.cells_pinned,
            seconds_per_token=self._load.token_s,
            prefixes=self._prefix_report.held,
        )

    @property
    def contended(self) -> Mapping[str, float]:
        """Seconds served while others waited, by `<class>/<tenant>`; {} where the order does not share them.

        Any thread may ask.
        """
        return self._order.contended

    @property
    def session_idle_s(self) -> float:
        """Seconds without an operation after which a session is closed."""
        return self._sessions.idle_s

    def session(self, scope: str, session_id: str) -> SessionFacts | None:
        """An open session. Any thread may ask."""
        return next((facts for facts in self._sessions.of(scope) if facts.session_id == session_id), None)

    def sessions(self, scope: str) -> list[SessionFacts]:
        """A tenant's open sessions."""
        return self._sessions.of(scope)

    def handle(self, command: Command, now: float, arrived: float | None = None) -> list[Event]:
        """Take a command in. An unknown id in `Stop` or `Abort` is ignored: its request has just ended.

        A request's time counts from `arrived`, if it had to wait for the end of a step.
        """
        try:
            self._sessions.expire(now)
            self._begin_preambles(now)
            if isinstance(command, Stop | Abort):
                self._end(command, now)
            elif isinstance(command, Notice):
                self.scheduler.take_notice(command, now)
            else:
                self._accept(command, now, now if arrived is None else arrived)
            expect_sound(self.cache)
        except Exception as failure:
            coming = None if isinstance(command, Stop | Abort | Notice) else command.request_id
            self._start_anew(failure, now, coming)
        return self._flush(now)

    def step(self, now: float, clock: Stopwatch | None = None) -> list[Event]:
        """Run one step. `clock` gives the time of its end, for the events; without it they carry `now`.

        Where steps overlap, its events come with the next call.
        """
        try:
            self._sessions.expire(now)
            self._begin_preambles(now)
            self._pipeline.advance(self.scheduler, self.cache, now, clock)
            self._prefix_report.look(self.cache, now)
        except Exception as failure:
            self._start_anew(failure, now)
        return self._flush(clock() if clock else now)  # session operations that begin now come after the commit

    def fail_all(self, error: HoldfastError, now: float) -> list[Event]:
        """End every request with `error`: the engine is stopping."""
        self._pipeline.forget()
        for sequence in self.scheduler.everything():
            try:
                self.scheduler.terminator.fail(sequence, error.info, now)
            except BooksError:
                log.exception("an engine that stops leaves its books as they are")
        self._sessions.fail_all(error)
        return self._flush(now)

    # ---- requests begin and end ----

    def _accept(self, command: Request, now: float, arrived: float) -> None:
        request_id = command.request_id
        if isinstance(command, Submit) and command.origin is not Origin.CLIENT:
            self._own[request_id] = command.origin
        try:
            if request_id in self.live or request_id in self._sessions:
                raise InvalidRequestError(f"request id {request_id} is in use", "request_id")
            waiting = len(self.scheduler.admission) + self._sessions.n_queued
            if isinstance(command, Submit) and command.session is not None and waiting >= self.config.max_waiting:
                raise OverloadedError(f"{self.config.max_waiting} requests are waiting already")
            if isinstance(command, OpenSession):
                if (before := self._sessions.replaced(command)) is not None:
                    self._close(before, now, arrived)
                self._sessions.open(command, now, arrived)
            elif isinstance(command, CloseSession):
                self._close(command, now, arrived)
            elif isinstance(command, ForkSession) or command.session is not None:
                self._begin_next(self._sessions.enqueue(command, now, arrived), now)
            else:
                self._begin(command, arrived, now)
        except HoldfastError as error:
            self._events.append(Rejected(request_id, error.info))

    def _begin(self, submit: Submit, arrived: float, now: float, session: Session | None = None) -> Sequence | None:
        """Take a request in. None: it ended at once, with an event. An exception here fails this request alone."""
        request_id = submit.request_id
        try:
            history = session.history if session is not None else NO_TOKENS
            tokens = np.concatenate((history, submit.tokens)) if len(history) else submit.tokens
            began = session.opened if session is not None else arrived
            # The tokens of a session are pinned, so labels decide nothing.
            labels = submit.labels if self._uses_labels and session is None else UNLABELLED
            arrival = self._arrivals.of(submit, arrived, began)
            submit = replace(submit, tokens=tokens, program_arrival=arrival, labels=labels)
            if submit.cells is not None:
                self.cache.limit(submit.scope, submit.cells, now)
            limited = self.cache.tree.tenants.any or bool(self._preambles)
            pages = pages_of(submit, self.cache) if limited else self.config.cells // self.config.page_size
            submit = fitted(submit, self.config, pages)
            check_submit(submit, self.config, self._vocabulary)
            if limited:
                check_cells(submit, self.cache)
            if session is not None:
                room = self.scheduler.admission.room_for_sessions(submit.scope) - self._sessions.promised
                check_room(submit, len(history), room)
            of = self.programs.of(submit)
            sequence = Sequence.of(submit, next(self._numbers), arrived, self._eos, self._seed(submit), of)
            sequence.n_history = len(history)
            sequence.cache_scope = self._cache_scope(sequence)
            if self._shares_prefixes:
                for digest in submit.prefixes:
                    self._prefix_report.seen(submit.cache_scope, digest, submit.tokens)
            if session is None:
                self.scheduler.admission.check_deadline(sequence)
                self._events += self.scheduler.admission.make_room(sequence, self._sessions.n_queued)
            self.scheduler.add(sequence, now)
        except HoldfastError as error:
            self._events.append(Rejected(request_id, error.info))
            return None
        except Exception as failure:
            log.exception("a request could not be taken in")
            self._events.append(Failed(request_id, EngineError(f"the engine failed: {failure}").info))
            return None
        self.live[request_id] = sequence
        return sequence

    def _begin_next(self, session: Session, now: float) -> None:
        """Begin the next operation of a session, unless one is running."""
        while (request := self._sessions.next_request(session, now)) is not None:
            submit, accepted = request
            session.running = self._begin(submit, accepted, now, session)

    def _close(self, command: CloseSession, now: float, arrived: float) -> None:
        session = self._sessions.close(command, now)
        if session.running is not None:
            self._end(Abort(session.running.request_id), now)
        self._sessions.closed(command, session, now, arrived)

    def _end(self, command: Stop | Abort, now: float) -> None:
        """End a request, if it has not ended."""
        request_id = command.request_id
        sequence = self.live.get(request_id)
        if sequence is None:
            if request_id in self._sessions:
                self._sessions.abort(request_id, now)
        elif isinstance(command, Stop):
            if command.completion is not None:
                sequence.cut(command.completion)
            self.scheduler.terminator.finish(sequence, "stop", now)
        else:
            self.scheduler.terminator.abort(sequence, now)

    # ---- parts ----

    def _seed(self, submit: Submit) -> int:
        """The seed of a request's noise: the given one, that of the prompt, or a random one.

        Each choice of a request after the first has its own: the hash of that seed and of the choice's number.
        """
        sampling = submit.sampling
        if sampling.choice and sampling.temperature > 0:
            seed = self._seed(replace(submit, sampling=replace(sampling, choice=0)))
            halves = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
            return prompt_seed(np.array([*halves, sampling.choice], np.uint32).view(np.int32))
        if sampling.seed is not None:
            return sampling.seed
        if sampling.temperature <= 0:
            return 0
        if not self.config.prompt_seed:
            return secrets.randbits(64)
        self.stats.prompt_seeds += submit.origin is Origin.CLIENT
        return prompt_seed(submit.tokens[: len(submit.tokens) - submit.n_generated])

    def _cache_scope(self, sequence: Sequence) -> str | None:
        """Where a request's cells are found and kept: the tenant's scope, its program's own scope, or none."""
        if self._shares_prefixes:
            return sequence.submit.cache_scope
        key = sequence.target.key if sequence.target is not None else None
        return key.own_scope if key is not None and (key.kind is Kind.SESSION or self._keeps_programs) else None

    def _open_books(self, limits: Mapping[str, tuple[CellLimits, float]]) -> None:
        """New cache, rows and scheduler. `limits`: of tenants on cells, each with the time of the last request."""
        config = self.config
        size = config.page_size
        evicts_to_host = config.host_cells >= size and self._shares_prefixes
        host = None
        if evicts_to_host:
            host = HostTier(config.host_cells // size, size, config.host_slots, config.host_window_cells // size)
        self.cache = KVCache(
            config.cells // size,
            size,
            host,
            evicted=self.stats.evicted_by_tag,
            state_slots=config.state_slots,
            window=(self._window, config.window_cells // size) if self._window else None,
        )
        for tenant, (cell_limits, last_seen) in limits.items():
            self.cache.limit(tenant, cell_limits, last_seen)
        self._pool = SequencePool(config.max_sequences, config.session_rows)
        self.scheduler = Scheduler(
            config,
            self.cache,
            self._pool,
            self.programs,
            self._drafter,
            self._order,
            self.stats,
            self._events,
            self._load,
        )

    def _start_anew(self, failure: Exception, now: float, coming: str | None = None) -> None:
        """Make new books over the same memory: the last resort when it is unknown which cells are free.

        Running requests fail, and so does the one that was `coming` in. Waiting requests continue; the cache is empty.
        Page rows on the device stay as they are: each is written again before it is read.
        """
        log.error("the engine starts anew", exc_info=failure)
        self._pipeline.forget()
        error = EngineError(f"the engine failed: {failure}").info
        ended = {event.request_id for event in self._events if isinstance(event, Terminal)}
        if coming is not None and not (coming in ended or coming in self.live or coming in self._sessions):
            self._events.append(Failed(coming, error))
        before, waiting = self.scheduler, []
        for sequence in self.live.values():
            waits = sequence.request_id not in ended and sequence in before.admission
            goes_on = waits and sequence.request_id not in self._preambles
            if sequence.status is not Status.ENDED and not (goes_on and sequence.preempted):
                self._order.left(sequence)  # a waiting request arrives again below, unless it was preempted
            if goes_on:
                waiting.append(sequence)
            if waits:
                continue
            if sequence.request_id not in ended:
                self._events.append(sequence.failed(error))
            if sequence.status is not Status.ENDED:
                sequence.move(Status.ENDED)
            sequence.holding = sequence.row = None
        self.programs.restart()
        self._open_books(self.cache.tree.tenants.known_limits)
        self._sessions.rows = self.scheduler.rows
        self._uncomputed = list(self._preambles)
        for sequence in waiting:
            self.scheduler.add(sequence, now)

    def _flush(self, now: float) -> list[Event]:
        """Return the events. Forgets ended requests, and begins the next operations of their sessions."""
        for i, event in enumerate(self._events):  # grows in the loop
            if not isinstance(event, Tokens) and isinstance(event, Terminal):
                if (own := self._own.pop(event.request_id, None)) is None:
                    self.stats.ended[type(event).__name__.lower()] += 1
                else:
                    self.stats.own_requests[own] += 1
                sequence = self.live.get(event.request_id)
                if sequence is not None and sequence.status is Status.ENDED:
                    del self.live[event.request_id]
                    session = self._sessions.ended(sequence, event, now)
                    if session is not None:
                        if isinstance(event, Finished):
                            self._events[i] = replace(event, past=session.past, start=sequence.n_history)
                        self._begin_next(session, now)
        events = self._events[:]
        if self._preambles:
            events = [event for event in events if not self._is_own(event, now)]
        self._events.clear()
        return events

    def _begin_preambles(self, now: float) -> None:
        """Submit the shared preambles, before the requests that would use them."""
        while self._uncomputed:
            name = self._uncomputed.pop()
            self._own[name] = origin = Origin.PREAMBLE
            sampling = Sampling(max_tokens=0)
            self._begin(
                Submit(name, tokens=self._preambles[name], sampling=sampling, scope=SHARED, origin=origin), now, now
            )

    def _is_own(self, event: Event, now: float) -> bool:
        """Whether an event is of a shared preamble. A computed preamble is pinned for good."""
        tokens = self._preambles.get(event.request_id)
        if tokens is None:
            return False
        if isinstance(event, Finished):
            self.cache.pin(SHARED, tokens, now)
        elif isinstance(event, Terminal):
            log.error("a shared preamble could not be computed: %s", event)
        return True


@dataclass(frozen=True, slots=True)
class _Flying:
    """A step that has begun."""

    step: Step
    flight: Flight
    planned: float  # when planning it began, by the stopwatch


class Pipeline:
    """Runs steps one after the other, or overlapped: each begins while the one before it still runs.

    Overlapped, `advance` plans and begins a step, and then lands and commits the step before: planning, commit and the
    handling of events take place while the model computes. Results come one step later and never differ. After a step
    whose tokens are needed to plan (`Step.open`) the next call only lands it. Work that planning need not wait for
    (`Drafter.catch_up`) is done once a step has begun.

    This is the supervisor of a step: an exception of a model or a kernel fails the requests in that step alone. Raises
    only BooksError, from the books.
    """

    def __init__(self, runner: Runner, overlap: bool, stats: EngineStats, watch: Stopwatch) -> None:
        self._runner = runner
        self._overlap = overlap
        self._stats = stats
        self._watch = watch
        self._flying: _Flying | None = None
        self._landed = -math.inf  # when the last step was over

    @property
    def flying(self) -> bool:
        """Whether a step is in flight."""
        return self._flying is not None

    def advance(self, scheduler: Scheduler, cache: KVCache, now: float, clock: Stopwatch | None) -> None:
        """Plan and begin a step, land and commit one. `clock` gives the time of a step's end, else that is `now`."""
        before, self._flying = self._flying, None
        if before is not None and not before.step.open:
            self._land(before, scheduler, now, clock)
            return
        try:
            t0 = self._watch()
            step = self._plan(scheduler, now, before)
            expect_sound(cache)
            if step is not None:
                self._flying = self._begin(step, scheduler, now, t0)
        finally:
            if before is not None:
                self._land(before, scheduler, now, clock)
        begun = self._flying
        if begun is not None:
            scheduler.drafts.catch_up(begun.step.sequences)
            if before is None and not (self._overlap and begun.step.open):
                self._flying = None
                self._land(begun, scheduler, now, clock)
        expect_sound(cache)

    def forget(self) -> None:
        """Drop the results of the step in flight: the books were replaced, or the engine stops."""
        flying, self._flying = self._flying, None
        if flying is not None:
            try:
                flying.flight.land()
            except Exception:  # of a step that no request waits for
                log.exception("a forgotten step failed")

    def _plan(self, scheduler: Scheduler, now: float, before: _Flying | None) -> Step | None:
        """The next step. None: there is nothing to do."""
        t0 = self._watch()
        step = scheduler.schedule(now, before.step if before is not None else None)
        self._stats.schedule_s += self._watch() - t0
        plan = step.plan
        return step if plan.busy or plan.writes or plan.copies else None

    def _begin(self, step: Step, scheduler: Scheduler, now: float, t0: float) -> _Flying | None:
        try:
            return _Flying(step, self._runner.begin(step.plan), t0)
        except Exception as failure:
            self._failed(step, scheduler, failure, now)
            return None

    def _land(self, flying: _Flying, scheduler: Scheduler, now: float, clock: Stopwatch | None) -> None:
        try:
            self._take_in(flying, scheduler, now, clock)
        finally:
            end = self._watch()
            self._stats.steps += 1
            self._stats.step_times.observe(end - max(flying.planned, self._landed))
            self._landed = end

    def _take_in(self, flying: _Flying, scheduler: Scheduler, now: float, clock: Stopwatch | None) -> None:
        step, stats, watch = flying.step, self._stats, self._watch
        try:
            output = flying.flight.land()
            if len(output.drawn) != len(step.plan.chunks):
                raise EngineError(f"{len(output.drawn)} results for {len(step.plan.chunks)} chunks")
        except Exception as failure:
            self._failed(step, scheduler, failure, now)
            return
        stats.forward_s += output.forward_s
        stats.sample_s += output.sample_s
        t0 = watch()
        scheduler.commit(step, output, clock() if clock else now)
        stats.commit_s += watch() - t0

    def _failed(self, step: Step, scheduler: Scheduler, failure: Exception, now: float) -> None:
        log.error("step failed", exc_info=failure)
        scheduler.fail(step, EngineError(f"the engine failed: {failure}"), now)


def expect_sound(cache: KVCache) -> None:
    """Raise BooksError if an operation on the cache broke off: the owners of pages are no longer certain."""
    if not cache.sound:
        raise BooksError("an operation on the cache broke off")


class Arrivals:
    """Puts arrivals of programs on one clock. Routers give them in seconds since the epoch; other requests give none
    and get a time of the engine's clock.

    No program begins after its request: where one seems to, the routers' clock is ahead of the engine's by at least the
    difference. Requests without an arrival are moved ahead by as much, so that neither kind always goes first.
    """

    def __init__(self) -> None:
        self._skew = 0.0  # seconds that the routers' clock is ahead at least

    def of(self, submit: Submit, arrived: float, began: float) -> float:
        """The arrival that a request gives, else `began`. `began` and `arrived` (of the request) are engine times."""
        if not submit.program_arrival:
            return began + self._skew
        self._skew = max(self._skew, submit.program_arrival - arrived)
        return submit.program_arrival


def fitted(submit: Submit, config: EngineConfig, pages: int) -> Submit:
    """`submit` with `max_tokens` reduced to the room that its prompt leaves in the context and in its tenant's `pages`.

    Where the prompt leaves none, one token stays: then `check_submit` rejects the prompt.
    """
    pages = min(pages, config.cells // config.page_size)
    # One page is spare: the end of a cached prefix may be copied into a page of its own.
    room = min(config.context_length, (pages - 1) * config.page_size) - len(submit.tokens)
    if submit.sampling.max_tokens <= max(1, room):
        return submit
    return replace(submit, sampling=replace(submit.sampling, max_tokens=max(1, room)))


def check_submit(submit: Submit, config: EngineConfig, vocabulary: int | None) -> None:
    """Raise InvalidRequestError or ContextLengthError for a request that can never be served."""
    n_prompt, max_tokens = len(submit.tokens), submit.sampling.max_tokens
    context, page = config.context_length, config.page_size
    if n_prompt == 0:
        raise InvalidRequestError("the prompt is empty", "prompt")
    if max_tokens < 0:
        raise InvalidRequestError(f"max_tokens must not be negative: {max_tokens}", "max_tokens")
    if submit.sampling.top_k > MOST_TOP_K:
        raise InvalidRequestError(f"top_k must be at most {MOST_TOP_K}: {submit.sampling.top_k}", "top_k")
    if submit.background is not None and (max_tokens or submit.session is not None):
        raise InvalidRequestError("a background prefill must not draw tokens or operate on a session", "background")
    if not 0 < submit.weight < math.inf:
        raise InvalidRequestError(f"weight must be positive: {submit.weight}", "weight")
    if n_prompt + min(max_tokens, 1) > context:
        new = ", and one more is asked for" if max_tokens else ""
        raise too_long(context, f"the prompt has {n_prompt} tokens{new}", "prompt")
    # One page more: the end of a cached prefix may be copied into a page of its own.
    if -(-(n_prompt + max_tokens) // page) + 1 > config.cells // page:
        raise ContextLengthError(f"the prompt has {n_prompt} tokens, and the cache {config.cells} cells", "prompt")
    if vocabulary is not None and not (int(submit.tokens.min()) >= 0 and int(submit.tokens.max()) < vocabulary):
        raise InvalidRequestError(f"token ids must be in [0, {vocabulary})", "prompt")
