"""From waiting to running: which requests start in a step, which wait for a leader, which end without starting.

    cells       running requests, with what they may still need, stay below a ceiling (stateful inference, section 3.2)
    grouping    one of several waiting prompts computes the prefix that they share (the same section)
    deadlines   a request whose answer cannot come in time is refused on arrival, or as soon as that is certain
    bounds      where the queue is full the new request is refused, or ends the last one of a lower class

The leader of a group is a running sequence in the middle of its prompt. A follower waits until the leader's cells reach
the end of the shared prefix, and then aliases them through the tree like any cached prefix.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf

import numpy as np

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ContextLengthError, DeadlineError, ErrorInfo, ErrorKind, OverloadedError
from holdfast.replicas.kv.cache import Freed, KVCache
from holdfast.replicas.kv.pages import SHARED
from holdfast.replicas.kv.radix import Prefix
from holdfast.replicas.programs import ProgramPin, Programs, Sequence, Status
from holdfast.replicas.requests import Event, GenerateRequest, Rejected, Submit
from holdfast.replicas.scheduling.batch import Running, StepBuilder, Terminator
from holdfast.replicas.scheduling.queue import Line, RequestOrder, WaitingQueue
from holdfast.replicas.scheduling.shares import Bounds, Classes
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import common_prefix

_PASSED_OVER = 64  # blocked requests of a line shared by several tenants that others may pass in a step
_TOO_LATE = ErrorInfo(ErrorKind.OVERLOADED, "the request waited too long for a place in the batch")
_PASSED = ErrorInfo(ErrorKind.DEADLINE, "the request's timeout leaves too little time to serve it")
_GAVE_WAY = ErrorInfo(
    ErrorKind.OVERLOADED, "the queue is full, and a request of a higher class took the place of this one; retry"
)


@dataclass(frozen=True, slots=True)
class PrefixWait:
    """`follower` gains `gain` tokens by waiting until `leader` has computed `shared`."""

    follower: Sequence
    leader: Sequence
    shared: int
    gain: int

    @property
    def over(self) -> bool:
        """The wait has ended: the shared tokens are computed, or the leader has left."""
        return self.leader.status is not Status.RUNNING or self.leader.n_computed >= self.shared


class BlockedBy(Enum):
    """The reason why a waiting sequence cannot start."""

    ALL = "all"  # the running sequences: no other passes it, except within a tenant's floor
    TENANT = "tenant"  # its tenant's ceiling, or the floors of others: requests of other tenants pass it


@dataclass(slots=True)
class _Round:
    """One pass over the waiting sequences. `needed`: cells that running ones may still need; `promised`: by tenant.

    `passed`: lines of tenants whose head is blocked; `aside`: blocked heads of lines that tenants share. `short`: a
    sequence is blocked for lack of room, so from then on only sequences within their tenants' floors start.
    """

    needed: int
    promised: Counter[str]
    passed: set[Line] = field(default_factory=set)
    aside: list[Sequence] = field(default_factory=list)
    short: bool = False

    def after(self, cache: KVCache, sequence: Sequence, need: int, prefix: Prefix | None) -> int:
        """Cells that its tenant may use with a sequence that needs `need` beyond its cached prefix."""
        scope = sequence.submit.scope
        return cache.cells.active_of(scope) + self.promised[scope] + need + cache.cells.available_in(prefix)

    def began(self, sequence: Sequence, need: int) -> None:
        self.needed += need
        self.promised[sequence.submit.scope] += need


class Admission:
    """The waiting sequences, and the rules by which they are started."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        programs: Programs,
        running: Running,
        waiting: WaitingQueue,
        classes: Classes,
        terminator: Terminator,
        order: RequestOrder,
        stats: EngineStats,
    ) -> None:
        self._config = config
        self._max_waiting_tokens = config.max_waiting_tokens
        self._groups = config.has("grouped_prefill") and config.has("prefix_cache")
        self._cache = cache
        self._programs = programs
        self._running = running
        self._budget = Budget.of(config)
        self._stats = stats
        self._classes = classes
        self._order = order
        self._terminator = terminator
        self._waiting = waiting
        self._following: list[PrefixWait] = []
        self.forecast = terminator.forecast
        self._deadlines: list[tuple[float, int, Sequence]] = []  # with the latest moment at which each may start

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    @property
    def tokens(self) -> int:
        """Tokens in the prompts of all waiting requests."""
        return self._waiting.tokens

    @property
    def tokens_ahead(self) -> int:
        """The part of `tokens` in background prefills."""
        return self._waiting.tokens_ahead

    def push(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)
        if sequence.submit.within_s < inf and not sequence.preempted:
            serving_s = self.forecast.serving_s(sequence.sampling.max_tokens, sequence.submit.begins)
            latest = _deadline(sequence) - serving_s
            heapq.heappush(self._deadlines, (latest, sequence.number, sequence))

    def make_room(self, sequence: Sequence, queued: int) -> list[Event]:
        """Make room in the queue for a new request; `queued` others wait elsewhere. Returns the ends of others.

        Raises OverloadedError, and then no other has ended.
        """
        bounds = Bounds(self._config.max_waiting - queued, self._max_waiting_tokens)
        lower = self._waiting.last_below(sequence.submit.rank)
        leaving = bounds.giving_way(lower, len(self._waiting), self.tokens, sequence.n_prompt)
        if leaving is None:
            self._stats.not_begun["full"] += 1
            raise OverloadedError(f"{len(self._waiting)} requests of {self.tokens} tokens are waiting already")
        return [self._end(each, _GAVE_WAY, "gave_way") for each in leaving]

    def check_deadline(self, sequence: Sequence) -> None:
        """Raises DeadlineError for a new request whose answer is not expected in time.

        Checks only while other requests wait, or the batch is half full. Below that, one more request costs others
        little, and forecasts learned from a full batch do not hold.
        """
        within_s, n, forecast = sequence.submit.within_s, len(self._waiting), self.forecast
        if within_s == inf or not (n or self._half_full):
            return
        wants = sequence.sampling.max_tokens, sequence.submit.begins
        sequence.expected_s = forecast.answer_s(*wants, n)
        if sequence.expected_s * forecast.correction > within_s:  # if all of them were before it
            sequence.expected_s = forecast.answer_s(*wants, self._waiting.before(sequence))
        expected_s = sequence.expected_s * forecast.correction
        if expected_s > within_s and not sequence.submit.foreseen:
            self._stats.not_begun["refused"] += 1
            raise _unmet(expected_s, within_s)

    @property
    def _half_full(self) -> bool:
        return 2 * len(self._running) >= self._config.max_sequences

    def check_deadline_early(self, submit: GenerateRequest, max_tokens: float, coming: int) -> bool:
        """`check_deadline` between steps, for the first request of a program: it comes behind all waiting requests of
        its class and above, and behind `coming` others that are not in the queue yet. Any thread may ask.

        Returns whether there was anything to check by. An admitted request keeps its place even if the estimate later
        exceeds its deadline slightly: its client can no longer go elsewhere.
        """
        waiting = self._waiting.up_to(submit.rank)
        if submit.within_s == inf or not (waiting or self._half_full):
            return False
        before = waiting + coming if waiting else 0
        expected_s = self.forecast.answer_s(max_tokens, submit.begins, before) * self.forecast.correction
        if expected_s > submit.within_s:
            self._stats.not_begun["foreseen"] += 1  # the caller's thread alone counts these
            raise _unmet(expected_s, submit.within_s)
        return True

    def leads(self, sequence: Sequence) -> bool:
        """Whether a follower waits for what this sequence computes."""
        return any(following.leader is sequence for following in self._following)

    def expire(self, now: float) -> list[Event]:
        """End requests that waited too long without starting; the order may promote others for their waiting."""
        self._waiting.promote(now)
        late = [
            self._end(sequence, _TOO_LATE, "waited")
            for sequence in self._waiting.expired(now - self._config.queue_timeout_s)
        ]
        return late + self._past(now, over=True)

    def _past(self, now: float, *, over: bool) -> list[Event]:
        """End requests that can no longer start in time. `over`: only those whose deadline has passed; the others may
        still start in this step.
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
        """End a request that waits, or has just left the queue."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._stats.not_begun[counted] += 1
        self._programs.end(sequence)
        self._order.left(sequence)
        sequence.move(Status.ENDED)
        return Rejected(sequence.request_id, why)

    def room_for_sessions(self, tenant: str) -> int:
        """Cells that a tenant's sessions may still keep."""
        room = self._budget.ceiling - self._running.cells_pinned
        if not self._cache.tree.tenants.any:
            return room
        return min(room, self._cache.cells.may_pin(tenant) - self._running.rows.session_cells_of(tenant))

    def admit(self, builder: StepBuilder, now: float) -> None:
        """Start waiting sequences, in order, while there are rows and cells.

        No sequence overtakes the head, except while it waits for a leader to compute its prefix. Requests that can no
        longer start in time end.
        """
        running = len(self._running)
        self._start_waiting(builder, now)
        self.forecast.started(max(0, len(self._running) - running), len(self._waiting), now)
        self._terminator.events += self._past(now, over=False)

    def _start_waiting(self, builder: StepBuilder, now: float) -> None:
        for done in [f for f in self._following if f.over]:
            self._following.remove(done)
            self._waiting.put_back(done.follower)
        if not len(self._waiting):
            return
        round_ = _Round(*self._committed())
        while (sequence := self._waiting.head(round_.passed)) is not None:
            try:
                need = self._start(builder, sequence, round_, now)
            except Exception as failure:
                if sequence.status is Status.RUNNING:
                    self._waiting.remove(sequence)
                self._terminator.fault(builder, sequence, failure, now)
                continue
            if not isinstance(need, BlockedBy):
                round_.began(sequence, need)
            elif self._preempt_batch_for(builder, sequence, need, round_, now):
                round_.needed, round_.promised = self._committed()
            elif sequence.background and not len(self._running):
                self._terminator.finish_early(None, sequence, now)  # no other sequence will make room for it
            elif not self._pass_over(sequence, need, round_):
                break
        for sequence in round_.aside:
            self._waiting.put_back(sequence)

    def _committed(self) -> tuple[int, Counter[str]]:
        """Cells that running sequences may still need, and, where tenants have limits, by tenant."""
        needed, promised = self._budget.committed(self._running), Counter[str]()
        if self._cache.tree.tenants.any:
            for each in self._running:
                promised[each.submit.scope] += self._budget.committed((each,))
        return needed, promised

    def _pass_over(self, sequence: Sequence, blocked_by: BlockedBy, round_: _Round) -> bool:
        """Let other sequences pass a blocked one. False: none may pass it."""
        if sequence.background or not self._cache.tree.tenants.any:
            return False
        round_.short |= blocked_by is BlockedBy.ALL
        line = self._waiting.line_of(sequence)
        if line is not None:
            round_.passed.add(line)
        elif len(round_.aside) < _PASSED_OVER:
            round_.aside.append(self._waiting.set_aside(round_.passed))
        else:
            return False
        return True

    def _preempt_batch_for(
        self, builder: StepBuilder, sequence: Sequence, blocked_by: BlockedBy, round_: _Round, now: float
    ) -> bool:
        if blocked_by is BlockedBy.TENANT:  # only batch requests of its own tenant help
            return self.preempt_batch(builder, sequence, now, own=True)
        return (
            not round_.short
            and self._fits_over_batch(sequence, round_.needed)
            and self.preempt_batch(builder, sequence, now)
        )

    def preempt_batch(self, builder: StepBuilder, to: Sequence, now: float, *, own: bool = False) -> bool:
        """Preempt the last batch request for an interactive one. False: no batch request runs, or it is batch's turn.

        `own`: only of its own tenant; else of any tenant whose cells it can use.
        """
        if to.batch or to.background or self._classes.due:
            return False
        candidates = [each for each in self._running.helpers(to) if each.batch]
        victim = next((each for each in reversed(candidates) if not own or each.submit.scope == to.submit.scope), None)
        if victim is None:
            return False
        self._terminator.preempt(builder, victim, now)
        self._stats.yielded += 1
        return True

    def _fits_over_batch(self, sequence: Sequence, needed: int) -> bool:
        """Whether a waiting sequence could start if batch gave all its cells back; if not, batch keeps them."""
        batch = [each for each in self._running if each.batch]
        if not batch or sequence.batch or sequence.background:
            return False
        size = self._config.page_size
        freed = sum(each.the_holding.n_pages * size for each in batch) + self._budget.committed(batch)
        need = self._budget.need(sequence, self._cached(sequence))
        alone = len(batch) == len(self._running)
        return self._budget.admits(self._cache.cells.active + needed - freed, need, alone=alone)

    def _cached(self, sequence: Sequence) -> int:
        prefix = self._cache.find(sequence.cache_scope, sequence.tokens)
        return prefix.length if prefix is not None else 0

    def _start(self, builder: StepBuilder, sequence: Sequence, round_: _Round, now: float) -> int | BlockedBy:
        """Start the head, or set it aside for a leader. Returns the cells it may need, or what blocks it."""
        if sequence.cache_scope is not None:
            self._cache.alias_shared(sequence.cache_scope, sequence.tokens, now)
        prefix = self._cache.find(sequence.cache_scope, sequence.tokens)
        n_cached = prefix.length if prefix is not None else 0
        if (following := self._find_leader(sequence, n_cached)) is not None:
            self._following.append(following)
            self._waiting.set_aside(round_.passed)
            return 0
        tenants = self._cache.tree.tenants
        if tenants.any:  # the tenant's limits may have changed since it arrived
            check_cells(sequence.submit, self._cache)
        need = self._budget.need(sequence, n_cached)
        # No other tenant holds cells within this tenant's floor, so they are there.
        floor = 0 if sequence.background else tenants.floor(sequence.submit.scope) * self._config.page_size
        within = floor > 0 and round_.after(self._cache, sequence, need, prefix) <= floor
        if round_.short and not within:
            return BlockedBy.ALL
        # Cells that only pins keep give way to running sequences; those of its own prefix become its own.
        taken = self._cache.cells.active + self._cache.cells.inactive_in(prefix)
        alone = not len(self._running) and not sequence.background
        if not self._running.can_start(sequence):
            return BlockedBy.ALL
        if not within:
            if not self._budget.admits(taken + round_.needed, need, alone=alone):
                return BlockedBy.ALL
            blocked_by = self._blocked_by(sequence, need, prefix, round_)
            if blocked_by is not None:
                return blocked_by
        if not self._running.start(builder, sequence, prefix, now):
            return BlockedBy.ALL
        self._waiting.remove(sequence)
        if sequence.scheduled is None:
            sequence.scheduled = now
            sequence.n_cached = min(sequence.n_computed, sequence.n_prompt)
            if sequence.counted:
                self._stats.prompt_cached += sequence.n_cached
        return need

    def _blocked_by(self, sequence: Sequence, need: int, prefix: Prefix | None, round_: _Round) -> BlockedBy | None:
        """The reason why a sequence cannot have the cells that it needs beside its cached `prefix`; None: it can.

        Drops as many pins of programs behind it as needed, or none if all of them would not be enough. If nothing runs,
        any pin may be dropped and the sequence starts: a queue never waits for pins alone (Continuum, section 5.3). A
        background prefill drops no pins. A tenant at its ceiling drops only its own pins, and its sequence starts if
        the tenant has none running.
        """
        cells, scope = self._cache.cells, sequence.submit.scope
        retention, program = self._running.retention, sequence.program
        tenants, size = self._cache.tree.tenants, self._config.page_size
        alone, freed = not len(self._running), Freed(size, prefix)
        leaving: list[ProgramPin] = []
        if tenants.any and not sequence.background:
            over = round_.after(self._cache, sequence, need, prefix) - tenants.ceiling(scope) * size
            first = not any(each.submit.scope == scope for each in self._running)

            def below(freed: Freed) -> bool:
                return over <= freed.pages[scope] * size

            pins = retention.pins_to_drop(
                None if first else sequence, freed, below, besides=program, of_tenants=scope.__eq__
            )
            if pins is None and not first:
                return BlockedBy.TENANT
            if pins is None:
                freed = Freed(size, prefix)
            else:
                leaving += pins
        cells_needed = round_.needed + need + cells.available_in(prefix)
        promised = {tenant: n // size for tenant, n in round_.promised.items()}

        def enough(freed: Freed) -> bool:
            kept = tenants.kept(scope, promised, freed.pages) if tenants.any else 0
            return cells_needed <= cells.available + (freed.total - kept) * size

        if not enough(freed):
            pins = None
            if not sequence.background:
                helps, to = self._running.helping(sequence, -(-need // size)), None if alone else sequence
                pins = retention.pins_to_drop(to, freed, enough, besides=program, of_tenants=helps)
            if pins is None and (sequence.background or not alone):
                return BlockedBy.ALL if cells_needed > cells.available + freed.total * size else BlockedBy.TENANT
            leaving += pins or ()
        retention.drop(leaving)
        return None

    def _find_leader(self, sequence: Sequence, n_cached: int) -> PrefixWait | None:
        if not self._groups or len(self._following) >= self._running.rows.total:
            return None
        # Shared cells are aliased in whole pages, so less than two pages are not worth a step's wait.
        following = find_leader(sequence, self._running, n_cached, least=2 * self._config.page_size)
        if following is not None and not keeps_state(following):
            return None
        if following is not None:
            self._stats.prompt_grouped += following.gain * sequence.counted
        return following


def keeps_state(following: PrefixWait) -> bool:
    """Whether the leader will leave a checkpoint where the shared tokens end, if the model needs one."""
    holding = following.leader.the_holding
    state = holding.state
    if state is None:
        return True
    end = following.shared - following.shared % holding.page_size
    if end <= max(state.at, following.shared - following.gain):
        return False
    holding.mark(end)
    return True


def check_cells(submit: Submit, cache: KVCache) -> None:
    """Check that a request fits its tenant's cells; those of a shared preamble come in addition.

    Raises ContextLengthError for a prompt that is too long, OverloadedError for a reply that limits no longer allow.
    """
    n_prompt, max_tokens, size = len(submit.tokens), submit.sampling.max_tokens, cache.page_size
    # One page more: the end of a cached prefix may be copied into a page of its own.
    room = pages_of(submit, cache) - 1
    most = cache.tree.tenants.most(submit.scope) * size
    if cache.pool.pages_for(n_prompt + min(max_tokens, 1)) > room:
        message = f"the prompt has {n_prompt} tokens, and this tenant {most} cells (its ceiling, and others' floors)"
        raise ContextLengthError(message, "prompt")
    if cache.pool.pages_for(n_prompt + max_tokens) > room:
        raise OverloadedError(f"this tenant has only {most} cells since its limits changed; send the request again")


def pages_of(submit: Submit, cache: KVCache) -> int:
    """Pages that a request may use: those that its tenant may have, and those of a shared preamble."""
    return cache.tree.tenants.most(submit.scope) + cache.peek(SHARED, submit.tokens) // cache.page_size


def _deadline(sequence: Sequence) -> float:
    """The time by which its client expects the answer."""
    return sequence.arrived + sequence.submit.within_s


def _unmet(expected_s: float, within_s: float) -> DeadlineError:
    message = f"the answer is expected in {expected_s:.1f} s, but the request's timeout is {within_s:.1f} s"
    return DeadlineError(message, "timeout", retry_after_s=expected_s - within_s)


@dataclass(frozen=True, slots=True)
class Budget:
    """The most cells that admitted requests may need in all, and the estimate of one request's need.

    `reserve` bounds the completion a request is charged for: most stop long before their `max_tokens`, and preemption
    covers those that do not.
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
        """Cells that `running` sequences may still need. Background prefills count for none."""
        reserve, foreground = self.reserve, [s for s in running if not s.background]
        return sum([s.length - s.n_computed + min(len(s.buffer) - s.length, reserve) for s in foreground])

    def admits(self, committed: int, need: int, *, alone: bool) -> bool:
        """Whether `need` more cells fit beside those that are `committed`: occupied, or yet to be computed.

        A request that runs alone always fits.
        """
        return alone or committed + need <= self.ceiling


def find_leader(sequence: Sequence, running: Iterable[Sequence], n_cached: int, least: int) -> PrefixWait | None:
    """The running prefill that shares most with `sequence` beyond its `n_cached` tokens; None under `least` tokens."""
    tokens = sequence.tokens[:-1]
    window = tokens[n_cached : n_cached + least]  # agrees, or the gain is less than `least`
    if len(window) < least:
        return None
    first = window.item(0)
    best: PrefixWait | None = None
    for leader in running:
        if leader.prompt_computed or leader.background or sequence.cache_scope is None:
            continue
        if leader.cache_scope not in (sequence.cache_scope, SHARED):
            continue
        if leader.length <= n_cached or leader.buffer.item(n_cached) != first:
            continue
        if not np.array_equal(leader.tokens[n_cached : n_cached + least], window):
            continue
        shared = common_prefix(tokens, leader.tokens)
        gain = shared - n_cached
        if shared > leader.n_computed and gain >= max(least, best.gain + 1 if best else 0):
            best = PrefixWait(sequence, leader, shared, gain)
    return best
