"""How sequences leave: finished, preempted, or failed; and the events that tell of it.

An event is noted before rows and cells are given back, so a request has its terminal event even where that fails.
"""

import logging

from holdfast.replicas.errors import EngineError, ErrorInfo, InvalidRequestError
from holdfast.replicas.events import Aborted, Event, Finished, FinishReason
from holdfast.replicas.scheduling.builder import PlanBuilder
from holdfast.replicas.scheduling.running import BooksError, Leaving, Running
from holdfast.replicas.scheduling.speculation import Speculation
from holdfast.replicas.scheduling.waiting import WaitingQueue
from holdfast.replicas.sequences.sequence import Sequence, Status
from holdfast.replicas.stats import EngineStats

log = logging.getLogger(__name__)


class Ends:
    """Takes sequences out, wherever they are. `events` belongs to the engine: it outlives these books."""

    def __init__(
        self,
        running: Running,
        waiting: WaitingQueue,
        speculation: Speculation,
        stats: EngineStats,
        events: list[Event],
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._speculation = speculation
        self._stats = stats
        self.events = events

    def end(self, sequence: Sequence, now: float, leaving: Leaving) -> None:
        """Take a sequence out. Its terminal event has been noted. Raises BooksError."""
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._running.leave(sequence, now, leaving)
        self._speculation.close(sequence)
        sequence.move(Status.ENDED)

    def abort(self, sequence: Sequence, now: float) -> None:
        self.events.append(Aborted(sequence.request_id, sequence.usage, sequence.timing(now)))
        self.end(sequence, now, Leaving.ABORTED)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self.events.append(Finished(sequence.request_id, reason, sequence.usage, sequence.timing(now)))
        self.end(sequence, now, Leaving.FINISHED)

    def fail(self, sequence: Sequence, error: ErrorInfo, now: float) -> None:
        self.events.append(sequence.failed(error))
        self.end(sequence, now, Leaving.FAILED)

    def preempt(self, builder: PlanBuilder | None, sequence: Sequence, now: float) -> None:
        """Back to the queue: what it computed goes to the tree, and what is evicted there is computed again.

        Nothing is lost: noise is keyed by position, so the recomputed sequence goes on as it would have.
        """
        self._stats.preemptions += 1
        sequence.n_before = sequence.n_computed
        if builder is not None:
            builder.forget(sequence)
        self._running.leave(sequence, now, Leaving.PREEMPTED)
        sequence.preempted = True
        sequence.move(Status.WAITING)
        self._waiting.push(sequence)

    def fault(self, builder: PlanBuilder | None, sequence: Sequence, failure: Exception, now: float) -> None:
        """The supervisor of planning and commit: what was raised for one sequence fails that sequence alone."""
        if isinstance(failure, BooksError) or sequence.status is Status.ENDED:
            raise failure
        log.error("%s failed", sequence.request_id, exc_info=failure)
        if builder is not None and sequence.status is Status.RUNNING:
            builder.forget(sequence)
        known = failure if isinstance(failure, InvalidRequestError) else EngineError(f"the engine failed: {failure}")
        self.fail(sequence, known.info, now)
