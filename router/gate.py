"""Where requests wait until a replica has room for them: slots and lines joined, on one event loop.

Whenever a slot comes free its replica takes whoever is first in line for it. So a replica with room has nobody waiting
for it, and one that comes then may have the slot at once. `fair`: of several tenants it is the one whose turn it is,
and where the line is full the last of whoever has most of it gives way.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from holdfast.replicas.errors import OverloadedError
from holdfast.router.lines import NOBODY, Key, Lines, Payer, SlotShares
from holdfast.router.slots import Slots

NOWHERE = ""  # no replica's id: its line is empty, so who waits for any comes first
CLOSED_S = 0.05  # how long a replica that said it is full is left alone, if nothing ends there meanwhile


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One request in line; `taken` gets the id of the replica that is to have it, None where there is none any more."""

    request_id: str
    payer: Payer
    taken: asyncio.Future[str | None]


class Hand(Protocol):
    """Who counts the requests that a replica has in hand."""

    def sent(self, replica_id: str) -> None: ...

    def ended(self, replica_id: str) -> None: ...


class Gate:
    """Replicas are known by their ids. Every slot that is taken has to be given back; `hand` is told of both."""

    def __init__(self, max_waiting: int, hand: Hand, control_calls: int = 0, *, fair: bool = False) -> None:
        self._hand = hand
        self._fair = fair
        self._shares = SlotShares()
        self._payers: dict[tuple[str, str], Payer] = {}  # of the slots that tenants have, by replica and request
        self._slots = Slots(CLOSED_S, control_calls)
        self._lines: Lines[Waiter] = Lines(max_waiting)

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._lines)

    def take(self, replica_id: str, request_id: str, payer: Payer = NOBODY) -> bool:
        """Take a slot at a replica; False where it has none."""
        if not self._slots.room(replica_id, asyncio.get_running_loop().time()):
            return False
        self._take(replica_id, request_id, payer if self._fair else NOBODY)
        return True

    def take_any(self, request_id: str, payer: Payer = NOBODY) -> str | None:
        """A slot at any replica that has one. Costs nothing where all are taken."""
        return next((each for each in self._slots.free if self.take(each, request_id, payer)), None)

    async def wait(
        self, key: Key, home: str | None, request_id: str, timeout_s: float, payer: Payer = NOBODY
    ) -> str | None:
        """A slot at replica `home`, or at any, in the order of keys; None where none came in time, or the last
        replica went.

        Raises OverloadedError where too many wait already, or this one has to give way to another tenant's.
        """
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[str | None] = loop.create_future()
        payer = payer if self._fair else NOBODY
        if self._lines.full:
            self._make_room(payer)
        place = self._lines.enter(key, Waiter(request_id, payer, taken), home, payer.tenant)
        self._shares.come(payer, loop.time())
        try:
            await asyncio.wait({taken}, timeout=max(0.0, timeout_s))
        except asyncio.CancelledError:
            if taken.done() and taken.exception() is None and (replica_id := taken.result()) is not None:
                self.give_back(replica_id, request_id)
            raise
        finally:
            self._lines.leave(place)
        return taken.result() if taken.done() else None

    def give_back(self, replica_id: str, request_id: str) -> None:
        """A request has ended at a replica, was refused there or never went there."""
        if self._slots.give_back(replica_id, request_id):
            payer = self._payers.pop((replica_id, request_id), NOBODY)
            self._shares.give_back(payer, asyncio.get_running_loop().time())
            self._hand.ended(replica_id)
        self._serve(replica_id)

    def told(self, replica_id: str, ongoing: int) -> None:
        """A replica has said how many calls it has."""
        self._ask(replica_id, self._slots.told(replica_id, ongoing, asyncio.get_running_loop().time()))

    def accepted(self, replica_id: str, request_id: str) -> None:
        """A replica has said how many calls it has, now that it has taken this request."""
        self._ask(replica_id, self._slots.accepted(replica_id, request_id, asyncio.get_running_loop().time()))

    def ended(self, replica_id: str) -> None:
        """One request fewer than the replica said."""
        self._slots.ended(replica_id)
        self._serve(replica_id)

    def replicas(self, capacity: Mapping[str, int]) -> None:
        """These are the replicas there are, with how many requests each takes at once. Without any nobody waits."""
        self._slots.update(capacity)
        self._lines.keep(set(capacity))
        if not capacity:
            while (waiter := self._next(NOWHERE)) is not None:
                waiter.taken.set_result(None)
        for replica_id in capacity:
            self._serve(replica_id)

    def _ask(self, replica_id: str, at: float | None) -> None:
        if at is None:
            self._serve(replica_id)
        else:
            asyncio.get_running_loop().call_at(at, self._serve, replica_id)

    def _serve(self, replica_id: str) -> None:
        now = asyncio.get_running_loop().time()
        while self._slots.room(replica_id, now) and (waiter := self._next(replica_id)) is not None:
            self._take(replica_id, waiter.request_id, waiter.payer)
            waiter.taken.set_result(replica_id)

    def _next(self, replica_id: str) -> Waiter | None:
        """Who waits for a replica and is first, out of its line."""
        tenants = self._lines.tenants(replica_id)
        if not tenants:
            return None
        return self._lines.take(replica_id, self._shares.first(tenants, asyncio.get_running_loop().time()))

    def _make_room(self, payer: Payer) -> None:
        """In a full line the last of a tenant that has more of it than `payer` gives way."""
        crowds = self._shares.crowds(self._lines.waiting(), payer) if payer.tenant else None
        waiter = None if crowds is None else self._lines.take_last(crowds)
        if waiter is not None:
            waiter.taken.set_exception(OverloadedError("so many requests wait that this one has to give way"))

    def _take(self, replica_id: str, request_id: str, payer: Payer) -> None:
        self._slots.take(replica_id, request_id)
        if payer.tenant and (replica_id, request_id) not in self._payers:
            self._payers[replica_id, request_id] = payer
            self._shares.take(payer, asyncio.get_running_loop().time())
        self._hand.sent(replica_id)
