"""A runner that counts what passes through it: forwards, KV that they read, and the host's time to begin steps."""

import time
from dataclasses import dataclass

from holdfast.replicas.scheduling.plan import Flight, PipelinedRunner, StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals. `positions`: tokens whose KV a forward read, once for each of its sequences.

    `filling` and `filling_positions`: the same of forwards that compute more than what is drawn from.
    """

    forwards: int = 0
    positions: int = 0
    filling: int = 0
    filling_positions: int = 0
    prepare_s: float = 0.0  # laying steps out, their copy to the device and their launches, with nothing running yet


class Watched:
    """`scheduling.plan.PipelinedRunner` over another one."""

    def __init__(self, runner: PipelinedRunner) -> None:
        self._runner = runner
        self._flying = 0
        self.counts = Counts()

    def run(self, plan: StepPlan) -> StepOutput:
        """Run one step. Raises like the runner."""
        self._count(plan, 0.0)
        return self._runner.run(plan)

    def begin(self, plan: StepPlan) -> Flight:
        """Begin a step. Raises like the runner."""
        began = time.perf_counter()
        flight = self._runner.begin(plan)
        # Beside a step that runs it costs nobody anything.
        self._count(plan, 0.0 if self._flying else time.perf_counter() - began)
        self._flying += 1
        return _Watching(self, flight)

    def landed(self) -> None:
        self._flying -= 1

    def _count(self, plan: StepPlan, prepare_s: float) -> None:
        before = self.counts
        positions = sum(chunk.start + len(chunk.tokens) for chunk in plan.chunks)
        filling = any(chunk.draw is None or len(chunk.tokens) > chunk.draw.drafts + 1 for chunk in plan.chunks)
        self.counts = Counts(
            before.forwards + bool(plan.chunks),
            before.positions + positions,
            before.filling + filling,
            before.filling_positions + positions * filling,
            before.prepare_s + prepare_s,
        )


@dataclass(frozen=True, slots=True)
class _Watching:
    watched: Watched
    flight: Flight

    def land(self) -> StepOutput:
        try:
            return self.flight.land()
        finally:
            self.watched.landed()
