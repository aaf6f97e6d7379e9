"""Where requests wait until a replica has room for them: slots and lines joined, on one event loop.

Whenever a slot comes free its replica takes whoever is first in line for it. So a replica with room has nobody waiting
for it, and one that comes then may have the slot at once. Batch waits behind interactive requests, and leaves a part of
each replica's slots to them. `fair`: of several tenants it is the one whose turn it is, and where the line is full the
last of whoever has most of it gives way.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast.replicas.errors import OverloadedError
from holdfast.replicas.scheduling.shares import Turn
from holdfast.replicas.stats import Mean
from holdfast.replicas.types import Priority
from holdfast.router.lines import NOBODY, Key, Line, Lines, Payer, Place, SlotShares
from holdfast.router.slots import Slots

NOWHERE = ""  # no replica's id: its line is empty, so who waits for any comes first
GIVES_WAY = "so much waits that this request has to give way"
SPARED = 8  # batch leaves the eighth part of a replica's slots to interactive requests
CLOSED_S = 0.05  # how long a replica that said it is full is left alone, if nothing ends there meanwhile


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One request in line, with its `turn` there; `taken` gets the id of the replica that is to have it, None where
    there is none any more.
    """

    request_id: str
    payer: Payer
    turn: Turn
    taken: asyncio.Future[str | None]


class Hand(Protocol):
    """Who counts the requests that a replica has in hand."""

    def sent(self, replica_id: str) -> None: ...

    def ended(self, replica_id: str) -> None: ...


