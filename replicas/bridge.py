"""Between asyncio and the engine: one thread runs the engine, one event loop talks to it.

    event loop        Bridge.run ---- commands ----> inbox of EngineThread      engine thread
                      Mailbox <- call_soon_threadsafe <- events of one step

Asyncio stops here: nothing below this file awaits, nothing above it touches the engine.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import EngineError, HoldfastError, InvalidRequestError, UnavailableError
from holdfast.replicas.events import (
    Abort,
    CloseSession,
    Command,
    Event,
    Failed,
    Notice,
    Rejected,
    Request,
    Stop,
    Terminal,
    Tokens,
    used_by,
)
from holdfast.replicas.requests import NO_WORK, Started, Usage, Work

log = logging.getLogger(__name__)

Sent: TypeAlias = tuple[Command, float] | None  # a command and when it was sent; None: the thread is to end
Urgent: TypeAlias = Callable[[tuple[int, ...]], bool]  # whether somebody waits for what these tokens say

_LONGEST_WAIT_S = 3600.0
FADING = 0.999  # of the longest step, with each one after it: a thousand steps later it counts a third
ENDED = 4096  # requests that have ended, or whose callers have left: it is remembered what was drawn for them
HANDING_S = 0.001  # for which the engine's thread leaves the interpreter to the event loop behind a first token


class EngineThread:
    """Runs an engine until told to stop. When it ends, for whatever reason, it ends every request it knows.

    `deliver` is called on the thread with the events of commands and with those of a step, `ended` once after the last
    of them.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Event]], None],
        ended: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._ended = ended
        self._clock = clock
        self._inbox: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._step_began: float | None = None  # of the step that runs
        self._longest_s = 0.0  # of the steps so far, the old ones fading
        self.error: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def hung(self) -> bool:
        """Whether a step has run for so long that it will hardly end: see `EngineConfig.hung_s`."""
        began, config = self._step_began, self._engine.config
        return began is not None and self._clock() - began > max(config.hung_s, config.hung_factor * self._longest_s)

    @property
    def unread(self) -> int:
        """Commands that the engine has not seen yet."""
        return self._inbox.qsize()

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put((command, self._clock()))

    def stop(self) -> None:
        """Ask the thread to end after the step it is in."""
        self._inbox.put(None)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _main(self) -> None:
        reason: HoldfastError = UnavailableError("the engine is shutting down")
        try:
            self._loop()
        except BaseException as error:  # the thread's supervisor: the error is kept, the requests are told
            log.exception("the engine died")
            self.error = error
            reason = EngineError(f"the engine died: {error}")
        self._deliver(self._end_all(reason))
        self._ended()

    def _loop(self) -> None:
        """Take in the commands that are here, deliver what they ended, run a step and deliver its events."""
        engine, clock = self._engine, self._clock
        while True:
            events: list[Event] = []
            try:
                for sent in self._waiting():
                    if sent is None:
                        return
                    command, at = sent
                    events += engine.handle(command, clock(), at)
            finally:  # also where the thread ends here: these requests are over
                if events:
                    self._deliver(events)
            if self._idle_s() == 0.0:
                self._step_began = began = clock()
                events = engine.step(began, clock)
                self._step_began = None
                self._longest_s = max(clock() - began, self._longest_s * FADING)
                if events:
                    self._deliver(events)

    def _waiting(self) -> Iterator[Sent]:
        """What is in the inbox; while the engine may be left alone, wait for the first.

        What is sent meanwhile comes after the next step, so that steps run however many commands there are.
        """
        try:
            yield self._inbox.get(timeout=self._idle_s())
        except queue.Empty:
            return
        for _ in range(self._inbox.qsize()):
            yield self._inbox.get()

    def _idle_s(self) -> float | None:
        """For how long the engine may be left alone, in seconds: 0 where a step has something to do, None for ever.

        An engine without requests still has to let go, now and then, of what its time is over for.
        """
        if self._engine.busy:
            return 0.0
        due = self._engine.due
        return None if due is None else min(max(due - self._clock(), 0.0), _LONGEST_WAIT_S)

    def _end_all(self, reason: HoldfastError) -> list[Event]:
        """End what the engine knows, and refuse what is still in the inbox."""
        events: list[Event] = []
        try:
            events = self._engine.fail_all(reason, self._clock())
        except Exception:  # after a crash the books may be wrong; the bridge tells those that are left
            log.exception("the engine could not end its requests")
        while not self._inbox.empty():
            sent = self._inbox.get()
            if sent is not None and not isinstance(sent[0], Stop | Abort | Notice):
                events.append(Rejected(sent[0].request_id, reason.info))
        return events


