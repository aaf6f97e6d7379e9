"""Which replica serves a program: filter, score and pick over snapshots of the replicas. Pure.

Three reasons, strongest first: the program's state is there (affinity); the hash of its name points there (so that
routers which know nothing of each other agree, and a change of the replica set moves few programs); it has less to do
(load). Remembering where a program went and waiting for room are `affinity`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from holdfast.replicas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """How far affinity goes. Counts are in programs and requests, times in seconds."""

    pins: int = 65536  # programs remembered with their replica; the least recently routed is forgotten first
    patience_s: float = (
        2.0  # how long a program waits in the router for its replica with `max_ongoing_requests` in hand
    )
    imbalance: int = 8  # a new program leaves its hashed replica when that has this many requests more than another
    no_replica_s: float = 60.0  # how long a request waits while there is no replica at all
    max_waiting: int = 4096  # requests that wait for a replica with room; one more is refused
    queue_timeout_s: float = 300.0  # a request that waited this long is refused

    def __post_init__(self) -> None:
        for name in ("pins", "imbalance", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", name)
        for name in ("patience_s", "no_replica_s", "queue_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}", name)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a router knows of a live replica: requests it has in hand, and how many it takes at once."""

    replica_id: str
    ongoing: int
    capacity: int

    @property
    def full(self) -> bool:
        return self.ongoing >= self.capacity


def weight(program: str, replica_id: str) -> int:
    """Rendezvous weight of the pair: equal in every process and release (Thaler and Ravishankar, 1998)."""
    return int.from_bytes(blake2b(f"{program}\0{replica_id}".encode(), digest_size=8).digest(), "big")


def rank(
    program: str, replicas: Sequence[ReplicaView], pinned: str | None, waited_s: float, config: PlacementConfig
) -> tuple[str, ...]:
    """Ids of the replicas to try, best first; empty only when `replicas` is.

    `pinned` is where the program's state is believed to be; a replica that is not among `replicas` counts as none.
    A program is offered its own replica alone until it has waited `patience_s`, then the others behind it. Without
    a program (`""`) only the load decides.
    """
    by_id = {replica.replica_id: replica for replica in replicas}
    home = by_id.get(pinned) if pinned is not None else None
    if home is not None and waited_s < config.patience_s:
        return (home.replica_id,)
    rest = sorted((replica for replica in replicas if replica is not home), key=_load)
    if home is not None:
        rest.insert(0, home)
    elif program:
        rest = _by_hash(program, rest, config.imbalance)
    return tuple(replica.replica_id for replica in rest)


def _by_hash(program: str, replicas: Sequence[ReplicaView], imbalance: int) -> list[ReplicaView]:
    """Highest rendezvous weight first, after those that are far busier than the least busy one."""
    if not replicas:
        return []
    least = min(replica.ongoing for replica in replicas)

    def order(replica: ReplicaView) -> tuple[bool, int]:
        crowded = replica.full or replica.ongoing - least >= imbalance
        return crowded, -weight(program, replica.replica_id)

    return sorted(replicas, key=order)


def _load(replica: ReplicaView) -> tuple[bool, int, str]:
    return replica.full, replica.ongoing, replica.replica_id
