"""What a replica learns of its own load for the policies: queue delay, turns of programs, cost of a prefill.

It outlives the books of the cache: a replica that starts anew still knows its load.
"""

import math
from collections import deque

from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.retention.restore import PrefillFit
from holdfast.replicas.retention.ttl import Conditions
from holdfast.replicas.scheduling.plan import StepPlan


class Turns:
    """How many turns finished programs had, and what the turns done say of the turns left.

    A program that is asked again after its answer counts as another one. Each turn of a finished program is one point
    (turns done, turns left); sums over a program have closed forms.
    """

    def __init__(self) -> None:
        self.programs = 0
        self._points = self._done = self._done2 = self._left = self._left2 = self._both = 0.0

    def ended(self, turns: int) -> None:
        """A program has ended after so many turns."""
        n = turns
        done, done2 = n * (n + 1) / 2, n * (n + 1) * (2 * n + 1) / 6
        self.programs += 1
        self._points += n
        self._done += done
        self._done2 += done2
        self._left += n * n - done
        self._left2 += n * n * n - 2 * n * done + done2
        self._both += n * done - done2

    @property
    def mean(self) -> float:
        return self._points / self.programs if self.programs else 1.0

    @property
    def eta(self) -> float:
        """Minus the correlation of turns done and turns left, kept within [0, 1]; 1 until it is known.

        Programs with ever more turns before them would make it negative, and a wait that is saved is no loss.
        """
        n = self._points
        spread = (n * self._done2 - self._done**2) * (n * self._left2 - self._left**2)
        if spread <= 0:
            return 1.0
        correlation = (n * self._both - self._done * self._left) / math.sqrt(spread)
        return min(max(-correlation, 0.0), 1.0)


class Learned:
    """Told by the engine as it runs. `latency` is the latest snapshot of the tools' statistics.

    `reload` is seconds a cell from a host tier, where there is one.
    """

    def __init__(self, wait_window: int) -> None:
        self.latency = LatencySnapshot()
        self.turns = Turns()
        self.reload: float | None = None
        self._waits: deque[float] = deque(maxlen=wait_window)
        self._waited = 0.0
        self._prefill = PrefillFit()

    def waited(self, seconds: float) -> None:
        """A follow-up turn whose cells were not pinned waited so long before it began."""
        if len(self._waits) == self._waits.maxlen:
            self._waited -= self._waits[0]
        self._waits.append(seconds)
        self._waited += seconds

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        self._prefill.measured(plan, seconds)

    def conditions(self, others: int = 0) -> Conditions:
        """What a policy may know now; `others` are the cells of the sequences that run."""
        wait = max(self._waited, 0.0) / len(self._waits) if self._waits else 0.0
        cost = self._prefill.cost
        if self.reload is not None:
            cost = type(cost)(cost.a, cost.b, cost.c, self.reload)
        return Conditions(wait, self.turns.eta, self.turns.mean, others, cost)
