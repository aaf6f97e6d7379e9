"""What a replica says of its steps and of its process."""

from holdfast.replicas.metrics.definition import Kind, Metric
from holdfast.replicas.metrics.reading import ReplicaMetric, counter, gauge
from holdfast.replicas.stats import STEP_SECONDS

PHASES = ("schedule", "forward", "sample", "commit")

STEPS = (
    counter(
        "engine_steps",
        "",
        "Steps run",
        "Stands still with sequences running: the engine hangs",
        lambda r: r.stats.steps,
    ),
    counter(
        "engine_steps_failed",
        "",
        "Steps that failed, with their requests",
        "Any: look into the replica's log",
        lambda r: r.stats.failed_steps,
    ),
    counter(
        "step_seconds",
        "s",
        "Time in the parts of a step: `schedule`, `forward`, `sample`, `commit`",
        "`schedule` and `commit` above a tenth of the sum: the host is short of cores",
        lambda r: {phase: getattr(r.stats, f"{phase}_s") for phase in PHASES},
        "phase",
    ),
    ReplicaMetric(
        Metric(
            "holdfast_step_duration_seconds",
            Kind.HISTOGRAM,
            "s",
            "How long whole steps took",
            "A growing tail with a steady median: long prefill chunks; see `engine.step_tokens`",
            buckets=STEP_SECONDS,
        ),
        lambda r: r.stats.step_times,
    ),
)

PROCESS = (
    counter(
        "replica_cpu_seconds",
        "s",
        "Processor time of the replica's process",
        "On a GPU at one core: the host holds the device up",
        lambda r: r.process.cpu_s,
    ),
    gauge(
        "replica_memory_bytes",
        "bytes",
        "Memory of the replica's process",
        "Growing without end: a leak; else give the pod more",
        lambda r: r.process.memory,
    ),
    gauge(
        "replica_start_time_seconds",
        "s since 1970",
        "When the replica's process began",
        "A new one that nobody deployed: a replica died; see the log of the one before",
        lambda r: r.process.started,
    ),
)
