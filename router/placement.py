"""Which replica serves a program: filter, score and pick over snapshots of the replicas. Pure.

Four reasons, strongest first: the program's state is there (affinity); what it is to be placed with is there (a group:
a parent's sub-agents, requests with one cache key), while there is room; the hash of its name points there (so that
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
    group_load: float = 1.25  # programs placed together leave a replica with so many times the mean of programs
    no_replica_s: float = 60.0  # how long a request waits while there is no replica at all
    max_waiting: int = 4096  # requests that wait for a replica with room; one more is refused
    queue_timeout_s: float = 300.0  # a request that waited this long is refused

    def __post_init__(self) -> None:
        for name in ("pins", "imbalance", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", name)
        if self.group_load < 1:
            raise ConfigError(f"group_load must be at least 1, not {self.group_load}", "group_load")
        for name in ("patience_s", "no_replica_s", "queue_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)}", name)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a router knows of a live replica: requests it has in hand, how many it takes at once, and how many programs
    it has served last.
    """

    replica_id: str
    ongoing: int
    capacity: int
    programs: int = 0

    @property
    def full(self) -> bool:
        return self.ongoing >= self.capacity


@dataclass(frozen=True, slots=True)
class Group:
    """What a new program is placed with: by its name, or where that was served last."""

    name: str
    replica_id: str | None = None


def weight(program: str, replica_id: str) -> int:
    """Rendezvous weight of the pair: equal in every process and release (Thaler and Ravishankar, 1998)."""
    return int.from_bytes(blake2b(f"{program}\0{replica_id}".encode(), digest_size=8).digest(), "big")


def rank(
    program: str,
    replicas: Sequence[ReplicaView],
    pinned: str | None,
    waited_s: float,
    config: PlacementConfig,
    group: Group | None = None,
) -> tuple[str, ...]:
    """Ids of the replicas to try, best first; empty only when `replicas` is.

    `pinned` is where the program's state is believed to be; a replica that is not among `replicas` counts as none.
    A program is offered its own replica alone until it has waited `patience_s`, then the others behind it. One that has
    none goes where its `group` is, unless that is crowded or has more than its share of programs. Without a program
    (`""`) only the load decides.
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
        if group is not None and (together := _of_group(group, replicas, config)) is not None:
            rest.remove(together)
            rest.insert(0, together)
    return tuple(replica.replica_id for replica in rest)


def _by_hash(program: str, replicas: Sequence[ReplicaView], imbalance: int) -> list[ReplicaView]:
    """Highest rendezvous weight first, after those that are far busier than the least busy one."""
    if not replicas:
        return []
    least = min(replica.ongoing for replica in replicas)

    def order(replica: ReplicaView) -> tuple[bool, int]:
        return _crowded(replica, least, imbalance), -weight(program, replica.replica_id)

    return sorted(replicas, key=order)


def _of_group(group: Group, replicas: Sequence[ReplicaView], config: PlacementConfig) -> ReplicaView | None:
    """Where the group is served, if there is room: one name that all use must not bring all to one replica."""
    if not replicas:
        return None
    home = next((each for each in replicas if each.replica_id == group.replica_id), None)
    home = home or max(replicas, key=lambda each: weight(group.name, each.replica_id))
    share = config.group_load * sum(each.programs for each in replicas) / len(replicas)
    least = min(each.ongoing for each in replicas)
    if _crowded(home, least, config.imbalance) or home.programs >= max(share, config.imbalance):
        return None
    return home


def _crowded(replica: ReplicaView, least: int, imbalance: int) -> bool:
    return replica.full or replica.ongoing - least >= imbalance


def _load(replica: ReplicaView) -> tuple[bool, int, str]:
    return replica.full, replica.ongoing, replica.replica_id
