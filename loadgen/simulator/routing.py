"""Which replica a program's turn goes to: the router's own placement, over what it would know of the replicas.

A program stays where it began. No replica is ever full here, so nothing waits in the router.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.loadgen.simulator.replica import Replica
from holdfast.router.placement import PlacementConfig, ReplicaView, rank

_CAPACITY = 1 << 30


class Routing:
    """Remembers where programs are."""

    def __init__(self, replicas: Sequence[Replica], config: PlacementConfig | None = None) -> None:
        self._replicas = {replica.name: replica for replica in replicas}
        self._config = config or PlacementConfig()

    def place(self, program: str, home: Replica | None) -> Replica:
        """The replica for a turn of a program whose state is at `home`; None: it is new."""
        if home is not None:
            return home  # what `rank` says of a program whose replica has room
        views = [ReplicaView(name, replica.ongoing, _CAPACITY) for name, replica in self._replicas.items()]
        return self._replicas[rank(program, views, None, 0.0, self._config)[0]]
