"""From waiting to running: who is started in a step, who waits for a leader, who has waited too long.

Admission counts cells (stateful inference, section 3.2): what runs, with what it may come to need, stays below a
ceiling. Grouped prefill (the same section): a prefix that several waiting prompts share is computed by one of them.
Deadlines: who cannot have its answer in the time that it gave is refused when it comes, or as soon as that is sure.
Where the queue is full who comes gives way, or the last of a lower class.

The leader is a running sequence in the middle of its prompt; a follower waits until the leader's cells reach the end of
what they share, and then aliases them through the tree like any cached prefix.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import DeadlineError, ErrorInfo, ErrorKind, OverloadedError
from holdfast.replicas.events import Event, Rejected, Submit
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.radix import Prefix
from holdfast.replicas.scheduling.queue import Order, WaitingQueue
from holdfast.replicas.scheduling.running import Ends, Running
from holdfast.replicas.scheduling.shares import Classes
from holdfast.replicas.scheduling.step import StepBuilder
from holdfast.replicas.sequences import Sequence, Status
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import common_prefix

_TOO_LATE = ErrorInfo(ErrorKind.OVERLOADED, "the request waited too long for a place in the batch")
_PASSED = ErrorInfo(ErrorKind.DEADLINE, "too little of the time that the request gave is left to serve it")
_GAVE_WAY = ErrorInfo(ErrorKind.OVERLOADED, "so much waits that this request had to give way to one of a higher class")


@dataclass(frozen=True, slots=True)
class Following:
    """`follower` gains `gain` tokens by waiting until `leader` has computed `shared`."""

    follower: Sequence
    leader: Sequence
    shared: int
    gain: int

    @property
    def over(self) -> bool:
        """Nothing is left to wait for: the shared tokens are computed, or the leader has gone."""
        return self.leader.status is not Status.RUNNING or self.leader.n_computed >= self.shared


class Admission:
    """The waiting sequences, and the rules by which they are started."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        running: Running,
        waiting: WaitingQueue,
        classes: Classes,
        ends: Ends,
        order: Order,
        stats: EngineStats,
    ) -> None:
        self._config = config
        self._cache = cache
        self._running = running
        self._budget = Budget.of(config)
        self._stats = stats
        self._classes = classes
        self._order = order
        self._ends = ends
        self._waiting = waiting
        self._following: list[Following] = []
        self.forecast = ends.forecast
        self._deadlines: list[tuple[float, int, Sequence]] = []  # with the latest moment at which each may start

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    @property
    def tokens(self) -> int:
        """In the prompts of all that wait."""
        return self._waiting.tokens

    def push(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)
        if sequence.submit.within_s < inf and not sequence.preempted:
            serving_s = self.forecast.serving_s(sequence.sampling.max_tokens, sequence.submit.begins)
            latest = _deadline(sequence) - serving_s
            heapq.heappush(self._deadlines, (latest, sequence.number, sequence))

    def make_room(self, sequence: Sequence, queued: int) -> list[Event]:
        """Room in the queue for one that comes; `queued` others wait elsewhere. What had to give way for it.

        Raises OverloadedError.
        """
        config, events = self._config, list[Event]()
        while queued + len(self._waiting) >= config.max_waiting or (
            len(self._waiting) and self.tokens + sequence.n_prompt > config.max_waiting_tokens
        ):
            last = self._waiting.last_below(sequence.submit.rank)
            if last is None:
                self._stats.not_begun["full"] += 1
                raise OverloadedError(f"{len(self._waiting)} requests of {self.tokens} tokens are waiting already")
            events.append(self._end(last, _GAVE_WAY, "gave_way"))
        return events

    def judge(self, sequence: Sequence) -> None:
        """Raises DeadlineError for one that comes and whose answer cannot be expected in the time that it gives.

        Only where others wait, or the batch is half full: before that trying costs nobody much, and what was learned of
        a full batch does not hold.
        """
        within_s, n, forecast = sequence.submit.within_s, len(self._waiting), self.forecast
        if within_s == inf or not (n or self._half_full):
            return
        wants = sequence.sampling.max_tokens, sequence.submit.begins
        sequence.expected_s = forecast.answer_s(*wants, n)
        if sequence.expected_s * forecast.correction > within_s:  # were all of them before it
            sequence.expected_s = forecast.answer_s(*wants, self._waiting.before(sequence))
        expected_s = sequence.expected_s * forecast.correction
        if expected_s > within_s:
            self._stats.not_begun["refused"] += 1
            raise _unmet(expected_s, within_s)

    @property
    def _half_full(self) -> bool:
        return 2 * len(self._running) >= self._config.max_sequences

    def foresee(self, submit: Submit, max_tokens: float, coming: int) -> DeadlineError | None:
        """`judge` from outside of a step, for a new program's request, which comes behind all that wait and are not of
        a lower class. `coming`: others that are not in the queue yet. Any thread may ask.
        """
        waiting = self._waiting.up_to(submit.rank)
        if submit.within_s == inf or not (waiting or self._half_full):
            return None
        before = waiting + coming if waiting else 0
        expected_s = self.forecast.answer_s(max_tokens, submit.begins, before) * self.forecast.correction
        if expected_s <= submit.within_s:
            return None
        self._stats.not_begun["foreseen"] += 1  # the caller's thread alone counts these
        return _unmet(expected_s, submit.within_s)

    def leads(self, sequence: Sequence) -> bool:
        """Whether somebody waits for what this sequence computes."""
        return any(following.leader is sequence for following in self._following)

    def expire(self, now: float) -> list[Event]:
        """End the requests that waited too long without being started; the order may let others gain by waiting."""
        self._waiting.promote(now)
        late = [
            self._end(sequence, _TOO_LATE, "waited")
            for sequence in self._waiting.expired(now - self._config.queue_timeout_s)
        ]
        return late + self._past(now, over=True)

    def _past(self, now: float, *, over: bool) -> list[Event]:
        """End those that can no more be started in time; `over`: those alone whose time is over.

        The others of them have had this step to start in.
        """
        events, left = list[Event](), []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            sequence = entry[2]
            if sequence not in self._waiting or sequence.preempted:
                continue
            if over and _deadline(sequence) > now:
                left.append(entry)
            else:
                events.append(self._end(sequence, _PASSED, "dropped"))
        for entry in left:
            heapq.heappush(self._deadlines, entry)
        return events

    def _end(self, sequence: Sequence, why: ErrorInfo, counted: str) -> Event:
        """The end of one that waits, or has just left the queue."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._stats.not_begun[counted] += 1
        if sequence.background:
            self._running.ahead.end(sequence)
        self._order.left(sequence)
        sequence.move(Status.ENDED)
        return Rejected(sequence.request_id, why)

    @property
    def room_for_sessions(self) -> int:
        """Cells that sessions may still come to keep."""
        return self._budget.ceiling - self._running.cells_pinned

    def admit(self, builder: StepBuilder, now: float) -> None:
        """Start waiting sequences, in order, while a row and the cell budget are there.

        The head is never overtaken, except by others while it waits for a leader to compute its prefix. Who is left and
        could only start too late from now on ends.
        """
        running = len(self._running)
        self._start_waiting(builder, now)
        self.forecast.started(max(0, len(self._running) - running), len(self._waiting), now)
        self._ends.events += self._past(now, over=False)

    def _start_waiting(self, builder: StepBuilder, now: float) -> None:
        for done in [f for f in self._following if f.over]:
            self._following.remove(done)
            self._waiting.put_back(done.follower)
        if not len(self._waiting):
            return
        needed = self._budget.committed(self._running)
        while (sequence := self._waiting.head()) is not None:
            try:
                need = self._start(builder, sequence, needed, now)
            except Exception as failure:
                if sequence.status is Status.RUNNING:
                    self._waiting.remove(sequence)
                self._ends.fault(builder, sequence, failure, now)
                continue
            if need is None:
                if self._fits_over_batch(sequence, needed) and self.yields(builder, sequence, now):
                    needed = self._budget.committed(self._running)
                    continue
                if not sequence.background or len(self._running):
                    return
                self._ends.give_up(None, sequence, now)  # nobody leaves who would make room for it
                continue
            needed += need

    def yields(self, builder: StepBuilder, to: Sequence, now: float) -> bool:
        """Preempt the last request of batch for an interactive one. False where there is none, or it is its turn."""
        if to.batch or to.background or self._classes.due:
            return False
        victim = next((each for each in reversed(self._running.in_order()) if each.batch), None)
        if victim is None:
            return False
        self._ends.preempt(builder, victim, now)
        self._stats.yielded += 1
        return True

    def _fits_over_batch(self, sequence: Sequence, needed: int) -> bool:
        """Whether a waiting sequence could start if batch gave all its cells back: else it gives none for it."""
        batch = [each for each in self._running if each.batch]
        if not batch or sequence.batch or sequence.background:
            return False
        size = self._config.page_size
        given = sum(each.the_holding.n_pages * size for each in batch) + self._budget.committed(batch)
        need = self._budget.need(sequence, self._cached(sequence))
        alone = len(batch) == len(self._running)
        return self._budget.admits(self._cache.cells.active + needed - given, need, alone=alone)

    def _cached(self, sequence: Sequence) -> int:
        prefix = self._cache.find(sequence.cache_scope, sequence.tokens)
        return prefix.length if prefix is not None else 0

    def _start(self, builder: StepBuilder, sequence: Sequence, needed: int, now: float) -> int | None:
        """Start the head, or set it aside for a leader; the cells it may come to need, None where it has to wait.

        `needed` are the cells that those who run may come to need beyond those they have.
        """
        prefix = self._cache.find(sequence.cache_scope, sequence.tokens)
        n_cached = prefix.length if prefix is not None else 0
        if (following := self._find_leader(sequence, n_cached)) is not None:
            self._following.append(following)
            self._waiting.set_aside()
            return 0
        need = self._budget.need(sequence, n_cached)
        # What pins alone keep for programs that pause gives way to those who run; what this one reads of it is its own.
        taken = self._cache.cells.active + self._cache.cells.inactive_in(prefix)
        alone = not len(self._running) and not sequence.background
        if not self._budget.admits(taken + needed, need, alone=alone):
            return None
        if not self._has_room(sequence, needed + need, prefix):
            return None
        if not self._running.start(builder, sequence, prefix, now):
            return None
        self._waiting.remove(sequence)
        if sequence.scheduled is None:
            sequence.scheduled = now
            sequence.n_cached = min(sequence.n_computed, sequence.n_prompt)
            if not sequence.background:
                self._stats.prompt_cached += sequence.n_cached
        return need

    def _has_room(self, sequence: Sequence, needed: int, prefix: Prefix | None) -> bool:
        """Whether `needed` cells are to be had beside the sequence's cached prefix, which is evicted for nobody then.

        `prefix` is where that ends: giving way lets leases go and leaves the tree as it is.

        What is kept for programs that pause can give way: those behind it in order, the last one first. Where nothing
        runs all of it does, and then the sequence starts with what there is: nobody else would make room, so a queue
        never waits for pins alone (Continuum, section 5.3). To work ahead nothing gives way.
        """
        if sequence.background:
            return needed + self._cache.cells.available_in(prefix) <= self._cache.cells.available
        retention, owner = self._running.retention, sequence.owner
        alone = not len(self._running)
        to = None if alone else sequence
        while True:
            claimed = self._cache.cells.available_in(prefix)
            if needed + claimed <= self._cache.cells.available:
                return True
            others = len(retention.pins) > (owner in retention.pins)
            if not (others and retention.give_way(to, besides=owner)):
                return alone

    def _find_leader(self, sequence: Sequence, n_cached: int) -> Following | None:
        config = self._config
        if not (config.grouped_prefill and config.prefix_cache) or len(self._following) >= self._running.rows.total:
            return None
        # What is shared is aliased in whole pages, so less than two pages would not be worth a step's wait.
        following = find_leader(sequence, self._running, n_cached, least=2 * config.page_size)
        if following is not None:
            self._stats.prompt_grouped += following.gain
        return following


def _deadline(sequence: Sequence) -> float:
    """When its answer is wanted."""
    return sequence.arrived + sequence.submit.within_s


def _unmet(expected_s: float, within_s: float) -> DeadlineError:
    told = f"an answer is expected in {expected_s:.1f} s, and the request gives it {within_s:.1f} s"
    return DeadlineError(told, "timeout", retry_after_s=expected_s - within_s)


@dataclass(frozen=True, slots=True)
class Budget:
    """The cells that admitted requests may have at their ends, and how a request's need is estimated, in cells.

    `reserve` bounds the completion a request is charged for: most stop long before their `max_tokens`, and one
    that does not is covered by preemption.
    """

    ceiling: int
    reserve: int

    @classmethod
    def of(cls, config: EngineConfig) -> "Budget":
        return cls(
            ceiling=int(config.cells * config.admission_ceiling),
            reserve=config.completion_reserve,
        )

    def need(self, sequence: Sequence, n_cached: int) -> int:
        """Cells the sequence will fill beyond its cached prefix: prompt - cached + completion."""
        completion = len(sequence.buffer) - sequence.length
        return sequence.length - n_cached + min(completion, self.reserve)

    def committed(self, running: Iterable[Sequence]) -> int:
        """The cells that all these may come to need beyond what they have computed. Work ahead has no claim to any."""
        reserve, those = self.reserve, [s for s in running if not s.background]
        return sum([s.length - s.n_computed + min(len(s.buffer) - s.length, reserve) for s in those])

    def admits(self, committed: int, need: int, *, alone: bool) -> bool:
        """Whether `need` more cells fit beside those that are `committed`: occupied, or yet to be computed.

        A request that runs alone always fits.
        """
        return alone or committed + need <= self.ceiling


def find_leader(sequence: Sequence, running: Iterable[Sequence], n_cached: int, least: int) -> Following | None:
    """The running prefill that shares most with `sequence` beyond its `n_cached` tokens; None under `least` tokens."""
    tokens = sequence.tokens[:-1]
    window = tokens[n_cached : n_cached + least]  # agrees, or the gain is less than `least`
    best: Following | None = None
    for leader in running:
        if leader.prompt_computed or leader.background or leader.cache_scope != sequence.cache_scope:
            continue
        if not np.array_equal(leader.tokens[n_cached : n_cached + len(window)], window):
            continue
        shared = common_prefix(tokens, leader.tokens)
        gain = shared - n_cached
        if shared > leader.n_computed and gain >= max(least, best.gain + 1 if best else 0):
            best = Following(sequence, leader, shared, gain)
    return best