class Gate:
    """Replicas are known by their ids. Every slot that is taken has to be given back; `hand` is told of both."""

    def __init__(
        self,
        max_waiting: int,
        hand: Hand,
        control_calls: int = 0,
        *,
        fair: bool = False,
        max_waiting_tokens: int = 1 << 62,
    ) -> None:
        self._hand = hand
        self._fair = fair
        self.shares = SlotShares()
        self._payers: dict[tuple[str, str], tuple[Payer, float]] = {}  # of slots, and since when
        self._slots = Slots(CLOSED_S, control_calls)
        self._lines: Lines[Waiter] = Lines(max_waiting, max_waiting_tokens)
        self._gap = Mean()  # seconds between two that get a slot while others wait
        self._since: float | None = None  # the latest of these

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._lines)

    @property
    def tokens(self) -> int:
        """In their prompts."""
        return self._lines.tokens

    @property
    def expected_s(self) -> float:
        """How long one that comes last will wait; 0 where nobody waits, or that is not known yet."""
        return (len(self._lines) + 1) * self._gap.value if len(self._lines) else 0.0

    def take(self, replica_id: str, request_id: str, payer: Payer = NOBODY) -> bool:
        """Take a slot at a replica; False where it has none."""
        if not self._room(replica_id, payer.priority):
            return False
        self._take(replica_id, request_id, self._counted(payer))
        return True

    def take_any(self, request_id: str, payer: Payer = NOBODY) -> str | None:
        """A slot at any replica that has one. Costs nothing where all are taken."""
        return next((each for each in self._slots.free if self.take(each, request_id, payer)), None)

    async def wait(
        self,
        key: Key,
        home: str | None,
        request_id: str,
        timeout_s: float,
        payer: Payer = NOBODY,
        tokens: int = 0,
    ) -> str | None:
        """A slot at replica `home`, or at any, in the order of keys; None where none came in time, or the last
        replica went.

        Raises OverloadedError where too much waits already, or this one has to give way to another tenant's, or to one
        of a higher class. Nobody gives way to one for which there is no place then.
        """
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[str | None] = loop.create_future()
        payer = self._counted(payer)
        for place in self._lines.giving_way(self._crowding(payer), tokens) or ():
            self._lines.leave(place)
            self.shares.leave(place.waiter.payer)
            place.waiter.taken.set_exception(OverloadedError(GIVES_WAY))
        turn = self.shares.come(payer, loop.time())
        try:
            waiter = Waiter(request_id, payer, turn, taken)
            place = self._lines.enter((*turn, *key), waiter, home, payer.line, tokens)
        except OverloadedError:
            self.shares.leave(payer)
            raise
        self._since = loop.time() if self._since is None else self._since
        try:
            await asyncio.wait({taken}, timeout=max(0.0, timeout_s))
        except asyncio.CancelledError:
            if taken.done() and taken.exception() is None and (replica_id := taken.result()) is not None:
                self.give_back(replica_id, request_id)
            raise
        finally:
            if not place.gone:
                self._lines.leave(place)
                self.shares.leave(payer)
            if not len(self._lines):
                self._since = None
        return taken.result() if taken.done() else None

    def give_back(self, replica_id: str, request_id: str) -> None:
        """A request has ended at a replica, was refused there or never went there."""
        if self._slots.give_back(replica_id, request_id):
            now = asyncio.get_running_loop().time()
            payer, since = self._payers.pop((replica_id, request_id), (None, now))
            if payer is not None:
                self.shares.give_back(payer, now, now - since)
            self._hand.ended(replica_id)
        self._serve(replica_id)

    def told(self, replica_id: str, ongoing: int) -> None:
        """A replica has said how many calls it has."""
        self._ask(replica_id, self._slots.told(replica_id, ongoing, asyncio.get_running_loop().time()))

    def accepted(self, replica_id: str, request_id: str) -> int | None:
        """A replica has said how many calls it has, now that it has taken this request: the number, where it is of now
        and not of when a request began that is over.
        """
        self._ask(replica_id, self._slots.accepted(replica_id, request_id, asyncio.get_running_loop().time()))
        return self._slots.said(replica_id)

    def ended(self, replica_id: str) -> None:
        """One request fewer than the replica said."""
        self._slots.ended(replica_id)
        self._serve(replica_id)

    def replicas(self, capacity: Mapping[str, int]) -> None:
        """These are the replicas there are, with how many requests each takes at once. Without any nobody waits."""
        self._slots.update(capacity)
        self._lines.keep(set(capacity))
        if not capacity:
            while (waiter := self._next(NOWHERE, batch=True)) is not None:
                self.shares.leave(waiter.payer)
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
        while self._room(replica_id, Priority.INTERACTIVE):
            waiter = self._next(replica_id, batch=self._room(replica_id, Priority.BATCH))
            if waiter is None:
                return
            self._take(replica_id, waiter.request_id, waiter.payer, waiter.turn)
            waiter.taken.set_result(replica_id)
            if self._since is not None:
                self._gap.add(now - self._since)
            self._since = now if len(self._lines) else None

    def _room(self, replica_id: str, priority: Priority) -> bool:
        spared = SPARED if priority is Priority.BATCH else 0
        return self._slots.room(replica_id, asyncio.get_running_loop().time(), spared)

    def _next(self, replica_id: str, *, batch: bool) -> Waiter | None:
        """Who waits for a replica and is first, out of its line; without `batch` one that is interactive."""
        lines = [line for line in self._lines.lines(replica_id) if batch or line.priority is Priority.INTERACTIVE]
        if not lines:
            return None
        return self._lines.take(replica_id, self.shares.first(lines, asyncio.get_running_loop().time()))

    def _crowding(self, payer: Payer) -> Iterator[Place[Waiter]]:
        """Who may give way to `payer` in a full line, in this order: the last of batch, and of whichever tenant has
        more of the line than it.
        """
        waiting = Counter(self._lines.waiting())
        lasts: dict[Line, Iterator[Place[Waiter]]] = {}
        while (crowds := self.shares.crowds(waiting, payer)) is not None:
            if crowds not in lasts:
                lasts[crowds] = self._lines.lasts(crowds)
            yield next(lasts[crowds])
            waiting -= Counter((crowds,))

    def _take(self, replica_id: str, request_id: str, payer: Payer, turn: Turn | None = None) -> None:
        self._slots.take(replica_id, request_id)
        now = asyncio.get_running_loop().time()
        if (replica_id, request_id) not in self._payers:
            self._payers[replica_id, request_id] = payer, now
            self.shares.take(payer, now, turn)
        elif turn is not None:
            self.shares.leave(payer)
        self._hand.sent(replica_id)

    def _counted(self, payer: Payer) -> Payer:
        """What a request counts for here: where tenants do not share, its class alone."""
        return payer if self._fair else replace(NOBODY, priority=payer.priority)
