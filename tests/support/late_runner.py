"""A fake runner that gives its results late: what it does when a step is begun, it keeps to itself until asked."""

from collections.abc import Callable
from dataclasses import replace

from fake_runner import FakeRunner

from holdfast.replicas.plan import Drawn, StepOutput, StepPlan


class LateFlight:
    """A step of a `LateRunner`. `land` may be called once."""

    def __init__(self, compute: Callable[[], StepOutput]) -> None:
        self._compute = compute
        self._done: StepOutput | Exception | None = None
        self.landed = False

    def compute(self) -> None:
        if self._done is None:
            try:
                self._done = self._compute()
            except Exception as failure:
                self._done = failure

    def land(self) -> StepOutput:
        assert not self.landed
        self.landed = True
        self.compute()
        assert self._done is not None
        if isinstance(self._done, Exception):
            raise self._done
        return self._done


class LateRunner(FakeRunner):
    """`eager(n)`: whether step n is computed when it is begun; else when it is landed, like a slow device."""

    def __init__(self, *args: int, eager: Callable[[int], bool] = lambda n: False) -> None:
        super().__init__(*args)
        self.eager = eager
        self.begun = 0
        self.begun_plans: list[StepPlan] = []
        self.most_in_flight = 0
        self._flights: list[LateFlight] = []
        self._drawn: tuple[Drawn | None, ...] = ()
        self._lost: set[tuple[int, int]] = set()  # row and end of the chunks of the step before, if that failed

    def begin(self, plan: StepPlan) -> LateFlight:
        flight = LateFlight(lambda: self._step(plan))
        self._flights = [each for each in self._flights if not each.landed] + [flight]
        self.most_in_flight = max(self.most_in_flight, len(self._flights))
        if self.eager(self.begun):
            for each in self._flights:  # in the order they were begun in
                each.compute()
        self.begun += 1
        self.begun_plans.append(plan)
        return flight

    def _step(self, plan: StepPlan) -> StepOutput:
        before, self._drawn = self._drawn, ()
        lost, self._lost = self._lost, {(chunk.row, chunk.start + len(chunk.tokens)) for chunk in plan.chunks}
        # A model would compute something from what a failed step left; here that is not even read.
        kept = [i for i, chunk in enumerate(plan.chunks) if (chunk.row, chunk.start) not in lost]
        chunks = plan.after(before).chunks
        output = self.run(replace(plan, chunks=tuple(chunks[i] for i in kept)))
        drawn: list[Drawn | None] = [Drawn((0,)) if chunk.draw else None for chunk in chunks]
        for i, each in zip(kept, output.drawn, strict=True):
            drawn[i] = each
        self._drawn, self._lost = tuple(drawn), set()
        return replace(output, drawn=self._drawn)
