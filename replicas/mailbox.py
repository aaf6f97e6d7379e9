"""Where one request's events wait for their reader. Used on the event loop only."""

import asyncio

from holdfast.replicas.events import Event, Terminal


class Mailbox:
    """Events in order, handed over in lists: at once when the last list is `interval` seconds old, else together.

    A reader pays for each list (a wake-up here, a message between processes later), not for each token, so steps much
    shorter than the interval share one. The first and the terminal event are never held back.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._loop = loop
        self._interval = interval
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
                self._cancel_timer()
        events, self._events = self._events, []
        self._due = self._loop.time() + self._interval
        return events

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
