"""Steps in a thread of their own, so that the next one can be planned meanwhile: for a device that is this machine.

torch lets go of the interpreter while it computes. Whether that pays depends on cores to spare; a GPU needs none of it.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from holdfast.replicas.scheduling.plan import Drawn, Runner, StepOutput, StepPlan


class _Begun:
    def __init__(self, future: "Future[StepOutput]") -> None:
        self._future = future

    def land(self) -> StepOutput:
        return self._future.result()


class Beside:
    """`scheduling.plan.PipelinedRunner` over any runner. Steps happen one after the other, in the order of `begin`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._drawn: tuple[Drawn | None, ...] = ()  # by the last step; the thread's own

    def run(self, plan: StepPlan) -> StepOutput:
        """Run one step, after those that have begun."""
        return self.begin(plan).land()

    def begin(self, plan: StepPlan) -> _Begun:
        """Begin a step; what it raises is raised by `land`."""
        return _Begun(self._executor.submit(self._step, plan))

    def _step(self, plan: StepPlan) -> StepOutput:
        before, self._drawn = self._drawn, ()  # nothing, should this step fail
        output = self._runner.run(plan.after(before))
        self._drawn = output.drawn
        return output
