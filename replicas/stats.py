"""What the engine counts while it runs. Plain numbers: the actor turns them into metrics."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    """Totals since the start, written by the engine thread alone."""

    steps: int = 0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    prompt_computed: int = 0
    prompt_cached: int = 0
    prompt_grouped: int = 0  # of the cached ones, those a leader computed while the request waited
    completion: int = 0
    drafted: int = 0
    accepted: int = 0  # of the drafted ones
    preemptions: int = 0
    failed_steps: int = 0
    ended: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("finished", "aborted", "rejected", "failed"), 0)
    )


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What is in use right now. Cells: free + in the tree + held by sequences == total."""

    running: int
    waiting: int
    rows_taken: int
    cells_total: int
    cells_free: int
    cells_tree: int
    cells_held: int
