"""Running the steps of an engine: one after the other, or each begun while the one before it still runs.

Overlapped, a call of `advance` plans a step and begins it, and then takes in what the step before drew: planning,
commit and everything that the caller does with events pass while the model computes. Results are one step late and
never different. After a step whose tokens are needed first (`Step.open`) the next call only takes them in.

This is the supervisor of a step: whatever a model or a kernel raises fails the requests in that step, no others.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.scheduling.plan import Flight, PipelinedRunner, Runner, StepOutput, StepPlan
from holdfast.replicas.scheduling.running import BooksError
from holdfast.replicas.scheduling.scheduler import Scheduler
from holdfast.replicas.scheduling.step import Step
from holdfast.replicas.stats import EngineStats

log = logging.getLogger(__name__)

Stopwatch = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Flying:
    """A step that has begun, and what it waits for."""

    step: Step
    flight: Flight
    planned: float  # when planning it began, by the stopwatch


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """The flight of a runner that has only `run`: over before anybody waits for it."""

    runner: Runner
    plan: StepPlan

    def land(self) -> StepOutput:
        return self.runner.run(self.plan)


class Steps:
    """At most one step is in flight between calls. Raises only BooksError, from the books."""

    def __init__(self, runner: Runner, overlap: bool, stats: EngineStats, watch: Stopwatch) -> None:
        """Raises ConfigError when steps are to overlap on a runner that cannot begin one before another is over."""
        self._pipelined: PipelinedRunner | None = None
        if overlap:
            if not isinstance(runner, PipelinedRunner):
                raise ConfigError(f"{type(runner).__name__} runs one step at a time", "overlap_steps")
            self._pipelined = runner
        self._runner = runner
        self._stats = stats
        self._watch = watch
        self._flying: _Flying | None = None
        self._landed = -math.inf  # when the last step was over

    @property
    def flying(self) -> bool:
        """Whether a step has begun whose results were not taken in."""
        return self._flying is not None

    def advance(
        self, scheduler: Scheduler, cache: KVCache, now: float, clock: Stopwatch | None, times: int = 1
    ) -> None:
        """Plan and begin a step, take one in. `clock` gives the time of a step's end; without it that is `now`."""
        before, self._flying = self._flying, None
        if before is not None and not before.step.open:
            self._land(before, scheduler, now, clock)
            return
        try:
            t0 = self._watch()
            step = self._plan(scheduler, now, before, times)
            expect_sound(cache)
            if step is not None:
                self._flying = self._begin(step, scheduler, now, t0)
        finally:
            if before is not None:
                self._land(before, scheduler, now, clock)
        begun = self._flying
        if before is None and begun is not None and not (self._pipelined and begun.step.open):
            self._flying = None
            self._land(begun, scheduler, now, clock)
        expect_sound(cache)

    def forget(self) -> None:
        """The books are gone, or the engine stops: nobody wants to know what the step in flight draws."""
        flying, self._flying = self._flying, None
        if flying is not None:
            try:
                flying.flight.land()
            except Exception:  # of a step that no request waits for
                log.exception("a forgotten step failed")

    def _plan(self, scheduler: Scheduler, now: float, before: _Flying | None, times: int) -> Step | None:
        """The next step, None where there is nothing to do."""
        t0 = self._watch()
        step = scheduler.schedule(now, before.step if before is not None else None, times)
        self._stats.schedule_s += self._watch() - t0
        plan = step.plan
        return step if plan.busy or plan.writes or plan.copies else None

    def _begin(self, step: Step, scheduler: Scheduler, now: float, t0: float) -> _Flying | None:
        if self._pipelined is None:
            return _Flying(step, _AtOnce(self._runner, step.plan), t0)
        try:
            return _Flying(step, self._pipelined.begin(step.plan), t0)
        except Exception as failure:
            self._failed(step, scheduler, failure, now)
            return None

    def _land(self, flying: _Flying, scheduler: Scheduler, now: float, clock: Stopwatch | None) -> None:
        try:
            self._take_in(flying, scheduler, now, clock)
        finally:
            end = self._watch()
            self._stats.steps += 1
            self._stats.step_times.observe(end - max(flying.planned, self._landed))
            self._landed = end

    def _take_in(self, flying: _Flying, scheduler: Scheduler, now: float, clock: Stopwatch | None) -> None:
        step, stats, watch = flying.step, self._stats, self._watch
        try:
            output = flying.flight.land()
            if len(output.drawn) != len(step.plan.chunks):
                raise EngineError(f"{len(output.drawn)} results for {len(step.plan.chunks)} chunks")
        except Exception as failure:
            self._failed(step, scheduler, failure, now)
            return
        stats.forward_s += output.forward_s
        stats.sample_s += output.sample_s
        t0 = watch()
        scheduler.commit(step, output, clock() if clock else now)
        stats.commit_s += watch() - t0

    def _failed(self, step: Step, scheduler: Scheduler, failure: Exception, now: float) -> None:
        log.error("step failed", exc_info=failure)
        scheduler.fail(step, EngineError(f"the engine failed: {failure}"), now)


def expect_sound(cache: KVCache) -> None:
    """Raise BooksError after an operation on the cache broke off: which page is whose is not sure any more."""
    if not cache.sound:
        raise BooksError("an operation on the cache broke off")
