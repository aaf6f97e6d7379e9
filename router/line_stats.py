"""What a request router has seen: requests that waited for a replica, and replicas that came and went.

Serve makes request routers, out of reach of whoever asks them for replicas. Those of this process are known here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Protocol
from weakref import WeakSet

from holdfast.router.placement import Reason


@dataclass(frozen=True, slots=True)
class LineStats:
    """`waiting`, `replicas` and `balance` are those of now, the rest totals. A request that waited twice is one of
    `waits`. `balance` is the most turns that a replica has in hand over the mean; `placed` are turns by why they went
    where they went.
    """

    waiting: int = 0
    tokens: int = 0  # in their prompts, now
    waits: int = 0
    home_waits: int = 0  # of the waits, those for the replica that holds the program's state
    wait_s: float = 0.0
    home_wait_s: float = 0.0
    replicas: int = 0
    joined: int = 0
    lost: int = 0
    foretold: int = 0  # refused here, for their replica had just refused others like them
    balance: float = 1.0
    placed: Mapping[Reason, int] = field(default_factory=dict)

    def waited(self, seconds: float, again: bool, for_home: bool) -> "LineStats":
        """A request has left the line, which it had entered for the first time or `again`."""
        return replace(
            self,
            waits=self.waits + (not again),
            home_waits=self.home_waits + (for_home and not again),
            wait_s=self.wait_s + seconds,
            home_wait_s=self.home_wait_s + (seconds if for_home else 0.0),
        )

    def placed_for(self, reason: Reason) -> "LineStats":
        """A turn has got its replica."""
        return replace(self, placed={**self.placed, reason: self.placed.get(reason, 0) + 1})

    def changed(self, joined: int, lost: int) -> "LineStats":
        return replace(self, joined=self.joined + joined, lost=self.lost + lost)

    @classmethod
    def total(cls, several: Iterable["LineStats"]) -> "LineStats":
        rows = list(several)
        numbers = [each.name for each in fields(cls) if each.name not in ("balance", "placed")]
        return cls(
            **{name: sum(getattr(row, name) for row in rows) for name in numbers},
            balance=max((row.balance for row in rows), default=1.0),
            placed=sum((Counter(row.placed) for row in rows), Counter()),
        )


class Shown(Protocol):
    @property
    def line_stats(self) -> LineStats: ...


_SHOWN: WeakSet[Shown] = WeakSet()


def show(router: Shown) -> None:
    """Count `router` in, as long as it lives."""
    _SHOWN.add(router)


def line_stats() -> LineStats:
    """Those of this process's request routers together."""
    return LineStats.total(router.line_stats for router in _SHOWN)
