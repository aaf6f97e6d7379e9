"""What one replica says of itself to those who watch a cluster: plain picklable data. Metrics are told elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.replicas.stats import EngineStats, Occupancy


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What is in use now, and totals since the start: whoever looks twice has the rates."""

    replica_id: str
    model: str
    device: str
    occupancy: Occupancy
    steps: int
    prompt_computed: int  # tokens
    prompt_cached: int
    completion: int
    drafted: int
    accepted: int
    pin_hits: int
    pin_misses: int
    preemptions: int
    failed_steps: int


def replica_status(replica_id: str, model: str, device: str, stats: EngineStats, now: Occupancy) -> ReplicaStatus:
    """The status of an engine with these counts. They are read while the engine runs on, so each is right by itself."""
    return ReplicaStatus(
        replica_id=replica_id,
        model=model,
        device=device,
        occupancy=now,
        steps=stats.steps,
        prompt_computed=stats.prompt_computed,
        prompt_cached=stats.prompt_cached,
        completion=stats.completion,
        drafted=stats.drafted,
        accepted=stats.accepted,
        pin_hits=stats.pin_hits,
        pin_misses=stats.pin_misses,
        preemptions=stats.preemptions,
        failed_steps=stats.failed_steps,
    )
