"""The border between asyncio and the engine: one thread runs the engine, one event loop talks to it.

    event loop        Bridge.run ---- commands ----> inbox of EngineThread      engine thread
                      Mailbox <- call_soon_threadsafe <- events of one step

Nothing below this file awaits, and nothing above it touches the engine while it runs.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import EngineError, HoldfastError, InvalidRequestError, UnavailableError
from holdfast.replicas.requests import (
    NO_WORK,
    Abort,
    Command,
    Event,
    Failed,
    Notice,
    Rejected,
    Request,
    Started,
    Stop,
    Terminal,
    Tokens,
    Usage,
    Work,
)

log = logging.getLogger(__name__)

Sent: TypeAlias = tuple[Command, float] | None  # a command and when it was sent; None: stop
Urgent: TypeAlias = Callable[[tuple[int, ...]], bool]  # whether these tokens must not wait in a mailbox

_LONGEST_WAIT_S = 3600.0
FADING = 0.999  # decay of the longest step with each further one: after a thousand steps it counts a third
HUNG_FACTOR = 20.0  # a step this many times longer than the longest one, and longer than `hung_s`, hangs
REMEMBERED = 4096  # ended requests whose usage can still be asked for
HANDING_S = 0.001  # time that the engine's thread leaves to the event loop after a first token
# Steps shorter than this share a message to the client. Each message costs a wake-up here and one between processes; a
# reader does not notice 5 ms.
STREAM_INTERVAL_S = 0.005


class EngineThread(threading.Thread):
    """Runs an engine until it is stopped. When the thread ends, for any reason, it ends every request it knows.

    On the thread it calls `deliver` with the events of commands and of each step, and finally `ended`.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Event]], None],
        ended: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._deliver = deliver
        self._ended = ended
        self._clock = clock
        self._inbox: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        self._step_began: float | None = None  # start of the running step
        self._longest_s = 0.0  # longest step so far, decaying

    @property
    def hung(self) -> bool:
        """Whether the running step has taken so long that it is unlikely to end: see `EngineConfig.hung_s`."""
        began, hung_s = self._step_began, self._engine.config.hung_s
        return began is not None and self._clock() - began > max(hung_s, HUNG_FACTOR * self._longest_s)

    @property
    def unread(self) -> int:
        """Commands that the engine has not handled yet."""
        return self._inbox.qsize()

    def send(self, command: Command) -> None:
        self._inbox.put((command, self._clock()))

    def stop(self) -> None:
        """Ask the thread to end after its current step."""
        self._inbox.put(None)

    def run(self) -> None:
        reason: HoldfastError = UnavailableError("the engine is shutting down")
        try:
            self._loop()
        except BaseException as error:  # the supervisor of this thread
            log.exception("the engine died")
            reason = EngineError(f"the engine died: {error}")
        self._deliver(self._end_all(reason))
        self._ended()

    def _loop(self) -> None:
        """Handle the commands in the inbox, deliver their events, run a step and deliver its events."""
        engine, clock = self._engine, self._clock
        while True:
            events: list[Event] = []
            try:
                for sent in self._waiting():
                    if sent is None:
                        return
                    command, at = sent
                    events += engine.handle(command, clock(), at)
            finally:  # also when stopping: these requests are over
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
        """The commands in the inbox. If the engine is idle, wait for the first.

        Commands sent meanwhile wait for the next step, so a flood of commands cannot keep steps from running.
        """
        try:
            yield self._inbox.get(timeout=self._idle_s())
        except queue.Empty:
            return
        for _ in range(self._inbox.qsize()):
            yield self._inbox.get()

    def _idle_s(self) -> float | None:
        """Seconds until the engine needs its next step; None: never.

        An engine without requests still needs steps to drop expired pins and sessions.
        """
        if self._engine.busy:
            return 0.0
        due = self._engine.due
        return None if due is None else min(max(due - self._clock(), 0.0), _LONGEST_WAIT_S)

    def _end_all(self, reason: HoldfastError) -> list[Event]:
        """Fail the engine's requests, and reject those still in the inbox."""
        events: list[Event] = []
        try:
            events = self._engine.fail_all(reason, self._clock())
        except Exception:  # a crash may have corrupted its state; the bridge fails the remaining requests
            log.exception("the engine could not end its requests")
        while not self._inbox.empty():
            sent = self._inbox.get()
            if sent is not None and not isinstance(sent[0], Stop | Abort | Notice):
                events.append(Rejected(sent[0].request_id, reason.info))
        return events