class Mailbox:
    """The events of one request, in order, until its reader takes them. Used on the event loop only.

    They are handed over in lists: at once when the last list is `interval` seconds old, else together. A reader pays
    for each list (a wake-up here, a message between processes later), not for each token, so steps much shorter than
    the interval share one. The first and the terminal event are never held back, nor are tokens that are `urgent`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float, urgent: Urgent = lambda tokens: False) -> None:
        self._loop = loop
        self._interval = interval
        self._urgent = urgent
        self._events: list[Event] = []
        self._due = 0.0  # when the next list may be handed over
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, events: list[Event]) -> None:
        """Add events; what comes after a terminal event is dropped."""
        if self._ended:
            return
        self._events += events
        self._ended = isinstance(self._events[-1], Terminal)
        if any(isinstance(event, Tokens) and self._urgent(event.tokens) for event in events):
            self._due = 0.0
        if self._reader is None:
            return
        if self._ended or self._loop.time() >= self._due:
            self._wake()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due, self._wake)

    async def take(self) -> list[Event]:
        """The events since the last call, at least one, once they are due. One reader at a time."""
        if not (self._ended or (self._events and self._loop.time() >= self._due)):
            self._reader = self._loop.create_future()
            if self._events:
                self._timer = self._loop.call_at(self._due, self._wake)
            try:
                await self._reader
            finally:
                self._reader = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
        events, self._events = self._events, []
        if not isinstance(events[-1], Started):  # the first tokens come as soon as they are there
            self._due = self._loop.time() + self._interval
        return events

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Bridge:
    """Submit requests and read their events, from one event loop.

    Create it on the loop that uses it.
    """

    def __init__(self, engine: Engine) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval = engine.config.stream_interval_s
        self._mailboxes: dict[str, Mailbox] = {}
        self._unended: set[str] = set()  # ids whose terminal event is on its way, also where its reader has left
        self._before: dict[str, Work] = {}  # what was done for live requests that were submitted before
        self._used: dict[str, asyncio.Future[Usage]] = {}  # by those of `ENDED`, once they have ended
        self._closed = False
        self._silent: set[str] = set()  # requests of which no token was delivered so far
        self._handed = threading.Event()  # the readers of the events that were delivered last have had them
        self._thread = EngineThread(engine, self._deliver, self._thread_ended)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.alive

    @property
    def hung(self) -> bool:
        return self._thread.hung

    @property
    def n_live(self) -> int:
        """Requests without a terminal event so far."""
        return len(self._mailboxes)

    async def run(
        self, request: Request, before: Work = NO_WORK, urgent: Urgent = lambda tokens: False
    ) -> AsyncGenerator[list[Event], None]:
        """The events of one request, in lists of one or more steps; the last list ends with its terminal event.
        `before`: what `drawn` is to count as well. `urgent`: which tokens do not wait for those of further steps.

        A caller that leaves early, by closing the generator or being cancelled, aborts the request. Its id stays in
        use until the engine has ended it.
        Raises InvalidRequestError for an id in use and UnavailableError once closed.
        """
        request_id = request.request_id
        if self._closed:
            raise UnavailableError("the engine is not running")
        if request_id in self._mailboxes or request_id in self._unended:
            raise InvalidRequestError(f"request id {request_id} is in use", "request_id")
        mailbox = Mailbox(self._loop, self._interval, urgent)
        self._mailboxes[request_id] = mailbox
        self._unended.add(request_id)
        self._silent.add(request_id)
        self._used.pop(request_id, None)  # of an attempt before
        if before != NO_WORK:
            self._before[request_id] = before
        ended = False
        try:
            self._thread.send(request)
            while not ended:
                events = await mailbox.take()
                ended = isinstance(events[-1], Terminal)
                yield events
        finally:
            del self._mailboxes[request_id]
            self._silent.discard(request_id)
            if not ended:
                self._use(request_id)
                self._thread.send(Abort(request_id))

    @property
    def unread(self) -> int:
        """Commands that the engine has not seen yet."""
        return self._thread.unread

    async def drawn(self, request_id: str) -> Usage | None:
        """What was computed and drawn for a request, once the engine has ended it. Its caller may not know that it has.

        None for one that is not known, or was so long ago that it is forgotten.
        """
        used = self._use(request_id) if request_id in self._mailboxes else self._used.get(request_id)
        return None if used is None else await asyncio.shield(used)

    def stop(self, request_id: str, completion: int | None = None) -> None:
        """End a request as finished, with so many tokens drawn; its terminal event still comes."""
        self._thread.send(Stop(request_id, completion))

    def notice(self, notice: Notice | CloseSession) -> None:
        """Tell the engine something that no request waits for."""
        self._thread.send(notice)

    async def close(self) -> None:
        """Stop the engine; requests still running fail as unavailable."""
        self._closed = True
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    # ---- on the engine's thread ----

    def _deliver(self, events: list[Event]) -> None:
        """Hand events to the loop. Where first tokens are among them their readers have them before the next step is
        planned, or `HANDING_S` is over: a loop that waits for the interpreter may wait for as long as planning takes.
        """
        first = {event.request_id for event in events if isinstance(event, Tokens)} & self._silent
        if not first:
            self._call_on_loop(self._dispatch, events)
            return
        self._silent.difference_update(first)
        self._handed.clear()
        self._call_on_loop(self._dispatch, events)
        self._handed.wait(HANDING_S)

    def _thread_ended(self) -> None:
        self._call_on_loop(self._fail_the_rest)

    def _call_on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to read
            log.debug("the event loop is closed")

    # ---- on the event loop ----

    def _dispatch(self, events: list[Event]) -> None:
        """Put events into the mailboxes of their requests."""
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, batch in by_request.items():
            if isinstance(batch[-1], Terminal):
                self._unended.discard(request_id)
                before = self._before.pop(request_id, NO_WORK)
                used = used_by(batch[-1])
                if not (told := self._use(request_id)).done():
                    told.set_result(replace(used, work=used.work + before))
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.put(batch)
        self._loop.call_soon(self._handed.set)  # behind the readers, which these events have woken

    def _use(self, request_id: str) -> asyncio.Future[Usage]:
        """What the request will have cost is remembered; of too many the first one is forgotten."""
        used = self._used.get(request_id)
        if used is None:
            used = self._used[request_id] = self._loop.create_future()
            if len(self._used) > ENDED:
                forgotten = self._used.pop(next(iter(self._used)))
                if not forgotten.done():
                    forgotten.set_result(Usage())
        return used

    def _fail_the_rest(self) -> None:
        """The engine has ended. Whoever submitted too late for it to notice is told here; nobody waits for ever."""
        self._closed = True
        info = UnavailableError("the engine has stopped").info
        self._unended.clear()
        self._before.clear()
        for used in self._used.values():
            if not used.done():
                used.set_result(Usage())
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put([Failed(request_id, info)])
