"""The end of a router: nothing new is let in, and what runs is ended when its time is over, with an error that says so.

Without it a server that stops would cut its streams, and a client could not tell a whole answer from half of one.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.replicas.errors import UnavailableError


class Drain:
    """Used on one event loop. Until `begin` or `bound` it does nothing."""

    def __init__(self) -> None:
        self._closed = False
        self._until: float | None = None
        self._open: set[asyncio.Timeout] = set()

    def begin(self, seconds: float) -> None:
        """From now on nothing new; what is still under way so many seconds later is ended then."""
        self._closed = True
        self.bound(seconds)

    def bound(self, seconds: float) -> None:
        """What is under way so many seconds from now is ended then; until then others may come: they are sent here
        while the proxy does not know yet that this router stops.
        """
        now = asyncio.get_running_loop().time()
        self._until = now + seconds if self._until is None else min(now + seconds, self._until)
        for each in self._open:
            each.reschedule(self._until)

    def check(self) -> None:
        """Raises UnavailableError where nothing new is let in."""
        if self._closed:
            raise UnavailableError("The server is stopping; another one, or this one anew, may be there soon")

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """What is done inside is cancelled when the time is over, which raises UnavailableError."""
        timeout = asyncio.timeout_at(self._until)
        try:
            async with timeout:
                self._open.add(timeout)
                try:
                    yield
                finally:
                    self._open.discard(timeout)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise UnavailableError("The server stopped before the answer was complete") from None