class Mailbox:
    """The events of one request, in order, until its reader takes them. Used on the event loop only.

    The reader gets them in lists, at least `interval` seconds apart. The first and the terminal event and `urgent`
    tokens are passed on at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float, urgent: Urgent = lambda tokens: False) -> None:
        self._loop = loop
        self._interval = interval
        self._urgent = urgent
        self._events: list[Event] = []
        self._due = 0.0  # when the reader may get the next list
        self._ready = asyncio.Event()  # set when a list is due
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    def put(self, events: list[Event]) -> None:
        """Add events. Those after a terminal event are dropped."""
        if self._ended:
            return
        self._events += events
        self._ended = isinstance(events[-1], Terminal)
        if self._ended or any(isinstance(event, Tokens) and self._urgent(event.tokens) for event in events):
            self._due = 0.0
        self._wake()

    async def take(self) -> list[Event]:
        """Wait for the events since the last call, at least one. One reader at a time."""
        await self._ready.wait()
        events, self._events = self._events, []
        if not isinstance(events[-1], Started):  # the first tokens do not wait
            self._due = self._loop.time() + self._interval
        self._ready.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return events

    def _wake(self) -> None:
        if self._loop.time() >= self._due:
            self._ready.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due, self._ready.set)


@dataclass(slots=True, eq=False)
class _Live:
    """A request whose terminal event has not been dispatched."""

    mailbox: Mailbox | None  # None: its reader has left
    before: Work  # done by earlier attempts
    used: asyncio.Future[Usage]  # set with the terminal event
    silent: bool = True  # no token was delivered so far


class Bridge:
    """Submits requests and reads their events, from the event loop that creates it."""

    def __init__(self, engine: Engine) -> None:
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, _Live] = {}
        self._ended: dict[str, Usage] = {}  # the latest `REMEMBERED`
        self._closed = False
        self._handed = threading.Event()  # readers have received the latest events
        self.thread = EngineThread(engine, self._deliver, partial(self._call_on_loop, self._fail_the_rest))
        self.thread.start()

    async def run(
        self, request: Request, before: Work = NO_WORK, urgent: Urgent = lambda tokens: False
    ) -> AsyncGenerator[list[Event], None]:
        """The events of one request, in lists of one or more steps. The last list ends with its terminal event.

        A caller that closes the generator early aborts the request. Its id stays in use until the engine has ended it.
        `before` is work done for it earlier, which `used` adds. Raises InvalidRequestError for an id in use and
        UnavailableError once closed.
        """
        request_id = request.request_id
        if self._closed:
            raise UnavailableError("the engine is not running")
        if request_id in self._live:
            raise InvalidRequestError(f"request id {request_id} is in use", "request_id")
        mailbox = Mailbox(self._loop, STREAM_INTERVAL_S, urgent)
        live = self._live[request_id] = _Live(mailbox, before, self._loop.create_future())
        ended = False
        try:
            self.thread.send(request)
            while not ended:
                events = await mailbox.take()
                ended = isinstance(events[-1], Terminal)
                yield events
        finally:
            live.mailbox = None
            if not live.used.done():
                self.thread.send(Abort(request_id))

    async def used(self, request_id: str) -> Usage | None:
        """The usage of a request that the engine has ended. None: unknown, or ended too long ago."""
        live = self._live.get(request_id)
        return self._ended.get(request_id) if live is None else await asyncio.shield(live.used)

    async def close(self) -> None:
        """Stop the engine. Requests that still run fail as unavailable."""
        self._closed = True
        self.thread.stop()
        await asyncio.to_thread(self.thread.join)

    # ---- on the engine's thread ----

    def _deliver(self, events: list[Event]) -> None:
        """Pass events to the loop.

        After a request's first token wait up to `HANDING_S` for the readers to receive it. Otherwise the loop would
        compete with the planning of the next step for the interpreter lock.
        """
        first = False
        for event in events:
            live = self._live.get(event.request_id) if isinstance(event, Tokens) else None
            if live is not None and live.silent:
                live.silent = False
                first = first or live.mailbox is not None
        if first:
            self._handed.clear()
        self._call_on_loop(self._dispatch, events)
        if first:
            self._handed.wait(HANDING_S)

    def _call_on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: no reader is left
            log.debug("the event loop is closed")

    # ---- on the event loop ----

    def _dispatch(self, events: list[Event]) -> None:
        """Put events into the mailboxes of their requests."""
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, batch in by_request.items():
            if (live := self._live.get(request_id)) is not None:
                self._put(request_id, live, batch)
        self._loop.call_soon(self._handed.set)  # after the readers that these events woke up

    def _put(self, request_id: str, live: _Live, events: list[Event]) -> None:
        ended = events[-1]
        if isinstance(ended, Terminal):
            del self._live[request_id]
            used = replace(ended.usage, work=ended.usage.work + live.before)
            live.used.set_result(used)
            self._ended.pop(request_id, None)  # of an earlier attempt: the latest goes last
            self._ended[request_id] = used
            if len(self._ended) > REMEMBERED:
                del self._ended[next(iter(self._ended))]
        if live.mailbox is not None:
            live.mailbox.put(events)

    def _fail_the_rest(self) -> None:
        """The engine has ended: fail the requests that it never saw."""
        self._closed = True
        info = UnavailableError("the engine has stopped").info
        for request_id, live in list(self._live.items()):
            self._put(request_id, live, [Failed(request_id, info)])
