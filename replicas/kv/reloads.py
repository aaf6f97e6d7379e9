"""What running sequences bring back from host memory, instead of computing it again.

    tokens     |<-- aliased on the device -->|<-- brought back -->|<-- computed -->|
               0                          n_cached              reach            length

The cells are brought back into the sequence's own pages, like cells that it computes: to the device's books a load is
a prefill chunk without a forward. Whatever goes wrong with the host tier costs the time to compute, and no request.
"""

import logging
from dataclasses import dataclass

from holdfast.replicas.kv.holding import Holding, Pin
from holdfast.replicas.kv.host_tier import HostTier
from holdfast.replicas.scheduling.plan import NO_MOVES, PageMoves
from holdfast.replicas.tokens import TokenIds

_WEIGHT = 0.2  # of the latest load in what is known of the speed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReloadSpeed:
    """How fast cells come back, as measured: a moving average of seconds a cell. None: nothing has come back yet."""

    cell_s: float | None = None

    @property
    def cells_per_s(self) -> float:
        return 1.0 / self.cell_s if self.cell_s else 0.0

    def measured(self, cells: int, seconds: float) -> "ReloadSpeed":
        if not cells or seconds <= 0.0:
            return self
        latest = seconds / cells
        return ReloadSpeed(latest if self.cell_s is None else self.cell_s + _WEIGHT * (latest - self.cell_s))


class Reloads:
    """Leases on the host tier, by holding. Without a `host` nothing is ever found."""

    def __init__(self, host: HostTier | None) -> None:
        self._host = host
        self._leases: dict[Holding, Pin] = {}
        self.speed = ReloadSpeed()

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, holding: Holding, tokens: TokenIds) -> int:
        """How far the host has the tokens of a holding that has just begun; 0 where that is not worth a step.

        From then on that is protected there, until all of it has come or the holding ends.
        """
        if self._host is None:
            return 0
        try:
            lease = self._host.find(holding.scope, tokens[:-1])
            if lease.length >= holding.n_cached + 2 * holding.page_size:
                self._leases[holding] = lease
                return lease.length
            self._host.let_go(lease)
        except Exception:
            log.exception("the host tier is emptied: its books broke off")
            self.lose()
        return 0

    def reach(self, holding: Holding) -> int:
        """How far this holding is to be brought back; 0: it is not, or not any more."""
        lease = self._leases.get(holding)
        return lease.length if lease is not None and self._host is not None and self._host.protects(lease) else 0

    def load(self, holding: Holding, start: int, end: int) -> PageMoves:
        """The copies that bring cells [start, end) back, within `reach`, into own pages that the holding has already.

        The page that `start` lies in is copied whole: the host has its cells before `start` as well.
        """
        assert self._host is not None
        slots = slice(start // holding.page_size, -(-end // holding.page_size))
        return PageMoves(holding.pages[slots].copy(), self._host.pages(self._leases[holding])[slots])

    def loaded(self, holding: Holding, end: int) -> None:
        """The cells up to `end` have come."""
        if end >= self.reach(holding):
            self.end(holding)

    def end(self, holding: Holding) -> None:
        """Nothing more is to come: all has, or the holding ends."""
        lease = self._leases.pop(holding, None)
        if lease is not None and self._host is not None:
            self._host.let_go(lease)

    def saves(self) -> PageMoves:
        """The copies of what was evicted since the last call: the step that is being planned has to begin with them."""
        return self._host.saves() if self._host is not None else NO_MOVES

    def lose(self) -> None:
        """Copies between the tiers went wrong: nothing in host memory is believed any more."""
        if self._host is not None:
            self._host.clear()
