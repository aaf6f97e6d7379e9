"""The cells that are kept for programs between their turns: pinned in the cache, counted, and never more than allowed.

The only caller of the cache for programs' pins. Not here: whom they are kept for and how long (`keeping`).
"""

from collections.abc import Iterator

from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.kv.pinned import PinnedPages
from holdfast.replicas.retention.config import RetentionConfig
from holdfast.replicas.retention.pins import Held, Pins
from holdfast.replicas.scheduling.places import surely
from holdfast.replicas.scheduling.waiting import WaitingQueue
from holdfast.replicas.sequences.parking import Owner
from holdfast.replicas.sequences.sequence import Sequence


class Kept:
    """Pins by program. Waiting turns of a program know whether it has one, and stand where the order puts them then."""

    def __init__(self, config: RetentionConfig, cache: KVCache, waiting: WaitingQueue) -> None:
        cells = cache.pool.total * cache.page_size
        self._most = int(cells * config.share)
        self._most_of_tenant = int(cells * config.tenant_share)
        self._cache = cache
        self._waiting = waiting
        self._pins = Pins()
        self._pages = PinnedPages(cache.tree)

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._pins)

    @property
    def cells(self) -> int:
        """Cells that pins keep from being evicted, shared ones counted once."""
        return self._pages.total * self._cache.page_size

    def cells_of(self, tenant: str) -> int:
        return self._pages.of(tenant) * self._cache.page_size

    def find(self, owner: Owner | None) -> Held | None:
        return self._pins.find(owner) if owner is not None else None

    def keep(self, sequence: Sequence, owner: Owner, pin: Pin, now: float, until: float) -> int:
        """Hold the `pin` on what `sequence` left in the tree, in place of what its program had pinned before.

        Returns how many pins were dropped because its tenant's, or all, would have kept too much; its own may be
        one of them.
        """
        before = self._pins.find(owner)
        if before is not None:
            self.drop(before)
        submit = sequence.submit
        turn = submit.program_turns + 1
        run_turn = turn - submit.answered_turns
        self._pins.add(Held(owner, pin, submit.program_arrival, submit.request_id, turn, run_turn, now, until))
        self._pages.add(owner.scope, pin.node)
        self._mark(owner, pinned=True)
        return self._keep_within_limits(owner.scope)

    def until(self, held: Held, deadline: float) -> None:
        self._pins.until(held, deadline)

    def drop(self, held: Held) -> None:
        self._pins.drop(held)
        self._pages.remove(held.owner.scope, held.pin.node)
        surely(self._cache.unpin, held.pin)
        self._mark(held.owner, pinned=False)

    @property
    def due(self) -> float | None:
        """When `expired` may find something next; None: never. What is kept for turns that wait does not count."""
        return self._pins.due(overdue=not len(self._waiting))

    def expired(self, now: float) -> list[Held]:
        """Those past their deadline whose program has no turn waiting. Drops none."""
        return self._pins.expired(now, lambda owner: bool(self._waiting.turns_of(owner)))

    def latest(self, besides: Owner | None = None) -> Held | None:
        """That of the program that arrived last, but for `besides`."""
        return self._pins.latest(besides)

    def _keep_within_limits(self, tenant: str) -> int:
        before = len(self)
        while self.cells_of(tenant) > self._most_of_tenant:
            self.drop(max((held for held in self if held.owner.scope == tenant), key=lambda held: held.arrival))
        while self.cells > self._most:
            latest = self._pins.latest()
            assert latest is not None, "cells are pinned by nobody"
            self.drop(latest)
        return before - len(self)

    def _mark(self, owner: Owner, *, pinned: bool) -> None:
        for sequence in self._waiting.turns_of(owner):
            sequence.pinned = pinned
            self._waiting.reorder(sequence)
