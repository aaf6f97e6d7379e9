"""What a request router has seen: requests that waited for a replica, and replicas that came and went.

Serve makes request routers, out of reach of whoever asks them for replicas. Those of this process are known here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Protocol
from weakref import WeakSet


@dataclass(frozen=True, slots=True)
class LineStats:
    """`waiting` and `replicas` are those of now, the rest totals. A request that waited twice is one of `waits`."""

    waiting: int = 0
    waits: int = 0
    wait_s: float = 0.0
    replicas: int = 0
    joined: int = 0
    lost: int = 0

    def waited(self, seconds: float, again: bool) -> "LineStats":
        """A request has left the line, which it had entered for the first time or `again`."""
        return replace(self, waits=self.waits + (not again), wait_s=self.wait_s + seconds)

    def changed(self, joined: int, lost: int) -> "LineStats":
        return replace(self, joined=self.joined + joined, lost=self.lost + lost)

    @classmethod
    def total(cls, several: Iterable["LineStats"]) -> "LineStats":
        rows = list(several)
        return cls(**{field.name: sum(getattr(row, field.name) for row in rows) for field in fields(cls)})


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
